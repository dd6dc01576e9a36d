"""Addresses of an agent: where coordinators reach it, and where a probe's endpoint listens."""

from __future__ import annotations

import ipaddress
import itertools
import os
from collections.abc import Sequence

from kvferry.errors import InputError

__all__ = ["check_reachable", "data_addresses", "loopback_address"]

_numbers = itertools.count()


def check_reachable(address: str) -> None:
    """Raise InputError for an address that stands for every interface: no peer could be told it."""
    scheme, _, rest = address.partition("://")
    host = rest.partition("?")[0].rpartition(":")[0].strip("[]")
    try:
        is_any = scheme == "tcp" and ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return  # a name, or no address at all: the transport says
    if is_any:
        raise InputError(
            f"listen: {host} is every interface at once; give the address by which other nodes reach this one"
        )


def loopback_address(scheme: str, name: str) -> str:
    """An address on this host that nobody else listens at."""
    if scheme == "tcp":
        return "tcp://127.0.0.1:0"
    return f"{scheme}://{name}-{os.getpid()}-{next(_numbers)}"


def data_addresses(
    control: str, transports: Sequence[str], given: Sequence[str], via: str
) -> tuple[str, ...]:
    """Where a probe's endpoint listens: as ``given`` for a transport, else beside the agent's own address.

    ``via``: what peers connect to instead, over tcp. Raises InputError.
    """
    found = []
    for scheme in transports:
        own = [address for address in given if address.startswith(f"{scheme}://")]
        address = own[0] if own else _beside(control, scheme)
        if via and scheme == "tcp":
            address += ("&" if "?" in address else "?") + f"contact={via}"
        found.append(address)
    return tuple(found)


def _beside(control: str, scheme: str) -> str:
    if scheme == "tcp" and control.startswith("tcp://"):
        place, question, options = control.partition("?")
        return f"{place.rpartition(':')[0]}:0{question}{options}"
    return loopback_address(scheme, "kvferry-probe")
