"""One worker of the fault tests: the tiny reference engine, its pool, its endpoint with a transfer process.

    python tests/fault_worker.py NAME TRAP_FILE [ADDRESS [IDENTITY]]

It reads commands, one JSON object a line, does them in order and answers each with one line. Its
transfer process is the real one, over the real sockets, but with traps: it stops itself (SIGSTOP)
at the point that TRAP_FILE names, once. Whoever set the trap kills it there, lets it be stopped,
or lets it go on. With an ADDRESS it listens there alone, by tcp with the IDENTITY of a PEM file, or
plain. Points are ``enter PHASE`` (before anything of that phase is done or said),
``send MESSAGE``, ``receive MESSAGE``, and ``read``, ``write``, ``serve``: in the middle of a copy.
"""

from __future__ import annotations

import os

# Before NumPy is imported, see the Makefile.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvferry.engines.reference import ReferenceEngine
from kvferry.errors import ErrorRecord, KVFerryError, LocalError
from kvferry.layout import BlockTable, PoolLayout, source_pieces
from kvferry.protocol.messages import decode
from kvferry.protocol.table import Phase
from kvferry.protocol.ticket import read_ticket
from kvferry.state import Exactness, ExecutionState
from kvferry.testing.faults import Fault, FaultScript, What, Where, faulty
from kvferry.transfer import Endpoint, Move, Pool, Push, Stats, Timeouts, TransferRecord, client, process
from kvferry.transfer.trace import PhaseClock
from kvferry.transport import Identity, registry
from kvferry.transport.base import Memory
from kvferry.transport.security import Plain
from reference_kit import SAMPLED, limits, prompt, start, take, tiny

