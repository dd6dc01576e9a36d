"""The standard streams as a command meets them: closed, full, gone, or unable to hold a text."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["discard_stdout", "prepare_streams", "printable", "say"]


def prepare_streams() -> bool:
    """Make both streams safe to print to; False where there is no stdout at all.

    Without a stderr ``print`` would fall back to stdout, into the middle of a JSON object. A text
    that the stream's encoding cannot hold (a file name that is no UTF-8) is written escaped.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return True


def discard_stdout() -> None:
    """Send what is still buffered nowhere, so that it does not fail once more when the process ends."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def printable(text: str) -> str:
    """The text with control characters, line breaks and lone surrogates escaped: a stranger's text
    moves no cursor, sets no colour, and stays one line of valid Unicode."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def say(message: str) -> None:
    """One line on stderr, after the command's name."""
    try:
        print(f"kvferry: {printable(message)}", file=sys.stderr)
    except OSError:
        return  # stderr is full or gone: nobody is left to tell, and the exit status still tells it
