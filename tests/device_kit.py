"""A device whose bytes no array can show, and a library that moves between windows of one process."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.device import DeviceBytes
from kvferry.transport.library import LibraryConnection, LibraryTransport
from kvferry.transport.staging import STEP_NBYTES
from kvferry.transport.windows import Arena, Progressing

__all__ = ["FakeDevice", "MemmoveTransport"]


class FakeDevice(DeviceBytes):
    """Keeps its bytes in a bytearray that no array looks into, and takes no step above two of staging."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self.name = "fake:3"
        self.nbytes = len(content)
        self.num_steps = 0
        self.gathered_nbytes = 0
        self._there = bytearray(content.tobytes())

    def show(self) -> NDArray[np.uint8]:
        """What is there now, for a test's own eyes."""
        return np.frombuffer(bytes(self._there), np.uint8)

    def poke(self, at: int) -> None:
        """The engine changes a byte."""
        self._there[at] ^= 1

    def gather(self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        self._note(out.nbytes)
        self.gathered_nbytes += out.nbytes
        places = zip(offset.tolist(), nbytes.tolist(), strict=True)
        out[:] = np.frombuffer(b"".join(self._there[at : at + size] for at, size in places), np.uint8)

    def scatter(self, offset: NDArray[np.int64], nbytes: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self._note(data.nbytes)
        done = 0
        for at, size in zip(offset.tolist(), nbytes.tolist(), strict=True):
            self._there[at : at + size] = data[done : done + size].tobytes()
            done += size
        assert done == len(data)

    def _note(self, nbytes: int) -> None:
        assert nbytes <= 2 * STEP_NBYTES
        self.num_steps += 1


class Moved:
    def is_done(self) -> bool:
        return True


class MemmoveConnection(LibraryConnection):
    """The staged way of every library, without one: both sides' windows are of this process."""

    scheme = "memmove"
    arenas = Arena("memmove")

    def _hello(self) -> bytes:
        return str(self.memory.nbytes).encode()

    def _meet(self, hello: bytes) -> None:
        self.arena, self.mover, self.peer_nbytes = self.arenas, self, int(hello)

    def write(self, here: int, there: int, nbytes: int) -> Moved:
        ctypes.memmove(there, here, nbytes)
        return Moved()

    def _read_known_bytes(self, limits: Progressing) -> str:
        limits.check()
        return "here"


class MemmoveTransport(LibraryTransport):
    """``memmove://HOST:PORT``"""

    scheme = "memmove"
    connection = MemmoveConnection
