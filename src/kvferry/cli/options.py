"""Option types that the verbs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

__all__ = ["Flag", "Whole"]


def _whole_number(_type: object, tokens: Sequence[Token]) -> int:
    # The converter of cyclopts would round 5.7 to 6.
    text = tokens[0].value
    try:
        return int(text[:40])
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a whole number") from None


Whole = Annotated[int, Parameter(converter=_whole_number)]
"""An integer; 5.7 is an error and not 6."""

Flag = Parameter(negative="")
"""A switch without a ``--no-`` form."""
