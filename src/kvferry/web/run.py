"""A live page beside a command that has an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import uvicorn

from kvferry.errors import InputError
from kvferry.serve.listening import bound_socket, is_loopback_host
from kvferry.serve.options import host_port
from kvferry.serve.patience import PatientProtocol
from kvferry.transport.security import Identity
from kvferry.web.app import LivePage
from kvferry.web.guard import read_token
from kvferry.web.renewal import follow_renewals

__all__ = ["PageOptions", "page_options", "serving_page"]

_END_SECONDS = 2
# Beyond the first a request is told so; beyond the second a connection is closed as it comes.
_MAX_REQUESTS, MAX_CONNECTIONS = 64, 128
# How long a client may take to begin TLS, and to end it.
HANDSHAKE_SECONDS = 5.0


class PageOptions(msgspec.Struct, frozen=True):
    """Where the page is, and for whom; ``identity``: whose certificate it shows, None in plain."""

    listen: str
    token: str
    identity: Identity | None


def page_options(listen: str, token_file: Path | None, identity: Identity | None) -> PageOptions:
    """The options, if the page may be shown there. Off loopback it wants a token and a certificate.

    Raises InputError naming the option.
    """
    token = "" if token_file is None else read_token(token_file)
    host, _ = host_port(listen, "web")
    if is_loopback_host(host):
        return PageOptions(listen, token, None)
    if not token or identity is None:
        raise InputError(
            f"web: {host} can be reached from other hosts, so the page needs --web-token FILE and --cert FILE"
        )
    return PageOptions(listen, token, identity)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            self.servers = [await self._listen_sealed(sock) for sock in sockets or ()]
            self.started = True
        self.answers.set()

    async def _listen_sealed(self, sock: socket.socket) -> asyncio.Server:
        """As uvicorn does it, which leaves a handshake asyncio's 60 s."""

        def protocol() -> PatientProtocol:
            return PatientProtocol(self.config, self.server_state, self.lifespan.state)

        return await asyncio.get_running_loop().create_server(
            protocol,
            sock=sock,
            ssl=self.config.ssl,
            backlog=self.config.backlog,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=HANDSHAKE_SECONDS,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the command's


@contextlib.asynccontextmanager
async def serving_page(page: LivePage, options: PageOptions) -> AsyncIterator[str]:
    """Serve while the block runs; gives the URL. Raises TransportError where it cannot be listened at."""
    identity = options.identity
    config = uvicorn.Config(
        page.app,
        log_level="error",  # a line for each bad request would be its client's to multiply
        access_log=False,
        lifespan="off",
        http=PatientProtocol,
        ws="none",
        timeout_graceful_shutdown=_END_SECONDS,
        limit_concurrency=_MAX_REQUESTS,
        ssl_certfile=None if identity is None else identity.certificate,
        ssl_keyfile=(identity.key or None) if identity is not None else None,
    )
    if identity is not None:
        config.load()
        assert config.ssl is not None
        follow_renewals(config.ssl, identity)
    scheme = "http" if identity is None else "https"
    socket_at = bound_socket(options.listen, field="web", scheme=scheme, connections=MAX_CONNECTIONS)
    with socket_at as (sock, url):
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        answers = asyncio.ensure_future(server.answers.wait())
        try:
            await asyncio.wait((serving, answers), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # raises why it does not
            yield url
        finally:
            answers.cancel()
            page.close()
            server.should_exit = True
            await serving
