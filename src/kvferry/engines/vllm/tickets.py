"""How the scheduler process gets a ticket out of a worker process, in the step that finishes a request.

vLLM carries a worker's words to the scheduler only after it has answered the request; a ticket
belongs into that answer. So each worker serves tickets at a socket of this host and user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from kvferry.errors import ErrorRecord, KVFerryError, LocalError

__all__ = ["TicketClient", "TicketServer"]

_LENGTH = struct.Struct("<I")
_MAX_NBYTES = 1 << 20


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    timeout_seconds: float


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ticket: bytes = b""
    error: ErrorRecord | None = None


class TicketServer:
    """A worker's end. ``lookup(request_id, timeout_seconds)`` returns the ticket or raises KVFerryError."""

    def __init__(self, lookup: Callable[[str, float], bytes]) -> None:
        self._lookup = lookup
        self.address = f"\0kvferry-tickets-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(4)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="kvferry-tickets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server and its connections. Safe to call twice."""
        for sock in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if _peer_uid(connection) != os.getuid():
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="kvferry-ticket-calls", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                ask = msgspec.msgpack.decode(_receive(connection), type=_Ask)
                try:
                    answer = _Answer(ticket=self._lookup(ask.request_id, ask.timeout_seconds))
                except KVFerryError as error:
                    answer = _Answer(error=error.to_record())
                _send(connection, msgspec.msgpack.encode(answer))
        self._connections.discard(connection)


class TicketClient:
    """The scheduler's end, to one worker."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def fetch(self, request_id: str, timeout_seconds: float) -> bytes:
        """The ticket of a request that the worker offers.

        Raises the worker's KVFerryError, or LocalError when the worker cannot be reached or does
        not answer in time; the next call connects anew.
        """
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(self._address)
            self._socket.settimeout(timeout_seconds + 1.0)
            _send(self._socket, msgspec.msgpack.encode(_Ask(request_id, timeout_seconds)))
            answer = msgspec.msgpack.decode(_receive(self._socket), type=_Answer)
        except (OSError, EOFError) as error:
            self.close()
            raise LocalError(
                f"the worker gave no ticket: {error}",
                request_id=request_id,
                now_true="the request's blocks stay at the worker until its offer is withdrawn",
                next_step="scheduler and workers have to run on one host, as one user",
            ) from error
        if answer.error is not None:
            raise KVFerryError.from_record(answer.error)
        return answer.ticket

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket) -> bytes:
    (nbytes,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if nbytes > _MAX_NBYTES:
        raise EOFError(f"a frame of {nbytes} bytes")
    return _exactly(sock, nbytes)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    body = bytearray()
    while len(body) < nbytes:
        piece = sock.recv(nbytes - len(body))
        if not piece:
            raise EOFError("the other side hung up")
        body += piece
    return bytes(body)
