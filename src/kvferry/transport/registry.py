"""Which class serves which scheme. A new transport is one file and one entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from kvferry.errors import InputError, LocalError, did_you_mean
from kvferry.transport.base import Transport

__all__ = ["GROUP", "known_schemes", "transport_for"]

GROUP = "kvferry.transports"


def known_schemes() -> tuple[str, ...]:
    """Every scheme that an installed package declares, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def transport_for(address: str) -> type[Transport]:
    """The class for ``scheme://...`` or for a bare scheme; its module is imported now.

    Raises:
        InputError: no such scheme; names the known ones and the nearest.
        LocalError: it is declared twice, cannot be imported, or is no Transport.
    """
    scheme = address.partition("://")[0]
    found = [entry for entry in entry_points(group=GROUP) if entry.name == scheme]
    if not found:
        known = known_schemes()
        hint = did_you_mean(scheme, known)
        raise InputError(f"transport: {scheme!r} is not known; known are {', '.join(known)}{hint}")
    if len({entry.value for entry in found}) > 1:
        values = ", ".join(entry.value for entry in found)
        raise LocalError(
            f"transport {scheme!r} is declared by several packages: {values}",
            next_step="uninstall all but one of them",
        )
    return _load(found[0])


def _load(entry: EntryPoint) -> type[Transport]:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise LocalError(
            f"transport {entry.name!r} cannot be loaded from {entry.value}: {error}",
            next_step="reinstall the package that declares it",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise LocalError(
            f"transport {entry.name!r}: {entry.value} is no kvferry Transport",
            next_step="point the entry point at the class",
        )
    return loaded
