"""The record's schema: closed, frozen, bounded; and any record that fits it survives the bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from kvferry import state as s
from kvferry.errors import KVFerryError
from kvferry.layout import ITEMSIZE, BlockTable
from state_cases import (
    good_arrival,
    good_expectation,
    good_import,
    good_replay,
    good_requirements,
    good_state,
    put,
)

INT32_BYTES = 4 * (1 << 27)


def types_in(root: inspect.Type) -> Iterator[inspect.Type]:
    """Every type in a record, each struct once."""
    seen, todo = set(), [root]
    while todo:
        kind = todo.pop()
        if isinstance(kind, inspect.StructType):
            if kind.cls in seen:
                continue
            seen.add(kind.cls)
            todo += [field.type for field in kind.fields]
        elif isinstance(kind, inspect.UnionType):
            todo += kind.types
        elif isinstance(kind, inspect.VarTupleType):
            todo.append(kind.item_type)
        yield kind


SCHEMA = list(types_in(inspect.type_info(s.ExecutionState)))


def test_every_part_is_frozen_and_closed() -> None:
    """No part of the record can be changed, or takes a field that it does not know."""
    structs = [kind for kind in SCHEMA if isinstance(kind, inspect.StructType)]
    assert len(structs) == 29
    for kind in structs:
        assert kind.forbid_unknown_fields, kind.cls
        assert kind.cls.__struct_config__.frozen, kind.cls


def test_schema_is_made_of_bounded_plain_values() -> None:
    """Only plain types; every list has a bound on its length, every number but a seed on its size."""
    allowed = (
        inspect.StructType, inspect.UnionType, inspect.VarTupleType, inspect.IntType, inspect.FloatType,
        inspect.BoolType, inspect.StrType, inspect.BytesType, inspect.EnumType, inspect.NoneType,
    )  # fmt: skip
    unbounded = 0
    for kind in SCHEMA:
        assert isinstance(kind, allowed), kind
        if isinstance(kind, inspect.VarTupleType):
            assert kind.max_length is not None, kind
        if isinstance(kind, inspect.IntType):
            unbounded += kind.le is None
            assert kind.ge is not None, kind
    assert unbounded == 2  # the two seeds, which may be any u64


def arbitrary(kind: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one a type
    """Values of a schema type, from the schema alone."""
    if isinstance(kind, inspect.StructType):
        if kind.cls is s.InlineTensor:
            return inline_tensors()
        if kind.cls is s.LogprobRow:
            return logprob_rows()
        return st.builds(kind.cls, **{field.name: arbitrary(field.type) for field in kind.fields})
    if isinstance(kind, inspect.UnionType):
        return st.one_of([arbitrary(one) for one in kind.types])
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(arbitrary(kind.item_type), max_size=min(2, kind.max_length or 2)).map(tuple)
    if isinstance(kind, inspect.EnumType):
        return st.sampled_from(list(kind.cls))
    if isinstance(kind, inspect.BytesType):
        if kind.max_length == INT32_BYTES:
            return st.lists(st.integers(0, 2**31 - 1), max_size=4).map(s.pack_ids)
        return st.binary(min_size=kind.min_length or 0, max_size=min(16, kind.max_length or 16))
    if isinstance(kind, inspect.StrType):
        if kind.pattern is not None:
            return st.text("0123456789abcdef", min_size=64, max_size=64)
        return st.text(min_size=kind.min_length or 0, max_size=6)
    return {
        inspect.IntType: lambda: st.integers(kind.ge, 2**64 - 1 if kind.le is None else kind.le),  # type: ignore[attr-defined]
        inspect.FloatType: lambda: st.floats(allow_nan=False),
        inspect.BoolType: st.booleans,
        inspect.NoneType: st.none,
    }[type(kind)]()


@st.composite
def inline_tensors(draw: st.DrawFn) -> s.InlineTensor:
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    nbytes = int(np.prod(shape, dtype=int)) * ITEMSIZE[dtype]
    return s.InlineTensor(dtype=dtype, shape=shape, data=draw(st.binary(min_size=nbytes, max_size=nbytes)))


@st.composite
def logprob_rows(draw: st.DrawFn) -> s.LogprobRow:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=3))
    values = draw(st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids)))
    return s.LogprobRow(
        token=draw(st.integers(0, 2**31 - 1)),
        logprob=draw(st.floats(allow_nan=False)),
        top_ids=s.pack_ids(ids),
        top_logprobs=np.array(values, "<f4").tobytes(),
    )


STATES = arbitrary(inspect.type_info(s.ExecutionState)).map(
    lambda state: msgspec.structs.replace(state, version=s.CURRENT_VERSION)
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(STATES)
def test_any_state_survives_its_bytes(state: s.ExecutionState) -> None:
    """Any state that fits the schema comes back equal, and its bytes are always the same."""
    data = s.encode_state(state)
    assert s.decode_state(data) == state
    assert s.encode_state(state) == data


def places(record: Any, kind: inspect.Type, prefix: str = "") -> list[tuple[str, inspect.Type]]:
    """Every field of a record, to any depth, with its type."""
    found = [(prefix[:-1], kind)] if prefix else []
    if isinstance(kind, inspect.UnionType):
        kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(record, tuple) and isinstance(kind, inspect.VarTupleType):
        for i, item in enumerate(record):
            found += places(item, kind.item_type, f"{prefix}{i}.")
    elif isinstance(record, msgspec.Struct) and isinstance(kind, inspect.StructType):
        # A tensor's bytes and shape belong together, so it is replaced whole.
        for field in () if isinstance(record, s.InlineTensor | s.LogprobRow) else kind.fields:
            found += places(getattr(record, field.name), field.type, f"{prefix}{field.name}.")
    return found


PLACES = places(good_state(), inspect.type_info(s.ExecutionState))
CHANGES = st.sampled_from(PLACES).flatmap(
    lambda place: arbitrary(place[1]).map(lambda value: put(good_state(), place[0], value))
)


def answer(state: s.ExecutionState) -> list[str]:
    """What each of the checks says: "" or the message."""
    local = good_requirements()
    answers = []
    for ask in (
        lambda: s.check_before_move(state, local, good_expectation()),
        lambda: s.check_after_move(state, local, good_arrival()),
        lambda: s.verify_finite(state, {}),
        lambda: s.verify_import(state, local, good_import()),
        lambda: s.verify_replay(state, good_replay()),
    ):
        try:
            ask()
            answers.append("")
        except KVFerryError as error:
            answers.append(error.message)
    return answers


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES)
def test_any_change_of_one_field_is_answered_by_the_checks(state: s.ExecutionState) -> None:
    """Whatever one field of a good state becomes, each check passes it or refuses it by name."""
    assert all(not message or message.startswith("check ") for message in answer(state))


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(STATES)
def test_any_state_is_answered_by_the_checks(state: s.ExecutionState) -> None:
    """A well-formed state that has nothing to do with this engine is never accepted, and never a crash."""
    assert answer(state)[0].startswith("check ")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_travel_as_little_endian_int32(ids: list[int]) -> None:
    """Packed ids are what struct packs, and come back equal."""
    raw = s.pack_ids(ids)
    assert raw == struct.pack(f"<{len(ids)}i", *ids)
    assert s.unpack_ids(raw).tolist() == ids


def test_unpacked_ids_cannot_be_written() -> None:
    """The array is a view of the record's bytes, so it is read-only."""
    with pytest.raises(ValueError, match="read-only"):
        s.unpack_ids(s.pack_ids([1]))[0] = 2


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64"]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_travel_little_endian(dtype: str, order: str) -> None:
    """An array of either byte order, and of any strides, comes back with equal values."""
    array = np.arange(24).astype(np.dtype(dtype).newbyteorder(order)).reshape(4, 6)[::2, ::-1]
    tensor = s.InlineTensor.of(array)
    assert tensor.dtype == dtype
    assert tensor.shape == (2, 6)
    assert tensor.data == array.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    np.testing.assert_array_equal(tensor.array(), array)


