"""Who this side is and whom it talks to: identities in PEM files, and where plain tcp is allowed.

Files are read again for each new connection, so certificates are renewed without a restart:
replace the files, and the next connection uses them.
"""

from __future__ import annotations

import enum
import fnmatch
import ssl
from pathlib import Path
from typing import Self

import msgspec

from kvferry.errors import InputError
from kvferry.transport.peers import read_entries

__all__ = ["HOST_ONLY", "Identity", "Plain", "Security", "names_match"]

MAX_PEM_NBYTES = 1 << 20


class Plain(enum.StrEnum):
    """Where tcp may be plain. ``ANYWHERE`` still needs ``?plain=yes`` in the address."""

    NEVER = "never"
    LOOPBACK = "loopback"
    ANYWHERE = "anywhere"

    @classmethod
    def of(cls, word: str) -> Self:
        """Raises InputError for an unknown word."""
        try:
            return cls(word)
        except ValueError:
            raise InputError(f"plain: {word!r} is not one of {', '.join(cls)}") from None


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One endpoint's certificate and key, and who signs its peers'; all are paths of PEM files.

    ``key`` may be empty where ``certificate`` holds the private key too, which lets a renewal
    replace both at once. ``authority`` holds the certificates that a peer's must lead to.
    ``peers`` are names, with ``*`` for any letters, or ``@FILE`` with such names; a peer's
    certificate must carry one that matches. Without them a listening side takes every peer of
    the authority, and a connecting side wants the certificate of the host that it connects to.
    """

    certificate: str
    authority: str
    key: str = ""
    peers: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        certificate: str | Path,
        authority: str | Path | None = None,
        *,
        key: str | Path | None = None,
        peers: tuple[str, ...] = (),
    ) -> Self:
        """An identity whose files were read and fit together now.

        ``authority`` is by default ``ca.pem`` beside the certificate, as ``kvferry certs`` leaves it.
        Raises InputError that names the file and what is wrong with it.
        """
        path = Path(certificate).absolute()
        identity = cls(
            str(path),
            str(path.with_name("ca.pem") if authority is None else Path(authority).absolute()),
            "" if key is None else str(Path(key).absolute()),
            tuple(f"@{Path(name[1:]).absolute()}" if name.startswith("@") else name for name in peers),
        )
        identity.context(server_side=False)
        identity.names()
        return identity

    def names(self) -> tuple[str, ...]:
        """What ``peers`` stand for now; files are read. Raises InputError that names the file."""
        return read_entries(self.peers, "peers")

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """TLS 1.3, this side's certificate shown and the peer's demanded; names are checked elsewhere.

        Reads the files. Raises InputError that names the file.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # set by who knows the host
        context.verify_mode = ssl.CERT_REQUIRED
        if server_side:
            context.num_tickets = 0  # each connection proves both identities anew
        _check_readable(self.certificate, self.authority, *([self.key] if self.key else ()))
        try:
            context.load_cert_chain(self.certificate, self.key or None, _no_password)
        except (OSError, ValueError) as error:
            holder = self.key or self.certificate
            raise InputError(
                f"identity: {self.certificate} and the key in {holder} cannot be used: {_reason(error)}",
                next_step="give the file with both that `kvferry certs issue` made, not the authority's",
            ) from error
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise InputError(f"identity: authority {self.authority}: {_reason(error)}") from error
        return context


class Security(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a node's connections are protected; the default keeps to this host."""

    identity: Identity | None = None
    plain: Plain = Plain.LOOPBACK


HOST_ONLY = Security()


def names_match(names: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether one of a certificate's names matches one of the patterns; letter case does not count."""
    return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name in names for pattern in wanted)


def _check_readable(*paths: str) -> None:
    for path in paths:
        try:
            with open(path, "rb") as file:
                if len(file.read(MAX_PEM_NBYTES + 1)) > MAX_PEM_NBYTES:
                    raise InputError(f"identity: {path} is longer than {MAX_PEM_NBYTES} bytes")
        except (OSError, ValueError) as error:
            raise InputError(f"identity: {path}: {getattr(error, 'strerror', None) or error}") from error


def _no_password() -> str:
    raise ValueError("the key is locked with a password; store it without one, readable by its user only")


def _reason(error: Exception) -> str:
    """OpenSSL's reason without its source file and line."""
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not this certificate's"
    return str(reason).replace("_", " ").lower() if reason else str(error)
