"""Addresses: ``scheme://rest?option=value``, checked word by word before anything is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.errors import InputError, did_you_mean

__all__ = ["Address", "parse_address", "parse_host_port"]

MAX_STREAMS = 8

_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>[^?#\s]*)(?:\?(?P<query>[^#\s]*))?")
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%a-z]+)\]|(?P<host>[^\[\]:/@]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address; ``options`` holds only options that were given."""

    scheme: str
    rest: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.scheme}://{self.rest}" + (f"?{query}" if query else "")

    def choice(self, option: str, *known: str) -> str | None:
        """The value of an option that must be one of ``known``; None when it was not given."""
        value = self.options.get(option)
        if value is not None and value not in known:
            raise InputError(f"address: {option}={value} is not one of {', '.join(known)}")
        return value

    @property
    def streams(self) -> int:
        """How many data threads one copy may use: option ``streams``, by default 1."""
        return self.streams_or(1)

    def streams_or(self, default: int) -> int:
        """Option ``streams``, or what this transport takes where it was not given."""
        return int(self.options.get("streams", default))


def parse_address(text: str, scheme: str, options: tuple[str, ...]) -> Address:
    """Parse an address of one scheme. Raises InputError naming the part that is wrong."""
    match = _ADDRESS.fullmatch(text)
    if match is None or match["scheme"] != scheme:
        raise InputError(f"address: {text!r} does not read {scheme}://...")
    given: dict[str, str] = {}
    for pair in (match["query"] or "").split("&") if match["query"] is not None else ():
        name, equals, value = pair.partition("=")
        if name not in options or not equals:
            known = (", ".join(options) or "none") + did_you_mean(name, options)
            raise InputError(f"address: option {pair!r} is not known; known for {scheme}: {known}")
        given[name] = value
    streams = given.get("streams", "1")
    if not re.fullmatch("[1-9]", streams) or int(streams) > MAX_STREAMS:
        raise InputError(f"address: streams={streams} is not a number from 1 to {MAX_STREAMS}")
    return Address(scheme, match["rest"], given)


def parse_host_port(address: Address) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT``; the host must be given. Raises InputError."""
    match = _HOST_PORT.fullmatch(address.rest)
    if match is None:
        raise InputError(
            f"address: {str(address)!r} does not read {address.scheme}://HOST:PORT "
            f"(IPv6: {address.scheme}://[ADDRESS]:PORT)"
        )
    port = int(match["port"])
    if port > 65535:
        raise InputError(f"address: port {port} is above 65535")
    return match["v6"] or match["host"], port
