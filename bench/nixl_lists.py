"""What keeping NIXL's descriptor lists would save: one step of a copy, made anew and from kept lists.

    .venv-nixl/bin/python bench/nixl_lists.py       (after `make .venv-nixl/installed`)

An agent reads its own windows over whatever UCX takes within a process. ``initialize_xfer`` is what the
transport does for each step; ``make_prepped_xfer`` is what it would do with kept lists of both pools;
``whole`` is the step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from transports import machine

from kvferry.transport.nixl_agent import NixlAgent, shared_agent

REPEAT = 60
STEPS = ((1, 2 << 20), (64, 32 << 10), (512, 4 << 10), (8192, 4 << 10))


def took(work: Callable[[], None]) -> str:
    """Median of its seconds, and the spread without the three fastest and slowest."""
    times = []
    for _ in range(REPEAT):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    times.sort()
    return f"{median(times) * 1e6:.0f} us ({times[3] * 1e6:.0f} to {times[-4] * 1e6:.0f})"


def rows(base: int, count: int, nbytes: int) -> np.ndarray:
    """Pieces in no order, as a block table has them."""
    found = np.zeros((count, 3), np.uint64)
    found[:, 0] = base + np.random.default_rng(1).permutation(count).astype(np.uint64) * nbytes
    found[:, 1] = nbytes
    return found


def step(agent: NixlAgent, count: int, nbytes: int) -> str:
    """The three times of one shape."""
    api, half = agent.api, agent.arena.nbytes // 2
    here, there = rows(agent.arena.address, count, nbytes), rows(agent.arena.address + half, count, nbytes)
    kept_here = api.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
    kept_there = api.prep_xfer_dlist(agent.name, there, "DRAM")
    index = np.arange(count, dtype=np.int32)

    def made() -> object:
        descs = api.get_xfer_descs(here, "DRAM"), api.get_xfer_descs(there, "DRAM")
        return api.initialize_xfer("READ", *descs, agent.name)

    def anew() -> None:
        made().release()  # type: ignore[attr-defined]

    def from_kept() -> None:
        api.make_prepped_xfer("READ", kept_here, index, kept_there, index).release()

    def whole() -> None:
        handle = made()
        state = api.transfer(handle)
        while state != "DONE":
            state = api.check_xfer_state(handle)
        handle.release()  # type: ignore[attr-defined]

    return f"{took(anew)}, {took(from_kept)}, {took(whole)}"


def main() -> None:
    """Print the table."""
    agent = shared_agent()
    print({**machine(), "load_at_end": os.getloadavg()[0]})
    print("pieces of bytes: initialize_xfer, make_prepped_xfer, whole")
    for count, nbytes in STEPS:
        print(f"{count} of {nbytes}: {step(agent, count, nbytes)}")


if __name__ == "__main__":
    main()
