"""Opens what the planning verbs read: texts of bounded size, traces line by line, compute profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import InputError
from kvferry.plan.trace import MAX_LINE_CHARACTERS, TraceRow, read_trace

if TYPE_CHECKING:
    from kvferry.plan.compute import ComputeProfile
    from kvferry.plan.compute_file import ProfileChoice

__all__ = ["MAX_TEXT_NBYTES", "load_profile", "open_trace", "read_text"]

MAX_TEXT_NBYTES = 16 << 20
"""A profile or a cluster file is a few KiB; more than this is some other file."""


def read_text(path: Path, field: str) -> str:
    """A whole file. Raises InputError for one that is not there, not UTF-8, or too large to be meant."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_TEXT_NBYTES:
        raise InputError(f"{field}: {path}, line 1: the file has more than {MAX_TEXT_NBYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{field}: {path}, line {line}: is not UTF-8") from error


def open_trace(path: Path, field: str = "trace", *, wants_output: bool = True) -> Iterator[TraceRow]:
    """The rows of a trace file, read as they are asked for."""
    return read_trace(_lines(path, field), f"{field}: {path}", wants_output=wants_output)


def _lines(path: Path, field: str) -> Iterator[str]:
    number = 1
    try:
        with path.open("r", encoding="utf-8", newline="") as file:
            # Bounded, so that a line of 10 GB is an error and not 10 GB of memory.
            while line := file.readline(MAX_LINE_CHARACTERS + 1):
                yield line
                number += 1
    except UnicodeDecodeError as error:
        raise InputError(f"{field}: {path}, line {number} or later: is not UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: {path}: {getattr(error, 'strerror', None) or error}") from error


def load_profile(name: str, choice: ProfileChoice, field: str = "profile") -> ComputeProfile:
    """A profile from a file, a published one by its name, or one that aiconfigurator's tables give."""
    from kvferry.plan.compute_aiconfigurator import PREFIX, aiconfigurator_profile
    from kvferry.plan.compute_file import parse_profile
    from kvferry.plan.public_profiles import PUBLIC_PROFILES, public_profile

    if name.startswith(PREFIX):
        return aiconfigurator_profile(name)
    path = Path(name)
    if name in PUBLIC_PROFILES or not path.suffix:
        return public_profile(name)
    return parse_profile(read_text(path, field), f"{field}: {name}", choice)
