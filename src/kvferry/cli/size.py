"""``kvferry size``."""

from __future__ import annotations


def size(model: str) -> None:
    """Say how many bytes a request's state is."""
    print(model)
