"""Option types that the verbs share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from kvferry.errors import InputError

__all__ = ["Flag", "Whole", "check_range"]


_WHOLE = re.compile(r"[+-]?[0-9](?:_?[0-9]){0,39}")
_SHOWN_LETTERS = 40


def _whole_number(_type: object, tokens: Sequence[Token]) -> int:
    # The converter of cyclopts would round 5.7 to 6, and int() takes digits of any script.
    text = tokens[0].value
    if _WHOLE.fullmatch(text.strip()) is None:
        more = "..." if len(text) > _SHOWN_LETTERS else ""
        raise ValueError(f"{text[:_SHOWN_LETTERS]!r}{more} is not a whole number of at most 40 digits")
    return int(text)


Whole = Annotated[int, Parameter(converter=_whole_number)]
"""An integer; 5.7 is an error and not 6."""


def check_range(field: str, value: int | None, least: int, most: int) -> None:
    """Raise InputError naming the option for a number outside; None is one that was not given."""
    if value is not None and not least <= value <= most:
        raise InputError(f"{field}: {value} is not from {least:,} to {most:,}")


Flag = Parameter(negative="")
"""A switch without a ``--no-`` form."""
