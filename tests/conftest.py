"""Shared by the tests: pairs of endpoints, and a check that nothing is left behind."""

from __future__ import annotations

import os

# Before NumPy is imported, and for every process that the tests start: see the Makefile.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import settings

from kvferry.layout import PoolLayout
from kvferry.transfer import Endpoint, Pool, Timeouts

# Patient enough for a machine that runs other tests beside; what is about silence sets its own.
QUICK = Timeouts(handshake=10.0, heartbeat=0.2, lost=3.0, abort=0.3, start=5.0)


# Time is never asserted, not by Hypothesis either: a busy machine is no fault.
settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")
_numbers = itertools.count()


def unique_address(scheme: str) -> str:
    """An address that no other test, of this process or another, listens at."""
    return "tcp://127.0.0.1:0" if scheme == "tcp" else f"{scheme}://test-{os.getpid()}-{next(_numbers)}"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0, what: Callable[[], Any] = str) -> None:
    """Poll a condition that another process or thread brings about; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds} s {what()}")
        time.sleep(0.005)


def held_by_this_process() -> Counter[str]:
    """Descriptors, threads, child processes and maps of pools and boards of this process, by name."""
    gc.collect()
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            held[f"fd {os.readlink(f'/proc/self/fd/{fd}')}"] += 1
    held["shared maps"] = Path("/proc/self/maps").read_text().count("memfd:kvferry-")
    held.update(f"thread {thread.name}" for thread in threading.enumerate() if "kvferry" in thread.name)
    held.update(f"process {child.pid}" for child in psutil.Process().children(recursive=True))
    return +held


# Their tests share what takes long to make (servers, faults that are played side by side), so each file goes
# to one worker of xdist. By name: from pytest 9.2 on the marks of xdist 3.8 (`xdist_group`) do nothing.
_TOGETHER = frozenset({"tests/test_faults.py", "tests/test_proxy.py", "tests/test_serve.py"})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How ``--dist loadgroup`` shares out the tests: each to whoever is free, but for those files."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return file if file in _TOGETHER else nodeid

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: else each ``gc.collect`` of ``held_by_this_process`` walks it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no descriptor, thread, process or map behind."""
    before = held_by_this_process()
    gc.freeze()  # what other tests left in memory is not walked again
    yield
    wait_until(lambda: not held_by_this_process() - before, 20.0, lambda: held_by_this_process() - before)


@pytest.fixture
def opened() -> Iterator[Callable[..., Endpoint]]:
    """Make endpoints that are closed, with their pools, when the test ends."""
    endpoints: list[Endpoint] = []
    pools: list[Pool] = []

    def open_endpoint(layout: PoolLayout, address: str | None = None, **options: Any) -> Endpoint:
        options = {"timeouts": QUICK, "process": False} | options
        pool = options.pop("pool", None) or Pool.allocate(layout)
        pools.append(pool)
        if address is None:
            endpoint = Endpoint.open(pool=pool, **options)
        else:
            endpoint = Endpoint.listen(address, pool=pool, **options)
        endpoints.append(endpoint)
        return endpoint

    yield open_endpoint
    for endpoint in endpoints:
        endpoint.close()
    for pool in pools:
        pool.close()


def fill_random(pool: Pool, seed: int) -> None:
    """Every byte of a pool, from a seed."""
    pool.array[:] = np.random.default_rng(seed).integers(0, 256, pool.array.nbytes, np.uint8)
