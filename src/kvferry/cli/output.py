"""Files that a verb writes at its end: what can be known to fail is said before the work, not after it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from kvferry.errors import InputError, LocalError

__all__ = ["Picture", "beside", "check_out", "write_whole"]

_FORMATS = ("svg", "png", "pdf")


def check_out(path: Path | None, field: str) -> None:
    """Refuse a file that could not be written. Raises InputError naming the option."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise InputError(f"{field}: {path} is a folder, not a file")
        if not path.parent.is_dir():
            raise InputError(f"{field}: {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"{field}: {path}: may not be written by this user")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{field}: {str(path)[:200]!r}: {getattr(error, 'strerror', '') or error}"
        ) from error


def beside(path: Path) -> Path:
    """Where to write what is renamed to ``path`` at its end: a reader sees the old file or the new.

    ``path`` itself where it is a link or no regular file (a device, a pipe): that is written through.
    """
    is_through = path.is_symlink() or (path.exists() and not path.is_file())
    return path if is_through else path.with_name(f".{path.name}.{os.getpid()}.part")


def write_whole(path: Path, data: bytes, field: str) -> None:
    """Write beside the target, then rename over it. Raises InputError naming the option."""
    part = beside(path)
    try:
        part.write_bytes(data)
        if part != path:
            part.replace(path)
    except BaseException as error:
        if part != path:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{field}: cannot write {path}: {error.strerror or error}") from error
        raise


class Picture:
    """A picture to be drawn, once it is known that it can be.

    Raises InputError for another ending than .svg, .png and .pdf or a place that cannot be written,
    LocalError where matplotlib is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format = path.suffix.removeprefix(".").lower()
        if self._format not in _FORMATS:
            known = ", ".join(f".{name}" for name in _FORMATS)
            raise InputError(f"plot: {str(path)!r} does not end in one of {known}")
        check_out(path, "plot")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise LocalError("plot: needs matplotlib", next_step="pip install 'kvferry[plot]'") from error
        self._figure = Figure

    def figure(self, width: float, height: float) -> Any:
        """An empty figure of matplotlib, in inches."""
        return self._figure(figsize=(width, height), layout="constrained")

    def save(self, figure: Any) -> None:
        """Raises InputError where it cannot be written after all."""
        drawn = io.BytesIO()
        try:
            figure.savefig(drawn, format=self._format)
        except ValueError as error:
            raise InputError(f"plot: cannot draw {self.path}: {error}") from error
        write_whole(self.path, drawn.getvalue(), "plot")
