"""The table of the 17 checks, in the order in which they run. Entry i has number i + 1."""

from __future__ import annotations

from kvferry.state.check import Check, Stage
from kvferry.state.check_arrival import (
    check_audit,
    check_bytes,
    check_import,
    check_landed,
    check_lease,
    check_replay,
)
from kvferry.state.check_complete import check_completeness
from kvferry.state.check_finite import check_finite
from kvferry.state.check_identity import check_envelope, check_exactness, check_fingerprint, check_identity
from kvferry.state.check_request import check_request
from kvferry.state.check_room import check_room, check_time
from kvferry.state.check_tokens import check_lengths, check_tokens

__all__ = ["CHECKS"]

_EXPORT = "correct the export, or the engine configuration that differs, and export again"
_AGAIN = "move it again; if it repeats, look at the transport and memory of both sides"
_ADAPTER = "drop the state that was set up aside and decode on at prefill; then look at the engine adapter"

CHECKS = (
    Check(
        1,
        "envelope",
        Stage.BEFORE_MOVE,
        "Is it a whole record of a version and with parts known here?",
        "compare the kvferry versions of both sides",
        check_envelope,
    ),
    Check(
        2,
        "identity",
        Stage.BEFORE_MOVE,
        "Is it the request expected, a new transfer, the newest attempt?",
        "export again with a fresh transfer id, for the newest attempt",
        check_identity,
    ),
    Check(
        3,
        "fingerprint",
        Stage.BEFORE_MOVE,
        "Was it computed with the same weights, config, tokenizer?",
        "route the request to a decode worker that runs the same model and build",
        check_fingerprint,
    ),
    Check(
        4,
        "exactness",
        Stage.BEFORE_MOVE,
        "May values be rounded on the way? For bits: are numerics and placement equal?",
        "ask for tokens or best_effort, or run both workers alike",
        check_exactness,
    ),
    Check(
        5,
        "tokens",
        Stage.BEFORE_MOVE,
        "Is the token history whole, with its prompt border?",
        _EXPORT,
        check_tokens,
    ),
    Check(
        6,
        "lengths",
        Stage.BEFORE_MOVE,
        "Do cache, positions, counts and block tables agree?",
        _EXPORT,
        check_lengths,
    ),
    Check(
        7,
        "completeness",
        Stage.BEFORE_MOVE,
        "Is everything there that this engine's config asks for?",
        _EXPORT,
        check_completeness,
    ),
    Check(
        8,
        "request",
        Stage.BEFORE_MOVE,
        "Can sampling, drafts, grammar, adapters and inputs go on here?",
        "route the request to a decode worker that has what is missing",
        check_request,
    ),
    Check(
        9,
        "room",
        Stage.BEFORE_MOVE,
        "Are blocks, slots and context reserved for it now?",
        "try again when requests have finished, or route to another worker",
        check_room,
    ),
    Check(
        10,
        "time",
        Stage.BEFORE_MOVE,
        "Is more of the lease left than the rest will take?",
        "ask for a longer lease",
        check_time,
    ),
    Check(
        11,
        "bytes",
        Stage.AFTER_MOVE,
        "Did every byte arrive, unchanged, in this transfer?",
        _AGAIN,
        check_bytes,
    ),
    Check(
        12,
        "landed",
        Stage.AFTER_MOVE,
        "Do the local blocks hold it, each once, without a hole?",
        "release the reservation and look at the block manager",
        check_landed,
    ),
    Check(
        13,
        "finite",
        Stage.AFTER_IMPORT,
        "Are recurrent state and logits finite?",
        "decode on at prefill; its state is broken there too if it repeats",
        check_finite,
    ),
    Check(
        14,
        "import",
        Stage.AFTER_IMPORT,
        "Do the import's return value and a read-back agree?",
        _ADAPTER,
        check_import,
    ),
    Check(
        15,
        "replay",
        Stage.AFTER_IMPORT,
        "Do sampler, grammar and text stand where they stood?",
        _ADAPTER,
        check_replay,
    ),
    Check(
        16,
        "audit",
        Stage.AFTER_IMPORT,
        "If audited: does the engine export what it was given?",
        _ADAPTER,
        check_audit,
    ),
    Check(17, "lease", Stage.COMMIT, "Is the lease still alive?", "ask for a longer lease", check_lease),
)
