"""The transfer process: runs one node for one engine, over one socket.

It exists so that a busy Python thread in the engine does not slow the data path (the GIL costs up
to four times). It ends when its engine closes the socket, by asking or by dying: no pool, port or
process outlives its owner.

    python -m kvferry.transfer SOCKET_FD
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys

import msgspec

from kvferry.errors import KVFerryError, LocalError
from kvferry.transfer.calls import Call, CloseCall, Ended, NodeConfig, Reply
from kvferry.transfer.node import Node
from kvferry.transfer.pool import memory_nbytes
from kvferry.transfer.service import Service
from kvferry.transfer.session import Session
from kvferry.transport.base import Memory
from kvferry.transport.memory import attach_shared

__all__ = ["FRAME", "main", "serve"]

FRAME = struct.Struct("<I")
_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_encoder = msgspec.msgpack.Encoder()


async def serve(sock: socket.socket, memory: Memory | None) -> None:
    """Run a node until the engine's end of ``sock`` is gone.

    The first frame is the NodeConfig. ``memory`` is the pool where the engine shares this
    process; None says to map the descriptor that the config names.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    node: Node | None = None
    tasks: set[asyncio.Task[None]] = set()
    try:
        config = msgspec.msgpack.decode(await _frame(reader), type=NodeConfig)
        if memory is None:
            memory = _map_pool(config)
        node = Node(config, memory)
        if config.is_observed:
            node.on_ended = lambda session: _tell(writer, session)
        service = Service(node)
        while True:
            call = _call_decoder.decode(await _frame(reader))
            task = asyncio.ensure_future(_answer(service, call, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if isinstance(call, CloseCall):
                await task
                node = None
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the engine is gone; what it owned ends below
    finally:
        for task in tasks:
            task.cancel()
        if node is not None:
            await node.close()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (nbytes,) = FRAME.unpack(await reader.readexactly(FRAME.size))
    return await reader.readexactly(nbytes)


async def _answer(service: Service, call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        reply = Reply(call.id, value=await service.handle(call))
    except KVFerryError as error:
        reply = Reply(call.id, error=error.to_record())
    except Exception as error:  # noqa: BLE001 - a bug here must reach the engine as an error, not as a hang
        reply = Reply(call.id, error=LocalError(f"kvferry failed inside: {error!r}").to_record())
    _write(writer, reply)
    with contextlib.suppress(ConnectionError):
        await writer.drain()


def _tell(writer: asyncio.StreamWriter, session: Session) -> None:
    error = session.ended.exception()
    told = error.to_record() if isinstance(error, KVFerryError) else None
    _write(writer, Reply(0, value=Ended(session.record(), told)))


def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    body = _encoder.encode(reply)
    writer.write(FRAME.pack(len(body)) + body)


def _map_pool(config: NodeConfig) -> Memory:
    if config.memory_fd is None:
        raise LocalError("a transfer process needs a pool in shared memory")
    return attach_shared(
        config.memory_fd,
        memory_nbytes(config.layout, config.staging_nbytes),
        owner_pid=config.owner_pid,
        owner_address=config.owner_address,
    )


def main() -> None:
    """Entry of the child process."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    asyncio.run(serve(sock, None))
    os._exit(0)  # no thread of ours may hold up the end: everything was closed above
