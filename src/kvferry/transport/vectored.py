"""Many scattered pieces in one system call: readv, writev and process_vm_readv over NumPy tables.

An I/O vector is an array of addresses and sizes, one row a piece: building it costs about 2 ns a
piece and no Python object. It is consumed: after a short count the entry that was cut is moved
on in place. Sockets must be non-blocking; every wait goes through a ``Patience``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.memory import address_of
from kvferry.transport.patience import Patience
from kvferry.transport.staging import FEW

__all__ = ["IOVecs", "copy_from_process", "iovecs", "merge_touching", "read_vectored", "write_vectored"]

IOVEC_NBYTES = 16
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

#: Address and bytes of each piece: uint64, [pieces, 2].
IOVecs = NDArray[np.uint64]


def iovecs(address: int, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> IOVecs:
    """The vector of the pieces at ``address + offset``; pieces without bytes are left out."""
    if len(offset) <= FEW:
        rows = [(address + at, n) for at, n in zip(offset.tolist(), nbytes.tolist(), strict=True) if n > 0]
        return np.array(rows, np.uint64).reshape(-1, 2)
    vector = np.empty((len(offset), 2), np.uint64)
    vector[:, 0] = offset
    vector[:, 0] += np.uint64(address)
    vector[:, 1] = nbytes
    return vector if (nbytes > 0).all() else vector[nbytes > 0]


def merge_touching(vector: IOVecs) -> IOVecs:
    """The same bytes in the same order with neighbours that touch in memory made one."""
    if len(vector) < 2:
        return vector
    base, nbytes = vector[:, 0], vector[:, 1]
    breaks = np.flatnonzero(base[:-1] + nbytes[:-1] != base[1:]) + 1
    first = np.concatenate(([0], breaks))
    merged = np.empty((len(first), 2), np.uint64)
    merged[:, 0] = base[first]
    merged[:, 1] = np.add.reduceat(nbytes, first)
    return merged


class _Cursor:
    """How far a vector has been consumed; one running sum serves every short count."""

    def __init__(self, vector: IOVecs) -> None:
        self.vector = vector
        is_short = len(vector) <= FEW
        self.ends = list(accumulate(vector[:, 1].tolist())) if is_short else vector[:, 1].cumsum()
        self.total = int(self.ends[-1]) if len(vector) else 0
        self.done = 0
        self.index = 0
        self._address = address_of(vector)

    def next_call(self) -> tuple[int, int]:
        """Address and number of the entries for the next call: at least one, at most IOV_MAX."""
        last = self._past(self.done + CALL_NBYTES)
        count = min(max(last - self.index, 1), IOV_MAX)
        return self._address + self.index * IOVEC_NBYTES, count

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.done == self.total:
            return
        index = self._past(self.done)
        into = self.done - (int(self.ends[index - 1]) if index else 0)
        cut = np.uint64(nbytes if index == self.index else into)
        self.vector[index, 0] += cut
        self.vector[index, 1] -= cut
        self.index = index

    def _past(self, nbytes: int) -> int:
        """How many entries end at or before so many bytes."""
        if isinstance(self.ends, list):
            return bisect_right(self.ends, nbytes)
        return int(self.ends.searchsorted(np.uint64(nbytes), side="right"))


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
