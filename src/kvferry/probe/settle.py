"""When a shape has been copied often enough. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["FEWEST", "is_settled"]

FEWEST = 8
# Half the width of the interval in which the median lies, over the median.
_HALF_WIDTH = 0.025


def is_settled(seconds: Sequence[float]) -> bool:
    """The median is known within 2.5 %: by ranks, hence whatever the distribution, at about 95 % confidence.

    The interval is from rank n/2 - 0.98*sqrt(n) to n/2 + 0.98*sqrt(n) of the sorted copies (Conover,
    Practical Nonparametric Statistics, 1999, section 3.2).
    """
    count = len(seconds)
    if count < FEWEST:
        return False
    ordered = sorted(seconds)
    reach = 0.98 * math.sqrt(count)
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach) - 1)]
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return (high - low) / 2 <= _HALF_WIDTH * median
