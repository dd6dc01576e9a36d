"""Hypothesis strategies: two pools of one model, laid out, split and tabled in unlike ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
from hypothesis import strategies as st

from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout, Role, TensorLayout

AXES = ("layer", "role", "block", "token", "head", "dim")
FLOATS = ("float32", "float16", "bfloat16")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


@dataclass(frozen=True)
class GroupModel:
    """What both sides agree on for one group."""

    kind: LayerKind
    layers: tuple[int, ...]
    heads: int
    widths: dict[Role, int]  # head_dim by role
    dtype: str
    is_split: bool
    window: int | None = None
    tokens_per_entry: int = 1
    encoder_tokens: int | None = None


@dataclass(frozen=True)
class Case:
    src: PoolLayout
    dst: PoolLayout
    src_tables: tuple[BlockTable, ...]
    dst_tables: tuple[BlockTable, ...]
    tokens: int
    first_token: int


ROLES = {
    LayerKind.FULL: (Role.KEY, Role.VALUE),
    LayerKind.SLIDING: (Role.KEY, Role.VALUE),
    LayerKind.MLA: (Role.LATENT, Role.ROPE),
    LayerKind.COMPRESSED: (Role.COMPRESSED,),
    LayerKind.CROSS: (Role.CROSS_KEY, Role.CROSS_VALUE),
    LayerKind.LINEAR: (Role.CONV, Role.SSM),
}


@st.composite
def group_models(
    draw: st.DrawFn, first_layer: int, kinds: Collection[LayerKind], *, can_split: bool = False
) -> GroupModel:
    kind = draw(st.sampled_from([*kinds]))
    is_split = kind is not LayerKind.LINEAR and draw(st.integers(0, 3)) == 0
    equal = is_split or can_split or draw(st.booleans())  # the overlap check wants like axes of split tensors
    width = draw(st.integers(1, 3))
    return GroupModel(
        kind,
        tuple(range(first_layer, first_layer + draw(st.integers(1, 3)))),
        1 if kind is LayerKind.MLA else draw(st.integers(1, 3)),
        {role: width if equal else draw(st.integers(1, 3)) for role in ROLES[kind]},
        draw(st.sampled_from(["float16", "uint8"])),
        is_split,
        window=draw(st.integers(1, 12)) if kind is LayerKind.SLIDING else None,
        tokens_per_entry=draw(st.sampled_from([2, 4])) if kind is LayerKind.COMPRESSED else 1,
        encoder_tokens=draw(st.integers(0, 9)) if kind is LayerKind.CROSS else None,
    )


@st.composite
def group_layouts(
    draw: st.DrawFn,
    model: GroupModel,
    name: str,
    layers: Sequence[int],
    base: int,
    *,
    all_heads: bool,
    is_unlike: bool = False,
) -> tuple[GroupLayout, int]:
    """One side's way to lay out a group from byte ``base`` on: any nesting of the axes, with gaps.

    ``is_unlike``: this side's own float dtype, and elements of a row that touch or not as it likes.
    """
    if is_unlike:
        model = replace(
            model,
            dtype=draw(st.sampled_from(FLOATS)) if model.dtype != "uint8" else "uint8",
            is_split=model.kind is not LayerKind.LINEAR and draw(st.booleans()),
        )
    is_state = model.kind is LayerKind.LINEAR
    block_size = None if is_state else model.tokens_per_entry * draw(st.integers(1, 6))
    num_blocks = draw(st.integers(1, 3)) if is_state else 24
    start = 0 if all_heads else draw(st.integers(0, model.heads - 1))
    heads = model.heads if all_heads else draw(st.integers(1, model.heads - start))
    counts = {
        "layer": len(layers),
        "role": len(model.widths),
        "block": num_blocks,
        "token": 1 if block_size is None else block_size // model.tokens_per_entry,
        "head": heads,
        "dim": max(model.widths.values()),
    }
    gap = st.sampled_from([0, 0, 0, 1, 8])
    covered, stride = ITEMSIZE[model.dtype], {}
    axes = draw(st.permutations(AXES if model.is_split else AXES[:-1]))
    for axis in reversed(axes if model.is_split else [*axes, "dim"]):
        stride[axis] = covered + (draw(gap) if axis != "dim" or model.is_split else 0)
        if axis == "dim" and model.is_split:
            stride[axis] = max(stride[axis], 2 * ITEMSIZE[model.dtype])
        covered = stride[axis] * (counts[axis] - 1) + covered
    tensors = [
        TensorLayout(
            layer,
            role,
            model.dtype,
            offset=base + i * stride["layer"] + j * stride["role"],
            block_stride=stride["block"],
            token_stride=0 if is_state else stride["token"],
            head_stride=stride["head"],
            heads=heads,
            head_dim=width,
            head_start=start,
            dim_stride=stride["dim"] if model.is_split else 0,
        )
        for i, layer in enumerate(layers)
        for j, (role, width) in enumerate(model.widths.items())
    ]
    group = GroupLayout(
        name,
        model.kind,
        block_size,
        num_blocks,
        tuple(draw(st.permutations(tensors))),
        model.window,
        model.tokens_per_entry,
    )
    return group, base + covered


@st.composite
def tables(draw: st.DrawFn, group: GroupLayout, model: GroupModel, tokens: int, slots: int) -> BlockTable:
    """A table with just the blocks that are live, or some more."""
    if group.is_state:
        return BlockTable(0, draw(st.permutations(range(group.num_blocks)))[:slots])
    entries = (tokens if model.encoder_tokens is None else model.encoder_tokens) // model.tokens_per_entry
    first = max(0, tokens - model.window) // group.entries_per_block if model.window else 0
    first = draw(st.integers(0, first)) if first else 0
    needed = -(-entries // group.entries_per_block) - first
    spare = draw(st.integers(0, 2))
    if draw(st.booleans()):  # neighbours, as a fresh pool gives them out
        at = draw(st.integers(0, max(0, group.num_blocks - needed - spare)))
        ids = list(range(at, at + needed + spare))
    else:
        ids = draw(st.permutations(range(group.num_blocks)))[: needed + spare]
    return BlockTable(first, ids, tokens=model.encoder_tokens)


@st.composite
def splits(draw: st.DrawFn, group: GroupLayout) -> list[GroupLayout]:
    """The group, or its tensors in two groups with a table each, as engines cut groups to equal sizes."""
    if len(group.tensors) < 2 or draw(st.integers(0, 3)):
        return [group]
    cut = draw(st.integers(1, len(group.tensors) - 1))
    return [
        msgspec.structs.replace(group, name=f"{group.name}{suffix}", tensors=tensors)
        for suffix, tensors in (("a", group.tensors[:cut]), ("b", group.tensors[cut:]))
    ]


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    same_split: bool = False,
    kinds: Collection[LayerKind] = tuple(ROLES),
    is_unlike: bool = False,
) -> Case:
    """Two layouts of one or two kinds of layers, with unlike layers and heads unless ``same_split``.

    ``is_unlike``: pairs that only a conversion bridges, in dtype and in how a row's elements lie.
    """
    tokens = draw(st.integers(0, 20))
    models: list[GroupModel] = []
    for _ in range(draw(st.integers(1, 2))):
        models.append(
            draw(group_models(sum(len(model.layers) for model in models), kinds, can_split=is_unlike))
        )
    sides: list[tuple[list[tuple[GroupModel, GroupLayout]], int]] = []
    for _ in range(2):
        groups: list[tuple[GroupModel, GroupLayout]] = []
        base = draw(st.integers(0, 5))
        for number, model in enumerate(models):
            layers = model.layers
            if not same_split:  # the middle layer is on both sides, its neighbours may not be
                middle = len(layers) // 2
                layers = layers[draw(st.integers(0, middle)) : draw(st.integers(middle + 1, len(layers)))]
            group, base = draw(
                group_layouts(model, f"g{number}", layers, base, all_heads=same_split, is_unlike=is_unlike)
            )
            groups += [(model, part) for part in draw(splits(group))]
        sides.append((draw(st.permutations(groups)), base + draw(st.integers(0, 4))))
    slots = draw(st.integers(1, min(group.num_blocks for groups, _ in sides for _, group in groups)))
    layouts = [PoolLayout(tuple(group for _, group in groups), nbytes) for groups, nbytes in sides]
    all_tables = [
        tuple(draw(tables(group, model, tokens, slots)) for model, group in groups) for groups, _ in sides
    ]
    return Case(*layouts, *all_tables, tokens, draw(st.integers(0, tokens)))
