"""The socket that an HTTP server of ours listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from kvferry.errors import LocalError, TransportError
from kvferry.serve.options import host_port

__all__ = ["bound_socket", "is_loopback_host", "missing_extra"]


@contextlib.contextmanager
def bound_socket(
    listen: str, *, field: str = "listen", scheme: str = "http", connections: int = 0
) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL. Raises InputError, TransportError.

    ``connections``: how many of its connections may be open at once, one more is closed at once; 0: a
    quarter of the files that this process may open, as clients must not take those of its peers.
    """
    host, port = host_port(listen, field)
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise TransportError(f"{field}: {listen}: {error.strerror or error}") from error
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = sys.maxsize if files == resource.RLIM_INFINITY else max(files // 4, 1)
    with _Listener(sock, connections or quarter) as sock:
        shown = f"[{host}]" if ":" in host else host
        yield sock, f"{scheme}://{shown}:{sock.getsockname()[1]}"


class _Listener(socket.socket):
    """A listening socket with a bound on what it has accepted, TLS handshakes among it."""

    def __init__(self, sock: socket.socket, most: int) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self._most = most
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """As its base; a connection too many is closed, and is to asyncio one that its client gave up."""
        sock, address = super().accept()
        if len(self._accepted) >= self._most:
            self._accepted = weakref.WeakSet(each for each in self._accepted if each.fileno() >= 0)
        if len(self._accepted) >= self._most:
            sock.close()
            raise ConnectionAbortedError
        self._accepted.add(sock)
        return sock, address


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
