"""A peer for the transport suite: ``python -m kvferry.testing.transport_peer CLASS ADDRESS NBYTES [posts]``.

It fills a pool with ``pattern``, listens, prints the address that it got, admits every copy, and
sends every control frame back, until its standard input ends. CLASS reads ``module:Name``. With ``posts``
the whole pool is on its board.
"""

from __future__ import annotations

import asyncio
import importlib
import sys

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.transport_pair import TRANSFER_ID
from kvferry.transport.base import Connection
from kvferry.transport.board import Board
from kvferry.transport.memory import create_shared

__all__ = ["main", "pattern"]


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """The bytes of a peer's pool: the same in every process."""
    return np.random.default_rng(20_240_229).integers(0, 256, nbytes, np.uint8)


async def _echo(connection: Connection) -> None:
    try:
        while True:
            await connection.send(await connection.receive())
    except TransportError:
        await connection.close()


async def _serve(class_name: str, address: str, nbytes: int, *, posts: bool) -> None:
    module, _, name = class_name.partition(":")
    memory = create_shared(nbytes)
    memory.array[:] = pattern(nbytes)
    board = Board.create() if posts else None
    if board is not None:
        whole = np.zeros(1, np.int64), np.array([nbytes])
        board.post(TRANSFER_ID, *whole, whole)
    transport = getattr(importlib.import_module(module), name)(memory, ScriptedGuard(board))
    echoes: set[asyncio.Task[None]] = set()
    listener = await transport.listen(address, lambda it: echoes.add(asyncio.ensure_future(_echo(it))))
    print(listener.address, flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_input() -> None:
        if not sys.stdin.readline():
            ended.set()

    loop.add_reader(sys.stdin, on_input)
    await ended.wait()


def main() -> None:
    class_name, address, nbytes, *posts = sys.argv[1:]
    asyncio.run(_serve(class_name, address, int(nbytes), posts=posts == ["posts"]))


if __name__ == "__main__":
    main()
