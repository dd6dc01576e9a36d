"""Certificates for tests: one cluster's, and every kind that must be refused."""

from __future__ import annotations

import atexit
import datetime as dt
import ipaddress
import os
import shutil
import tempfile
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
