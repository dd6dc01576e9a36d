"""When fetching a prefix's KV is faster than computing it again."""

from __future__ import annotations

__all__ = ["least_reuse_rate"]

_ATTENTION, _LINEAR = 4, 22
"""Mooncake's constants a and b: operations a token pair and a weight pair of a Llama layer."""


def least_reuse_rate(
    operations_per_second: float, *, tokens: int, hidden: int, gqa: int, nbytes_per_value: int = 2
) -> float:
    """The bytes a second above which moving a prefix beats computing it, at a compute rate.

    Args:
        operations_per_second: what the instance computes at (a brochure rate gives a bound).
        tokens: tokens of the prefix.
        hidden: width of the model.
        gqa: query heads for each KV head.
        nbytes_per_value: of K and V.

    Source: Mooncake (Qin et al., FAST 2025), Eq. 2: ``B / G > 2 d s / (gqa (a p d + b d^2))``.
    """
    work = gqa * (_ATTENTION * tokens * hidden + _LINEAR * hidden**2)
    return operations_per_second * 2 * hidden * nbytes_per_value / work
