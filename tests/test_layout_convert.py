"""Conversions: against a loop over every value, within their bounds, refused by name where there is none."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert_oracle import DTYPES, FLOATS, expected, random_values
from kvferry.errors import CapacityError, IncompatibleError, InputError
from kvferry.layout import (
    BlockTable,
    Conversions,
    ErrorBound,
    Extent,
    GroupLayout,
    LayerKind,
    PoolLayout,
    Role,
    Selection,
    TensorLayout,
    WireFormat,
    convert_dtype,
    copy_plan,
    cut_windows,
    mismatches,
    pack,
    rank_plan,
    unpack,
    wire_form,
)
from kvferry.layout.conversion import conversion
from kvferry.layout.pack import _as_fp8, numpy_dtype
from layout_oracle import copy_by_plan
from layout_strategies import Case, cases

WIRES = [None, *WireFormat]
PAIRS = [(a, b) for a, b in itertools.permutations(("float32", "float16", "bfloat16"), 2)]


def convert(
    case: Case,
    allowed: Conversions,
    src: np.ndarray,
    dst: np.ndarray,
    *,
    slot_nbytes: int = 1 << 14,
    token_range: tuple[int, int] | None = None,
) -> int:
    """Pack, cross and unpack every window; returns the bytes that crossed."""
    form = wire_form(case.src, case.dst, allowed)
    if form is None:
        copy_by_plan(
            copy_plan(
                case.src,
                case.dst,
                case.src_tables,
                case.dst_tables,
                case.tokens,
                first_token=case.first_token,
            ),
            src,
            dst,
        )
        return 0
    sides = (case.src, case.src_tables), (case.dst, case.dst_tables)
    extent = Extent(case.tokens, case.first_token, token_range or (0, case.tokens))
    crossed = 0
    names: list[int] = []
    for window in cut_windows(form, *sides, extent, slot_nbytes=slot_nbytes):
        assert 0 < window.nbytes <= slot_nbytes
        source, target = np.zeros(window.nbytes, np.uint8), np.zeros(window.nbytes, np.uint8)
        plan = window.plan(0, 0)
        names += plan.chunk_id.tolist()
        for at, segment in zip(plan.src_offset.tolist(), window.segments, strict=True):
            wire = form[segment.tensor]
            pack(wire, segment, sides[0], src, source[at:])
        copy_by_plan(plan, source, target)
        for at, segment in zip(plan.dst_offset.tolist(), window.segments, strict=True):
            wire = form[segment.tensor]
            unpack(wire, segment, sides[1], dst, target[at:])
        crossed += window.nbytes
    assert len(set(names)) == len(names)
    return crossed


@given(
    cases(is_unlike=True),
    st.sampled_from(WIRES),
    st.sampled_from([24, 100, 1 << 20]),
    st.sampled_from([512, 1 << 14]),
)
@settings(max_examples=100)
def test_every_value_is_what_a_loop_makes_of_it(
    case: Case, wire: WireFormat | None, limit: int, slot_nbytes: int
) -> None:
    """All dtypes, packings, axis orders, block sizes, heads and kinds of layers; no other byte changes."""
    src, dst = random_values(case.src, 1), random_values(case.dst, 2)
    wanted = expected(case, wire, src, dst)
    with mock.patch("kvferry.layout.wire.CHUNK_NBYTES", limit):
        convert(case, Conversions(lossy=True, wire=wire), src, dst, slot_nbytes=slot_nbytes)
    np.testing.assert_array_equal(dst, wanted)


@given(cases(is_unlike=True, kinds=(LayerKind.FULL, LayerKind.MLA, LayerKind.SLIDING)), st.data())
@settings(max_examples=30)
def test_parts_that_follow_each_other_are_the_whole(case: Case, data: st.DataObject) -> None:
    """Without scales, token ranges that follow each other store what one move stores."""
    cut = data.draw(st.integers(0, case.tokens))
    src, whole = random_values(case.src, 1), random_values(case.dst, 2)
    parts = whole.copy()
    allowed = Conversions(lossy=True)
    convert(case, allowed, src, whole)
    for token_range in (0, cut), (cut, case.tokens):
        convert(case, allowed, src, parts, token_range=token_range)
    np.testing.assert_array_equal(parts, whole)


def one_tensor(values: np.ndarray, dtype: str, block_size: int = 8) -> tuple[PoolLayout, np.ndarray]:
    """(tokens, heads, elements) as a pool of one layer's keys and values."""
    tokens, heads, dim = values.shape
    layout = PoolLayout.paged(
        [0],
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        block_size=block_size,
        num_blocks=-(-tokens // block_size),
        alignment=1,
    )
    memory = np.zeros(layout.nbytes, np.uint8)
    for tensor in layout.groups[0].tensors:
        rows = as_rows(layout, memory, tensor)
        rows[:tokens] = values
    return layout, memory


def as_rows(layout: PoolLayout, memory: np.ndarray, tensor: TensorLayout) -> np.ndarray:
    size = layout.groups[0].num_blocks * layout.groups[0].block_size
    flat = memory[tensor.offset :].view(DTYPES[tensor.dtype])[: size * tensor.heads * tensor.head_dim]
    return flat.reshape(size, tensor.heads, tensor.head_dim)


def crossed(values: np.ndarray, src: str, dst: str, wire: WireFormat | None) -> tuple[np.ndarray, ErrorBound]:
    """The values before (as the source holds them) and after, float64, and the stated bound."""
    layout, memory = one_tensor(values, src)
    other, target = one_tensor(np.zeros_like(values), dst)
    allowed = Conversions(lossy=True, wire=wire)
    table = (BlockTable(0, range(layout.groups[0].num_blocks)),)
    convert(Case(layout, other, table, table, len(values), 0), allowed, memory, target)
    pair = [
        as_rows(*side, side[0].groups[0].tensors[0]).astype(np.float64)[: len(values)]
        for side in ((layout, memory), (other, target))
    ]
    how = conversion(layout.groups[0].tensors[0], other.groups[0].tensors[0], allowed)
    assert how is not None
    return np.stack(pair), how.bound


def limit_of(before: np.ndarray, bound: ErrorBound, block_size: int = 8) -> np.ndarray:
    blocks = before.reshape(-1, block_size, *before.shape[1:])
    largest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    allowed = bound.relative * np.abs(blocks) + bound.of_largest * largest + bound.absolute
    return allowed.reshape(before.shape)


def hard_values(seed: int, src: str, dst: str, *, tokens: int = 4096) -> np.ndarray:
    """Every size that both hold, half steps of the narrow formats among them, blocks mixed and not."""
    rng = np.random.default_rng(seed)
    shape = (tokens, 2, 4)
    top = min(np.log2(FLOATS[src][2]), np.log2(FLOATS[dst][2])) - 1
    exponent = rng.uniform(-150, top, (tokens // 8, 1, 2, 1))
    exponent = np.repeat(exponent, 8, axis=1).reshape(tokens, 2, 1) - rng.exponential(4.0, shape)
    bits = rng.choice([4, 8, 11], shape)
    values = np.exp2(np.floor(exponent)) * (1 + (rng.integers(0, 2**bits) + 0.5) / 2.0 ** (bits - 1) % 1)
    mixed = np.where(rng.random(shape) < 0.5, values, rng.uniform(1, 2, shape) * np.exp2(exponent))
    return (mixed * rng.choice([-1.0, 1.0], shape)).astype(np.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("src", "dst"), [*PAIRS, ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_bounds_hold_and_are_reached(src: str, dst: str, wire: WireFormat | None) -> None:
    """No value of any size leaves its bound; some come close, so that a coarser rounding would leave it."""
    (before, after), bound = crossed(hard_values(3, src, dst), src, dst, wire)
    error, limit = np.abs(after - before), limit_of(before, bound)
    assert np.isfinite(after).all()
    if bound.is_exact:
        assert (error == 0).all()
        return
    assert (error <= limit).all()
    assert (error[limit > 0] / limit[limit > 0]).max() > 0.9


@pytest.mark.parametrize("bits", [8, 11])
def test_cutting_bits_off_instead_of_rounding_leaves_the_bound(bits: int) -> None:
    """The bound is that of rounding to nearest: a store that truncates breaks it."""
    dst = {8: "bfloat16", 11: "float16"}[bits]
    bound = convert_dtype("float32", dst)
    assert bound is not None
    values = np.random.default_rng(1).uniform(1, 2, 1000)
    cut = np.floor(values * 2.0 ** (bits - 1)) / 2.0 ** (bits - 1)
    assert (np.abs(cut - values) > bound.relative * values + bound.absolute).any()


@pytest.mark.parametrize("wire", WireFormat)
def test_a_scale_of_a_whole_tensor_would_leave_the_bound(wire: WireFormat) -> None:
    """Scales are by block and head: a large head or block does not cost a small one its precision."""
    values = np.ones((64, 2, 4), np.float32) * np.float32(0.7)
    values[:, 1] *= 1e6
    values[32:] *= 1e-3
    (before, after), bound = crossed(values, "float32", "float32", wire)
    assert (np.abs(after - before) <= limit_of(before, bound)).all()
    assert np.allclose(after, before, rtol=0.07)


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_stay_zeros(wire: WireFormat | None) -> None:
    """A block without any value divides by no zero."""
    (_, after), _ = crossed(np.zeros((16, 2, 4), np.float32), "float32", "bfloat16", wire)
    assert (after == 0).all()


def test_what_is_not_a_number_stays_so_and_infinities_too() -> None:
    """Floats keep NaN and infinity, whichever way they go."""
    values = np.ones((8, 1, 4), np.float32)
    values[0, 0] = [np.nan, np.inf, -np.inf, -0.0]
    for src, dst in PAIRS:
        (before, after), _ = crossed(values, src, dst, None)
        np.testing.assert_array_equal(after, before)
        np.testing.assert_array_equal(np.signbit(after[0, 0, 1:]), [False, True, True])


@pytest.mark.parametrize(
    ("src", "dst", "wire", "value", "words"),
    [
        ("float32", "float16", None, 65520.0, "65520 is beyond what float16 holds"),
        ("bfloat16", "float16", None, -1e30, "beyond what float16 holds"),
        ("float32", "bfloat16", None, 3.4e38, "beyond what bfloat16 holds"),
        ("float32", "float16", WireFormat.INT8, 7e4, "70000 is beyond what float16 holds"),
        ("float32", "float32", WireFormat.INT8, np.inf, "not finite has no place in int8"),
        ("float32", "float32", WireFormat.FP8, np.nan, "not finite has no place in float8_e4m3fn"),
    ],
)
def test_a_value_without_a_place_is_an_error(
    src: str, dst: str, wire: WireFormat | None, value: float, words: str
) -> None:
    """A finite value never becomes an infinity, and nothing that is no number gets a scale."""
    values = np.ones((8, 1, 4), np.float32)
    values[3, 0, 2] = value
    with pytest.raises(IncompatibleError, match=words) as caught:
        crossed(values, src, dst, wire)
    assert "layer 0 key" in str(caught.value)


@pytest.mark.parametrize("wire", WireFormat)
def test_the_largest_values_of_a_dtype_come_back_finite(wire: WireFormat) -> None:
    """Rounding the largest value up would end in infinity: it is brought back."""
    for dtype in ("float16", "bfloat16", "float32"):
        values = np.full((8, 1, 4), FLOATS[dtype][2], np.float32)
        (before, after), bound = crossed(values, dtype, dtype, wire)
        assert (np.abs(after - before) <= limit_of(before, bound)).all()


PAGED = {"kv_heads": 3, "head_dim": 5, "dtype": "float32", "block_size": 4, "num_blocks": 9}


def paged(**changes: object) -> PoolLayout:
    return PoolLayout.paged(range(2), **PAGED | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wire", "nbytes_of_value", "scale_nbytes"),
    [(None, 2, 0), (WireFormat.FP8, 1, 4), (WireFormat.INT8, 1, 4)],
)
def test_bytes_on_the_wire(wire: WireFormat | None, nbytes_of_value: int, scale_nbytes: int) -> None:
    """Values in the narrower dtype, and one scale of 4 bytes for each (block, head) of the source."""
    src, dst = paged(), paged(dtype="bfloat16", block_size=8, num_blocks=5)
    case = Case(src, dst, (BlockTable(0, range(8)),), (BlockTable(0, range(4)),), 30, 0)
    got = convert(case, Conversions(lossy=True, wire=wire), random_values(src, 1), random_values(dst, 2))
    # 2 layers of K and V, 3 heads of 5, 30 tokens in 8 blocks of 4.
    assert got == 2 * 2 * 3 * (30 * 5 * nbytes_of_value + 8 * scale_nbytes)


@pytest.mark.parametrize(
    ("change", "allowed", "words"),
    [
        ({"dtype": "bfloat16"}, None, "dtype: float32 against bfloat16, conversion is not allowed"),
        ({"dtype": "bfloat16"}, Conversions(), "lossy conversion is not allowed"),
        ({"dtype": "float16"}, Conversions(), "lossy conversion is not allowed"),
        ({"dtype": "int8"}, Conversions(lossy=True, wire=WireFormat.INT8), "there is no conversion"),
        ({"axis_order": "HND", "transposed_keys": True}, None, "key dim_stride: elements together"),
        ({"head_dim": 6}, Conversions(lossy=True), "head_dim: 5 against 6"),
    ],
)
def test_pairs_are_refused_by_the_field_that_differs(
    change: dict[str, object], allowed: Conversions | None, words: str
) -> None:
    """Where there is no conversion, or it is not allowed, the reason names the field and both values."""
    reasons = mismatches(paged(), paged(**change), allowed)
    assert any(words in reason for reason in reasons), reasons
    table = [BlockTable(0, [0])]
    with pytest.raises(IncompatibleError, match=words):
        (allowed and wire_form(paged(), paged(**change), allowed)) or copy_plan(
            paged(), paged(**change), table, table, 1
        )


@pytest.mark.parametrize(
    ("src", "dst", "name", "is_exact"),
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16 -> float32", True),
        ({"dtype": "float16"}, {}, "float16 -> float32", True),
        ({}, {"axis_order": "HND", "transposed_keys": True}, "float32, repacked", True),
    ],
)
def test_exact_conversions_need_no_leave_to_lose(
    src: dict[str, object], dst: dict[str, object], name: str, is_exact: bool
) -> None:
    """Widening and repacking are allowed by allowing conversions at all, and the way back by its own rule."""
    form = wire_form(paged(**src), paged(**dst), Conversions())
    assert form[0].conversion.name == name
    assert form[0].conversion.bound.is_exact is is_exact


def test_like_pairs_are_copied_and_not_converted() -> None:
    """Equal dtypes and packings need no staging; keys transposed on both sides are such a pair."""
    transposed = paged(axis_order="HND", transposed_keys=True)
    assert wire_form(paged(), paged(axis_order="HND", block_size=8), Conversions(lossy=True)) is None
    assert wire_form(transposed, transposed, Conversions()) is None
    table = (BlockTable(0, [3, 5]),)
    plan = copy_plan(transposed, transposed, table, table, 8)
    assert plan.num_pieces == 2 * 2 * 2  # whole blocks are one piece each, as bytes


def cpu_pool(heads: int, dim: int, block: int, num_blocks: int) -> PoolLayout:
    """vLLM's CPU pool: (blocks, heads, tokens, 2 x dim), of each (block, head) K transposed, then V."""
    half, head = block * dim * 4, 2 * block * dim * 4
    common = {"block_stride": heads * head, "head_stride": head, "heads": heads, "head_dim": dim}
    tensors = (
        TensorLayout(0, Role.KEY, "float32", 0, token_stride=4, dim_stride=block * 4, **common),
        TensorLayout(0, Role.VALUE, "float32", half, token_stride=dim * 4, **common),
    )
    group = GroupLayout("full", LayerKind.FULL, block, num_blocks, tensors)
    return PoolLayout((group,), num_blocks * heads * head)


@pytest.mark.parametrize("wire", WIRES)
def test_transposed_keys_of_a_cpu_pool_are_repacked(wire: WireFormat | None) -> None:
    """Into a plain pool of another block size and back: against the loop over every element."""
    cpu = cpu_pool(heads=2, dim=3, block=4, num_blocks=8)
    plain = PoolLayout.paged(
        [0], kv_heads=2, head_dim=3, dtype="bfloat16", block_size=6, num_blocks=6, joined_kv=True
    )
    tables = (BlockTable(0, [6, 1, 3, 0, 5]),), (BlockTable(0, [4, 0, 2]),)
    for case in (
        Case(cpu, plain, *tables, 17, 3),
        Case(plain, cpu, *reversed(tables), 17, 3),
    ):
        src, dst = random_values(case.src, 1), random_values(case.dst, 2)
        wanted = expected(case, wire, src, dst)
        convert(case, Conversions(lossy=True, wire=wire), src, dst)
        np.testing.assert_array_equal(dst, wanted)


def test_ranks_convert_each_their_heads() -> None:
    """A converting pair of unlike tensor parallelism is shared out as a copying one is, each head once."""
    ranks = [paged(kv_heads=1, head_start=head) for head in range(3)]
    target = paged(dtype="bfloat16")
    with pytest.raises(IncompatibleError, match="dtype"):
        rank_plan(ranks, [target])
    moves = rank_plan(ranks, [target], Conversions(lossy=True))
    found = []
    for move in moves:
        selection = Selection(move.layers, frozenset(move.parts), move.head_range)
        form = wire_form(ranks[move.src_rank], target, Conversions(lossy=True), (selection,))
        found += [(wire.src.layer, wire.src.role, head) for wire in form for head in range(*wire.heads)]
    assert sorted(found) == sorted(itertools.product(range(2), (Role.KEY, Role.VALUE), range(3)))


def test_a_block_that_no_window_holds_is_refused() -> None:
    """One head of one block has to fit into staging; the message says what it needs."""
    case = Case(paged(), paged(dtype="bfloat16"), (BlockTable(0, [0]),), (BlockTable(0, [0]),), 4, 0)
    with pytest.raises(CapacityError, match="40 bytes on the wire, a window has 39"):
        convert(
            case, Conversions(lossy=True), *map(random_values, (case.src, case.dst), (1, 2)), slot_nbytes=39
        )


def test_a_request_of_too_many_segments_is_refused() -> None:
    """A peer whose windows hold next to nothing cannot make this side cut a request for minutes."""
    case = Case(
        paged(), paged(dtype="bfloat16"), (BlockTable(0, range(9)),), (BlockTable(0, range(9)),), 36, 0
    )
    with (
        mock.patch("kvferry.layout.wire.MAX_SEGMENTS", 100),
        pytest.raises(CapacityError, match="more than 100 segments"),
    ):
        convert(
            case, Conversions(lossy=True), *map(random_values, (case.src, case.dst), (1, 2)), slot_nbytes=40
        )


def test_unlike_tables_are_refused() -> None:
    """As for a copy: the two sides' tables are for as many entries."""
    tensor = TensorLayout(0, Role.SSM, "float32", 0, 8, 0, 4, 2, 1)
    state = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (tensor,)),), 24)
    narrow = PoolLayout(
        (
            GroupLayout(
                "state", LayerKind.LINEAR, None, 3, (msgspec.structs.replace(tensor, dtype="float16"),)
            ),
        ),
        24,
    )
    case = Case(state, narrow, (BlockTable(0, [1]),), (BlockTable(0, [1, 2]),), 5, 0)
    with pytest.raises(InputError, match="'state': it is for 2 entries, the source has 1"):
        convert(case, Conversions(lossy=True), np.zeros(24, np.uint8), np.zeros(24, np.uint8))


def test_a_state_slot_too_large_for_a_window_is_cut_by_heads() -> None:
    """Recurrent state crosses whole, head by head where it must, and never in a wire format with scales."""
    tensor = TensorLayout(0, Role.SSM, "float32", 0, 640, 0, 80, 8, 20)
    state = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (tensor,)),), 1920)
    narrow = msgspec.structs.replace(tensor, dtype="bfloat16", head_stride=40, block_stride=320)
    other = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (narrow,)),), 1920)
    case = Case(state, other, (BlockTable(0, [1]),), (BlockTable(0, [2]),), 5, 0)
    src, dst = random_values(state, 1), random_values(other, 2)
    wanted = expected(case, WireFormat.INT8, src, dst)
    crossed_nbytes = convert(case, Conversions(lossy=True, wire=WireFormat.INT8), src, dst, slot_nbytes=100)
    np.testing.assert_array_equal(dst, wanted)
    assert crossed_nbytes == 8 * 20 * 2


