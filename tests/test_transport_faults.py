"""The faulty transport does what its script says, once, where it says, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import DeadlineError, InputError, KVFerryError, TransportError
from kvferry.testing.faults import POSSIBLE, Fault, FaultScript, What, Where, faulty
from kvferry.testing.plans import expected_copy, expected_digests, make_plan
from kvferry.testing.transport_fixture import fill
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.testing.transport_suite import FrameTests
from kvferry.transport.base import CancelToken, Direction, Memory
from kvferry.transport.inproc import InprocTransport
from kvferry.transport.memory import private

POOL_NBYTES = 64 << 10
# Eight chunks of 4 KiB, reversed.
PLAN = make_plan([i * 4096 for i in range(8)], [i * 4096 for i in range(8)][::-1], [4096] * 8, [*range(9)])
_count = itertools.count()


def address() -> str:
    return f"inproc://faults-{os.getpid()}-{next(_count)}"


class Scripted:
    """Makes pairs whose two sides follow one script."""

    def __init__(self) -> None:
        self.pairs: list[TransportPair] = []

    def pair(self, *faults: Fault) -> tuple[TransportPair, FaultScript]:
        script = FaultScript(*faults)
        pools = private(bytearray(POOL_NBYTES)), private(bytearray(POOL_NBYTES))
        self.pairs.append(TransportPair(faulty(InprocTransport, script), address(), *pools))
        return self.pairs[-1], script


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    for pair in scripted.pairs:
        pair.close()


class TestWithoutFaults(FrameTests):
    """With an empty script the wrapper passes the suite's frame tests as the transport itself does."""

    transport = faulty(InprocTransport, FaultScript())
    malformed_addresses = ("inproc:",)

    @classmethod
    def listen_address(cls) -> str:
        return address()

    @classmethod
    def make_memory(cls, nbytes: int) -> Memory:
        return private(bytearray(nbytes))


@pytest.mark.parametrize("where", list(Where))
def test_only_faults_that_exist_can_be_scripted(where: Where) -> None:
    """A pair that ``POSSIBLE`` has is taken, another is an InputError that lists the possible ones."""
    for what in What:
        if what in POSSIBLE[where]:
            FaultScript(Fault(what, where))
        else:
            with pytest.raises(InputError, match=str(where)):
                FaultScript(Fault(what, where))


async def send_and_receive(pair: TransportPair, frames: list[bytes], number: int) -> list[bytes]:
    sender, receiver = (side.connection for side in pair.sides)
    for frame in frames:
        await sender.send(frame)
    return [await receiver.receive() for _ in range(number)]


@pytest.mark.parametrize("where", [Where.SEND, Where.RECEIVE])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (What.DELAY, [b"zero", b"first", b"second"]),
        (What.TRUNCATE, [b"zero", b"fi", b"second"]),
        (What.DUPLICATE, [b"zero", b"first", b"first", b"second"]),
        (What.FLIP, [b"zero", b"fisst", b"second"]),
    ],
)
def test_a_frame_is_damaged_once(scripted: Scripted, where: Where, what: What, expected: list[bytes]) -> None:
    """The second frame of three, and no other, suffers; the script says that it happened."""
    fault = Fault(what, where, nth=1, seconds=0.01)
    pair, script = scripted.pair(fault)
    received = pair.loop.run(send_and_receive(pair, [b"zero", b"first", b"second"], len(expected)))
    assert received == expected
    assert script.fired == [fault]


@pytest.mark.parametrize("where", [Where.SEND, Where.RECEIVE])
def test_a_fault_can_wait_for_its_frame(scripted: Scripted, where: Where) -> None:
    """``matches`` picks the frame; ``nth`` counts only those."""
    fault = Fault(What.FLIP, where, nth=1, matches=lambda frame: frame.startswith(b"commit"))
    pair, _ = scripted.pair(fault)
    frames = [b"offer", b"commit one", b"move", b"commit two", b"commit six"]
    received = pair.loop.run(send_and_receive(pair, frames, 5))
    assert [a == b for a, b in zip(received, frames, strict=True)] == [True, True, True, False, True]


@pytest.mark.parametrize("where", [Where.SEND, Where.RECEIVE])
def test_a_cut_breaks_the_connection_for_both(scripted: Scripted, where: Where) -> None:
    """Whoever uses it gets TransportError, from then on."""
    pair, script = scripted.pair(Fault(What.CUT, where))
    with pytest.raises(TransportError, match="fault script"):
        pair.loop.run(send_and_receive(pair, [b"frame"], 1))
    assert script.fired
    for side in pair.sides:
        with pytest.raises(TransportError):
            pair.loop.run(asyncio.wait_for(side.connection.receive(), WAIT_SECONDS))


