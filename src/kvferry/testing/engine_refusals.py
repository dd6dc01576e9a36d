"""The part of the engine suite about saying no: nothing that would decode on wrongly gets in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.engines.base import BlockTables
from kvferry.errors import IncompatibleError, InputError, KVFerryError, LocalError
from kvferry.layout import PoolLayout, Role
from kvferry.state import (
    Draft,
    Exactness,
    ExecutionState,
    Expectation,
    GroupRoom,
    LayerState,
    Limits,
    SamplingParameters,
    check_before_move,
    ids_digest,
    pack_ids,
    unpack_ids,
)
from kvferry.testing.engine_fixture import EngineFixture
from kvferry.testing.engine_host import EngineHost, Handed, load_factory

__all__ = ["RefusalTests"]

replace = msgspec.structs.replace
Damage = tuple[str, ExecutionState]


class RefusalTests(EngineFixture):
    """Needs ``factory`` and ``stranger``."""

    def exported(self, host: EngineHost, request_id: str, steps: int = 5) -> Handed:
        """A sampled request after some tokens, offered."""
        self.submit(host.engine, request_id, self.samplings["sampled"])
        host.steps(request_id, steps)
        return host.offer(request_id)

    def made(self, host: EngineHost, handed: Handed) -> int:
        """Outputs before the handover: with drafts, a step makes several."""
        return handed.tokens - 1 - len(self.prompt(host.engine))

    def test_every_field_counts(self, host: EngineHost, other: EngineHost) -> None:
        """Leave one out: a state that lacks any one thing, or says one thing wrongly, may not start."""
        handed = self.exported(host, "r")
        state = host.engine.export_state("r", Exactness.BITS)
        room = _expectation(state, other)
        check_before_move(state, other.engine.requirements(), room)  # whole, it may
        for what, damaged in damages(state):
            with pytest.raises(KVFerryError) as refusal:
                check_before_move(damaged, other.engine.requirements(), room)
            assert "check " in str(refusal.value), what
        host.withdraw(handed)

    def test_every_tensor_counts(self, host: EngineHost, other: EngineHost) -> None:
        """Leave one out: with any one kind of tensor zeroed on its way, the import refuses or it shows.

        So no tensor moves that the tests above would not miss.
        """
        expected = self.alone(host, self.samplings["sampled"])
        kinds = {
            (group.name, tensor.role, tensor.part)
            for group in host.engine.layout.groups
            for tensor in group.tensors
            if (tensor.role, tensor.part) not in self.silent
        }
        for number, kind in enumerate(sorted(kinds)):
            handed = self.exported(host, f"r{number}")
            tables = other.room(handed)
            move, state = other.pull(handed, tables)
            zero(other.engine.layout, other.engine.memory, tables, kind)
            try:
                other.engine.import_state(state, tables)
            except KVFerryError:
                other.engine.free(tables)
                move.abort("zeroed")
            else:
                move.started()
                rest = other.steps(f"r{number}")
                other.engine.release(f"r{number}")
                assert rest.logits != expected.logits[self.made(host, handed) :], f"{kind} changes nothing"
            host.withdraw(handed)

    def test_other_weights_are_refused_before_a_byte_moves(self, host: EngineHost) -> None:
        """The same shape, other numbers: every length fits, so only the fingerprint can tell."""
        handed = self.exported(host, "r")
        with EngineHost(load_factory(self.factory)(*self.stranger), "stranger") as stranger:
            tables = stranger.room(handed)
            with pytest.raises(IncompatibleError, match="weights"):
                stranger.pull(handed, tables)
            stranger.engine.free(tables)
        host.withdraw(handed)

    def test_a_refused_import_changes_nothing(self, host: EngineHost, other: EngineHost) -> None:
        """Blocks that are not the caller's, or an id in use: refused, and the same state then starts."""
        free = other.engine.num_free_blocks
        handed = self.exported(host, "r")
        tables = other.room(handed)
        move, state = other.pull(handed, tables)
        other.engine.free(tables)
        with pytest.raises(LocalError):
            other.engine.import_state(state, tables)
        with pytest.raises(LocalError):
            other.engine.request("r")
        move.abort("the blocks were given back")
        host.withdraw(handed)
        handed = self.exported(host, "r")
        other.take_over(handed)
        again = other.engine.allocate(handed.tokens)
        with pytest.raises(LocalError, match="in use"):
            other.engine.import_state(state, again)
        other.engine.free(again)
        assert len(other.steps("r").tokens) == self.max_tokens - self.made(host, handed)
        other.engine.release("r")
        host.let_go(handed)
        assert other.engine.num_free_blocks == free

    @pytest.mark.parametrize("field", ["n", "top_p", "temperature"])
    def test_what_has_no_meaning_here_is_refused_by_name(self, host: EngineHost, field: str) -> None:
        """Several samples of one prompt are not one sequence, and numbers have ranges."""
        values: dict[str, Any] = {"n": 2, "top_p": 0.0, "temperature": -1.0}
        sampling = replace(SamplingParameters(temperature=1.0), **{field: values[field]})
        with pytest.raises(InputError, match=field):
            host.engine.submit(
                "r", self.prompt(host.engine), sampling, Limits(max_tokens_left=3), **self.inputs()
            )

    def test_only_a_running_request_is_exported(self, host: EngineHost) -> None:
        """Not before its prompt is in, not after its end, and not one that nobody knows."""
        with pytest.raises(LocalError, match="no such request"):
            host.engine.export_state("r", Exactness.BITS)
        given = Limits(max_tokens_left=2, ignore_eos=True)
        host.engine.submit("r", self.prompt(host.engine), self.samplings["greedy"], given, **self.inputs())
        with pytest.raises(LocalError, match="prefilling"):
            host.engine.export_state("r", Exactness.BITS)
        while not host.engine.prefill("r"):
            pass
        host.steps("r")
        with pytest.raises(LocalError, match="finished"):
            host.engine.export_state("r", Exactness.BITS)
        host.engine.release("r")


