"""The matrix of faults: what happens to a worker at which point, and what its peer must then find.

The *victim* is a worker process (``fault_worker``) with a transfer process of its own. Its peer,
the *survivor*, is a worker in this process, with a transfer process too; one survivor takes part
in all cases, so that whatever a fault leaves behind adds up. A *spare* victim is the survivor's
next peer.
"""

from __future__ import annotations

import contextlib
import enum
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
from fault_worker import STEPS, Command, FaultWorker, Reply
from kvferry.errors import ErrorRecord, KVFerryError
from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Stats
from kvferry.transfer.retry import NextTry, advice

__all__ = ["CASES", "SCHEMES", "Case", "Fault", "Result", "Stage", "play", "wait_stopped"]

# Timeout and lease of everything that takes part in a fault; an error may come GRACE after it.
DEADLINE_SECONDS = 1.5
GRACE_SECONDS = 1.0
# Time for what has no fault in it, on a machine that is busy.
PATIENCE_SECONDS = 30.0
NUM_BLOCKS = 64
SCHEMES = tuple(os.environ.get("KVFERRY_FAULT_SCHEMES", "tcp,shm").split(","))
# One control socket, and one data channel each way; libraries have sockets of their own beside, and
# some that they open with the first peer and keep.
HAS_LIBRARY = not set(SCHEMES) <= {"tcp", "shm"}
FDS_A_PEER, FDS_KEPT = (12, 2) if HAS_LIBRARY else (3, 0)


class Fault(enum.StrEnum):
    """What happens to which process of the victim."""

    KILL_TRANSFER = "kill transfer"
    STOP_TRANSFER = "stop transfer"
    KILL_ENGINE = "kill engine"
    STOP_ENGINE = "stop engine"


# One line a point: where the victim is (its trap, see fault_worker; tcp and shm where they differ;
# nothing where it idles), in which phases the survivor's transfer may then fail, and how it ends
# for each Fault: a kind of error, or "ok" for a handoff that goes through. Two kinds stand where
# the order of two processes' last steps is not ours to choose.
_TEXT = """
# victim | mode | point      | trap                 | survivor fails while                    | kill transfer | stop transfer | kill engine             | stop engine
prefill  | pull | handshake  | receive Hello        | handshake claiming                      | transport     | deadline      | transport peer deadline | ok
prefill  | pull | held       |                      | handshake connect claiming claim        | transport     | deadline      | transport peer deadline | ok
prefill  | pull | moving     | enter moving         | claiming checking moving                | transport     | deadline      | transport peer          | ok
prefill  | pull | copying    | serve                | moving settling                         | transport     | deadline      | transport peer          | ok
prefill  | pull | vouching   | enter vouching       | settling                                | transport     | deadline      | transport peer ok       | ok
prefill  | pull | committing | enter committing     | settling                                | transport     | deadline      | transport peer ok       | ok
prefill  | pull | committed  | enter committed      |                                         | ok            | ok            | ok                      | ok
prefill  | pull | aborting   | serve                | moving                                  | local         | local         | local                   | local

prefill  | push | handshake  | send Hello           | held checking moving                    | deadline      | deadline      | deadline transport peer | deadline
prefill  | push | claiming   | send Claim           | held checking moving                    | deadline      | deadline      | deadline transport peer | deadline
prefill  | push | moving     | enter moving         | moving                                  | transport     | deadline      | transport peer          | deadline
prefill  | push | copying    | write, serve         | moving settling                         | transport     | deadline      | transport peer          | deadline ok
prefill  | push | vouching   | enter vouching       | moving settling                         | transport     | deadline      | transport peer ok       | ok
prefill  | push | committing | enter committing     | moving settling                         | transport     | deadline      | transport peer ok       | ok
prefill  | push | committed  | enter committed      |                                         | ok            | ok            | ok                      | ok
prefill  | push | aborting   | write, serve         | moving settling                         | local         | local         | local                   | local

decode   | pull | handshake  | send Hello           | held moving vouching committing committed | deadline    | deadline      | deadline transport peer | deadline
decode   | pull | claiming   | send Claim           | held moving vouching committing committed | deadline    | deadline      | deadline transport peer | deadline
decode   | pull | checking   | enter checking       | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | moving     | enter moving         | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | copying    | read                 | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | settling   | enter settling       | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | verifying  | enter verifying      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | pull | committed  | enter committed      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | pull | published  |                      | committing committed                         | transport     | deadline      | transport peer          | deadline
decode   | pull | starting   | enter starting       | committed                               | transport     | deadline      | transport peer ok       | ok
decode   | pull | aborting   | read                 | moving                                  | local         | local         | local                   | local

decode   | push | handshake  | receive Hello        | handshake claiming committed            | transport     | deadline      | transport peer deadline | deadline
decode   | push | held       |                      | handshake connect claiming claim committed | transport  | deadline      | transport peer deadline | deadline
decode   | push | checking   | enter checking       | claiming moving vouching committing committed | transport | deadline    | transport peer          | deadline
decode   | push | moving     | enter moving         | claiming moving vouching committing committed | transport | deadline    | transport peer          | deadline
decode   | push | copying    | serve, read          | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | push | settling   | enter settling       | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | verifying  | enter verifying      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | committed  | enter committed      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | published  |                      | committing committed                         | transport     | deadline      | transport peer          | deadline
decode   | push | starting   | enter starting       | committed                               | transport     | deadline      | transport peer ok       | ok
decode   | push | aborting   | serve, read          | moving vouching committing              | local         | local         | local                   | local
"""  # noqa: E501 - a table reads by its columns


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one point, and how the survivor's transfer must end."""

    victim: Role
    mode: Mode
    point: str
    fault: Fault
    scheme: str
    trap: str
    phases: frozenset[str]
    endings: frozenset[str]

    def __str__(self) -> str:
        return f"{self.victim}-{self.mode}-{self.point}-{self.fault}-{self.scheme}".replace(" ", "-")