def test_dtypes_that_numpy_lacks_come_as_bits() -> None:
    """bfloat16 and float8 are read as their bit patterns."""
    tensor = s.InlineTensor(dtype="bfloat16", shape=(2,), data=b"\x80\x3f\x00\x40")
    assert tensor.array().tolist() == [0x3F80, 0x4000]
    assert s.InlineTensor(dtype="float8_e5m2", shape=(1,), data=b"\x7c").array().tolist() == [0x7C]


def test_block_table_travels() -> None:
    """An engine's block table becomes a record and a table again."""
    blocks = s.GroupBlocks.of("full", BlockTable(3, [9, 1, 4]), block_tokens=16, layout="NHD")
    table = blocks.table()
    assert (table.first_block, table.ids.tolist(), table.tokens) == (3, [9, 1, 4], None)
    assert (blocks.group, blocks.block_tokens, blocks.layout) == ("full", 16, "NHD")
    assert blocks.table(29).tokens == 29


def test_tokens_take_their_own_digest() -> None:
    """Tokens made from ids carry the digest of their bytes."""
    tokens = s.Tokens.of([5, 6], prompt_tokens=1, emitted_tokens=0, pending=6)
    assert tokens.digest == hashlib.sha256(bytes([5, 0, 0, 0, 6, 0, 0, 0])).hexdigest()
    assert tokens.pending == 6
