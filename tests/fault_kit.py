"""The matrix of faults: what happens to a worker at which point, and what its peer must then find.

The *victim* is a worker process (``fault_worker``) with a transfer process of its own. Its peer,
the *survivor*, is a worker in this process, with a transfer process too; one survivor takes part
in all cases, so that whatever a fault leaves behind adds up. A *spare* victim is the survivor's
next peer. When a link is cut the two are on hosts of their own, neither dies, and what must be
true of the survivor must be true of the victim as well. The cases are in ``fault_table``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from conftest import wait_until
from fault_table import CASES, OK, SCHEMES, WIRES, Case, Fault
from fault_wire import Wire, wires
from fault_worker import STEPS, TIMEOUTS, Command, FaultWorker, Reply
from kvferry.errors import ErrorRecord, KVFerryError
from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Stats
from kvferry.transfer.retry import NextTry, advice

__all__ = ["CASES", "SCHEMES", "Case", "Ending", "Fault", "Result", "Stage", "play", "wait_stopped"]

# Timeout and lease of everything that takes part in a fault; an error may come GRACE after it.
DEADLINE_SECONDS = 1.5
GRACE_SECONDS = 1.0
# Decode, which has started, holds its ticket until the peer answers, or its silence is loss.
LET_GO_SECONDS = TIMEOUTS.lost + GRACE_SECONDS
# Time for what has no fault in it, on a machine that is busy.
PATIENCE_SECONDS = 90.0
NUM_BLOCKS = 64
# One control socket, and one data channel each way; libraries have sockets of their own beside, and
# some that they open with the first peer and keep.
HAS_LIBRARY = not set(SCHEMES) <= {"tcp", "shm"}
FDS_A_PEER, FDS_KEPT = (12, 2) if HAS_LIBRARY else (3, 0)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a transfer ended for a worker; ``error`` is None when the handoff went through.

    ``seconds`` from the fault until its engine knew. ``held`` is what its node held then.
    """

    error: ErrorRecord | None
    seconds: float
    held: Stats

    @property
    def kind_and_phase(self) -> tuple[str, str]:
        return OK if self.error is None else (self.error.kind, self.error.phase)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case; ``victim`` only where the link was cut."""

    case: Case
    survivor: Ending
    victim: Ending | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transfer process has open."""

    peers: int
    fds: int
    threads: int
    maps: int

    def fits(self, alone: Footprint) -> bool:
        """No more than it had alone, two copy threads, and what its peers need."""
        return (
            self.fds <= alone.fds + FDS_KEPT + self.peers * FDS_A_PEER
            and self.threads <= alone.threads + 2 + self.peers
            and self.maps <= alone.maps + 2 * self.peers  # its pool and its board
        )


