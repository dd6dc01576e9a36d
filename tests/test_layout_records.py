"""Layout records: what they accept, what they refuse, and that hostile ones cost nothing."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.layout import GroupLayout, LayerKind, PoolLayout, Role, TensorLayout
from layout_oracle import all_bytes
from layout_strategies import Case, cases

PAGED = {"kv_heads": 2, "head_dim": 3, "dtype": "float16", "block_size": 4, "num_blocks": 3}
TENSOR = {
    "layer": 0,
    "role": Role.KEY,
    "dtype": "uint8",
    "offset": 0,
    "block_stride": 4,
    "token_stride": 2,
    "head_stride": 2,
    "heads": 1,
    "head_dim": 2,
}


def pool(
    nbytes: int = 1000, block_size: int | None = 2, num_blocks: int = 3, **changes: object
) -> PoolLayout:
    tensor = TensorLayout(**{**TENSOR, **changes})
    kind = LayerKind.LINEAR if block_size is None else LayerKind.FULL
    return PoolLayout((GroupLayout("g", kind, block_size, num_blocks, (tensor,)),), nbytes)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_paged_pools_use_every_byte_once(order: str, joined: bool, cross: bool) -> None:
    """The usual forms fill their pool, all but the alignment of regions, and no byte has two owners."""
    layout = PoolLayout.paged(
        range(3), axis_order=order, joined_kv=joined, cross_layer=cross, alignment=1, **PAGED
    )
    owners = Counter(byte for _, byte in all_bytes(layout))
    assert sorted(owners) == list(range(layout.nbytes))
    assert set(owners.values()) == {1}


def test_paged_axis_orders_are_what_they_say() -> None:
    """NHD puts a token's heads side by side, HND a head's tokens; joined K and V adjoin in a block."""
    nhd = PoolLayout.paged([0], **PAGED).groups[0].tensors[0]
    hnd = PoolLayout.paged([0], axis_order="HND", **PAGED).groups[0].tensors[0]
    assert (nhd.token_stride, nhd.head_stride, nhd.block_stride) == (12, 6, 48)
    assert (hnd.token_stride, hnd.head_stride, hnd.block_stride) == (6, 24, 48)
    key, value = PoolLayout.paged([0], joined_kv=True, **PAGED).groups[0].tensors
    assert (value.offset - key.offset, key.block_stride) == (48, 96)
    tensors = PoolLayout.paged([0, 1], cross_layer=True, joined_kv=True, **PAGED).groups[0].tensors
    assert [tensor.offset for tensor in tensors] == [0, 48, 96, 144]
    apart = PoolLayout.paged([0], alignment=64, **PAGED).groups[0].tensors
    assert [tensor.offset for tensor in apart] == [0, 192]


@given(cases())
@settings(max_examples=50, deadline=None)
def test_any_nesting_of_the_axes_is_accepted(case: Case) -> None:
    """What is accepted has no byte with two owners and none outside the pool (checked byte by byte)."""
    for layout in (case.src, case.dst):
        owners = Counter(byte for _, byte in all_bytes(layout))
        assert set(owners.values()) == {1}
        assert max(owners) < layout.nbytes


@given(cases(), st.data())
@settings(max_examples=80, deadline=None)
def test_no_change_of_a_number_hides_an_overlap(case: Case, data: st.DataObject) -> None:
    """One changed offset or stride is either refused, or the layout still has one owner a byte."""
    group_index = data.draw(st.integers(0, len(case.src.groups) - 1))
    group = case.src.groups[group_index]
    index = data.draw(st.integers(0, len(group.tensors) - 1))
    field = data.draw(st.sampled_from(["offset", "block_stride", "token_stride", "head_stride"]))
    value = data.draw(st.integers(0, 60))
    try:
        tensor = msgspec.structs.replace(group.tensors[index], **{field: value})
        tensors = (*group.tensors[:index], tensor, *group.tensors[index + 1 :])
        groups = list(case.src.groups)
        groups[group_index] = msgspec.structs.replace(group, tensors=tensors)
        layout = PoolLayout(tuple(groups), case.src.nbytes)
    except InputError:
        return
    owners = Counter(byte for _, byte in all_bytes(layout))
    assert set(owners.values()) == {1}
    assert max(owners) < layout.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": -1}, "layer: -1"),
        ({"dtype": "int4"}, "dtype: 'int4' is not known"),
        ({"heads": 0}, "heads: 0"),
        ({"head_dim": 0}, "head_dim: 0"),
        ({"head_dim": 1.5}, "head_dim: 1.5"),
        ({"offset": -1}, "offset: -1"),
        ({"offset": 1 << 70}, "offset: "),
        ({"role": "key"}, "role: 'key'"),
        ({"block_stride": 3}, "block_stride 3 is less than the 4 bytes"),
        ({"token_stride": 1}, "token_stride 1 is less than the 2 bytes"),
        ({"heads": 2, "head_stride": 1}, "head_stride 1 is less than the 2 bytes"),
        ({"offset": 995}, "layer 0 key: ends at byte 1007, the pool has nbytes 1000"),
        ({"num_blocks": 0}, "num_blocks: 0"),
        ({"block_size": 0}, "block_size: 0"),
        ({"block_size": None}, "token_stride and dim_stride must be 0"),
        ({"nbytes": 0}, "nbytes: 0"),
        ({"nbytes": 1 << 60}, "nbytes: "),
    ],
)
def test_wrong_numbers_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    """Each field out of range raises InputError that names it."""
    with pytest.raises(InputError, match=message):
        pool(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": LayerKind.SLIDING}, "window is None in a group of kind sliding"),
        ({"window": 3}, "window is 3 in a group of kind full"),
        ({"kind": "full"}, "kind: 'full' is not a LayerKind"),
        ({"tokens_per_entry": 2}, "tokens_per_entry 2 needs kind compressed"),
        (
            {"tokens_per_entry": 3, "kind": LayerKind.COMPRESSED},
            "block_size 4 is not a multiple of tokens_per_entry 3",
        ),
        ({"tensors": ()}, "tensors is empty"),
    ],
)
def test_wrong_groups_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    """A group whose fields contradict each other raises InputError that names it."""
    group = PoolLayout.paged([0], **PAGED).groups[0]
    with pytest.raises(InputError, match=message):
        msgspec.structs.replace(group, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis_order": "DNH"}, "axis_order"),
        ({"layers": []}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"alignment": 0}, "alignment"),
        ({"num_blocks": 1 << 40}, "num_blocks|block_stride|offset|nbytes"),
        ({"layers": [0, 0]}, "layer 0 key' comes twice"),
    ],
)
def test_paged_names_the_wrong_parameter(changes: dict[str, object], message: str) -> None:
    """PoolLayout.paged refuses what makes no pool."""
    with pytest.raises(InputError, match=message):
        PoolLayout.paged(**{"layers": [0], **PAGED, **changes})


def test_overlap_is_refused_by_both_names() -> None:
    """Two tensors on the same bytes raise InputError that names both."""
    one = PoolLayout.paged([0], **PAGED)
    two = PoolLayout.paged([1], name="more", **PAGED)
    with pytest.raises(InputError, match="group 'full' layer 0 key and group 'more' layer 1 key overlap"):
        PoolLayout(one.groups + two.groups, one.nbytes)
    both = PoolLayout.beside(one, two)
    assert both.layers == (0, 1)
    assert both.nbytes == one.nbytes + two.nbytes


def test_a_pool_may_be_filled_to_its_last_byte_and_not_further() -> None:
    """The last byte of the last block is the last that fits."""
    assert pool(nbytes=12, block_stride=4).nbytes == 12
    with pytest.raises(InputError, match="ends at byte 12, the pool has nbytes 11"):
        pool(nbytes=11, block_stride=4)


def test_interleaved_groups_are_told_apart() -> None:
    """Groups whose blocks lie between each other's are sound; one more on a far block is not."""
    tensor = {**TENSOR, "block_stride": 50, "token_stride": 5}
    groups = [
        GroupLayout(
            name, LayerKind.FULL, 2, count, (TensorLayout(**{**tensor, "layer": i, "offset": offset}),)
        )
        for i, (name, count, offset) in enumerate((("a", 4, 0), ("b", 2, 20), ("c", 1, 150)))
    ]
    assert len(PoolLayout(tuple(groups[:2]), 200).groups) == 2
    with pytest.raises(InputError, match="overlap"):
        PoolLayout(tuple(groups), 200)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_layouts_cross_the_wire(case: Case) -> None:
    """A layout decodes to an equal one with an equal hash."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(case.src), type=PoolLayout)
    assert again == case.src
    assert hash(again) == hash(case.src)


def test_hostile_layouts_are_refused_without_allocating() -> None:
    """Decoded values at the edge of every integer are refused or kept, in little memory and no overflow."""
    good = msgspec.to_builtins(PoolLayout.paged([0], **PAGED))
    edges = (-1, 0, 1 << 31, 1 << 56, (1 << 63) - 1, (1 << 64) - 1)
    fields = [name for name in TENSOR if name not in ("role", "dtype")]
    tracemalloc.start()
    refused = 0
    for field, value in itertools.product(fields, edges):
        hostile = msgspec.to_builtins(good)
        hostile["groups"][0]["tensors"][0][field] = value
        hostile["nbytes"] = 1 << 56
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(hostile), type=PoolLayout)
        except InputError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > len(fields) * 3
    assert peak < 1 << 20


def test_unknown_fields_and_too_many_tensors_are_refused() -> None:
    """The schema is closed, and a layout has at most 2**14 tensors."""
    good = msgspec.to_builtins(PoolLayout.paged([0], **PAGED))
    good["groups"][0]["packing"] = "transposed"
    with pytest.raises(msgspec.ValidationError, match="packing"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=PoolLayout)
    with pytest.raises(InputError, match="more than 16384 tensors"):
        PoolLayout.paged(range((1 << 13) + 1), **PAGED)
