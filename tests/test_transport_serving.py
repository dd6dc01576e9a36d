"""What the serving side of a connection says when an admission ends, and when the connection does."""

from __future__ import annotations

import socket
import threading

import pytest

from kvferry.errors import CapacityError, KVFerryError
from kvferry.testing.guards import ScriptedGuard
from kvferry.transport.base import CancelToken
from kvferry.transport.channel import Channel
from kvferry.transport.look import serve_look
from kvferry.transport.memory import create_shared
from kvferry.transport.serving import Served, Serving, Slots
from kvferry.transport.users import Users
from kvferry.transport.wire import MARK, Operation
from transport_raw import POOL_NBYTES, request


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
        assert len(ours.recv(MARK.itemsize, socket.MSG_WAITALL)) == MARK.itemsize  # admitted
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
