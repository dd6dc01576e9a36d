"""Build a server of the reference engine, and run it until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from kvferry.demo.stage import load_model
from kvferry.engines.reference import Model, ReferenceEngine
from kvferry.errors import LocalError, TransportError
from kvferry.layout import PoolLayout
from kvferry.serve.batcher import Batcher
from kvferry.serve.options import ServeOptions, check_options, host_port
from kvferry.serve.roles import Roles
from kvferry.transfer import Endpoint, Pool

__all__ = ["Serving", "bound_socket", "run_app", "run_server"]

_GRACE_SECONDS = 5


class Serving(msgspec.Struct, frozen=True):
    """What a server says once it serves: the line on stdout, as JSON with ``--json``."""

    url: str
    model: str
    kv: tuple[str, ...]
    incarnation: str
    pid: int


def run_server(options: ServeOptions, on_ready: Callable[[Serving], None]) -> None:
    """Serve until SIGINT or SIGTERM; then answer what is under way for 5 s at most, free everything, return.

    Raises InputError naming the option, LocalError for a package that is missing, TransportError
    where an address cannot be listened at; nothing is left behind.
    """
    check_options(options)
    app_of = _make_app()
    model = choose_model(options.model)
    with bound_socket(options.listen) as (sock, url):
        engine, pool = make_engine(model, options)
        endpoint = None
        try:
            if pool is not None:
                endpoint = Endpoint.listen(
                    options.kv,
                    pool=pool,
                    name=options.name,
                    requirements=engine.requirements(),
                    tls=options.security.identity,
                    plain=options.security.plain,
                )
            roles = None if endpoint is None else Roles(engine, endpoint, options)
            batcher = Batcher(engine, roles, options)

            def close() -> None:
                batcher.close()
                if roles is not None:
                    roles.close()

            def withdraw(ticket: bytes) -> None:
                if roles is not None:
                    roles.withdraw(ticket)

            app = app_of(
                engine, batcher, options, has_peers=roles is not None, withdraw=withdraw, close=close
            )
            serving = Serving(
                url=url,
                model=model.name,
                kv=() if endpoint is None else endpoint.addresses,
                incarnation="" if endpoint is None else endpoint.incarnation.hex(),
                pid=os.getpid(),
            )
            try:
                run_app(app, sock, lambda: on_ready(serving), lambda: asyncio.to_thread(batcher.close))
            finally:
                close()  # a second time, unless a second signal cut the first one short
        finally:
            if endpoint is not None:
                endpoint.close()
            if pool is not None:
                pool.close()


def choose_model(name: str) -> Model:
    """The model by name; ``auto`` takes random weights, and says so, if it must."""
    if name != "auto":
        return load_model("smollm2" if name == "smollm2" else "tiny", (1, 1))
    try:
        return load_model("smollm2", (1, 1))
    except LocalError as error:
        print(f"kvferry: random weights instead of SmolLM2: {error}", file=sys.stderr)
        return load_model("tiny", (1, 1))


def make_engine(model: Model, options: ServeOptions) -> tuple[ReferenceEngine, Pool | None]:
    """The engine, and its pool where peers are to reach it."""
    layout = PoolLayout.paged(
        range(model.config.layers),
        kv_heads=model.config.kv_heads,
        head_dim=model.config.head_dim,
        dtype="float32",
        block_size=options.block_size,
        num_blocks=-(-options.pool_tokens // options.block_size),
    )
    pool = Pool.allocate(layout) if options.kv else None
    memory = np.zeros(layout.nbytes, np.uint8) if pool is None else pool.array
    return ReferenceEngine(model, layout, memory, chunk_tokens=options.chunk_tokens), pool


@contextlib.contextmanager
def bound_socket(listen: str) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL. Raises InputError, TransportError."""
    host, port = host_port(listen)
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise TransportError(f"listen: {listen}: {error.strerror or error}") from error
    with sock:
        shown = f"[{host}]" if ":" in host else host
        yield sock, f"http://{shown}:{sock.getsockname()[1]}"


def run_app(
    app: Any, sock: socket.socket, on_ready: Callable[[], None], on_end: Callable[[], Awaitable[None]]
) -> None:
    """Run an application on a socket until SIGINT or SIGTERM.

    What is under way has 5 s then, or until a second SIGINT; ``on_end`` makes the rest fail in order.
    An error of ``on_ready`` (stdout is gone) ends it in order too, and is raised.
    """
    import uvicorn  # noqa: PLC0415

    failed: list[Exception] = []

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            try:
                yield
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                try:
                    on_ready()
                except Exception as error:  # noqa: BLE001 - raised again below, when all has ended in order
                    failed.append(error)
                    self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.ensure_future(self._end())
            await super().shutdown(sockets)
            if self.force_exit:  # then uvicorn leaves both out
                await ending
                await self.lifespan.shutdown()
            ending.cancel()

        async def _end(self) -> None:
            end = asyncio.get_running_loop().time() + _GRACE_SECONDS
            while not self.force_exit and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.1)
            await on_end()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=2 * _GRACE_SECONDS,
    )
    asyncio.run(Server(config).serve(sockets=[sock]))
    if failed:
        raise failed[0]


def _make_app() -> Any:
    try:
        from kvferry.serve.app import make_app  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra(error) from error
    return make_app


def missing_extra(error: ImportError) -> LocalError:
    """What to install."""
    name = (error.name or "of an extra").partition(".")[0]
    return LocalError(f"the package {name!r} is missing", next_step="pip install 'kvferry[serve]'")
