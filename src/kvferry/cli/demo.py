"""``kvferry demo``."""

from __future__ import annotations


def demo() -> None:
    """Hand a request from a prefill process to a decode process and compare."""
