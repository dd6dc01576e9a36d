"""Certificates for tests: one cluster's, and every kind that must be refused."""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import ipaddress
import itertools
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvferry.transport.certificates import init_authority, issue
from kvferry.transport.security import Identity, Plain, Security
from kvferry.transport.tcp import TcpTransport

_FOLDER = "KVFERRY_TEST_CERTIFICATES"


def _shared_folder() -> Path:
    """One authority for this process and those that it starts."""
    if _FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="kvferry-test-certificates-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        init_authority(folder)
        issue(folder, "node", hosts=["127.0.0.1", "::1"])
        os.environ[_FOLDER] = str(folder)
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), here]))
    return Path(os.environ[_FOLDER])


FOLDER = _shared_folder()
NODE = Identity.load(FOLDER / "node.pem")


class SealedTcpTransport(TcpTransport):
    """TCP that is encrypted on loopback too; importable by name in another process."""

    security = Security(NODE, Plain.NEVER)


def transport_of(identity: Identity | None, plain: Plain = Plain.NEVER) -> type[TcpTransport]:
    """The class of an endpoint with that identity."""
    return type("TcpOfIdentity", (TcpTransport,), {"security": Security(identity, plain)})


def odd_identity(folder: Path, name: str, **changes: object) -> Identity:
    """An identity that kvferry itself would not issue, signed by the authority in ``FOLDER``.

    ``changes``: ``start`` and ``end`` in days from now, ``usage`` (extended key usages), ``host``.
    """
    says = {"start": -1, "end": 1, "usage": None, "host": "127.0.0.1"} | changes
    authority = x509.load_pem_x509_certificate((FOLDER / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((FOLDER / "ca-key.pem").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=float(str(says["start"]))))
        .not_valid_after(now + dt.timedelta(days=float(str(says["end"]))))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address(str(says["host"])))]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if says["usage"] is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(says["usage"]), critical=False)  # type: ignore[arg-type]
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    path = folder / f"{name}.pem"
    path.write_bytes(pem)
    return Identity(str(path), str(FOLDER / "ca.pem"))


class TamperingProxy:
    """Stands between two ends of a tcp transport: passes every byte on, keeps it, changes one part when told.

    ``downstream`` is from the listener to who connected. Only sockets after the first, the data
    channels, are tampered with.
    """

    def __init__(self, address: str) -> None:
        place, _, options = address.removeprefix("tcp://").partition("?")
        host, _, port = place.rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}" + (f"?{options}" if options else "")
        self.tampered = threading.Event()
        self._lock = threading.Lock()
        self._seen: list[bytes] = []
        self._socks: list[socket.socket] = []
        self._order: tuple[str, int, bool] | None = None
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def seen(self) -> bytes:
        """All that passed until now, in any order of the sockets."""
        with self._lock:
            return b"".join(self._seen)

    def tamper(self, how: str, *, after_nbytes: int, downstream: bool) -> None:
        """Change the data channel's bytes once, beyond so many that pass from now on."""
        with self._lock:
            self._order = (how, after_nbytes, downstream)

    def close(self) -> None:
        for sock in (self._server, *self._socks):  # by this a thread in accept or recv wakes, not by close
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(5.0)
        for sock in self._socks:
            sock.close()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._socks += [near, far]
            for source, sink, downstream in ((near, far, False), (far, near, True)):
                thread = threading.Thread(
                    target=self._pass, args=(source, sink, downstream, number > 0), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, downstream: bool, is_data: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self._seen.append(data)
                    if is_data:
                        data = self._changed(data, downstream)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _changed(self, data: bytes, downstream: bool) -> bytes:
        if self._order is None or self._order[2] is not downstream:
            return data
        how, left, _ = self._order
        if len(data) <= left or len(data) - left < 64:
            self._order = (how, max(0, left - len(data)), downstream)
            return data
        self._order = None
        self.tampered.set()
        middle = left + (len(data) - left) // 2
        first, rest = data[:left], data[left:]
        return {
            "flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
            "drop": first + rest[32:],
            "repeat": first + rest[:32] + rest,
            "swap": first + rest[32:64] + rest[:32] + rest[64:],
        }[how]
