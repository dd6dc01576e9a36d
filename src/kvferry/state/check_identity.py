"""Checks 1 to 4: is it a record of ours, of this request, from a worker that fits, as exact as asked?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.errors import PeerError
from kvferry.state.check import Case, Refusal
from kvferry.state.fit import Conversion, fingerprint_differences
from kvferry.state.record import MAJOR_VERSION, ExecutionState
from kvferry.state.requirements import Placement, Requirements, TokenSource
from kvferry.state.values import Exactness, unpack_ids

__all__ = ["check_envelope", "check_exactness", "check_fingerprint", "check_identity"]

_FIELDS = frozenset(ExecutionState.__struct_fields__)


def check_envelope(case: Case) -> Iterator[Refusal]:
    """Check 1, after ``decode_state``: the major version, and every part that has to be understood."""
    state, local = case.state, case.local
    if state.version.major != MAJOR_VERSION:
        yield Refusal("version.major", state.version.major, MAJOR_VERSION)
    names = [extension.name for extension in state.ext]
    for name in names:
        if name in _FIELDS or names.count(name) > 1:
            why = "an extension may not hide a field or another extension"
            yield Refusal("ext", repr(name), "a name of its own", why, PeerError)
    known = _FIELDS | set(local.extensions)
    for name in state.must_understand:
        if name not in known:
            yield Refusal("must_understand", repr(name), "a part that this side knows")


def check_identity(case: Case) -> Iterator[Refusal]:
    """Check 2: a transfer not seen before, of the request expected, in its newest attempt."""
    state, expect = case.state, case.expect
    if state.transfer_id in expect.known_transfer_ids:
        why = "a record of this transfer was here already"
        yield Refusal("transfer_id", state.transfer_id.hex(), "one not seen before", why, PeerError)
    if state.request_id != expect.request_id:
        yield Refusal("request_id", repr(state.request_id), repr(expect.request_id))
    if state.attempt < expect.newest_attempt:
        yield Refusal(
            "attempt", state.attempt, f"at least {expect.newest_attempt}", "a newer one was announced"
        )


def check_fingerprint(case: Case) -> Iterator[Refusal]:
    """Check 3: each fingerprint field by its class; the probe is part of check 4."""
    state, local = case.state, case.local
    theirs = state.fingerprint
    for found in fingerprint_differences(local.fingerprint, theirs, state.exactness, local.proven):
        if found.field != "probe":
            yield Refusal(f"fingerprint.{found.field}", found.peer, found.local, found.rule)


def check_exactness(case: Case) -> Iterator[Refusal]:
    """Check 4: where ``bits`` are asked for, equal numerics, and nothing on the way that changes them.

    A conversion that rounds is for ``best_effort`` alone: no one can promise the same tokens after it.
    """
    state, local = case.state, case.local
    if case.expect.lossy and state.exactness is not Exactness.BEST_EFFORT:
        why = "values are rounded on the way"
        yield Refusal("exactness", state.exactness.value, "best_effort", f"{why}: {case.expect.lossy[0]}")
    if state.exactness is not Exactness.BITS:
        return
    theirs = state.fingerprint
    for found in fingerprint_differences(local.fingerprint, theirs, state.exactness, local.proven):
        if found.field == "probe":
            yield Refusal("fingerprint.probe", found.peer, found.local, found.rule)
    if local.placement is Placement.UNCONTROLLED:
        why = "the order of slots changes this engine's bits and an import cannot restore it"
        yield Refusal("exactness", "bits", "tokens or best_effort", why)
    yield from _conversions(state, local)
    if local.placement is Placement.RESTORABLE:
        yield from _placement(state, local)


def _conversions(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    groups = {need.group: need for need in local.groups}
    for blocks in state.blocks:
        if (need := groups.get(blocks.group)) is None:
            continue  # check 7 refuses it
        for conversion, found, expected in (
            (Conversion.LAYOUT, blocks.layout, need.layout),
            (Conversion.BLOCK_TOKENS, blocks.block_tokens, need.block_tokens),
        ):
            if found != expected and conversion not in local.proven:
                why = "a conversion not proven to keep the bits"
                yield Refusal(f"blocks {blocks.group!r}.{conversion.value}", found, expected, why)


def _placement(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    groups = {need.group: need for need in local.groups}
    for blocks in state.blocks:
        need = groups.get(blocks.group)
        if need is None or blocks.block_tokens is None or need.covers is not TokenSource.REQUEST:
            continue
        fewest = state.kv_tokens - need.first_needed_token(state.kv_tokens)
        field = f"blocks {blocks.group!r}.placement"
        if blocks.placement is None:
            yield Refusal(field, "missing", "a slot for each token", "slot order changes this engine's bits")
        elif (num_slots := np.unique(unpack_ids(blocks.placement)).size) < fewest:
            yield Refusal(field, f"{num_slots} unlike slots", f"at least {fewest}")
