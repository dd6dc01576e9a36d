"""The page's certificate, renewed as its worker's is: by replacing the file, without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from kvferry.transport.security import Identity

__all__ = ["follow_renewals"]

_log = logging.getLogger(__name__)


def follow_renewals(context: ssl.SSLContext, identity: Identity) -> None:
    """Show what the identity's files hold at each handshake; files that cannot be used change nothing."""
    files = [Path(name) for name in (identity.certificate, identity.key) if name]
    current, seen = context, _stamp(files)

    def on_handshake(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        nonlocal current, seen
        if (found := _stamp(files)) != seen:
            seen = found
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                fresh.load_cert_chain(identity.certificate, identity.key or None, lambda: "")
                current = fresh
            except (OSError, ValueError) as error:
                _log.warning("live page: the certificate is as before: %s: %s", identity.certificate, error)
        connection.context = current

    context.sni_callback = on_handshake


def _stamp(files: list[Path]) -> tuple[tuple[int, int, int], ...] | None:
    try:
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in map(Path.stat, files))
    except OSError:
        return None
