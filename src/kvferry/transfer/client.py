"""The engine's end of the socket to its node: calls out, answers in, each with an end.

The node runs in a transfer process (the default for pools in shared memory) or in a thread of
the engine. Both speak the same records over a socket pair, so there is one path to test.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError
from kvferry.transfer.calls import Call, CloseCall, Ended, NodeConfig, Reply, StatsCall
from kvferry.transfer.process import FRAME, serve
from kvferry.transport.base import Memory

__all__ = ["NodeClient", "Observer"]

_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_config_decoder = msgspec.msgpack.Decoder(NodeConfig)
_encoder = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)

Observer = Callable[[Ended], None]
"""Told, in a thread of the endpoint and in order, of every transfer that ends there; it should be quick."""

# Beyond a call's own limit: how long the node may take to say that the limit has passed.
_GRACE_SECONDS = 0.5
_REAP_SECONDS = 1.0
# How long the node may leave its socket full of calls before it counts as frozen.
_SEND_SECONDS = 5
_clients: weakref.WeakSet[NodeClient] = weakref.WeakSet()


def _disown_all() -> None:
    for client in list(_clients):
        client.disown()


os.register_at_fork(after_in_child=_disown_all)


class NodeClient:
    """Owns a node: its process or thread, and the socket to it."""

    def __init__(
        self, config: NodeConfig, memory: Memory, *, process: bool, observers: Sequence[Observer] = ()
    ) -> None:
        body = _encode_config(config)
        if not all(callable(observer) for observer in observers):
            raise InputError("observers: each needs to be callable")
        self._name = config.name
        self._observers = tuple(observers)
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dispatcher: threading.Thread | None = None
        self._sock, theirs = socket.socketpair()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._ids = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._closed = False  # no call can be made any more
        self._released = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            if process:
                self._process = _spawn(theirs, memory)
            else:
                self._thread = threading.Thread(
                    target=_run_in_thread,
                    args=(theirs.dup(), memory),
                    name=f"kvferry-node-{config.name}",
                    daemon=True,
                )
                self._thread.start()
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._send(body)
        self._reader = threading.Thread(
            target=self._read_all, name=f"kvferry-calls-{config.name}", daemon=True
        )
        self._reader.start()
        if self._observers:
            self._dispatcher = threading.Thread(
                target=self._dispatch, name=f"kvferry-observers-{config.name}", daemon=True
            )
            self._dispatcher.start()
        _clients.add(self)

    @property
    def pid(self) -> int:
        """The process that the node runs in."""
        return os.getpid() if self._process is None else self._process.pid

    def submit(self, kind: type[Call], **fields: Any) -> Future[Any]:
        """Send a call; the future gives its value or its KVFerryError.

        Raises InputError for a field of the wrong type or range; then nothing was sent.
        """
        future: Future[Any] = Future()
        # Whoever holds it cannot take back the answer of a node: cancelling is a call of its own.
        future.set_running_or_notify_cancel()
        number = next(self._ids)
        body = _encode(kind(number, **fields))
        with self._lock:
            if self._closed:
                raise _closed() if self._released else self._gone()
            self._futures[number] = future
        self._send(body)
        return future

    def call(self, kind: type[Call], limit_seconds: float, **fields: Any) -> Any:
        """Send a call and wait for its answer, at most ``limit_seconds`` and a grace."""
        return self.wait(self.submit(kind, **fields), limit_seconds)

    def wait(self, future: Future[Any], limit_seconds: float) -> Any:
        """A future's value or its error, for as long as the node lives: its clocks end every transfer.

        Raises DeadlineError when at the limit, which the node should have kept, it does not answer.
        """
        if threading.current_thread() is self._reader and not future.done():
            raise LocalError(
                "this call waits for the endpoint, inside a callback that the endpoint waits for",
                next_step="make it from another thread",
            )
        while True:
            if not self._reader.is_alive() and not future.done():
                raise _closed()  # in a forked child, where nobody reads
            try:
                return future.result(limit_seconds + _GRACE_SECONDS)
            except TimeoutError:
                if not self._answers():
                    raise self._silent(limit_seconds) from None

    def close(self, limit_seconds: float) -> None:
        """End the node and everything that it holds; a node that does not end in time is killed."""
        with self._lock:
            if self._released:
                return
            self._released = True
        try:
            self.call(CloseCall, limit_seconds)
        except KVFerryError as error:
            # A frozen one is killed: only this makes sure that it touches nothing any more. One that
            # is gone already has nothing left; what is ours is released below.
            if isinstance(error, DeadlineError) and self._process is not None:
                self._process.kill()
        except BaseException:  # Ctrl-C: the end is still the end
            if self._process is not None:
                self._process.kill()
            raise
        finally:
            self._tear_down(limit_seconds)

    def _tear_down(self, limit_seconds: float) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        if self._dispatcher is not None and self._dispatcher is not threading.current_thread():
            self._dispatcher.join(limit_seconds)
        self._sock.close()
        if self._process is not None:
            try:
                self._process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._thread is not None:
            self._thread.join(limit_seconds)

    def disown(self) -> None:
        """In a forked child: the node is the parent's. The child only lets go of its copy of the socket.

        Else the transfer process would live for as long as the child does.
        """
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._closed = self._released = True
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())  # not shutdown: that would be the parent's end of it too

    def _answers(self) -> bool:
        try:
            self.submit(StatsCall).result(_GRACE_SECONDS)
        except TimeoutError:
            return False
        except KVFerryError:
            pass  # it is gone, or closed here: whoever waits gets that as his error
        return True

    def _send(self, body: bytes) -> None:
        with self._lock:
            try:
                self._sock.sendall(FRAME.pack(len(body)) + body)
            except BlockingIOError as error:  # the limit: half a call may be out, so nothing can follow it
                self._sock.shutdown(socket.SHUT_RDWR)
                if self._process is not None:
                    self._process.kill()  # frozen: only this makes sure that it touches nothing any more
                raise self._gone() from error
            except OSError as error:
                raise self._gone() from error

    def _read_all(self) -> None:
        try:
            # A node that ends before it has read all of our calls resets the socket: an end like another.
            with contextlib.suppress(ConnectionError), self._sock.makefile("rb") as stream:
                while (reply := _next_reply(stream)) is not None:
                    self._take(reply)
            if not self._released:
                self._reap()
        finally:  # whatever ended this thread, a callback's own fault too: nobody waits for ever
            with self._lock:
                pending, self._futures = list(self._futures.values()), {}
                closing, self._closed = self._closed, True
            self._told.put(None)
            for future in pending:
                future.set_exception(_closed() if closing else self._gone())

    def _take(self, reply: Reply) -> None:
        if reply.id == 0:
            self._told.put(reply.value)
            return
        with self._lock:
            future = self._futures.pop(reply.id)
        if reply.error is not None:
            future.set_exception(KVFerryError.from_record(reply.error))
        else:
            future.set_result(reply.value)

    def _dispatch(self) -> None:
        """Tell the observers, in a thread of their own: they may be slow, and call the endpoint."""
        while (told := self._told.get()) is not None:
            for observer in self._observers:
                try:
                    observer(told)
                except BaseException:  # noqa: BLE001 - who looks on must not end what is looked at
                    _log.exception("an observer of %s failed", self._name)

    def _silent(self, limit_seconds: float) -> DeadlineError:
        return DeadlineError(
            f"the transfer process of {self._name!r} says nothing, {limit_seconds:.3g} s were allowed",
            now_true="the transfer goes on as far as is known here, and its blocks are still lent to it",
            next_step="it is frozen or starved: ask again, or close this endpoint, which ends it for certain",
        )

    def _reap(self) -> None:
        """Wait until a process that ends has let go of everything; what it died of is known then too."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECONDS)

    def _gone(self) -> LocalError:
        self._reap()  # one that was killed just now may be in the middle of a copy still
        status = None if self._process is None else self._process.poll()
        return LocalError(
            f"the transfer process of {self._name!r} is gone"
            + ("" if status is None else f" (status {status})"),
            now_true="what it held is free; peers find out by their broken connections",
            next_step="open a new endpoint; look for what killed the process",
        )