def test_a_wire_format_that_is_none_is_refused() -> None:
    """Also when it comes from a peer; one that is known may be given by its name."""
    assert Conversions(wire="int8") == Conversions(wire=WireFormat.INT8)  # type: ignore[arg-type]
    assert type(Conversions(wire="int8").wire) is WireFormat  # type: ignore[arg-type]
    with pytest.raises(InputError, match="wire: 'int4' is not one of float8_e4m3fn, int8"):
        Conversions(wire="int4")  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"lossy": False, "wire": "int4"}), type=Conversions)


def test_bounds_add_up_in_order() -> None:
    """Two steps: the second rounds what the first made, and sees a largest value that has grown."""
    first, second = ErrorBound(0.5, 0.25, 1.0), ErrorBound(0.1, 0.2, 3.0)
    both = first.then(second)
    worst, largest = 8.0, 10.0
    made = worst + 0.5 * worst + 0.25 * largest + 1.0
    grown = largest + 0.5 * largest + 0.25 * largest + 1.0
    end = made + 0.1 * made + 0.2 * grown + 3.0
    assert both.relative * worst + both.of_largest * largest + both.absolute == pytest.approx(end - worst)
    assert str(ErrorBound()) == "exact"
    assert str(replace(first, absolute=0.0)) == "at most 0.5 x |value| + 0.25 x largest"


@pytest.mark.parametrize("lower", [0, 1, 0x8000, 0xFFFF])
def test_float8_is_looked_up_as_it_is_rounded(lower: int) -> None:
    """Every upper half of a finite float32 with a lower half: the bits that ml_dtypes' own cast gives."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(lower)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    values = values[np.abs(values) <= 448]  # what is scaled is never larger
    cast = values.astype(numpy_dtype("float8_e4m3fn")).view(np.uint8)
    assert np.array_equal(_as_fp8(values, is_short=lower == 0), cast)


def test_without_ml_dtypes_it_says_what_to_install() -> None:
    """One line that names the package; float32 and float16 need it not."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from kvferry.errors import LocalError\n"
        "from kvferry.layout.pack import numpy_dtype\n"
        "print(numpy_dtype('float16'), numpy_dtype('int8'))\n"
        "try: numpy_dtype('bfloat16')\n"
        "except LocalError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("float16 int8\n")
    assert "pip install 'kvferry[convert]'" in done.stdout