class Victim:
    """A worker process: commands out, replies in, traps set and sprung."""

    _numbers = itertools.count()

    def __init__(self, folder: Path, wire: Wire | None = None) -> None:
        self.name = f"victim-{next(self._numbers)}"
        self._trap = folder / f"{self.name}.trap"
        script = str(Path(__file__).parent / "fault_worker.py")
        inside, site = (wire.hosts.inside(wire.victim), wire.site(wire.victim)) if wire else ([], ())
        self._process = subprocess.Popen(
            [*inside, sys.executable, script, self.name, str(self._trap), *site],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""
        self.waiting: deque[str] = deque()
        self._pids: tuple[int, int] | None = None
        self.fds_alone = 0
        self.tell(Command("open"))

    @property
    def pids(self) -> tuple[int, int]:
        """Engine's and transfer process; waits until the worker has come up."""
        if self._pids is None:
            opened = self.reply()
            assert opened.error is None, opened.error
            self._pids = opened.pids
            self.fds_alone = self.stats().fds
        return self._pids

    def reopen(self) -> None:
        """Begin a new life of its endpoint."""
        self._pids = self.ask(Command("open")).pids
        self.fds_alone = self.stats().fds

    def tell(self, *commands: Command) -> None:
        """Let it do these, one after the other."""
        assert self._process.stdin is not None
        for command in commands:
            self.waiting.append(command.do)
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def reply(self, seconds: float = PATIENCE_SECONDS) -> Reply:
        """The next answer, whatever it is."""
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{self.name} did not answer {self.waiting[0]} within {seconds} s"
            read = os.read(fd, 1 << 16)
            assert read, f"{self.name} has ended before it answered {self.waiting[0]}"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        self.waiting.popleft()
        return msgspec.json.decode(line, type=Reply)

    def ask(self, command: Command) -> Reply:
        """One command that must go well."""
        assert self.pids
        assert not self.waiting
        self.tell(command)
        return _well(self.reply())

    def stats(self) -> Stats:
        """What its transfer process has now."""
        return _stats_of(self.ask(Command("stats")))

    def set_trap(self, point: str) -> None:
        """Let its transfer process stop itself at this point."""
        self._trap.write_text(point)

    def wait_for_trap(self) -> None:
        """Wait until that has happened."""
        wait_until(lambda: not self._trap.exists(), PATIENCE_SECONDS, lambda: f"{self.name} sprang its trap")
        wait_stopped(self.pids[1])

    def first_error(self) -> tuple[ErrorRecord | None, float]:
        """Wait for all answers; the first error among them, and when the last that counts was there."""
        error, when = None, time.monotonic()
        while self.waiting:
            reply = self.reply()
            if error is None:
                error, when = reply.error, time.monotonic()
        return error, when

    def kill(self) -> None:
        """Kill the engine's process and reap it; its transfer process must notice."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, in whatever state it is."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self._pids is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[1], signal.SIGCONT)  # its engine is gone: it ends by itself
            wait_until(lambda: _state(self.pids[1]) in "XZ", PATIENCE_SECONDS, lambda: "orphan")


class Stage:
    """One survivor, the workers around it, and the cases that they play: on one wire, or without.

    With a wire the thread that enters moves to the survivor's host.
    """

    _numbers = itertools.count(1)

    def __init__(self, folder: Path, wire: Wire | None = None) -> None:
        self._folder, self._wire = folder, wire
        self._ready: deque[Victim] = deque()
        site = wire.site(wire.survivor) if wire else ()
        self.survivor = FaultWorker(f"survivor-{next(self._numbers)}", *site)
        self._alone: Footprint | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fault-survivor")

    def __enter__(self) -> Self:
        if self._wire is not None:
            self._wire.hosts.enter(self._wire.survivor)
        _well(self.survivor.run(Command("open")))
        self._alone = self._footprint()
        self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        while self._ready:
            self._ready.popleft().close()
        try:
            if error is None:
                wait_until(self._is_flat, PATIENCE_SECONDS, self._footprint)
                assert self._footprint().peers == 0
        finally:
            self.survivor.run(Command("close"))
            self.survivor.pool.close()
            del self.survivor  # and with it the last array over the pool

    def run(self, case: Case) -> Result:
        """Play one case; raises AssertionError for anything that is not as it must be."""
        self._prepare()
        victim, request = self._ready.popleft(), f"r{next(self._numbers)}"
        try:
            result = self._fault(case, victim, request)
            self._check(result, request)
            self._drop(request)
            if self._wire is not None:
                # The cut outlasts the silence that counts as loss, and any handshake.
                wait_until(
                    lambda: self._is_alone(victim), LET_GO_SECONDS, lambda: (victim.stats(), self._stats())
                )
                self._wire.mend()
                self._recover(result, victim, request)
                self._next_request(case, victim, request)
                self._ready.append(victim)
            else:
                self._next_request(case, self._ready[0], request)
                if case.fault is Fault.KILL_ENGINE:
                    victim.close()
                else:
                    self._recover(result, victim, request)
                    self._ready.append(victim)
            wait_until(self._is_flat, PATIENCE_SECONDS, self._footprint)
        except BaseException:  # the next case must not pay for this one
            victim.close()
            if self._wire is not None:
                self._wire.mend()
            for do in ("abort", "drop"):
                self.survivor.run(Command(do, request))
            raise
        self._prepare()
        return result

    def _prepare(self) -> None:
        while len(self._ready) < (1 if self._wire else 2):
            self._ready.append(Victim(self._folder, self._wire))

    # The fault.

    def _fault(self, case: Case, victim: Victim, request: str) -> Result:
        assert victim.pids
        if case.point == "handshake":
            victim.reopen()  # so that nobody is connected to it
        hold = Command("hold", request, seconds=DEADLINE_SECONDS, transport=case.transport)
        here, there, last = self._parts(case, hold, victim)
        if case.trap:
            victim.set_trap(case.trap)
        playing: Future[tuple[ErrorRecord | None, float]] | None = None
        if case.point != "held":
            playing = self._thread.submit(self._play, here)
        if case.point != "held" or self._wire:
            victim.tell(*there)
        if case.trap:
            victim.wait_for_trap()
        elif case.point == "published":
            assert victim.waiting[-1] == "arrive"
            while victim.waiting:
                _well(victim.reply())
        if case.point == "aborting":
            _well(self.survivor.run(Command("abort", request)))
        struck = time.monotonic()
        self._strike(case.fault, victim)
        playing = playing or self._thread.submit(self._play, here)
        if self._wire is not None:
            victim.tell(*last)
            own = self._victims_ending(victim, struck)
            return Result(case, self._survivors_ending(playing, struck), own)
        return Result(case, self._survivors_ending(playing, struck))

    def _victims_ending(self, victim: Victim, struck: float) -> Ending:
        """How it ended for the first of two that live on."""
        error, when = victim.first_error()
        wait_until(lambda: _holds_nothing(victim.stats()), LET_GO_SECONDS, victim.stats)
        return Ending(error, when - struck, victim.stats())

    def _survivors_ending(self, playing: Future[tuple[ErrorRecord | None, float]], struck: float) -> Ending:
        error, when = playing.result(PATIENCE_SECONDS)
        wait_until(self._is_idle, LET_GO_SECONDS, self._stats)
        return Ending(error, when - struck, self._stats())

    def _strike(self, fault: Fault, victim: Victim) -> None:
        """Do it. The transfer process stands in its trap until then, if one was set."""
        engine, transfer = victim.pids
        if fault is Fault.KILL_TRANSFER:
            os.kill(transfer, signal.SIGKILL)
        elif fault is Fault.STOP_TRANSFER:
            os.kill(transfer, signal.SIGSTOP)
        elif fault is Fault.KILL_ENGINE:
            victim.kill()
            os.kill(transfer, signal.SIGCONT)
        elif fault is Fault.STOP_ENGINE:
            os.kill(engine, signal.SIGSTOP)
            wait_stopped(engine)
            os.kill(transfer, signal.SIGCONT)
        else:
            assert self._wire is not None
            self._wire.cut()
            os.kill(transfer, signal.SIGCONT)

    def _parts(self, case: Case, hold: Command, victim: Victim) -> tuple[list[Command], ...]:
        """Hold and give the ticket; what the survivor has to do then, the victim, and it after the fault."""
        ask = {case.victim: victim.ask, _other(case.victim): lambda c: _well(self.survivor.run(c))}

        def command(do: str, **changes: object) -> Command:
            return msgspec.structs.replace(hold, do=do, **changes)

        ask[Role.PREFILL](command("prefill", salt=_salt(hold.request)))
        if case.mode is Mode.PULL:
            ticket = ask[Role.PREFILL](command("offer")).ticket
            parts = {Role.PREFILL: ["ended"], Role.DECODE: ["pull", "arrive", "started"]}
        else:
            ticket = ask[Role.DECODE](command("reserve")).ticket
            parts = {Role.PREFILL: ["push", "layers", "commit", "ended"], Role.DECODE: ["arrive", "started"]}
        mine, theirs = parts[_other(case.victim)], parts[case.victim]
        last = [theirs.pop()] if case.point == "published" else []
        return tuple([command(do, ticket=ticket) for do in part] for part in (mine, theirs, last))

    def _play(self, commands: list[Command]) -> tuple[ErrorRecord | None, float]:
        """Do the survivor's part up to its first error; the error, and when it was known."""
        for command in commands:
            reply = self.survivor.run(command)
            if reply.error is not None:
                return reply.error, time.monotonic()
        return None, time.monotonic()

    # What must be true then.

    def _check(self, result: Result, request: str) -> None:
        case, mine, theirs = result.case, result.survivor, result.victim
        assert mine.kind_and_phase in case.endings, mine
        self._check_ending(mine, _other(case.victim), request)
        if mine.error is None and case.victim is Role.PREFILL:
            self._check_tokens(self.survivor.run(Command("go_on", request)), request)
        if theirs is not None:
            assert theirs.kind_and_phase in case.victims_endings, theirs
            self._check_ending(theirs, case.victim, request)
            prefill, decode = (theirs, mine) if case.victim is Role.PREFILL else (mine, theirs)
            # Decode goes on: prefill must not be told that the request is its own again.
            assert decode.error is not None or prefill.error is None or prefill.error.in_doubt, result

    def _check_ending(self, ending: Ending, role: Role, request: str) -> None:
        """In time; an error says everything that a worker in that role needs."""
        assert ending.seconds < DEADLINE_SECONDS + GRACE_SECONDS
        error = ending.error
        if error is None:
            return
        assert error.request_id == request, error
        assert error.now_true, error
        assert error.next_step, error
        assert error.peer or error.phase == "held", error
        is_unknown = role is Role.PREFILL and error.phase in ("committing", "committed")
        assert error.in_doubt == (is_unknown and error.kind != "peer"), error
        advised = advice(KVFerryError.from_record(error), 1, PATIENCE_SECONDS).next_try
        assert advised == (
            NextTry.GIVE_UP
            if error.in_doubt
            else NextTry.RECOMPUTE
            if error.kind == "local"
            else NextTry.RETRY_OTHER
        )

    def _next_request(self, case: Case, spare: Victim, request: str) -> None:
        """The survivor retries the request, with a fresh peer if it needs one: the tokens of one process."""
        assert spare.pids
        roles = {case.victim: spare.ask, _other(case.victim): lambda c: _well(self.survivor.run(c))}
        prefill, decode = roles[Role.PREFILL], roles[Role.DECODE]
        hold = Command("hold", request, transport=case.transport, seconds=PATIENCE_SECONDS)

        def command(do: str, ticket: bytes = b"") -> Command:
            return msgspec.structs.replace(hold, do=do, ticket=ticket)

        prefill(msgspec.structs.replace(hold, do="prefill", salt=_salt(request)))
        if case.mode is Mode.PULL:
            ticket = prefill(command("offer")).ticket
            decode(command("pull", ticket))
        else:
            ticket = decode(command("reserve")).ticket
            for do in ("push", "layers", "commit"):
                prefill(command(do, ticket))
        decode(command("arrive"))
        decode(command("started"))
        path = prefill(command("ended")).path
        assert path == case.scheme or self._wire is None, path
        self._check_tokens(decode(command("go_on")), request)
        spare.ask(Command("drop", request))
        self._drop(request)

    def _recover(self, result: Result, victim: Victim, request: str) -> None:
        """The victim goes on: whatever it decodes is right, and in the end it holds nothing either."""
        case = result.case
        for pid in victim.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        replies = [victim.reply() for _ in range(len(victim.waiting))]
        errors = [reply.error for reply in replies if reply.error is not None]
        if result.victim is not None and result.victim.error is not None:
            errors.append(result.victim.error)
        if case.fault is Fault.KILL_TRANSFER:
            assert {error.kind for error in errors} <= {"local"}, errors
            assert all(error.next_step and error.now_true for error in errors[:1]), errors
            victim.ask(Command("drop", request))
            victim.reopen()
        else:
            if not errors and case.victim is Role.DECODE and case.point != "held":
                self._check_tokens(victim.ask(Command("go_on", request)), request)
            victim.ask(Command("drop", request))
        wait_until(lambda: _is_idle(victim.ask(Command("stats"))), PATIENCE_SECONDS)

    def _drop(self, request: str) -> None:
        self.survivor.run(Command("drop", request))
        assert self.survivor.engine.pool.num_free_blocks == NUM_BLOCKS

    def _check_tokens(self, reply: Reply, request: str) -> None:
        assert len(reply.tokens) == STEPS
        alone = FaultWorker("alone")
        alone.run(Command("prefill", request, salt=_salt(request)))
        assert reply.tokens == alone.run(Command("go_on", request)).tokens
        alone.pool.close()

    def _stats(self) -> Stats:
        return _stats_of(self.survivor.run(Command("stats")))

    def _is_idle(self) -> bool:
        return _holds_nothing(self._stats())

    def _footprint(self) -> Footprint:
        stats = self._stats()
        maps = Path(f"/proc/{stats.pid}/maps").read_text().count("memfd:kvferry-")
        return Footprint(stats.peers, stats.fds, stats.threads, maps)

    def _is_alone(self, victim: Victim) -> bool:
        """Neither end has a connection any more, nor is about to."""
        return self._stats().peers == 0 and self._is_flat() and victim.stats().fds <= victim.fds_alone

    def _is_flat(self) -> bool:
        """The transfer process has what it began with, and what each connection of now needs."""
        assert self._alone is not None
        return self._footprint().fits(self._alone)


@contextlib.contextmanager
def play(cases: Sequence[Case], folder: Path, lanes: int) -> Iterator[dict[Case, Future[Result]]]:
    """Play cases in a few lanes side by side, each with a survivor of its own: mostly they wait.

    Each wire is a lane of its own. On leaving, every case has been played, and nothing of any of
    them is left.
    """
    results: dict[Case, Future[Result]] = {case: Future() for case in cases}
    todo = {path: deque(case for case in cases if case.scheme == path) for path in WIRES}
    todo = {path: of_path for path, of_path in todo.items() if of_path}
    on_loopback = deque(case for case in cases if case.scheme not in WIRES)

    def run_lane(todo: deque[Case], wire: Wire | None = None) -> None:
        with Stage(folder, wire) as stage:
            while todo:
                with contextlib.suppress(IndexError):  # another lane took the last one
                    case = todo.popleft()
                    try:
                        results[case].set_result(stage.run(case))
                    except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                        results[case].set_exception(error)

    with (
        wires(list(todo)) as links,
        ThreadPoolExecutor(lanes + len(links), thread_name_prefix="fault-lane") as pool,
    ):
        running = [pool.submit(run_lane, on_loopback) for _ in range(min(lanes, len(on_loopback)))]
        running += [pool.submit(run_lane, todo[path], link) for path, link in zip(todo, links, strict=True)]
        yield results
    for lane in running:
        lane.result()


def wait_stopped(pid: int) -> None:
    """Wait until SIGSTOP has taken hold of a process."""
    wait_until(lambda: _state(pid) == "T", PATIENCE_SECONDS, lambda: f"process {pid} is {_state(pid)}")


def _state(pid: int) -> str:
    """One letter, as ps says it; X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def _well(reply: Reply) -> Reply:
    assert reply.error is None, reply
    return reply


def _stats_of(reply: Reply) -> Stats:
    assert reply.stats is not None
    return reply.stats


def _holds_nothing(stats: Stats) -> bool:
    return (stats.transfers, stats.holds, stats.grants, stats.copies, stats.digesting) == (0, 0, 0, 0, 0)


def _is_idle(reply: Reply) -> bool:
    return reply.stats is not None and _holds_nothing(reply.stats) and reply.free_blocks == NUM_BLOCKS


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _salt(request: str) -> int:
    return int(request[1:])
