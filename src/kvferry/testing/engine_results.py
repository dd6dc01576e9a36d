"""What the engine suite writes down, for a table of what was shown. Needs no pytest."""

from __future__ import annotations

import msgspec

__all__ = ["RESULTS", "Result"]

RESULTS = "KVFERRY_ENGINE_RESULTS"
"""Environment variable: a file that takes one JSON line for each continuation that was exact."""


class Result(msgspec.Struct, frozen=True):
    """One row for a table of what was shown."""

    engine: str
    model: str
    dtype: str
    sampling: str
    borders: list[int]
    moves: str
    nbytes: int
