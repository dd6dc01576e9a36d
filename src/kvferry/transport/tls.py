"""TLS 1.3 over a socket of the event loop, without asyncio's own: the handshake, then bytes both ways.

It carries the control connection only. Payload goes over data channels, sealed with keys that the
two sides exchange here (seal.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

from kvferry.errors import KVFerryError, LocalError, PeerError, TransportError
from kvferry.transport.security import Identity, names_match

__all__ = ["TlsStream"]

_READ_NBYTES = 64 << 10
# How long a refused peer may take to read why.
_FAREWELL_SECONDS = 1.0

#: OpenSSL's names of alerts by which a peer refuses this side's certificate, in words.
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it shows none",
    "UNKNOWN_CA": "the peer does not know the authority that signed it",
    "CERTIFICATE_EXPIRED": "it is not valid at this time",
    "CERTIFICATE_UNKNOWN": "the peer does not accept it",
    "BAD_CERTIFICATE": "the peer does not accept it (its name, for example)",
    "UNSUPPORTED_CERTIFICATE": "it is not for this use",
    "CERTIFICATE_REVOKED": "it was revoked",
    "DECRYPT_ERROR": "its key does not fit",
}
# By OpenSSL's verify code: the name, and the address, at which the peer was looked for are not in it.
_REISSUE = dict.fromkeys(
    (62, 64),
    "issue the peer's with this host (`kvferry certs issue FOLDER NAME --host HOST`), "
    "or check names instead of hosts (peers, `--peer-name`)",
)


class TlsStream:
    """One side of one TLS connection. ``host`` is whom the connecting side means to reach."""

    def __init__(self, identity: Identity, peer: str, *, host: str | None) -> None:
        """Raises InputError when the identity's files cannot be used."""
        self._peer = peer
        self._identity = identity
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = identity.context(server_side=host is None)
        self._wanted = identity.names()
        # With names to check, any host may carry them: workers move between hosts.
        context.check_hostname = host is not None and not identity.peers
        self._ssl = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=host is None,
            server_hostname=None if host is None else host.partition("%")[0],
        )
        self.peer_names: tuple[str, ...] = ()
        self._doing = "during"

    async def handshake(self, sock: socket.socket) -> None:
        """Both sides prove who they are. Raises PeerError, LocalError, TransportError: by whose fault it is.

        The side that connected may learn only from its next read that the peer refuses it.
        """
        while True:
            try:
                self._ssl.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush(sock)
                await self._fill(sock)
            except ssl.SSLError as error:
                await self._flush(sock)
                await self._farewell(sock)
                raise self._failure(error) from error
        await self._flush(sock)
        self._doing = "after"
        self.peer_names = _names((self._ssl.getpeercert() or {}).get("subjectAltName", ()))

    def check_names(self) -> None:
        """Raise PeerError when the peer's certificate carries no name that this side wants."""
        # A list that has become empty takes nobody.
        if self._identity.peers and not names_match(self.peer_names, self._wanted):
            raise PeerError(
                f"the peer's certificate is for {', '.join(self.peer_names) or 'nobody'}, "
                f"and this side takes {', '.join(self._wanted) or 'nobody'}",
                phase="connect",
                peer=self._peer,
                now_true="nothing is held",
                next_step="check whom this side should talk to, or issue a certificate with the right name",
            )

    async def send(self, sock: socket.socket, data: bytes) -> None:
        """Send ``data``. Raises OSError."""
        self._ssl.write(data)
        await self._flush(sock)

    async def receive(self, sock: socket.socket, nbytes: int) -> bytes:
        """Exactly ``nbytes``. Raises as ``handshake`` does, OSError."""
        data = b""
        while len(data) < nbytes:
            try:
                data += self._ssl.read(nbytes - len(data))
            except ssl.SSLWantReadError:
                await self._flush(sock)
                await self._fill(sock)
            except ssl.SSLError as error:
                raise self._failure(error) from error
        return data

    async def send_last(self, sock: socket.socket, data: bytes) -> None:
        """Send the last words, and wait a little for the peer to have read them."""
        with contextlib.suppress(OSError):
            await self.send(sock, data)
            await self._farewell(sock)

    # For the control connection's own loop.

    def feed(self, data: bytes) -> bytes:
        """What the bytes from the socket hold. Raises TransportError when they are not the peer's."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            while piece := self._ssl.read(_READ_NBYTES):
                plain += piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the peer says that nothing more comes; the socket will say so too
        except ssl.SSLError as error:
            raise self._failure(error) from error
        return bytes(plain)

    def wrap(self, data: bytes) -> bytes:
        """``data`` as it goes to the socket, behind what TLS itself has to say."""
        if data:
            self._ssl.write(data)
        return self._outgoing.read()

    def end(self) -> bytes:
        """What tells the peer, unforgeably, that nothing more comes."""
        with contextlib.suppress(ssl.SSLError):
            self._ssl.unwrap()
        return self._outgoing.read()

    async def _flush(self, sock: socket.socket) -> None:
        if data := self._outgoing.read():
            await asyncio.get_running_loop().sock_sendall(sock, data)

    async def _fill(self, sock: socket.socket) -> None:
        data = await asyncio.get_running_loop().sock_recv(sock, _READ_NBYTES)
        if not data:
            raise ConnectionResetError(f"the peer hung up {self._doing} the TLS handshake without a reason")
        self._incoming.write(data)

    async def _farewell(self, sock: socket.socket) -> None:
        """Let the peer read an alert: a socket closed over unread bytes resets, and loses it."""
        with contextlib.suppress(OSError, TimeoutError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while await asyncio.get_running_loop().sock_recv(sock, _READ_NBYTES):
                    pass

    def _failure(self, error: ssl.SSLError) -> KVFerryError:
        """Whose certificate failed and why; else that the stream broke."""
        found = self._told(error)
        return found.with_context(phase="connect", peer=self._peer, now_true="nothing is held")

    def _told(self, error: ssl.SSLError) -> KVFerryError:
        reason = error.reason or ""
        if isinstance(error, ssl.SSLCertVerificationError):
            return PeerError(
                f"the peer's certificate is refused by this side: {error.verify_message}",
                next_step=_REISSUE.get(error.verify_code, "renew or reissue the peer's certificate")
                + f", or see {self._identity.authority}",
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return PeerError(
                "the peer shows no certificate", next_step="give the peer an identity of this cluster"
            )
        for alert, why in _ALERTS.items():
            if reason.endswith(f"ALERT_{alert}"):
                return LocalError(
                    f"this side's certificate is refused by the peer: {why}",
                    next_step=f"see {self._identity.certificate}, and the authority that the peer trusts",
                )
        return TransportError(
            f"the encrypted control connection broke: {reason.replace('_', ' ').lower() or error}",
            next_step="check that the peer is a kvferry endpoint, and connect again",
        )


def _names(entries: Any) -> tuple[str, ...]:
    """Hosts, addresses and URIs that a verified certificate is for, as ``ssl`` gives them."""
    return tuple(name for kind, name in entries if kind in ("DNS", "IP Address", "URI"))
