"""Many scattered pieces in one system call: readv, writev and process_vm_readv over NumPy tables.

An I/O vector is a structured array of IOVEC, one entry a piece: building it costs about 2 ns a
piece and no Python object. It is consumed: after a short count the entry that was cut is moved
on in place. Sockets must be non-blocking; every wait goes through a ``Patience``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.memory import address_of
from kvferry.transport.patience import Patience

__all__ = ["IOVEC", "copy_from_process", "iovecs", "merge_touching", "read_vectored", "write_vectored"]

IOVEC = np.dtype([("base", "<u8"), ("nbytes", "<u8")])
IOV_MAX = os.sysconf("SC_IOV_MAX")
# One call moves at most about this much, so that a cancel token is looked at every few milliseconds.
CALL_NBYTES = 8 << 20

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("readv", "writev"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
    getattr(_libc, _name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]

IOVecs = NDArray[np.void]


def iovecs(address: int, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> IOVecs:
    """The vector of the pieces at ``address + offset``; pieces without bytes are left out."""
    vector = np.empty(len(offset), IOVEC)
    vector["base"] = offset
    vector["base"] += np.uint64(address)
    vector["nbytes"] = nbytes
    return vector if (nbytes > 0).all() else vector[nbytes > 0]


def merge_touching(vector: IOVecs) -> IOVecs:
    """The same bytes in the same order with neighbours that touch in memory made one."""
    if len(vector) < 2:
        return vector
    breaks = np.flatnonzero(vector["base"][:-1] + vector["nbytes"][:-1] != vector["base"][1:]) + 1
    first = np.concatenate(([0], breaks))
    merged = np.empty(len(first), IOVEC)
    merged["base"] = vector["base"][first]
    merged["nbytes"] = np.add.reduceat(vector["nbytes"], first)
    return merged


class _Cursor:
    """How far a vector has been consumed; one running sum serves every short count."""

    def __init__(self, vector: IOVecs) -> None:
        self.vector = vector
        self.ends = vector["nbytes"].astype(np.int64).cumsum()
        self.total = int(self.ends[-1]) if len(vector) else 0
        self.done = 0
        self.index = 0
        self._address = address_of(vector)

    def next_call(self) -> tuple[int, int]:
        """Address and number of the entries for the next call: at least one, at most IOV_MAX."""
        last = int(self.ends.searchsorted(self.done + CALL_NBYTES, side="right"))
        count = min(max(last - self.index, 1), IOV_MAX)
        return self._address + self.index * IOVEC.itemsize, count

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        index = int(self.ends.searchsorted(self.done, side="right"))
        if index < len(self.vector):
            into = self.done - (int(self.ends[index - 1]) if index else 0)
            cut = nbytes if index == self.index else into
            self.vector["base"][index] += np.uint64(cut)
            self.vector["nbytes"][index] -= np.uint64(cut)
        self.index = index


def read_vectored(fd: int, vector: IOVecs, patience: Patience) -> None:
    """Fill every piece from a non-blocking socket. Consumes ``vector``.

    Raises TransportError when the peer closed or broke it, DeadlineError, or the token's error;
    then the pieces are filled up to somewhere.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    cursor = _Cursor(vector)
    while cursor.done < cursor.total:
        patience.wait(poll)
        got = _libc.readv(fd, *cursor.next_call())
        if got > 0:
            cursor.advance(got)
        elif got == 0:
            raise patience.lost("the peer closed it", cursor.done)
        else:
            _raise_unless_again(patience, cursor.done)


def write_vectored(
    fd: int, vector: IOVecs, patience: Patience, on_input: Callable[[], NoReturn] | None = None
) -> None:
    """Send every piece over a non-blocking socket. Consumes ``vector``.

    ``on_input`` is called when the peer says something meanwhile, which ends the copy.
    Raises as ``read_vectored`` does.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT | (select.POLLIN if on_input else 0))
    cursor = _Cursor(vector)
    while cursor.done < cursor.total:
        ((_, events),) = patience.wait(poll)
        if on_input and events & select.POLLIN:
            on_input()
        sent = _libc.writev(fd, *cursor.next_call())
        if sent >= 0:
            cursor.advance(sent)
        else:
            _raise_unless_again(patience, cursor.done)


def copy_from_process(pid: int, local: IOVecs, remote: IOVecs, check: Callable[[], None]) -> None:
    """Copy the ``remote`` pieces of process ``pid`` into the ``local`` ones. Consumes both.

    The two hold the same number of bytes and may be cut differently. ``check`` is called before
    each system call and raises to end the copy. Raises OSError where the kernel does not permit
    it, the process is gone, or a piece is not mapped there.
    """
    into, source = _Cursor(local), _Cursor(remote)
    while into.done < into.total:
        check()
        got = _libc.process_vm_readv(pid, *into.next_call(), *source.next_call(), 0)
        if got <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        into.advance(got)
        source.advance(got)


def _raise_unless_again(patience: Patience, bytes_done: int) -> None:
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.EINTR):
        raise patience.lost(os.strerror(code), bytes_done)
