"""What the serving side of a connection says when an admission ends, and when the connection does."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.errors import CapacityError, KVFerryError
from kvferry.testing.guards import ScriptedGuard
from kvferry.transport.base import CancelToken
from kvferry.transport.channel import Channel, make_marks
from kvferry.transport.look import serve_look
from kvferry.transport.memory import create_shared
from kvferry.transport.patience import Patience
from kvferry.transport.serving import Served, Serving, Slots
from kvferry.transport.staged import serve_pushed
from kvferry.transport.users import Users
from kvferry.transport.windows import Arena, Progressing
from kvferry.transport.wire import MARK_NBYTES, Kind, Operation, Request
from transport_raw import POOL_NBYTES, TRANSFER_ID, request


@pytest.mark.parametrize("ends", ["admission", "connection"])
def test_the_end_of_a_connection_is_no_refusal(ends: str) -> None:
    """A reader is told why its admission ended; the end of the connection it sees by the hang-up alone."""
    ended, left, guard = CancelToken(), threading.Event(), ScriptedGuard()
    memory, users = create_shared(POOL_NBYTES), Users(left.set)
    served = Served(
        memory, guard, {Operation.LOOK: lambda channel, _, limits: serve_look(channel, limits)}, Slots()
    )
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(20.0)
        serving = Serving(served, "peer", users, ended)
        assert serving.start(Channel(theirs))
        ours.sendall(request(Operation.LOOK))
        assert len(ours.recv(MARK_NBYTES, socket.MSG_WAITALL)) == MARK_NBYTES  # admitted
        if ends == "admission":
            guard.tokens[0].cancel(CapacityError("no room"))
        else:
            ended.cancel(KVFerryError("gone"))
        told = b"".join(iter(lambda: ours.recv(4096), b""))
    assert b"no room" in told if ends == "admission" else told == b""
    serving.join()
    users.end(KVFerryError("over"))
    assert left.wait(20.0)
    memory.close()


class Mover:
    """A library that moves nothing, and is done when it is told to."""

    def __init__(self) -> None:
        self.posted, self.done = threading.Event(), False

    def write(self, here: int, there: int, nbytes: int) -> Mover:  # noqa: ARG002 - the signature is Mover's
        self.posted.set()
        return self

    def is_done(self) -> bool:
        return self.done


def test_a_pushed_copy_that_ends_waits_for_the_readers_last_word() -> None:
    """The grant ends while bytes move: the reader is told why, and the channel stays whole for its answer.

    Closed before that, it would break under what the reader says, who then never reads why.
    """
    grant, mover = CancelToken(), Mover()
    ask = Request(Operation.PUSH, TRANSFER_ID, 20.0, False, *np.array([[0], [4096], [0], [0]]))
    limits = Progressing.of(Patience(time.monotonic() + 20.0, (CancelToken(), grant), "peer"), None)
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, ThreadPoolExecutor(1) as thread:
        ours.settimeout(20.0)
        serving = thread.submit(
            serve_pushed, channel, np.zeros(8192, np.uint8), ask,
            patience=limits, arena=Arena("test"), mover=mover,
        )  # fmt: skip
        assert mover.posted.wait(20.0)
        grant.cancel(KVFerryError("the lease is over"))
        mover.done = True
        told = b""
        while b"the lease is over" not in told:
            told += ours.recv(4096)
        for mark in (make_marks(Kind.FREE, 4096), make_marks(Kind.RELEASE, 0)):
            ours.sendall(mark.tobytes())
        serving.result(20.0)
    assert channel.is_in_step
    channel.close()
