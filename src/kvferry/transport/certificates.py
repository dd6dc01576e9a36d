"""A small authority for one cluster: certificates by which endpoints know each other.

One folder holds ``ca.pem`` (what everybody trusts), ``ca-key.pem`` (what signs; keep it away from
workers) and ``NAME.pem`` for each endpoint: its private key and its certificate in one file, so
that a renewal replaces both at once. A cluster that has an authority already needs none of this:
``Identity`` takes any PEM files.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import InputError, LocalError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["AUTHORITY", "AUTHORITY_KEY", "init_authority", "issue"]

AUTHORITY = "ca.pem"
AUTHORITY_KEY = "ca-key.pem"
MAX_DAYS = 36500
# Clocks of a cluster differ a little: a certificate is good at once everywhere.
_BACKDATED = dt.timedelta(minutes=5)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


def init_authority(folder: Path, *, name: str = "kvferry cluster", days: int = 3650) -> Path:
    """Make a new authority in ``folder``, which is created; returns the path of what everybody trusts.

    Raises InputError where there is one already: a second would not know the first one's endpoints.
    """
    x509 = _cryptography()
    _check_days(days)
    for file in (AUTHORITY, AUTHORITY_KEY):
        if (folder / file).exists():
            raise InputError(f"folder: {folder / file} is there already; move it away to begin anew")
    if not name.strip() or len(name) > 64:  # the longest common name that X.509 allows
        raise InputError(f"name: {name!r} has not from 1 to 64 characters")
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / AUTHORITY_KEY, _key_pem(key), mode=0o600)
    _write(folder / AUTHORITY, _signed(builder, key), mode=0o644)
    return folder / AUTHORITY


def issue(folder: Path, name: str, *, hosts: Sequence[str] = (), days: int = 90) -> Path:
    """Make or renew ``NAME.pem``, signed by the authority in ``folder``; returns its path.

    ``hosts``: host names and IP addresses at which the endpoint listens, for peers that check the
    host and not the name. The file is replaced at once, so that endpoints may run meanwhile.
    Raises InputError for a name or host that no certificate can carry, or when there is no authority.
    """
    x509 = _cryptography()
    from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415 - an extra

    _check_days(days)
    if not _NAME.fullmatch(name) or f"{name}.pem" in (AUTHORITY, AUTHORITY_KEY):
        raise InputError(f"name: {name!r} is no name: letters, digits, dots and dashes; not ca")
    authority, signer = _read_authority(folder)
    key = _new_key()
    expires = authority.not_valid_after_utc
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, authority.subject, key.public_key(), days, expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), *map(_general_name, hosts)]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    path = folder / f"{name}.pem"
    _write(path, _key_pem(key) + _signed(builder, signer), mode=0o600)
    return path


def _cryptography() -> Any:
    try:
        from cryptography import x509  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise LocalError(
            "certificates need the package cryptography", next_step="pip install 'kvferry[tls]'"
        ) from error
    return x509


def _check_days(days: int) -> None:
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"days: {days} is not from 1 to {MAX_DAYS}")


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509  # noqa: PLC0415 - an extra

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _NAME.fullmatch(host):
            raise InputError(f"host: {host!r} is neither an IP address nor a host name") from None
        return x509.DNSName(host)


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - an extra

    return ec.generate_private_key(ec.SECP256R1())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    not_beyond: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    from cryptography import x509  # noqa: PLC0415 - an extra

    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end if not_beyond is None else min(end, not_beyond))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509  # noqa: PLC0415 - an extra

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - an extra

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    from cryptography import x509  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - an extra

    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    except OSError as error:
        raise InputError(
            f"folder: {error.filename}: {error.strerror}; `kvferry certs init {folder}` makes an authority"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"folder: {folder} holds no authority that can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InputError(f"folder: {folder / AUTHORITY_KEY} is not the key of {folder / AUTHORITY}")
    return certificate, key


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Replace a file at once; it never has other rights than ``mode``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LocalError(
            f"{path}: {error.strerror}",
            now_true="the file is as it was before",
            next_step="make room, or choose a folder that can be written",
        ) from error
