"""Pool memory: a sealed memfd that several processes map, or any writable buffer of this process.

Three processes may map one shared pool: the engine and its transfer process, both writable, and
peers on the same host, read-only. The seals are SHRINK, GROW and SEAL: the size never changes
under a map (a shrunk file would kill its readers by SIGBUS). FUTURE_WRITE is not set, because a
transfer process that was restarted must map the pool writable again; peers get a descriptor that
was opened read-only instead. See docs/decisions/0050-shared-memory.md for what that protects.

A map lives as long as an array over it: closing never leaves an array that points nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError, InputError, LocalError, PeerError
from kvferry.transport.base import Memory
from kvferry.transport.device import DeviceBytes, TorchBytes

__all__ = [
    "HUGE_NBYTES",
    "address_of",
    "attach_shared",
    "check_peer_memory",
    "create_shared",
    "map_shared",
    "private",
    "read_only_fd",
]

HUGE_NBYTES = 2 << 20
MEMFD_NAME = "kvferry-pool"

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MFD_NOEXEC_SEAL = 0x8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


def create_shared(nbytes: int, name: str = MEMFD_NAME) -> Memory:
    """Make a zeroed pool of ``nbytes`` bytes that other processes can map; ``name`` is what maps are called.

    It is touched here, in huge pages where the kernel gives them, so that no transfer pays for
    first touch. The returned memory owns its descriptor; ``Memory.close`` gives it back.

    Raises:
        InputError: ``nbytes`` is not positive.
        CapacityError: the kernel has no room for it; nothing is held.
    """
    if nbytes <= 0:
        raise InputError(f"nbytes: a pool holds at least one byte, not {nbytes}")
    fd = None
    try:
        fd = _memfd(name)
        os.ftruncate(fd, _file_nbytes(nbytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        array, reserved, lead = _map(fd, nbytes, True)
        _touch(reserved, lead, nbytes)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        raise CapacityError(
            f"no shared memory of {nbytes} bytes: {error.strerror}",
            next_step="ask for less, or free memory on this host",
        ) from error
    return Memory(array=array, owner_pid=os.getpid(), owner_address=address_of(array), fd=fd)


def attach_shared(fd: int, nbytes: int, *, owner_pid: int, owner_address: int) -> Memory:
    """The same pool in another process of its owner: maps ``fd`` writable and takes it over.

    Raises LocalError when ``fd`` is no sealed memfd of at least ``nbytes``; then ``fd`` stays open.
    """
    problem = _seal_problem(fd, nbytes)
    if problem:
        raise LocalError(f"descriptor {fd} {problem}", next_step="pass the fd of a kvferry pool")
    array = map_shared(fd, nbytes, writable=True)
    return Memory(array=array, owner_pid=owner_pid, owner_address=owner_address, fd=fd)


def map_shared(fd: int, nbytes: int, *, writable: bool) -> NDArray[np.uint8]:
    """Map the first ``nbytes`` of a memfd at a 2 MiB boundary, as uint8 of one dimension.

    The map ends when the last array over it goes. Does not take over ``fd``. Raises OSError.
    """
    return _map(fd, nbytes, writable)[0]


def read_only_fd(fd: int) -> int:
    """Open the memfd again so that maps made from the result can only be read. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def check_peer_memory(fd: int, nbytes: int, peer: str) -> None:
    """Refuse a descriptor from a peer that could change size under a map. Raises PeerError."""
    problem = _seal_problem(fd, nbytes)
    if problem:
        raise PeerError(
            f"the memory that the peer passed {problem}",
            phase="connect",
            peer=peer,
            now_true="nothing was mapped",
            next_step="run the same kvferry on both sides",
        )


def private(buffer: Any) -> Memory:
    """Memory over a writable buffer of this process: a NumPy array, a bytearray, a tensor.

    A torch tensor on a GPU, or any ``DeviceBytes``, stays where it is: see device.py. Anything else
    with ``.numpy()`` is asked for its array. The buffer must be contiguous and must
    outlive the result. Raises InputError naming what is wrong.
    """
    if getattr(buffer, "is_cuda", False):
        buffer = TorchBytes(buffer)
    if isinstance(buffer, DeviceBytes):
        return Memory(np.empty(0, np.uint8), os.getpid(), 0, device=buffer)
    if hasattr(buffer, "numpy") and not isinstance(buffer, np.ndarray):
        try:
            buffer = buffer.numpy()
        except (TypeError, RuntimeError, ValueError) as error:
            raise InputError(
                f"buffer: {type(buffer).__name__} gives no NumPy array ({error}); "
                "for a torch tensor pass tensor.detach().view(torch.uint8)"
            ) from error
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InputError(f"buffer: {type(buffer).__name__} is no usable buffer: {error}") from error
    if not array.flags.c_contiguous or not array.flags.writeable or not array.nbytes:
        raise InputError("buffer: a pool needs writable, C-contiguous memory of at least one byte")
    flat = array.reshape(-1).view(np.uint8)
    return Memory(array=flat, owner_pid=os.getpid(), owner_address=address_of(flat))


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        # Before Linux 6.3 the flag is unknown, and there is nothing that it would have to forbid.
        return os.memfd_create(name, flags)


def _file_nbytes(nbytes: int) -> int:
    """Whole pages; whole huge pages for a pool that can have them, so that its tail gets one too."""
    page = HUGE_NBYTES if nbytes >= HUGE_NBYTES else mmap.PAGESIZE
    return -(-nbytes // page) * page


def _map(fd: int, nbytes: int, writable: bool) -> tuple[NDArray[np.uint8], mmap.mmap, int]:
    """The array, the object that owns the addresses, and where in it the array starts."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    length = _file_nbytes(nbytes)
    # The mmap object reserves the addresses and, as the array's base, owns the unmapping; the
    # file goes over the aligned part of it, since huge pages need an aligned start.
    reserved = mmap.mmap(-1, length + HUGE_NBYTES, flags=flags, prot=prot)
    start = address_of(np.frombuffer(reserved, np.uint8))
    lead = -start % HUGE_NBYTES
    mapped = _libc.mmap(start + lead, length, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if mapped != start + lead:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return np.frombuffer(reserved, np.uint8, count=nbytes, offset=lead), reserved, lead


def _touch(reserved: mmap.mmap, lead: int, nbytes: int) -> None:
    """Back the map with pages now, huge where possible; smaller pages work as well, only slower."""
    length = _file_nbytes(nbytes)
    if length >= HUGE_NBYTES:
        # MADV_COLLAPSE works where shmem_enabled is "never", but wants one page of each present.
        np.frombuffer(reserved, np.uint8, count=length, offset=lead)[::HUGE_NBYTES] = 0
        with contextlib.suppress(OSError):
            reserved.madvise(_MADV_COLLAPSE, lead, length)
    with contextlib.suppress(OSError):
        reserved.madvise(_MADV_POPULATE_WRITE, lead, length)


def _seal_problem(fd: int, nbytes: int) -> str | None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "is not a memfd"
    if not seals & fcntl.F_SEAL_SHRINK:
        return "is not sealed against shrinking"
    if os.fstat(fd).st_size < nbytes:
        return f"holds {os.fstat(fd).st_size} bytes, not the {nbytes} that were announced"
    return None


def address_of(array: NDArray[Any]) -> int:
    """Where the first byte of an array lies in this process."""
    # A third of the time of array.ctypes, which makes an object first; a copy asks a dozen times.
    return int(array.__array_interface__["data"][0])