TIMEOUTS = Timeouts(handshake=1.5, heartbeat=0.1, lost=1.0, abort=0.3, start=1.5)
PROMPT_TOKENS, STEPS = 75, 6
# Other transports than the two that every worker has; see test_faults.
OTHERS = tuple(
    f"{scheme}://127.0.0.1:0" + ("?wildcard=yes" if scheme == "mooncake" else "")
    for scheme in os.environ.get("KVFERRY_FAULT_SCHEMES", "").split(",")
    if scheme not in ("", "shm", "tcp")
)
TRAP_VARIABLE = "KVFERRY_FAULT_TRAP"


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """``do`` names a method of FaultWorker; each takes what it needs of the rest."""

    do: str
    request: str = ""
    salt: int = 0
    ticket: bytes = b""
    transport: str = ""
    seconds: float = 10.0


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a command: ``error``, or whatever else the command gives."""

    do: str
    error: ErrorRecord | None = None
    pids: tuple[int, int] = (0, 0)
    ticket: bytes = b""
    tokens: tuple[tuple[int, str], ...] = ()
    stats: Stats | None = None
    free_blocks: int = 0
    path: str = ""


@dataclass(slots=True)
class Lent:
    """What one request has lent to a transfer here."""

    ticket: bytes = b""
    tables: tuple[BlockTable, ...] = ()
    move: Move | None = None
    push: Push | None = None
    state: ExecutionState | None = None
    outcome: Future[TransferRecord] | None = None


class FaultWorker:
    """Each public method is a command. After an error nothing has been freed: ``drop`` does it."""

    def __init__(self, name: str, address: str = "", identity: str = "") -> None:
        self._name, self._address, self._identity = name, address, identity
        model = tiny()
        layout = PoolLayout.paged(
            range(model.config.layers),
            kv_heads=model.config.kv_heads,
            head_dim=model.config.head_dim,
            dtype="float32",
            block_size=16,
            num_blocks=64,
        )
        self.pool = Pool.allocate(layout)
        self.engine = ReferenceEngine(model, layout, self.pool.array, chunk_tokens=32)
        self._lent: dict[str, Lent] = {}
        self._lives = 0
        self.endpoint: Endpoint | None = None

    def run(self, command: Command) -> Reply:
        """Do one command; its KVFerryError is an answer like any other."""
        do: Callable[[Command], Reply] = getattr(self, command.do)
        try:
            return do(command)
        except KVFerryError as error:
            return Reply(command.do, error=error.to_record())

    def open(self, command: Command) -> Reply:
        """Begin a new life of the endpoint over the same pool; an earlier one is closed."""
        self.close(command)
        self._lives += 1
        shm = f"shm://fault-{os.getpid()}-{self._name}-{self._lives}"
        self.endpoint = Endpoint.listen(
            (self._address,) if self._address else ("tcp://127.0.0.1:0", shm, *OTHERS),
            tls=Identity.load(self._identity) if self._identity else None,
            plain=Plain.ANYWHERE if "plain=yes" in self._address else Plain.LOOPBACK,
            pool=self.pool,
            name=self._name,
            requirements=self.engine.requirements(),
            timeouts=TIMEOUTS,
            process=True,
        )
        return Reply(command.do, pids=(os.getpid(), self.endpoint.stats().pid))

    def prefill(self, command: Command) -> Reply:
        """Compute a prompt of the salt's own; so a block that stayed behind is never right by accident."""
        start(self.engine, command.request, prompt(PROMPT_TOKENS, command.salt), SAMPLED, limits(STEPS))
        self._lent[command.request] = Lent()
        return Reply(command.do)

    def offer(self, command: Command) -> Reply:
        lent = self._lent[command.request]
        state = self.engine.export_state(command.request, Exactness.BITS)
        tables = self.engine.tables(command.request)
        lent.ticket = self._endpoint.offer(state, tables, lease_seconds=command.seconds)
        lent.outcome = self._endpoint.outcome(lent.ticket)
        return Reply(command.do, ticket=lent.ticket)

    def push(self, command: Command) -> Reply:
        lent = self._lent[command.request]
        lent.ticket = command.ticket
        lent.state = self.engine.export_state(command.request, Exactness.BITS)
        lent.push = self._endpoint.push(
            command.ticket,
            self.engine.tables(command.request),
            state=lent.state,
            timeout_seconds=command.seconds,
            transport=command.transport,
        )
        lent.outcome = self._endpoint.outcome(command.ticket)
        return Reply(command.do)

    def layers(self, command: Command) -> Reply:
        self._push(command).layers(0, self.engine.model.config.layers)
        return Reply(command.do)

    def commit(self, command: Command) -> Reply:
        self._push(command).commit(self._lent[command.request].state)
        return Reply(command.do)

    def ended(self, command: Command) -> Reply:
        """Prefill: wait until the blocks are the engine's again."""
        outcome = self._lent[command.request].outcome
        if outcome is None:
            raise LocalError("nothing was lent")
        return Reply(command.do, path=outcome.result(60).path)

    def reserve(self, command: Command) -> Reply:
        tables = self.engine.allocate(PROMPT_TOKENS + 1)
        lent = self._lent[command.request] = Lent(tables=tables)
        lent.ticket = self._endpoint.reserve(
            command.request, PROMPT_TOKENS, tables, lease_seconds=command.seconds
        )
        lent.move = self._endpoint.arrival(lent.ticket)
        return Reply(command.do, ticket=lent.ticket)

    def pull(self, command: Command) -> Reply:
        """Begin to pull; ``arrive`` waits for it."""
        tables = self.engine.allocate(read_ticket(command.ticket).tokens + 1)
        lent = self._lent[command.request] = Lent(command.ticket, tables)
        lent.move = self._endpoint.pull(
            command.ticket, tables, timeout_seconds=command.seconds, transport=command.transport
        )
        return Reply(command.do)

    def arrive(self, command: Command) -> Reply:
        """Decode: wait for the state and import it."""
        lent = self._lent[command.request]
        assert lent.move is not None
        state = lent.move.result()
        assert state is not None
        self.engine.import_state(state, lent.tables)
        lent.tables = ()  # the request's own now
        return Reply(command.do)

    def started(self, command: Command) -> Reply:
        move = self._lent[command.request].move
        assert move is not None
        move.started()
        return Reply(command.do)

    def abort(self, command: Command) -> Reply:
        lent = self._lent.get(command.request, Lent())
        self._endpoint.withdraw(lent.ticket, "the client went away")
        return Reply(command.do)

    def go_on(self, command: Command) -> Reply:
        """The rest of the request's tokens, each with a digest of its logits' bits."""
        outputs = take(self.engine, command.request, STEPS)
        digests = [xxhash.xxh3_64_hexdigest(output.logits.tobytes()) for output in outputs]
        return Reply(command.do, tokens=tuple((o.token, d) for o, d in zip(outputs, digests, strict=True)))

    def drop(self, command: Command) -> Reply:
        """Free what the request had here and write noise over all free blocks, as reuse would."""
        lent = self._lent.pop(command.request, Lent())
        if lent.tables:
            self.engine.free(lent.tables)
        try:
            self.engine.release(command.request)
        except KVFerryError:
            assert lent.tables  # it never became a request
        free = self.engine.pool.allocate(self.engine.pool.num_free_blocks)
        pieces = source_pieces(self.pool.layout, (BlockTable(0, free),), 16 * len(free))
        for offset, nbytes in zip(pieces.offset, pieces.nbytes, strict=True):
            noise = np.random.default_rng(int(offset)).integers(0, 256, nbytes, np.uint8)
            self.pool.array[offset : offset + nbytes] = noise
        self.engine.pool.free(free)
        return Reply(command.do)

    def stats(self, command: Command) -> Reply:
        return Reply(command.do, stats=self._endpoint.stats(), free_blocks=self.engine.pool.num_free_blocks)

    def close(self, command: Command) -> Reply:
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None
        return Reply(command.do)

    def _push(self, command: Command) -> Push:
        push = self._lent[command.request].push
        if push is None:
            raise LocalError("the push did not begin")
        return push

    @property
    def _endpoint(self) -> Endpoint:
        assert self.endpoint is not None, "open comes first"
        return self.endpoint


