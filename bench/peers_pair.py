"""One of the two processes of a pair in ``bench/peers.py``: takes commands as JSON lines, answers likewise.

    python bench/peers_pair.py KIND NBYTES

KIND: plain (shm and tcp), nixl, or mooncake. The pair's other process is driven the same way; the
one that is told ``connect`` then moves bytes, by kvferry's transports or by the library alone with
the settings that suit it best.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvferry.layout import BlockTable, CopyPlan, PoolLayout
from kvferry.testing.transport_pair import LoopThread
from kvferry.transfer import Endpoint, Pool
from kvferry.transfer.lease import Grants
from kvferry.transport import Connection, Copy, create_shared, transport_for
from kvferry.transport.base import Direction
from kvferry.transport.board import Board
from kvferry.transport.memory import address_of

SECONDS = 120.0
WORD = np.uint64(0x9E3779B97F4A7C15)
# Between two looks at a transfer that is not over; without it two cores starve each other.
PAUSE_SECONDS = 5e-5
# What is shorter than a copy of so much is moved so many times in a row, and the median counts.
SMALL_NBYTES = 1 << 20
SMALL_TIMES = 50
MOONCAKE_BATCH = 1024


def some_of(rows: np.ndarray) -> Iterator[Any]:
    """Rows by the thousand; a single one as a slice, which copies nothing."""
    if len(rows) == 1:
        yield slice(int(rows[0]), int(rows[0]) + 1)
    else:
        yield from (rows[first : first + 1024] for first in range(0, len(rows), 1024))


class Side:
    """A pool, and ways to move its bytes to or from the other side's."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind = kind
        self.memory = create_shared(nbytes)
        self.plain = np.ones(nbytes, np.uint8)
        self.loop = LoopThread()
        self.listeners: list[Any] = []
        self.accepted: list[Connection] = []
        self.connections: dict[str, Connection] = {}
        self.resting = threading.Event()
        self.resting.set()
        self.library: Any = None
        self.endpoints: dict[tuple[int, ...], Endpoint] = {}
        self.grants = Grants(Board.create())

    # Commands.

    def fill(self) -> None:
        array = self.memory.array.view(np.uint64)
        np.multiply(np.arange(len(array), dtype=np.uint64), WORD, out=array)
        np.copyto(self.plain, self.memory.array)

    def grant(self, shape: list[int]) -> None:
        """The other side may read a shape's sources here, and write its destinations: no other bytes."""
        block, source, destination = table(*shape)
        sizes = np.full(len(source), block, np.int64)
        for direction, offset in ((Direction.READ, source), (Direction.WRITE, destination)):
            self.grants.close(id_of(direction, shape))
            self.grants.open(id_of(direction, shape), direction, offset, sizes, lambda _: None)

    def zero(self, shape: list[int]) -> None:
        """Nothing is at the destinations of a shape."""
        block, _, destination = table(*shape)
        for rows in some_of(destination // block):
            self._by_block(self.memory.array, block)[rows] = 0

    def check(self, shape: list[int]) -> bool:
        """Every destination holds what lies at its source in a filled pool; then it is filled again."""
        block, source, destination = table(*shape)
        found, filled = (self._by_block(array, block) for array in (self.memory.array, self.plain))
        is_right = True
        for here, there in zip(some_of(destination // block), some_of(source // block), strict=True):
            is_right &= np.array_equal(found[here], filled[there])
            found[here] = filled[here]
        return is_right

    @staticmethod
    def _by_block(array: np.ndarray, block: int) -> np.ndarray:
        return array.view(np.uint64).reshape(-1, block // 8)

    def listen(self, addresses: list[str]) -> list[str]:
        for address in addresses:
            transport = transport_for(address)(self.memory, self.grants)
            self.listeners.append(self.loop.run(transport.listen(address, self.accepted.append)))
        return [listener.address for listener in self.listeners]

    def connect(self, name: str, address: str) -> str:
        transport = transport_for(address)(self.memory, self.grants)
        connection = self.loop.run(transport.connect(address, SECONDS))
        self.connections[name] = connection
        return connection.path

    def introduce(self) -> dict[str, Any]:
        """This side's library, ready, and what the other side must know of it."""
        address, nbytes = address_of(self.memory.array), self.memory.nbytes
        if self.kind == "nixl":
            from kvferry.transport.nixl_agent import shared_agent

            self.library = shared_agent()
            self.library.register(address, nbytes)
            metadata = self.library.metadata((address, nbytes)).hex()
            return {"name": self.library.name, "metadata": metadata, "address": address}
        from kvferry.transport.mooncake_engine import shared_engine

        self.library = shared_engine("127.0.0.1", "tcp", "")
        assert self.library.api.register_memory(address, nbytes) == 0
        return {"segment": self.library.segment, "address": address}

    def meet(self, other: dict[str, Any]) -> None:
        self.other = other
        if self.kind == "nixl":
            self.peer = self.library.meet(other["name"], bytes.fromhex(other["metadata"]), "peer")

    def drive(self) -> None:
        """Keep NIXL going for the other side, as an application's own thread would."""
        self.resting.clear()

        def run() -> None:
            while not self.resting.is_set():
                self.library.progress()
                time.sleep(PAUSE_SECONDS)

        threading.Thread(target=run, daemon=True).start()

    def rest(self) -> None:
        self.resting.set()

    def memcpy(self, nbytes: int) -> float:
        """Seconds of a plain copy; both pools are filled, so nothing changes."""
        return timed(lambda: np.copyto(self.plain[:nbytes], self.memory.array[:nbytes]))

    def move(self, way: str, shape: list[int]) -> dict[str, float]:
        self.shape = shape
        tables, work = table(*shape), getattr(self, "_" + way)
        cpu, times = time.process_time(), times_of(shape)
        seconds = statistics.median(work(*tables) for _ in range(times))
        return {"seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / times}

    def open_endpoint(self, address: str, shape: list[int]) -> str:
        """An endpoint over the same pool, whose blocks are those of the shape; where it listens."""
        block, _, pool_blocks = shape
        layout = PoolLayout.paged(
            range(1),
            kv_heads=1,
            head_dim=block // 8,
            dtype="float32",
            block_size=1,
            num_blocks=pool_blocks,
            joined_kv=True,
        )
        endpoint = Endpoint.listen(address, pool=Pool(self.memory, layout), name=f"peers-{os.getpid()}")
        self.endpoints[tuple(shape)] = endpoint
        return endpoint.addresses[0]

    def offer(self, shape: list[int]) -> list[tuple[str, float]]:
        """Tickets, and the seconds that each offer took, digests at export among them."""
        block, source, _ = table(*shape)
        blocks = [BlockTable(0, (source // block).astype(np.int32))]
        endpoint, found = self.endpoints[tuple(shape)], []
        for _ in range(times_of(shape)):
            started, name = time.perf_counter(), uuid.uuid4().hex
            ticket = endpoint.offer(None, blocks, tokens=len(source), request_id=name, lease_seconds=SECONDS)
            found.append((ticket.hex(), time.perf_counter() - started))
        return found

    def pull(self, shape: list[int], tickets: list[tuple[str, float]]) -> dict[str, float]:
        """Fetch what was offered: claim, move, digests compared, commit, started."""
        block, _, destination = table(*shape)
        blocks = [BlockTable(0, (destination // block).astype(np.int32))]
        endpoint, times = self.endpoints[tuple(shape)], []
        for ticket, offered in tickets:
            started = time.perf_counter()
            move = endpoint.pull(bytes.fromhex(ticket), blocks, timeout_seconds=SECONDS)
            move.result()
            move.started()
            times.append(offered + time.perf_counter() - started)
        return {"seconds": statistics.median(times)}

    def cpu(self) -> float:
        return time.process_time()

    def estimate(self, shape: list[int]) -> float:
        """Seconds that NIXL says the transfer will take."""
        block, source, destination = table(*shape)
        handle = self._nixl_request("READ", block, destination, source)
        duration = self.library.api.estimate_xfer_cost(handle)[0]
        handle.release()
        return float(duration) / 1e6

    # Ways to move. Each gives seconds.

    def _kvferry(
        self, name: str, direction: str, table_: tuple[int, np.ndarray, np.ndarray], sums: bool
    ) -> float:
        block, source, destination = table_
        starts = np.append(np.arange(0, len(source), max(1, (1 << 20) // block)), len(source))
        count = len(starts) - 1
        plan = CopyPlan(
            source,
            destination,
            np.full(len(source), block, np.int64),
            starts,
            np.arange(count),
            np.ones(count, np.bool_),
        )
        name_of_grant = id_of(Direction(direction), self.shape)
        copy = Copy(name_of_grant, plan, time.monotonic() + SECONDS, sums)
        call = getattr(self.connections[name], direction)
        return timed(lambda: call(copy))

    def _shm(self, *table_: Any) -> float:
        return self._kvferry("shm", "read", table_, False)

    def _tcp(self, *table_: Any) -> float:
        return self._kvferry("tcp", "write", table_, False)

    def _tcp_summed(self, *table_: Any) -> float:
        return self._kvferry("tcp", "write", table_, True)

    def _ours(self, *table_: Any) -> float:
        return self._kvferry("ours", "read", table_, False)

    def _ours_summed(self, *table_: Any) -> float:
        return self._kvferry("ours", "read", table_, True)

    def _nixl_request(self, operation: str, block: int, here: np.ndarray, there: np.ndarray) -> Any:
        rows = np.zeros((2, len(here), 3), np.uint64)
        rows[:, :, 1] = block
        rows[0, :, 0] = here.astype(np.uint64) + np.uint64(address_of(self.memory.array))
        rows[1, :, 0] = there.astype(np.uint64) + np.uint64(self.other["address"])
        api = self.library.api
        here_list, there_list = (api.get_xfer_descs(part, "DRAM") for part in rows)
        return api.initialize_xfer(operation, here_list, there_list, self.other["name"])

    def _nixl(self, operation: str, block: int, here: np.ndarray, there: np.ndarray) -> float:
        api = self.library.api

        def run() -> None:
            handle = self._nixl_request(operation, block, here, there)
            state = api.transfer(handle)
            while state == "PROC":
                if block * len(here) > 1 << 20:
                    time.sleep(PAUSE_SECONDS)
                state = api.check_xfer_state(handle)
            assert state == "DONE"
            handle.release()

        return timed(run)

    def _nixl_read(self, block: int, source: np.ndarray, destination: np.ndarray) -> float:
        return self._nixl("READ", block, destination, source)

    def _nixl_write(self, block: int, source: np.ndarray, destination: np.ndarray) -> float:
        return self._nixl("WRITE", block, source, destination)

    def _mooncake_write(self, block: int, source: np.ndarray, destination: np.ndarray) -> float:
        """One piece: submitted, with a pause between looks; several: batches of at most 1,024."""
        api, segment = self.library.api, self.other["segment"]
        here = (source + address_of(self.memory.array)).tolist()
        there = (destination + self.other["address"]).tolist()

        def run() -> None:
            if len(here) == 1:
                self._submit(here[0], there[0], block)
                return
            for first in range(0, len(here), MOONCAKE_BATCH):
                some = slice(first, first + MOONCAKE_BATCH)
                blocks = [block] * len(here[some])
                assert api.batch_transfer_sync_write(segment, here[some], there[some], blocks) == 0

        return timed(run)

    def _submit(self, here: int, there: int, nbytes: int) -> None:
        api = self.library.api
        batch = api.transfer_submit_write(self.other["segment"], here, there, nbytes)
        while (status := api.transfer_check_status(batch)) == 0:
            time.sleep(PAUSE_SECONDS)
        assert status == 1


def table(block: int, count: int, pool_blocks: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Block size, and where ``count`` blocks lie at the source and at the destination: permuted."""
    if count == 1:
        return block, np.zeros(1, np.int64), np.zeros(1, np.int64)
    rng = np.random.default_rng(7)
    source, destination = (rng.permutation(pool_blocks)[:count].astype(np.int64) * block for _ in range(2))
    return block, source, destination


def id_of(direction: Direction, shape: list[int]) -> bytes:
    """The transfer by which a shape may be read or written."""
    return hashlib.blake2b(f"{direction} {shape}".encode(), digest_size=16).digest()


def times_of(shape: list[int]) -> int:
    """How often a shape is moved at a turn."""
    return SMALL_TIMES if shape[0] * shape[1] < SMALL_NBYTES else 1


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    side = Side(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(*arguments)), flush=True)
    for endpoint in side.endpoints.values():
        endpoint.close()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
