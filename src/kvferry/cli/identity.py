"""The options by which a verb says who it is to encrypted peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.transport.security import Identity

__all__ = ["identity_of"]


def identity_of(cert: Path | None, authority: Path | None, peers: tuple[str, ...] = ()) -> Identity | None:
    """An identity of files, read now; None without ``--cert``. Raises InputError that names the file."""
    if cert is None:
        if authority is not None or peers:
            raise InputError("cert: needed with --authority and the names of peers: who is this side?")
        return None
    from kvferry.transport.security import Identity

    return Identity.load(cert, authority, peers=peers)
