"""``kvferry agent``: a node's end of probes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from kvferry.cli.identity import identity_of
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.transport.security import Identity
    from kvferry.web.run import PageOptions

__all__ = ["agent"]


def agent(
    *,
    listen: str,
    name: str = "",
    zone: str = "",
    data: tuple[str, ...] = (),
    max_bytes: str = "8GiB",
    cert: Path | None = None,
    authority: Path | None = None,
    peers: tuple[str, ...] = (),
    plain: Literal["never", "loopback", "anywhere"] | None = None,
    web: str = "",
    web_token: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Answer probes at this node until it is told to end (Ctrl-C, SIGTERM).

    It serves one probe at a time, over a pool that it makes for that probe, to peers with a ticket of
    that probe. It never touches the pool of an engine.

    Parameters
    ----------
    listen
        tcp://HOST:PORT, the address by which coordinators and other nodes reach this one; port 0 for any.
        Off loopback it is encrypted, with --cert; or add ?plain=yes to send in plain over a trusted network.
    name
        What the matrix calls this node. Default: the host's name.
    zone
        Its rack or domain: pairs are compared with those of the same zones.
    data
        Where a probe's endpoint listens, once for each transport. Default: the same host, any free port.
    max_bytes
        The largest pool that a probe may have here.
    cert
        This node's certificate and key (see `kvferry certs`).
    authority
        The certificate that its peers' must lead to. Default: ca.pem beside --cert.
    peers
        Names that its peers' certificates must carry, with * for any letters; repeatable. @FILE: the
        names in a file, one a line, read again for each new connection.
    plain
        Where a probe may send in plain. Default: on loopback, and anywhere if --listen says ?plain=yes.
    web
        HOST:PORT of a page that shows what happens here now, and of /metrics; read only. On loopback
        anybody of this host may look; elsewhere it needs --web-token and --cert, whose TLS it uses.
    web_token
        A file with the word of 16 letters or more that the page asks for as its password.
    as_json
        Print the ready line as one JSON object.
    """
    from kvferry.transport.security import Plain
    from kvferry.units import parse_bytes

    limit = parse_bytes(max_bytes, "max_bytes")
    if limit < 1:
        raise InputError("max_bytes: must be 1 or more")
    identity = identity_of(cert, authority, peers)
    address = listen if "://" in listen else f"tcp://{listen}"
    options = {
        "name": name,
        "zone": zone,
        "data": data,
        "max_bytes": limit,
        "tls": identity,
        "plain": None if plain is None else Plain(plain),
    }
    if web_token is not None and not web:
        raise InputError("web_token: it is of a page; give --web too")
    page = _page(web, web_token, identity) if web else None
    asyncio.run(_serve(address, options, page, as_json=as_json))


def _page(web: str, web_token: Path | None, tls: Identity | None) -> PageOptions:
    """Raises InputError before anything is opened, LocalError that says what to install."""
    from kvferry.serve.listening import missing_extra

    try:
        from kvferry.web.run import page_options
    except ImportError as error:
        raise missing_extra(error) from error
    return page_options(web, web_token, tls)


async def _serve(address: str, options: dict[str, Any], page: PageOptions | None, *, as_json: bool) -> None:
    from kvferry.probe import Agent

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        if page is None:
            agent_here = await stack.enter_async_context(await Agent.listen(address, **options))
            url = ""
        else:
            from kvferry.web.agent import agent_with_page

            agent_here, url = await stack.enter_async_context(agent_with_page(address, options, page))
        ready = {
            "address": agent_here.address,
            "name": agent_here.name,
            "incarnation": agent_here.incarnation.hex(),
        } | ({"web": url} if url else {})
        if as_json:
            print(msgspec.json.encode(ready).decode(), flush=True)
        else:
            print("ready: {name} at {address}, incarnation {incarnation}".format(**ready), flush=True)
            if url:
                print(f"live page: {url}", flush=True)
        await stop.wait()