def _parse(text: str) -> Iterator[Case]:
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        victim, mode, point, trap, phases, *endings = (cell.strip() for cell in line.split("|"))
        traps = [one.strip() for one in trap.split(",")]
        for (fault, ending), (scheme, where) in itertools.product(
            # Only tcp writes; by the others decode reads, also what is pushed.
            zip(Fault, endings, strict=True),
            ((scheme, traps[0 if scheme == "tcp" else -1]) for scheme in SCHEMES),
        ):
            yield Case(
                Role(victim),
                Mode(mode),
                point,
                fault,
                scheme,
                where,
                frozenset(phases.split()),
                frozenset(ending.split()),
            )


CASES = tuple(_parse(_TEXT))


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case; ``error`` is the survivor's, None when the handoff went through.

    ``seconds`` from the fault until the survivor's engine knew. ``held`` is what its node held then.
    """

    case: Case
    error: ErrorRecord | None
    seconds: float
    held: Stats


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
            and self.maps <= alone.maps + self.peers
        )


class Victim:
    """A worker process: commands out, replies in, traps set and sprung."""

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.name = f"victim-{next(self._numbers)}"
        self._trap = folder / f"{self.name}.trap"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fault_worker.py"), self.name, str(self._trap)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""
        self.waiting: deque[str] = deque()
        self._pids: tuple[int, int] | None = None
        self.tell(Command("open"))

    @property
    def pids(self) -> tuple[int, int]:
        """Engine's and transfer process; waits until the worker has come up."""
        if self._pids is None:
            opened = self.reply()
            assert opened.error is None, opened.error
            self._pids = opened.pids
        return self._pids

    def reopen(self) -> None:
        """Begin a new life of its endpoint."""
        self._pids = self.ask(Command("open")).pids

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

    def set_trap(self, point: str) -> None:
        """Let its transfer process stop itself at this point."""
        self._trap.write_text(point)

    def wait_for_trap(self) -> None:
        """Wait until that has happened."""
        wait_until(lambda: not self._trap.exists(), PATIENCE_SECONDS, lambda: f"{self.name} sprang its trap")
        wait_stopped(self.pids[1])

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
    """One survivor, the workers around it, and the cases that they play."""

    _numbers = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready: deque[Victim] = deque()
        self.survivor = FaultWorker(f"survivor-{next(self._numbers)}")
        self._alone: Footprint | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fault-survivor")

    def __enter__(self) -> Self:
        _well(self.survivor.run(Command("open")))
        self._alone = self._footprint()
        self._prepare(2)
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
        self._prepare(2)
        victim, request = self._ready.popleft(), f"r{next(self._numbers)}"
        try:
            result = self._fault(case, victim, request)
            self._check(result, request)
            self._drop(request)
            self._next_request(case, self._ready[0], request)
            if case.fault is Fault.KILL_ENGINE:
                victim.close()
            else:
                self._recover(case, victim, request)
                self._ready.append(victim)
            wait_until(self._is_flat, PATIENCE_SECONDS, self._footprint)
        except BaseException:  # the next case must not pay for this one
            victim.close()
            self.survivor.run(Command("drop", request))
            raise
        self._prepare(2)
        return result

    def _prepare(self, count: int) -> None:
        while len(self._ready) < count:
            self._ready.append(Victim(self._folder))

    # The fault.

    def _fault(self, case: Case, victim: Victim, request: str) -> Result:
        assert victim.pids
        if case.point == "handshake":
            victim.reopen()  # so that nobody is connected to it
        hold = Command("hold", request, seconds=DEADLINE_SECONDS, transport=case.scheme)
        here, there = self._parts(case, hold, victim)
        if case.trap:
            victim.set_trap(case.trap)
        playing: Future[tuple[ErrorRecord | None, float]] | None = None
        if case.point != "held":
            playing = self._thread.submit(self._play, here)
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
        _strike(case.fault, victim)
        playing = playing or self._thread.submit(self._play, here)
        error, when = playing.result(PATIENCE_SECONDS)
        wait_until(self._is_idle, GRACE_SECONDS, self._stats)
        return Result(case, error, when - struck, self._stats())

    def _parts(self, case: Case, hold: Command, victim: Victim) -> tuple[list[Command], list[Command]]:
        """Hold and give the ticket; what the survivor, and what the victim, has to do then."""
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
        if case.point == "published":
            parts[Role.DECODE].remove("started")
        mine, theirs = parts[_other(case.victim)], parts[case.victim]
        return [command(do, ticket=ticket) for do in mine], [command(do, ticket=ticket) for do in theirs]

    def _play(self, commands: list[Command]) -> tuple[ErrorRecord | None, float]:
        """Do the survivor's part up to its first error; the error, and when it was known."""
        for command in commands:
            reply = self.survivor.run(command)
            if reply.error is not None:
                return reply.error, time.monotonic()
        return None, time.monotonic()

    # What must be true then.

    def _check(self, result: Result, request: str) -> None:
        case, error = result.case, result.error
        assert (error.kind if error else "ok") in case.endings, error
        assert result.seconds < DEADLINE_SECONDS + GRACE_SECONDS
        if error is not None:
            assert error.request_id == request, error
            assert error.phase in case.phases, error
            assert error.now_true, error
            assert error.next_step, error
            assert error.peer or error.phase == "held", error
            is_unknown = case.victim is Role.DECODE and error.phase in ("committing", "committed")
            assert error.in_doubt == (is_unknown and error.kind != "peer"), error
            advised = advice(KVFerryError.from_record(error), 1, PATIENCE_SECONDS).next_try
            assert advised == (
                NextTry.GIVE_UP
                if error.in_doubt
                else NextTry.RECOMPUTE
                if error.kind == "local"
                else NextTry.RETRY_OTHER
            )
        elif case.victim is Role.PREFILL:
            self._check_tokens(self.survivor.run(Command("go_on", request)), request)

    def _next_request(self, case: Case, spare: Victim, request: str) -> None:
        """The survivor retries the request with a fresh peer, and the tokens are those of one process."""
        assert spare.pids
        roles = {case.victim: spare.ask, _other(case.victim): lambda c: _well(self.survivor.run(c))}
        prefill, decode = roles[Role.PREFILL], roles[Role.DECODE]
        hold = Command("hold", request, transport=case.scheme, seconds=PATIENCE_SECONDS)

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
        prefill(command("ended"))
        self._check_tokens(decode(command("go_on")), request)
        spare.ask(Command("drop", request))
        self._drop(request)

    def _recover(self, case: Case, victim: Victim, request: str) -> None:
        """The victim goes on: whatever it decodes is right, and in the end it holds nothing either."""
        for pid in victim.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        replies = [victim.reply() for _ in range(len(victim.waiting))]
        errors = [reply.error for reply in replies if reply.error is not None]
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
        stats = self.survivor.run(Command("stats")).stats
        assert stats is not None
        return stats

    def _is_idle(self) -> bool:
        return _holds_nothing(self._stats())

    def _footprint(self) -> Footprint:
        stats = self._stats()
        maps = Path(f"/proc/{stats.pid}/maps").read_text().count("kvferry-pool")
        return Footprint(stats.peers, stats.fds, stats.threads, maps)

    def _is_flat(self) -> bool:
        """The transfer process has what it began with, and what each connection of now needs."""
        assert self._alone is not None
        return self._footprint().fits(self._alone)