def _next_reply(stream: io.BufferedReader) -> Reply | None:
    header = stream.read(FRAME.size)
    if len(header) < FRAME.size:
        return None
    (nbytes,) = FRAME.unpack(header)
    body = stream.read(nbytes)
    return None if len(body) < nbytes else _reply_decoder.decode(body)


def _encode_config(config: NodeConfig) -> bytes:
    """The options as they travel; raises InputError for what the node could not read."""
    try:
        body = _encoder.encode(config)
        _config_decoder.decode(body)
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"endpoint options: {error}") from error
    return body


def _encode(call: Call) -> bytes:
    """The call as it travels; raises InputError for what the node could not read."""
    try:
        body = _encoder.encode(call)
        _call_decoder.decode(body)
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"{type(call).__name__.removesuffix('Call').lower()}: {error}") from error
    return body


def _closed() -> LocalError:
    return LocalError(
        "this endpoint is closed", now_true="it holds nothing", next_step="open another endpoint"
    )


def _spawn(theirs: socket.socket, memory: Memory) -> subprocess.Popen[bytes]:
    if memory.device is not None:
        raise LocalError(
            f"a transfer process cannot reach a pool on {memory.device.name}",
            next_step="use process=False, which is the default for such a pool",
        )
    if memory.fd is None:
        raise LocalError(
            "a transfer process needs a pool in shared memory",
            next_step="use Pool.allocate, or process=False",
        )
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.transfer", str(theirs.fileno())],
        pass_fds=(theirs.fileno(), memory.fd),
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C goes to the engine, which decides when this ends
    )


def _run_in_thread(sock: socket.socket, memory: Memory) -> None:
    asyncio.run(serve(sock, memory))
