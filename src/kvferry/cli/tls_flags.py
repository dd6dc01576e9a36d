"""The options of every verb that opens an endpoint: who it is, and what may be plain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.transport.security import Security

__all__ = ["TlsFlags"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """Encryption of tcp."""

    identity: Path | None = None
    "PEM file with this endpoint's key and certificate (`kvferry certs issue`); tcp off loopback needs it."
    authority: Path | None = None
    "PEM file of the authority that a peer's certificate must lead to. Default: ca.pem beside the identity."
    peer_name: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A name (* for any letters), or @FILE of such, that a peer's certificate must carry. Default: the host's."
    plain: Literal["never", "loopback", "anywhere"] = "loopback"
    "Where tcp may be plain; off loopback the address has to say ?plain=yes too."

    def security(self) -> Security:
        """For ``Endpoint.open(tls=security.identity, plain=security.plain)``. Raises InputError."""
        from kvferry.transport.security import Identity, Plain, Security

        if self.identity is None:
            for option, value in (("authority", self.authority), ("peer_name", self.peer_name)):
                if value:
                    raise InputError(f"{option}: it is of an identity; give --identity too")
            return Security(None, Plain(self.plain))
        identity = Identity.load(self.identity, self.authority, peers=self.peer_name)
        return Security(identity, Plain(self.plain))
