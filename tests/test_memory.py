"""Pool memory: sealed, shared, read-only for peers, touched, and never left behind."""

from __future__ import annotations

import array
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import CapacityError, InputError, LocalError, PeerError
from kvferry.transport.memory import (
    HUGE_NBYTES,
    MEMFD_NAME,
    address_of,
    attach_shared,
    check_peer_memory,
    create_shared,
    map_shared,
    private,
    read_only_fd,
)


def num_maps() -> int:
    """Maps of pools in this process."""
    return Path("/proc/self/maps").read_text().count(MEMFD_NAME)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, 100_001, HUGE_NBYTES, HUGE_NBYTES + 1, 5 * HUGE_NBYTES - 7]
)
def test_a_shared_pool_is_zeroed_writable_and_aligned(nbytes: int) -> None:
    """Exactly the bytes asked for, all zero, at a huge page's border, and every one can be written."""
    memory = create_shared(nbytes)
    assert (memory.nbytes, memory.array.dtype, memory.array.ndim) == (nbytes, np.uint8, 1)
    assert not memory.array.any()
    assert memory.owner_pid == os.getpid()
    assert memory.owner_address == address_of(memory.array)
    assert memory.owner_address % HUGE_NBYTES == 0
    memory.array[:] = 7
    assert (memory.array == 7).all()
    memory.close()


def test_pages_are_there_from_the_start() -> None:
    """Creating a pool touches it: its maps have no page missing, so no transfer pays for first touch."""
    memory = create_shared(3 * HUGE_NBYTES + 5)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(
        i
        for i, line in enumerate(lines)
        if MEMFD_NAME in line and line.startswith(f"{memory.owner_address:x}-")
    )
    sizes = {
        line.split(":")[0]: int(line.split()[1]) for line in lines[at + 1 : at + 10] if line.endswith("kB")
    }
    assert sizes["Rss"] == sizes["Size"] == 4 * HUGE_NBYTES >> 10
    memory.close()


def test_the_size_is_sealed_for_good() -> None:
    """Nobody can shrink or grow the file or add another seal, so no map of it can die of SIGBUS."""
    memory = create_shared(4096)
    assert memory.fd is not None
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    for nbytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()


def test_what_peers_get_can_only_be_read() -> None:
    """A map of the read-only descriptor sees the bytes and cannot be written, nor mapped writable."""
    memory = create_shared(10_000)
    assert memory.fd is not None
    fd = read_only_fd(memory.fd)
    seen = map_shared(fd, memory.nbytes, writable=False)
    memory.array[9_999] = 5
    assert seen[9_999] == 5
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    with pytest.raises(PermissionError):
        map_shared(fd, memory.nbytes, writable=True)
    os.close(fd)
    memory.close()


def test_a_process_that_was_given_the_descriptor_can_write() -> None:
    """The transfer process maps the same pool writable, also when it was started again."""
    memory = create_shared(10_000)
    assert memory.fd is not None
    code = (
        "import sys; from kvferry.transport.memory import attach_shared as a\n"
        "m = a(int(sys.argv[1]), 10_000, owner_pid=int(sys.argv[2]), owner_address=0)\n"
        "m.array[int(sys.argv[3])] += 1; m.close()"
    )
    for at in (1, 2):
        command = [sys.executable, "-c", code, str(memory.fd), str(os.getpid()), str(at)]
        subprocess.run(command, pass_fds=[memory.fd], check=True)
    assert memory.array[:4].tolist() == [0, 1, 1, 0]
    memory.close()


def test_closing_leaves_no_descriptor_and_no_map() -> None:
    """After close, twice, nothing is held; an array that is still used stays valid until it goes."""
    before = num_descriptors(), num_maps()
    memory = create_shared(HUGE_NBYTES)
    kept = memory.array[10:20]
    memory.close()
    memory.close()
    assert num_descriptors() == before[0]
    kept[:] = 3
    assert kept.sum() == 30
    assert num_maps() == before[1] + 1
    del kept
    assert num_maps() == before[1]
    assert memory.nbytes == 0


def test_a_pool_that_cannot_be_had_holds_nothing() -> None:
    """Zero bytes are an InputError, more than the address space a CapacityError; no descriptor stays."""
    before = num_descriptors()
    for nbytes in (0, -1):
        with pytest.raises(InputError, match="nbytes"):
            create_shared(nbytes)
    with pytest.raises(CapacityError) as caught:
        create_shared(1 << 62)
    assert caught.value.next_step
    assert num_descriptors() == before


def test_only_a_sealed_memfd_of_the_right_size_is_mapped(tmp_path: Path) -> None:
    """A plain file, an unsealed memfd and one that is too small are refused from a peer and for attaching."""
    (tmp_path / "file").write_bytes(bytes(4096))
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    memory = create_shared(4096)
    assert memory.fd is not None
    plain = os.open(tmp_path / "file", os.O_RDWR)
    for fd, nbytes, why in (
        (plain, 4096, "not a memfd"),
        (unsealed, 4096, "not sealed"),
        (memory.fd, 4097, "4096 bytes"),
    ):
        with pytest.raises(PeerError, match=why):
            check_peer_memory(fd, nbytes, "peer")
        with pytest.raises(LocalError, match=why):
            attach_shared(fd, nbytes, owner_pid=1, owner_address=0)
    check_peer_memory(memory.fd, 4096, "peer")
    os.close(plain)
    os.close(unsealed)
    memory.close()


class FakeTensor:
    """Has ``numpy()`` as a CPU tensor does."""

    def __init__(self, content: np.ndarray | Exception) -> None:
        self.content = content

    def numpy(self) -> np.ndarray:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(24),
        np.zeros((2, 3), np.float32),
        array.array("d", [0, 0, 0]),
        FakeTensor(np.zeros(12, np.uint16)),
    ],
    ids=["bytearray", "array of two axes", "array.array", "tensor"],
)
def test_private_memory_is_the_buffer_itself(buffer: object) -> None:
    """Any writable contiguous buffer serves, without a copy."""
    memory = private(buffer)
    assert memory.nbytes == 24
    assert memory.fd is None
    memory.array[:] = 255
    content = buffer.content if isinstance(buffer, FakeTensor) else buffer
    assert bytes(np.asarray(content).reshape(-1).view(np.uint8)) == b"\xff" * 24
    assert memory.owner_address == address_of(np.asarray(content))


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (b"read-only", "writable"),
        (np.zeros((4, 4))[:, ::2], "contiguous"),
        (np.zeros(0), "at least one byte"),
        ("text", "no usable buffer"),
        (FakeTensor(TypeError("unsupported ScalarType BFloat16")), "torch.uint8"),
    ],
    ids=["read-only", "strided", "empty", "no buffer", "bfloat16 tensor"],
)
def test_unusable_buffers_are_named(buffer: object, word: str) -> None:
    """What cannot be a pool is an InputError that says why."""
    with pytest.raises(InputError, match=word):
        private(buffer)
