"""GGUF files, read with the package ``gguf``: tensors as stored, fields, and the identity of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import LocalError
from kvferry.state import weights_digest

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["gguf_field", "gguf_weights", "open_gguf"]


def open_gguf(path: Path) -> GGUFReader:
    """The file, mapped. Raises LocalError where ``gguf`` is missing or the file is none."""
    try:
        import gguf  # noqa: PLC0415
    except ImportError as error:
        raise LocalError("the package 'gguf' is missing", next_step="pip install 'kvferry[demo]'") from error

    class PlainReader(gguf.GGUFReader):
        """Indexes a plain view of the file: through np.memmap itself 98,000 short strings take 1.5 s more."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    try:
        return PlainReader(path)
    except (OSError, ValueError) as error:
        raise LocalError(f"{path}: not a GGUF file that can be read: {error}") from error


def gguf_weights(reader: GGUFReader) -> str:
    """``weights_digest`` over the tensors as stored."""
    return weights_digest((t.name, t.tensor_type.name, t.shape.tolist(), t.data) for t in reader.tensors)


def gguf_field(reader: GGUFReader, key: str) -> Any:
    """One metadata value. Raises LocalError where the file has none."""
    field = reader.get_field(key)
    if field is None:
        raise LocalError(f"the GGUF file has no {key}", next_step="look whether the file is whole")
    return field.contents()
