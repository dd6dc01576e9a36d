"""What an engine needs as a function of the tokens, and block tables that cover them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import state as s
from kvferry.layout import GroupLayout, LayerKind, PoolLayout, Role
from kvferry.state.check_blocks import block_refusals
from state_cases import TD, THD, good_requirements, good_state, put


def need(role: Role, shape: tuple[int, ...], rows: s.RowRule, axes: tuple[s.Axis, ...] = THD) -> s.TensorNeed:
    return s.TensorNeed(layer=0, role=role, dtype="bfloat16", axes=axes, shape=shape, rows=rows)


BHTD = (s.Axis.BATCH, s.Axis.HEAD, s.Axis.TOKEN, s.Axis.DIM)

# Cache tensors that transformers 5.24 holds after 37 prompt tokens and 1 step, window 16, kernel 4.
TRANSFORMERS = [
    ("Llama", need(Role.KEY, (1, 2, 0, 16), s.RowRule(), BHTD), (1, 2, 38, 16)),
    ("Gemma 3, sliding", need(Role.KEY, (1, 2, 0, 16), s.RowRule(most=15), BHTD), (1, 2, 15, 16)),
    ("DeepSeek-V3, latent", need(Role.LATENT, (1, 1, 0, 32), s.RowRule(), BHTD), (1, 1, 38, 32)),
    (
        "DeepSeek-V3.2, indexer",
        need(Role.INDEX, (1, 0, 16), s.RowRule(), (s.Axis.BATCH, s.Axis.TOKEN, s.Axis.DIM)),
        (1, 38, 16),
    ),
    (
        "Bamba, recurrent",
        need(Role.SSM, (1, 8, 16, 16), s.RowRule(), (s.Axis.BATCH, s.Axis.HEAD, s.Axis.STATE, s.Axis.DIM)),
        (1, 8, 16, 16),
    ),
    ("Whisper, cross", need(Role.CROSS_KEY, (1, 4, 0, 16), s.RowRule(of_encoder=True), BHTD), (1, 4, 29, 16)),
]


@pytest.mark.parametrize(("family", "tensor", "shape"), TRANSFORMERS)
def test_shapes_are_those_that_transformers_holds(
    family: str, tensor: s.TensorNeed, shape: tuple[int, ...]
) -> None:
    """The token axis follows its own rule per tensor, as seen in real caches."""
    local = put(good_requirements(), "cache", (tensor,))
    (spec,) = local.tensors(38, encoder_tokens=29)
    assert spec.shape == shape


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 7, 8, 9, 63, 64, 65])
def test_rows_by_rule(tokens: int) -> None:
    """All tokens, at most a window of them, or one row for every few."""
    assert s.RowRule().rows(tokens, 5) == tokens
    assert s.RowRule(most=8).rows(tokens, 5) == (min(8, tokens))
    assert s.RowRule(tokens_per_row=4).rows(tokens, 5) == len(range(4, tokens + 1, 4))
    assert s.RowRule(of_encoder=True).rows(tokens, 5) == 5


def test_requirements_list_is_the_states_own() -> None:
    """For the good state, the list derived from the decode side's config is the prefill side's list."""
    listed = good_requirements().tensors(39, encoder_tokens=29)
    assert [(spec.key, spec.dtype, spec.shape) for spec in listed] == [
        (entry.key, entry.dtype, entry.shape) for entry in good_state().tensors
    ]


def test_group_need_comes_from_the_pools_layout() -> None:
    """Name, block size and window are the pool's; a pool's recurrent group has slots."""
    pool = PoolLayout.paged(
        [0, 1], kv_heads=2, head_dim=8, dtype="float32", block_size=4, num_blocks=8, name="w", window=9
    )
    got = s.GroupNeed.of(pool.groups[0], layout="NHD")
    assert got == s.GroupNeed(group="w", block_tokens=4, layout="NHD", window=9)
    state = msgspec.structs.replace(pool.groups[0].tensors[0], role=Role.SSM, token_stride=0)
    slots = GroupLayout("r", LayerKind.LINEAR, None, 2, (state,))
    assert s.GroupNeed.of(slots, layout="NHD").block_tokens is None


@settings(deadline=None, max_examples=300)
@given(
    kv_tokens=st.integers(1, 60),
    block_tokens=st.integers(1, 9),
    window=st.none() | st.integers(1, 20),
    change=st.sampled_from(["none", "first", "last", "more", "twice", "earlier", "placeholders"]),
)
def test_block_table_is_accepted_only_when_it_covers_each_needed_token_once(
    kv_tokens: int, block_tokens: int, window: int | None, change: str
) -> None:
    """Token by token: each one needed lies in the table, no block past the last, and none of theirs twice."""
    needed = [token for token in range(kv_tokens) if window is None or token >= kv_tokens - window]
    first, last = needed[0] // block_tokens, needed[-1] // block_tokens
    first, last = {
        "first": (first + 1, last),
        "last": (first, last - 1),
        "more": (first, last + 1),
        "earlier": (max(0, first - 1), last),
        "placeholders": (0, last),
    }.get(change, (first, last))
    held = list(range(first, last + 1))
    dead = needed[0] // block_tokens
    ids = [0 if change == "placeholders" and block < dead else 10 + block for block in held]
    if change == "twice":
        ids[-1] = ids[0]
    blocks = s.GroupBlocks(
        group="g", block_tokens=block_tokens, layout="NHD", first_logical_block=first, ids=s.pack_ids(ids)
    )
    group = s.GroupNeed(group="g", block_tokens=block_tokens, layout="NHD", window=window)
    covers = (
        all(token // block_tokens in held for token in needed)
        and max(held, default=-1) == needed[-1] // block_tokens
        and (change != "twice" or len(ids) < 2)
    )
    assert (not list(block_refusals("blocks", blocks, group, kv_tokens))) == covers


@settings(deadline=None)
@given(
    kv_tokens=st.integers(0, 60),
    more=st.integers(1, 9),
    block_tokens=st.integers(1, 9),
    window=st.none() | st.integers(1, 20),
)
def test_blocks_for_a_request_are_those_its_tokens_touch(
    kv_tokens: int, more: int, block_tokens: int, window: int | None
) -> None:
    """Room is counted block by block: what the import still needs, and what comes after it."""
    group = s.GroupNeed(group="g", block_tokens=block_tokens, layout="NHD", window=window)
    first = 0 if window is None else max(0, kv_tokens - window)
    touched = {token // block_tokens for token in range(first, kv_tokens + more)}
    assert group.blocks_for(kv_tokens + more, kv_tokens) == len(touched)


def test_slots_for_a_request_are_as_many_as_it_has() -> None:
    """A recurrent group needs its slots whatever the tokens; an opaque one at least one."""
    slots = s.GroupNeed(group="g", block_tokens=None, layout="x", slots=2)
    assert slots.blocks_for(1000, 10) == 2
    assert msgspec.structs.replace(slots, slots=None).blocks_for(1000, 10) == 1


def test_needs_must_have_one_extent_an_axis() -> None:
    """A requirement whose axes and shape differ in number is the engine's own mistake, and raises."""
    with pytest.raises(ValueError, match="zip"):
        need(Role.KEY, (0, 2), s.RowRule(), TD + THD).spec(1, 0)