def test_connecting_can_fail_or_take_longer(scripted: Scripted) -> None:
    """A cut connect is a TransportError; a delayed one connects."""
    delay, cut = Fault(What.DELAY, Where.CONNECT, seconds=0.01), Fault(What.CUT, Where.CONNECT, nth=1)
    pair, script = scripted.pair(delay, cut)
    with pytest.raises(TransportError, match="fault script"):
        pair.connect()
    pair.connect()
    assert script.fired == [delay, cut]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("what", [What.DELAY, What.DUPLICATE, What.TRUNCATE, What.CUT, What.FLIP])
def test_a_copy_goes_wrong_as_scripted(scripted: Scripted, direction: Direction, what: What) -> None:
    """Destination, source, digests and outcome are those of the fault; the next copy is right."""
    pair, script = scripted.pair(Fault(what, Where(direction), seconds=0.01))
    asking, other = pair.sides
    source, destination = (other, asking) if direction is Direction.READ else (asking, other)
    sent, before = fill(source, 1), fill(destination, 2)
    expected = expected_copy(PLAN, sent, before)
    digests = expected_digests(PLAN, sent)
    half = make_plan(PLAN.src_offset[:4].tolist(), PLAN.dst_offset[:4].tolist(), [4096] * 4)
    if what is What.CUT:
        with pytest.raises(TransportError, match="fault script"):
            asking.copy(direction, PLAN)
    else:
        arrived = asking.copy(direction, PLAN)
        if direction is Direction.WRITE:
            arrived = other.guard.landed_copies[-1][1]
        assert arrived.digests is not None
        found = arrived.digests.tolist()
        if what is What.TRUNCATE:
            assert (arrived.nbytes, found) == (4 * 4096, digests[:4])
        elif what is What.FLIP:
            assert [a == b for a, b in zip(found, digests, strict=True)] == [False] + [True] * 7
            expected[PLAN.dst_offset[0]] ^= 1
        else:
            assert found == digests
    if what in (What.TRUNCATE, What.CUT):
        expected = expected_copy(half, sent, before)
    assert np.array_equal(destination.memory.array, expected)
    assert np.array_equal(source.memory.array, sent)
    assert len(script.fired) == 1
    if what is not What.CUT:
        asking.copy(direction, PLAN)
        assert np.array_equal(destination.memory.array, expected_copy(PLAN, sent, before))


def test_a_delayed_copy_sees_its_limits(scripted: Scripted) -> None:
    """A copy that is held up ends by its deadline or its token, as a slow one would."""
    pair, _ = scripted.pair(
        Fault(What.DELAY, Where.READ, seconds=60.0), Fault(What.DELAY, Where.READ, nth=1, seconds=60.0)
    )
    asking = pair.listening
    with pytest.raises(DeadlineError):
        asking.copy(Direction.READ, PLAN, seconds=0.05)
    token, error = CancelToken(), KVFerryError("enough")
    copying = pair.threads.submit(asking.copy, Direction.READ, PLAN, cancel=token)
    token.cancel(error)
    with pytest.raises(KVFerryError) as caught:
        copying.result(WAIT_SECONDS)
    assert caught.value is error


def test_serving_can_be_slow(scripted: Scripted) -> None:
    """SERVE delays the guard; the copy still lands."""
    pair, script = scripted.pair(Fault(What.DELAY, Where.SERVE, seconds=0.01))
    sent, before = fill(pair.connecting, 1), fill(pair.listening, 2)
    pair.listening.copy(Direction.READ, PLAN)
    assert np.array_equal(pair.listening.memory.array, expected_copy(PLAN, sent, before))
    assert len(script.fired) == 1


PROGRAM = """
import asyncio, sys
from kvferry.testing.faults import Fault, FaultScript, What, Where, faulty
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import TransportPair
from kvferry.transport import Direction, private
from kvferry.transport.inproc import InprocTransport

what, where = What(sys.argv[1]), Where(sys.argv[2])
plan = make_plan([0, 4096], [4096, 0], [4096] * 2, [0, 1, 2])
pools = private(bytearray(b"a" * 8192)), private(bytearray(b"b" * 8192))
print("begun", flush=True)
pair = TransportPair(faulty(InprocTransport, FaultScript(Fault(what, where))), "inproc://x", *pools)
pair.loop.run(pair.connecting.connection.send(b"frame"))
pair.loop.run(pair.listening.connection.receive())
pair.connecting.copy(Direction.READ, plan)
pair.connecting.copy(Direction.WRITE, plan)
pair.close()
print("ended", flush=True)
"""


@pytest.mark.parametrize("where", [where for where in Where if What.DIE in POSSIBLE[where]])
def test_a_process_dies_or_freezes_on_cue(where: Where) -> None:
    """DIE ends it by SIGKILL; FREEZE stops it, and after SIGCONT it goes on to its end."""
    for what in (What.DIE, What.FREEZE):
        command = [sys.executable, "-c", PROGRAM, what, where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            if what is What.FREEZE:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                process.send_signal(signal.SIGCONT)
            assert process.stdout.read() == ("ended\n" if what is What.FREEZE else "")
        assert process.returncode == (0 if what is What.FREEZE else -signal.SIGKILL)