def damages(state: ExecutionState) -> Iterator[Damage]:
    """A state with one thing left out or wrong, each; what it is in words."""
    tokens, ids = state.tokens, unpack_ids(state.tokens.ids)
    shorter = pack_ids(ids[:-1])
    for what, changes in (
        ("no random state", {"rng": None}),
        ("neither pending nor logits", {"tokens": replace(tokens, pending=None, last_logits=None)}),
        ("a token lost", {"tokens": replace(tokens, ids=shorter, digest=ids_digest(shorter))}),
        ("no prompt border", {"tokens": replace(tokens, prompt_tokens=0)}),
        ("another history", {"tokens": replace(tokens, ids=pack_ids(ids[::-1]))}),
        ("one token fewer in the cache", {"kv_tokens": state.kv_tokens - 1}),
        ("another position", {"positions": replace(state.positions, next=state.kv_tokens + 1)}),
        ("no limit left", {"limits": replace(state.limits, max_tokens_left=0)}),
        ("a stop string without text", {"limits": replace(state.limits, stop_strings=("x",)), "text": None}),
        ("two samples", {"sampling": replace(state.sampling, n=2)}),
        ("another request", {"request_id": "another"}),
    ):
        yield what, replace(state, **changes)
    yield from _fields_of_fingerprint(state)
    yield from _each_left_out(state)
    if state.draft is not None:
        yield from _of_draft(state, state.draft)
    for at, layer in enumerate(state.layers):
        for what, damaged in _scalars(layer):
            yield f"layer {layer.layer} {what}", _put(state, "layers", at, damaged)


def _fields_of_fingerprint(state: ExecutionState) -> Iterator[Damage]:
    print_of = state.fingerprint
    for field in ("weights", "config", "tokenizer", "probe"):
        yield field, replace(state, fingerprint=replace(print_of, **{field: "f" * 64}))
    yield "vocabulary", replace(state, fingerprint=replace(print_of, vocab_size=print_of.vocab_size + 1))
    yield "build", replace(state, fingerprint=replace(print_of, build="another"))


def _each_left_out(state: ExecutionState) -> Iterator[Damage]:
    for field in ("layers", "tensors", "blocks", "sections"):
        rows = getattr(state, field)
        for at in range(len(rows)):
            yield f"{field} {at}", replace(state, **{field: rows[:at] + rows[at + 1 :]})
    for at, entry in enumerate(state.tensors):
        other = "float16" if entry.dtype != "float16" else "float32"
        yield f"dtype of tensor {at}", _put(state, "tensors", at, replace(entry, dtype=other))
        shape = (entry.shape[0] + 1, *entry.shape[1:])
        yield f"shape of tensor {at}", _put(state, "tensors", at, replace(entry, shape=shape))
    for field in ("draft", "encoder"):
        if getattr(state, field) is not None:
            yield f"no {field}", replace(state, **{field: None})


def _of_draft(state: ExecutionState, draft: Draft) -> Iterator[Damage]:
    for what, changes in (
        ("draft: another method", {"method": "another"}),
        ("draft: another model", {"fingerprint": None}),
        ("draft: one token fewer", {"kv_tokens": draft.kv_tokens - 1}),
        ("draft: a layer left out", {"layers": draft.layers[1:]}),
        ("draft: a tensor left out", {"tensors": draft.tensors[1:]}),
    ):
        yield what, replace(state, draft=replace(draft, **changes))


def _scalars(layer: LayerState) -> Iterator[tuple[str, LayerState]]:
    changes: dict[str, Callable[[int], object]] = {
        "window": lambda value: value + 1,
        "cumulative_length": lambda value: value - 1,
        "entry_count": lambda value: value + 1,
        "has_previous_state": lambda _: False,
        "record_past": lambda value: not value,
    }
    for field, change in changes.items():
        value = getattr(layer, field)
        if value is None or (field == "cumulative_length" and layer.kind.value == "cross"):
            continue
        yield field, replace(layer, **{field: change(value)})
        yield f"no {field}", replace(layer, **{field: None})


def _put(state: ExecutionState, field: str, at: int, row: object) -> ExecutionState:
    rows = list(getattr(state, field))
    rows[at] = row
    return replace(state, **{field: tuple(rows)})


def zero(
    layout: PoolLayout, memory: np.typing.NDArray[np.uint8], tables: BlockTables, kind: tuple[str, Role, int]
) -> None:
    """Zero one kind of tensor (group, role, part), in all layers, in the blocks of one request."""
    for group, table in zip(layout.groups, tables, strict=True):
        for tensor in group.tensors:
            if (group.name, tensor.role, tensor.part) != kind:
                continue
            rows, heads = group.entries_per_block, tensor.heads
            view = np.ndarray(
                (group.num_blocks, rows, heads, tensor.row_nbytes),
                np.uint8,
                buffer=memory.data,
                offset=tensor.offset,
                strides=(tensor.block_stride, tensor.token_stride, tensor.head_stride, 1),
            )
            view[table.ids] = 0


def _expectation(state: ExecutionState, host: EngineHost) -> Expectation:
    rooms = tuple(
        GroupRoom(group=need.group, num_blocks=1 << 20) for need in host.engine.requirements().groups
    )
    return Expectation(
        request_id=state.request_id,
        room=rooms,
        batch_slots=1,
        lease_seconds_left=30.0,
        estimated_seconds=0.0,
    )
