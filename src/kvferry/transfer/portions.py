"""What of a pair of ranks moves: portions shared out over the ranks, checked, and planned.

One rank of prefill and one of decode are one session, whatever number of portions it moves. The
ranks of a worker together bring every head of every layer of every destination rank, each once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout import BlockTable, Conversions, CopyPlan, PoolLayout, Role, copy_plan, rank_plan
from kvferry.protocol.messages import MAX_PORTIONS, Portion

__all__ = ["Coverage", "check_portions", "plan_portions", "share_out"]

Rank = tuple[PoolLayout, Sequence[BlockTable]]
"""A layout and its block tables."""


@lru_cache(maxsize=16)
def share_out(
    src: tuple[PoolLayout, ...], dst: tuple[PoolLayout, ...], allowed: Conversions | None = None
) -> Mapping[tuple[int, int], tuple[Portion, ...]]:
    """(source rank, destination rank) -> its portions, for the pairs that move anything.

    ``allowed``: what may be converted. Raises IncompatibleError as ``rank_plan``: ranks that do not
    fit, or heads that no source holds.
    """
    pairs: defaultdict[tuple[int, int], list[Portion]] = defaultdict(list)
    for move in rank_plan(src, dst, allowed):
        pairs[move.src_rank, move.dst_rank].append(Portion(move.layers, move.parts, move.head_range))
    return MappingProxyType({pair: tuple(portions) for pair, portions in sorted(pairs.items())})


class Coverage:
    """Which heads of one rank's tensors are still to be named, when each may be named once."""

    def __init__(self, layout: PoolLayout) -> None:
        self._left: dict[tuple[int, Role, int], list[tuple[int, int]]] = {
            (tensor.layer, tensor.role, tensor.part): [(tensor.head_start, tensor.head_stop)]
            for group in layout.groups
            for tensor in group.tensors
        }

    @property
    def is_complete(self) -> bool:
        """Every head of every tensor was named."""
        return not self._left

    def add(self, portions: Sequence[Portion]) -> None:
        """Name what these move. Raises InputError for heads that the rank has not, or were named before."""
        for portion in portions:
            for layer in portion.layers:
                for role, part in portion.parts:
                    self._take((layer, role, part), portion.head_range)

    def _take(self, tensor: tuple[int, Role, int], heads: tuple[int, int]) -> None:
        start, stop = heads
        left = self._left.get(tensor, [])
        for index, (low, high) in enumerate(left):
            if low <= start < stop <= high:
                left[index : index + 1] = [gap for gap in ((low, start), (stop, high)) if gap[0] < gap[1]]
                if not left:
                    del self._left[tensor]
                return
        layer, role, part = tensor
        name = f"layer {layer} {role.value}" + (f" part {part}" if part else "")
        raise InputError(f"portions: {name} heads [{start}, {stop}) are not held, or are named twice")


def check_portions(portions: tuple[Portion, ...], *layouts: PoolLayout) -> None:
    """Raise InputError unless each layout holds all that the portions name, and they name nothing twice."""
    if len(portions) > MAX_PORTIONS:
        raise InputError(f"portions: {len(portions)} of one pair of ranks, more than {MAX_PORTIONS}")
    for layout in layouts if portions else ():
        Coverage(layout).add(portions)


def plan_portions(
    portions: tuple[Portion, ...],
    src: Rank,
    dst: Rank,
    tokens: int,
    *,
    layers: Collection[int] | None = None,
    first_token: int = 0,
    token_range: tuple[int, int] | None = None,
) -> CopyPlan:
    """One copy plan for all portions, in their order; without portions, for all that both layouts hold.

    ``layers``: only these of what moves anyway. A range of any length costs no more than the layers
    that both hold. The rest, and what is raised, is as in ``copy_plan``.
    """
    (src_layout, src_tables), (dst_layout, dst_tables) = src, dst
    rest: dict[str, Any] = {"first_token": first_token, "token_range": token_range}
    if not portions:
        if layers is not None:
            layers = [layer for layer in src_layout.layers if layer in dst_layout.layers and layer in layers]
        return copy_plan(src_layout, dst_layout, src_tables, dst_tables, tokens, layers=layers, **rest)
    plans = [
        copy_plan(
            src_layout,
            dst_layout,
            src_tables,
            dst_tables,
            tokens,
            layers=chosen,
            parts=portion.parts,
            head_range=portion.head_range,
            **rest,
        )
        for portion in portions
        if (chosen := [layer for layer in portion.layers if layers is None or layer in layers])
    ]
    return plans[0] if len(plans) == 1 else _joined(plans)


def _joined(plans: Sequence[CopyPlan]) -> CopyPlan:
    """The copies of several plans, one plan after the other."""

    def column(name: str, dtype: type[np.generic] = np.int64) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *(getattr(plan, name) for plan in plans)])

    first = np.cumsum([0, *(plan.num_pieces for plan in plans)])
    starts = [plan.chunk_start[:-1] + at for plan, at in zip(plans, first, strict=False)]
    return CopyPlan(
        src_offset=column("src_offset"),
        dst_offset=column("dst_offset"),
        nbytes=column("nbytes"),
        chunk_start=np.concatenate([*starts, first[-1:]]),
        chunk_id=column("chunk_id"),
        chunk_complete=column("chunk_complete", np.bool_),
        runs=tuple(run for plan in plans for run in plan.runs),
    )
