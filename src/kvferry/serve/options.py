"""What a server is asked to be. Plain record."""

from __future__ import annotations

import msgspec

from kvferry.errors import InputError
from kvferry.transport.address import parse_address, parse_host_port
from kvferry.transport.security import HOST_ONLY, Security

__all__ = ["ServeOptions", "check_options", "host_port"]


class ServeOptions(msgspec.Struct, frozen=True):
    """One server of the reference engine.

    Args:
        listen: ``HOST:PORT`` of HTTP; port 0 takes any free one.
        kv: where peers fetch KV from or push it to (``tcp://HOST:PORT``, ``shm://NAME``); empty: no handoffs.
        model: ``smollm2``, ``tiny`` (random weights) or ``auto``: the first where it is installed.
        name: what peers call this worker in errors.
        chunk_tokens: prompt tokens that one step computes; beside them it decodes all running requests.
        pool_tokens: tokens of KV that the pool holds.
        max_running: requests that decode at the same time.
        max_waiting: requests that may wait for a place; one more is answered 429.
        queue_seconds: how long one waits at most; then 503.
        lease_seconds: how long prefilled KV, or a reservation, is kept for the peer.
        timeout_seconds: how long a move may take.
        security: who it is to its peers, and where KV may go in plain.
    """

    listen: str = "127.0.0.1:8000"
    kv: str = ""
    model: str = "auto"
    name: str = "server"
    block_size: int = 16
    chunk_tokens: int = 256
    pool_tokens: int = 16384
    max_running: int = 64
    max_waiting: int = 128
    queue_seconds: float = 60.0
    lease_seconds: float = 30.0
    timeout_seconds: float = 10.0
    security: Security = HOST_ONLY


def check_options(options: ServeOptions) -> ServeOptions:
    """The options, if a server can be made of them. Raises InputError naming the option."""
    host_port(options.listen)
    if options.model not in {"auto", "smollm2", "tiny"}:
        raise InputError(f"model: {options.model!r} is not one of auto, smollm2, tiny")
    for field, least, most in (
        ("block_size", 1, 4096),
        ("chunk_tokens", 1, 1 << 20),
        ("pool_tokens", 16, 1 << 24),
        ("max_running", 1, 4096),
        ("max_waiting", 1, 1 << 16),
        ("queue_seconds", 0.001, 3600.0),
        ("lease_seconds", 0.001, 3600.0),
        ("timeout_seconds", 0.001, 3600.0),
    ):
        value = getattr(options, field)
        if not least <= value <= most:  # not NaN either
            raise InputError(f"{field}: {value} is not from {least} to {most}")
    return options


def host_port(text: str, field: str = "listen") -> tuple[str, int]:
    """``HOST:PORT``. Raises InputError naming the option."""
    try:
        return parse_host_port(parse_address(f"http://{text}", "http", ()))
    except InputError:
        raise InputError(f"{field}: {text!r} does not read HOST:PORT (IPv6: [ADDRESS]:PORT)") from None
