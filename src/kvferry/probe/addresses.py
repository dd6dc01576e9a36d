"""Addresses of an agent: where coordinators reach it, and where a probe's endpoint listens."""

from __future__ import annotations

import ipaddress
import itertools
import os
from collections.abc import Sequence

from kvferry.errors import InputError, LocalError
from kvferry.transport.address import Address, parse_address, parse_host_port
from kvferry.transport.registry import transport_for
from kvferry.transport.security import Plain
from kvferry.transport.tcp import TcpTransport

__all__ = ["check_data", "check_reachable", "data_addresses", "is_loopback", "loopback_address", "plain_of"]

_OPTIONS = ("plain", "streams", "contact")
_numbers = itertools.count()


def check_reachable(address: str) -> None:
    """Raise InputError for an address that stands for every interface: no peer could be told it."""
    if not address.startswith("tcp://"):
        return
    parsed = parse_address(address, "tcp", _OPTIONS)
    ip = _ip(parsed)
    if ip is not None and ip.is_unspecified and "contact" not in parsed.options:
        raise InputError(
            f"listen: {ip} is every interface at once; give the address by which other nodes reach this one, "
            "or add ?contact=HOST:PORT"
        )


def check_data(given: Sequence[str]) -> None:
    """Whether a probe could listen there: one address of a transport, which works here.

    Raises InputError for what cannot be read, LocalError for a transport without its library.
    """
    schemes = set()
    for address in given:
        scheme, mark, _ = address.partition("://")
        if not mark:
            raise InputError(f"data: {address!r} does not begin with a transport; write tcp://HOST:PORT")
        kind = transport_for(scheme)
        if scheme in schemes:
            raise InputError(f"data: {scheme} has two addresses; a probe listens once for each transport")
        schemes.add(scheme)
        if issubclass(kind, TcpTransport):
            parse_host_port(parse_address(address, scheme, kind.options))
        if (why := kind.unavailable()) is not None:
            raise LocalError(f"data: {scheme} does not work here: {why}")


def is_loopback(address: str) -> bool:
    """Whether a tcp address stays on this host, as far as its text says; others are of this host anyway."""
    if not address.startswith("tcp://"):
        return True
    parsed = parse_address(address, "tcp", _OPTIONS)
    ip = _ip(parsed)
    return ip.is_loopback if ip is not None else parsed.rest.startswith("localhost:")


def plain_of(address: str, said: Plain | None) -> Plain:
    """Where this side may send in plain: as said, else anywhere for who wrote ``?plain=yes`` himself."""
    if said is not None:
        return said
    is_own_word = address.startswith("tcp://") and "plain=yes" in address.partition("?")[2].split("&")
    return Plain.ANYWHERE if is_own_word else Plain.LOOPBACK


def loopback_address(scheme: str, name: str, *, tls: bool = False) -> str:
    """An address on this host that nobody else listens at."""
    if _with_ports(scheme) is not None:
        return f"{scheme}://127.0.0.1:0" + ("?plain=no" if tls and scheme == "tcp" else "")
    return f"{scheme}://{name}-{os.getpid()}-{next(_numbers)}"


def data_addresses(
    control: str, transports: Sequence[str], given: Sequence[str], *, tls: bool = False, via: str = ""
) -> tuple[str, ...]:
    """Where a probe's endpoint listens: as ``given`` for a transport, else beside the agent's own address.

    ``tls``: over tcp it is encrypted. ``via``: what peers connect to instead, over tcp. Raises InputError.
    """
    found = []
    for scheme in transports:
        own = [address for address in given if address.startswith(f"{scheme}://")]
        address = own[0] if own else _beside(control, scheme)
        if scheme == "tcp":
            address = _spoken(parse_address(address, "tcp", _OPTIONS), tls=tls, via=via)
        elif (kind := _with_ports(scheme)) is not None and not own:
            # What carries the words beside a library is tcp, in plain or not like it.
            address = _spoken(parse_address(address, scheme, kind.options), tls=tls, via="")
        found.append(address)
    return tuple(found)


def _with_ports(scheme: str) -> type[TcpTransport] | None:
    """The transport if its addresses are HOST:PORT: tcp, and the libraries that have tcp beside them."""
    kind = transport_for(scheme)
    return kind if issubclass(kind, TcpTransport) else None


def _beside(control: str, scheme: str) -> str:
    if _with_ports(scheme) is None or not control.startswith("tcp://"):
        return loopback_address(scheme, "kvferry-probe")
    parsed = parse_address(control, "tcp", _OPTIONS)
    streams = f"?streams={parsed.streams}" if "streams" in parsed.options else ""
    return f"{scheme}://{parsed.rest.rpartition(':')[0]}:0{streams}"


def _spoken(address: Address, *, tls: bool, via: str) -> str:
    options = {name: value for name, value in address.options.items() if name != "plain"}
    stays = is_loopback(f"tcp://{address.rest}")
    if tls is stays:  # not the rule, which is: encrypted exactly where it leaves the host
        options["plain"] = "no" if tls else "yes"
    if via:
        options["contact"] = via
    return str(Address(address.scheme, address.rest, options))


def _ip(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None  # a name