@contextlib.contextmanager
def play(cases: Sequence[Case], folder: Path, lanes: int) -> Iterator[dict[Case, Future[Result]]]:
    """Play cases in a few lanes side by side, each with a survivor of its own: mostly they wait.

    On leaving, every case has been played, and nothing of any of them is left.
    """
    results: dict[Case, Future[Result]] = {case: Future() for case in cases}
    todo = deque(cases)

    def run_lane() -> None:
        with Stage(folder) as stage:
            while todo:
                with contextlib.suppress(IndexError):  # another lane took the last one
                    case = todo.popleft()
                    try:
                        results[case].set_result(stage.run(case))
                    except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                        results[case].set_exception(error)

    with ThreadPoolExecutor(lanes, thread_name_prefix="fault-lane") as pool:
        running = [pool.submit(run_lane) for _ in range(min(lanes, len(cases)))]
        yield results
    for lane in running:
        lane.result()


def _strike(fault: Fault, victim: Victim) -> None:
    """Do it. The transfer process stands in its trap until then, if one was set."""
    engine, transfer = victim.pids
    if fault is Fault.KILL_TRANSFER:
        os.kill(transfer, signal.SIGKILL)
    elif fault is Fault.STOP_TRANSFER:
        os.kill(transfer, signal.SIGSTOP)
    elif fault is Fault.KILL_ENGINE:
        victim.kill()
        os.kill(transfer, signal.SIGCONT)
    else:
        os.kill(engine, signal.SIGSTOP)
        wait_stopped(engine)
        os.kill(transfer, signal.SIGCONT)


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


def _holds_nothing(stats: Stats) -> bool:
    return (stats.transfers, stats.holds, stats.grants, stats.copies, stats.digesting) == (0, 0, 0, 0, 0)


def _is_idle(reply: Reply) -> bool:
    return reply.stats is not None and _holds_nothing(reply.stats) and reply.free_blocks == NUM_BLOCKS


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _salt(request: str) -> int:
    return int(request[1:])