# The trapped transfer process.


class Trap(FaultScript):
    """Springs once at the point that a file names; setting it is writing the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def due(self, where: Where, subject: bytes = b"") -> Fault | None:
        point = where.value
        if where in (Where.SEND, Where.RECEIVE):
            point += f" {type(decode(subject)).__name__}"
        return Fault(What.FREEZE, where) if self.springs(point) else None

    def has(self, where: Where) -> bool:
        """Any of them, later."""
        return where in Where

    def springs(self, point: str) -> bool:
        """True if the trap was set for this point; it no longer is."""
        try:
            if self._path.read_text() != point:
                return False
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


def run_transfer_process() -> None:
    """``kvferry.transfer``, with the trap on its phases, frames and copies."""
    trap = Trap(Path(os.environ[TRAP_VARIABLE]))
    found = registry.transport_for
    registry_users = sys.modules["kvferry.transfer.directory"]
    registry_users.transport_for = lambda address: faulty(found(address), trap)  # type: ignore[attr-defined]
    enter = PhaseClock.enter

    def enter_trapped(clock: PhaseClock, phase: Phase) -> None:
        enter(clock, phase)
        if trap.springs(f"enter {phase}"):
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    PhaseClock.enter = enter_trapped  # type: ignore[method-assign]
    process.main()


def _spawn_trapped(theirs: Any, memory: Memory) -> subprocess.Popen[bytes]:
    assert memory.fd is not None
    return subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=(theirs.fileno(), memory.fd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    """The engine's process, or, with a descriptor as only argument, its transfer process."""
    if len(sys.argv) == 2:
        run_transfer_process()
    name, os.environ[TRAP_VARIABLE], *site = sys.argv[1:]
    client._spawn = _spawn_trapped
    worker = FaultWorker(name, *site)
    decoder = msgspec.json.Decoder(Command)
    for line in sys.stdin.buffer:
        reply = worker.run(decoder.decode(line))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    worker.close(Command("close"))


if __name__ == "__main__":
    main()
