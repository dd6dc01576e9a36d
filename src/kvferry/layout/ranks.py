"""Which source rank gives which layers and heads to which destination rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.errors import IncompatibleError
from kvferry.layout.conversion import Conversions
from kvferry.layout.match import Key, layer_ranges, mismatches, places
from kvferry.layout.records import PoolLayout
from kvferry.layout.words import Role

__all__ = ["RankMove", "rank_plan"]

Heads = tuple[int, int]
Holders = list[tuple[int, Heads]]


@dataclass(frozen=True, slots=True)
class RankMove:
    """One copy between two ranks: ``copy_plan(..., layers=, parts=, head_range=)`` of their layouts."""

    src_rank: int
    dst_rank: int
    layers: tuple[int, ...]
    parts: tuple[tuple[Role, int], ...]
    head_range: Heads


@dataclass(frozen=True, slots=True)
class _Unit:
    """Heads that one destination rank needs, and the source ranks that hold all of them."""

    heads: Heads
    dst_rank: int
    holders: tuple[int, ...]


def rank_plan(
    src: Sequence[PoolLayout], dst: Sequence[PoolLayout], allowed: Conversions | None = None
) -> tuple[RankMove, ...]:
    """Cover every layer and head of every destination rank, each byte from one source rank.

    Heads that several source ranks hold (MLA, KV heads replicated under tensor parallelism)
    cross once for each destination rank that wants them, and the ranks that hold them take turns:
    by destination where that comes out even (fewest connections), else by layer as well.
    ``allowed``: pairs that these conversions bridge match too.

    Raises IncompatibleError naming tensors and fields where a pair of ranks does not match, or
    the layers and heads that no source rank holds.
    """
    _check_pairs(src, dst, allowed)
    holders, wanted = _by_tensor(src), _by_tensor(dst)
    kinds = {key: rank.groups[group].kind for rank in dst for key, (group, _) in places(rank).items()}
    turns: Counter[tuple[object, ...]] = Counter()
    moves: defaultdict[tuple[int, int, int], defaultdict[tuple[Role, int], list[Heads]]]
    moves = defaultdict(lambda: defaultdict(list))
    missing: defaultdict[str, set[int]] = defaultdict(set)
    for (layer, role, part), wanting in sorted(wanted.items()):
        kind = kinds[layer, role, part]
        by_holders: defaultdict[tuple[int, ...], list[_Unit]] = defaultdict(list)
        for unit in _units(holders.get((layer, role, part), []), wanting):
            by_holders[unit.holders].append(unit)
            if not unit.holders:
                name = f"{role.value} heads {unit.heads[0]} to {unit.heads[1] - 1}"
                missing[f"{name} of destination rank {unit.dst_rank}: at no source rank"].add(layer)
        for ranks, units in by_holders.items():
            # A layer kind takes turns of its own: one full layer after five sliding ones would
            # otherwise fall to the same of six ranks each time.
            turn = turns[kind, role, part, ranks, tuple(units)]
            turns[kind, role, part, ranks, tuple(units)] += 1
            for i, unit in enumerate(units if ranks else ()):
                rank = ranks[(turn * len(units) + i) % len(ranks)]
                moves[rank, unit.dst_rank, layer][role, part].append(unit.heads)
    if missing:
        raise IncompatibleError(
            "; ".join(f"{reason} (layers {layer_ranges(layers)})" for reason, layers in missing.items())
        )
    return _merged(moves)


def _check_pairs(src: Sequence[PoolLayout], dst: Sequence[PoolLayout], allowed: Conversions | None) -> None:
    for i, source in enumerate(src):
        for j, target in enumerate(dst):
            if not set(source.layers).isdisjoint(target.layers):
                reasons = mismatches(source, target, allowed)
                if reasons:
                    raise IncompatibleError(f"source rank {i} and destination rank {j}: {'; '.join(reasons)}")


def _by_tensor(ranks: Sequence[PoolLayout]) -> dict[Key, Holders]:
    holders: defaultdict[Key, Holders] = defaultdict(list)
    for rank, layout in enumerate(ranks):
        for key, (_, tensor) in places(layout).items():
            holders[key].append((rank, (tensor.head_start, tensor.head_stop)))
    return holders


def _units(holders: Holders, wanting: Holders) -> Iterable[_Unit]:
    """Cut one tensor's heads wherever a rank of either side begins or ends."""
    borders = sorted({border for _, heads in [*holders, *wanting] for border in heads})
    for heads in pairwise(borders):
        ranks = tuple(rank for rank, held in holders if _within(heads, held))
        for dst_rank, want in wanting:
            if _within(heads, want):
                yield _Unit(heads, dst_rank, ranks)


def _within(heads: Heads, held: Heads) -> bool:
    return held[0] <= heads[0] and heads[1] <= held[1]


def _merged(
    moves: defaultdict[tuple[int, int, int], defaultdict[tuple[Role, int], list[Heads]]],
) -> tuple[RankMove, ...]:
    """Join neighbouring heads, then tensors with equal heads, then layers with equal tensors."""
    layers: defaultdict[tuple[int, int, tuple[tuple[Role, int], ...], Heads], list[int]] = defaultdict(list)
    for (src_rank, dst_rank, layer), tensors in sorted(moves.items()):
        by_heads: defaultdict[Heads, list[tuple[Role, int]]] = defaultdict(list)
        for tensor, ranges in tensors.items():
            for heads in _touching(ranges):
                by_heads[heads].append(tensor)
        for heads, names in by_heads.items():
            layers[src_rank, dst_rank, tuple(names), heads].append(layer)
    return tuple(
        RankMove(src_rank, dst_rank, tuple(layer_list), parts, heads)
        for (src_rank, dst_rank, parts, heads), layer_list in layers.items()
    )


def _touching(ranges: list[Heads]) -> list[Heads]:
    joined: list[Heads] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
