"""The socket that an HTTP server of ours listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from kvferry.errors import LocalError, TransportError
from kvferry.serve.options import host_port

__all__ = ["bound_socket", "is_loopback_host", "missing_extra"]


@contextlib.contextmanager
def bound_socket(
    listen: str, *, field: str = "listen", scheme: str = "http"
) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL. Raises InputError, TransportError."""
    host, port = host_port(listen, field)
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise TransportError(f"{field}: {listen}: {error.strerror or error}") from error
    with sock:
        shown = f"[{host}]" if ":" in host else host
        yield sock, f"{scheme}://{shown}:{sock.getsockname()[1]}"


def is_loopback_host(host: str) -> bool:
    """Whether a host, as written, is this one and no other can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def missing_extra(error: ImportError) -> LocalError:
    """What to install."""
    name = (error.name or "of an extra").partition(".")[0]
    return LocalError(f"the package {name!r} is missing", next_step="pip install 'kvferry[serve]'")
