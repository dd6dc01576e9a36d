"""Pools on a device: what moves them stages through bounded windows, and everything else refuses by name."""

from __future__ import annotations

import numpy as np
import pytest

from device_kit import FakeDevice, MemmoveTransport
from kvferry.errors import InputError, LocalError
from kvferry.layout import PoolLayout
from kvferry.layout.conversion import Conversions
from kvferry.testing.plans import expected_copy, expected_digests, random_plan
from kvferry.testing.transport_pair import TransportPair
from kvferry.testing.transport_peer import pattern
from kvferry.transfer import Endpoint, Pool
from kvferry.transport.base import Direction
from kvferry.transport.device import TorchBytes
from kvferry.transport.digest import digest_chunks
from kvferry.transport.memory import private

NBYTES = 6 << 20
# Nothing aligned, pieces above a window, and many small ones.
SIZES = [3 << 20, 1, 4097, 65_536, *[777] * 300, 1 << 20]


@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize("on_device", [(True, True), (True, False), (False, True)])
def test_a_copy_between_devices_and_hosts(on_device: tuple[bool, bool], integrity: bool) -> None:
    """Byte for byte what a copy in host memory is, digests too; at most two steps are staged at once."""
    sent, before = pattern(NBYTES), np.full(NBYTES, 9, np.uint8)
    source, destination = (
        FakeDevice(content) if is_there else content.copy()
        for content, is_there in zip((sent, before), on_device, strict=True)
    )
    pair = TransportPair(MemmoveTransport, "memmove://127.0.0.1:0", private(source), private(destination))
    plan = random_plan(5, NBYTES, SIZES, 7)
    try:
        arrived = pair.connecting.copy(Direction.READ, plan, integrity=integrity)
    finally:
        pair.close()
    found = destination.show() if isinstance(destination, FakeDevice) else destination
    assert np.array_equal(found, expected_copy(plan, sent, before))
    assert arrived.path == "memmove-here"
    assert (arrived.digests is not None) is integrity
    if arrived.digests is not None:
        assert arrived.digests.tolist() == expected_digests(plan, sent)


def test_digests_at_export_are_those_of_the_bytes_on_the_device() -> None:
    """The same sums as of the same bytes in an array, in steps."""
    plan, device = random_plan(6, NBYTES, SIZES, 7), FakeDevice(pattern(NBYTES))
    sums = digest_chunks(device, plan.src_offset, plan.nbytes, plan.chunk_start)
    assert sums.tolist() == expected_digests(plan, pattern(NBYTES))
    assert device.num_steps >= sum(SIZES) // (2 << 20)


def layout() -> PoolLayout:
    return PoolLayout.paged(range(1), kv_heads=1, head_dim=8, dtype="float32", block_size=4, num_blocks=16)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "shm://device", "inproc://device"])
def test_transports_of_host_memory_refuse_by_name(address: str) -> None:
    """When the address is opened, in one line that says what to use."""
    pool = Pool(FakeDevice(np.zeros(layout().nbytes, np.uint8)), layout())
    with pytest.raises(
        InputError, match=r"moves host memory, and this pool lies on fake:3.*use nixl or mooncake"
    ):
        Endpoint.listen(address, pool=pool)


def test_what_needs_an_array_refuses_by_name() -> None:
    """A transfer process, conversions, and whoever asks the pool for its bytes."""
    pool = Pool(FakeDevice(np.zeros(layout().nbytes, np.uint8)), layout())
    with pytest.raises(LocalError, match=r"cannot reach a pool on fake:3.*process=False"):
        Endpoint.open(pool=pool, process=True)
    with pytest.raises(InputError, match=r"conversions: .*lies on fake:3"):
        Endpoint.open(pool=pool, conversions=Conversions())
    with pytest.raises(InputError, match="no array can show it"):
        _ = pool.array
    with pytest.raises(InputError, match="but the layout needs"):
        Pool(FakeDevice(np.zeros(8, np.uint8)), layout())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_torch_tensor_is_such_a_device(device: str) -> None:
    """Gathered and scattered by torch as by NumPy; on the CPU it is the same code, save for pinned memory."""
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    plan, sent = random_plan(7, NBYTES, SIZES, 3), pattern(NBYTES)
    source = TorchBytes(torch.from_numpy(sent.copy()).to(device))
    sums = digest_chunks(source, plan.src_offset, plan.nbytes, plan.chunk_start)
    assert sums.tolist() == expected_digests(plan, sent)
    tensor = torch.zeros(NBYTES // 4, dtype=torch.float32, device=device)
    there, data = TorchBytes(tensor), np.empty(plan.total_nbytes, np.uint8)
    source.gather(plan.src_offset, plan.nbytes, data)
    there.scatter(plan.dst_offset, plan.nbytes, data)
    landed = tensor.cpu().view(torch.uint8).numpy()
    assert np.array_equal(landed, expected_copy(plan, sent, np.zeros(NBYTES, np.uint8)))
    assert private(tensor).device is (None if device == "cpu" else private(tensor).device)
    with pytest.raises(InputError, match="contiguous"):
        TorchBytes(tensor[::2])
