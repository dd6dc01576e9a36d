"""Who may look at the page, and what its answers let a browser do."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.errors import InputError
from kvferry.serve.listening import is_loopback_host

__all__ = ["Guard", "read_token"]

MIN_TOKEN_LETTERS, MAX_TOKEN_NBYTES = 16, 4096
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Before an application: with a token whoever knows it gets in, without one only this host does.

    Without a token the name that the browser asked for must be this host's: a stranger's page, whose
    name was made to lead to 127.0.0.1, is refused.
    """

    def __init__(self, app: ASGIApp, token: str = "") -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        if self._token:
            if hmac.compare_digest(_given(headers.get("authorization", "")), self._token):
                return None
            # A browser asks its user, and sends what he types as the password with every request.
            ask = {"WWW-Authenticate": 'Basic realm="kvferry: the token is the password"'}
            return PlainTextResponse("this page needs its token\n", 401, ask)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if is_loopback_host(name):
            return None
        return PlainTextResponse(f"this page is for this host only, not for {name!r}\n", 403)


def _given(authorization: str) -> bytes:
    """What a request shows: a bearer's token, or the password of a browser."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def read_token(path: Path) -> str:
    """The token in a file. Raises InputError for one that can be guessed, or cannot be sent."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_NBYTES + 1)
    except OSError as error:
        raise InputError(f"web_token: {path}: {error.strerror}") from error
    token = raw.decode("ascii", "replace").strip()
    if len(raw) > MAX_TOKEN_NBYTES or not re.fullmatch("[!-~]*", token):
        raise InputError(f"web_token: {path} does not hold one word of ASCII")
    if len(token) < MIN_TOKEN_LETTERS:
        raise InputError(
            f"web_token: {path}: {len(token)} letters, fewer than {MIN_TOKEN_LETTERS}",
            next_step="make one with `openssl rand -hex 16`",
        )
    return token
