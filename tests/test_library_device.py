"""Whole handoffs over NIXL and Mooncake between pools on devices, and between a device and host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conftest import wait_until
from device_kit import FakeDevice
from kvferry.errors import CorruptError, KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.testing.transport_peer import pattern
from kvferry.transfer import Endpoint, Pool
from kvferry.transport import transport_for

LAYOUT = PoolLayout.paged(range(4), kv_heads=2, head_dim=64, dtype="bfloat16", block_size=16, num_blocks=256)
TABLES = [
    BlockTable(0, np.random.default_rng(side).permutation(256)[:200].astype(np.int32)) for side in (0, 1)
]
BLOCK_NBYTES = LAYOUT.nbytes // 8 // 256
TOKENS = 200 * 16
ADDRESSES = {"nixl": "nixl://127.0.0.1:0", "mooncake": "mooncake://127.0.0.1:0?wildcard=yes"}
PROBLEMS = {scheme: transport_for(f"{scheme}://").unavailable() for scheme in ADDRESSES}
pytestmark = pytest.mark.skipif(all(PROBLEMS.values()), reason="; ".join(map(str, PROBLEMS.values())))


@pytest.fixture(params=list(ADDRESSES))
def address(request: pytest.FixtureRequest) -> str:
    problem = PROBLEMS[request.param]
    if problem is not None:
        pytest.skip(problem)
    return ADDRESSES[request.param]


class Worker:
    """An endpoint over a pool on a fake device, or in shared memory with a transfer process."""

    def __init__(self, address: str, content: np.ndarray, *, on_device: bool, **options: object) -> None:
        self.device = FakeDevice(content) if on_device else None
        self.pool = Pool.allocate(LAYOUT) if self.device is None else Pool(self.device, LAYOUT)
        if self.device is None:
            self.pool.array[:] = content
        self.endpoint = Endpoint.listen(address, pool=self.pool, **options)

    def show(self) -> np.ndarray:
        return self.pool.array if self.device is None else self.device.show()

    def blocks(self, table: BlockTable) -> np.ndarray:
        """The bytes of a request, by layer and K or V."""
        bytes_of = self.show().reshape(8, 256, -1)
        return bytes_of[:, table.ids]

    def close(self) -> None:
        self.endpoint.close()
        self.pool.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest, address: str) -> Iterator[tuple[Worker, Worker]]:
    (on_device, integrity) = request.param
    contents = pattern(LAYOUT.nbytes), np.full(LAYOUT.nbytes, 3, np.uint8)
    made = []
    try:
        for content, is_there in zip(contents, on_device, strict=True):
            made.append(Worker(address, content, on_device=is_there, integrity=integrity))
        yield made[0], made[1]
    finally:
        for worker in made:
            worker.close()


def pull(prefill: Worker, decode: Worker, ticket: bytes) -> str:
    move = decode.endpoint.pull(ticket, [TABLES[1]], timeout_seconds=20)
    move.result()
    move.started()
    return str(move.record.path)


@pytest.mark.parametrize(
    "workers",
    [
        ((True, True), True),
        ((True, True), False),
        ((True, False), True),
        ((False, True), True),
        ((False, True), False),
    ],
    indirect=True,
)
def test_a_request_moves_from_and_to_a_device(workers: tuple[Worker, Worker], address: str) -> None:
    """Every byte of every block, and no other; recorded by the path that the library took."""
    prefill, decode = workers
    ticket = prefill.endpoint.offer(None, [TABLES[0]], tokens=TOKENS, request_id="r")
    assert pull(prefill, decode, ticket).startswith(address.partition(":")[0])
    assert np.array_equal(decode.blocks(TABLES[1]), prefill.blocks(TABLES[0]))
    others = BlockTable(0, np.setdiff1d(np.arange(256), TABLES[1].ids).astype(np.int32))
    assert (decode.blocks(others) == 3).all()


@pytest.mark.parametrize("workers", [((True, True), True)], indirect=True)
def test_a_block_on_a_device_that_was_reused_is_found(workers: tuple[Worker, Worker]) -> None:
    """Digests are taken of the device's bytes when the request is offered, and compared before commit."""
    prefill, decode = workers
    ticket = prefill.endpoint.offer(None, [TABLES[0]], tokens=TOKENS, request_id="r")
    outcome, device = prefill.endpoint.outcome(ticket), prefill.device
    assert device is not None
    wait_until(lambda: device.gathered_nbytes == prefill.blocks(TABLES[0]).nbytes)
    device.poke(int(TABLES[0].ids[5]) * BLOCK_NBYTES)
    with pytest.raises(CorruptError, match="digest"):
        decode.endpoint.pull(ticket, [TABLES[1]], timeout_seconds=20).result()
    with pytest.raises(KVFerryError):
        outcome.result(20)
