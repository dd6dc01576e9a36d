"""Build a server of the reference engine, and run it until it is told to end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvferry.demo.stage import load_model
from kvferry.engines.reference import Model, ReferenceEngine
from kvferry.errors import LocalError
from kvferry.layout import PoolLayout
from kvferry.serve.batcher import Batcher
from kvferry.serve.listening import bound_socket, is_loopback_host, missing_extra
from kvferry.serve.options import ServeOptions, check_options, host_port
from kvferry.serve.roles import Roles
from kvferry.transfer import Endpoint, Pool

if TYPE_CHECKING:
    from kvferry.serve.look import Look

__all__ = ["Serving", "run_server"]


class Serving(msgspec.Struct, frozen=True):
    """What a server says once it serves: the line on stdout, as JSON with ``--json``.

    ``live``: the page of what happens here, or "" where other hosts could look.
    """

    url: str
    model: str
    kv: tuple[str, ...]
    incarnation: str
    pid: int
    live: str


def run_server(options: ServeOptions, on_ready: Callable[[Serving], None]) -> None:
    """Serve until SIGINT or SIGTERM; then answer what is under way for 5 s at most, free everything, return.

    Raises InputError naming the option, LocalError for a package that is missing, TransportError
    where an address cannot be listened at; nothing is left behind.
    """
    check_options(options)
    app_of, run_app, look = _parts()
    model = choose_model(options.model)
    with bound_socket(options.listen) as (sock, url):
        engine, pool = make_engine(model, options)
        endpoint = None
        try:
            if pool is not None:
                endpoint = _open(options, engine, pool, look)
            roles = None if endpoint is None else Roles(engine, endpoint, options)
            batcher = Batcher(engine, roles, options)
            look.at_engine(batcher.stats)

            def close() -> None:
                batcher.close()
                if roles is not None:
                    roles.close()

            def withdraw(ticket: bytes) -> None:
                if roles is not None:
                    roles.withdraw(ticket)

            has_peers = roles is not None
            app = app_of(engine, batcher, options, look, has_peers=has_peers, withdraw=withdraw, close=close)
            serving = Serving(
                url=url,
                model=model.name,
                kv=() if endpoint is None else endpoint.addresses,
                incarnation="" if endpoint is None else endpoint.incarnation.hex(),
                pid=os.getpid(),
                live="" if look.page is None else f"{url}/live/",
            )

            def end() -> Awaitable[None]:
                return asyncio.to_thread(batcher.close)

            try:
                run_app(app, sock, lambda: on_ready(serving), end, look.close)
            finally:
                close()  # a second time, unless a second signal cut the first one short
        finally:
            if endpoint is not None:
                endpoint.close()
            if pool is not None:
                pool.close()


def _open(options: ServeOptions, engine: ReferenceEngine, pool: Pool, look: Look) -> Endpoint:
    """The endpoint by which peers reach the pool, looked at; /live only where no other host can look."""
    endpoint = Endpoint.listen(
        options.kv,
        pool=pool,
        name=options.name,
        requirements=engine.requirements(),
        tls=options.security.identity,
        plain=options.security.plain,
        observers=(look.tally, look.metrics),
    )
    host, _ = host_port(options.listen)
    look.at_endpoint(options.name, endpoint, page=is_loopback_host(host))
    return endpoint


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


def _parts() -> tuple[Callable[..., Any], Callable[..., None], Look]:
    try:
        from kvferry.serve.app import make_app  # noqa: PLC0415
        from kvferry.serve.look import Look  # noqa: PLC0415
        from kvferry.serve.running import run_app  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra(error) from error
    return make_app, run_app, Look()
