"""The one NIXL agent of a process, and the rules that keep it safe; see docs/decisions/0130.

One agent with strict locks and no thread of its own: NIXL's progress thread keeps about half of a
core busy while nothing moves, so the waits of this transport drive the library instead. Peers
are known by a name of one process life; metadata travels over kvferry's own connection.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, LocalError, TransportError
from kvferry.transport.memory import address_of
from kvferry.transport.nixl_paths import PathLog
from kvferry.transport.staging import FEW
from kvferry.transport.windows import PEEK_NBYTES, Arena, PoolMover

__all__ = ["INSTALL", "NixlAgent", "NixlPeer", "NixlPosted", "missing", "rows", "shared_agent"]

# Wheels of the two CUDA versions hold modules of their own names; either works without a GPU.
PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
DISTRIBUTIONS = {"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13", "nixl": "nixl"}
# The first whose import does not need torch.
OLDEST = (1, 4)
PARTING_SECONDS = 0.5
# Over tcp each piece costs system calls; smaller ones are gathered for less, and are in the cache then.
MIN_PIECE_NBYTES = 256 << 10
_END_SECONDS = 5.0
INSTALL = "pip install --no-deps nixl-cu12"

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_agents: dict[int, NixlAgent] = {}


def missing() -> str | None:
    """Why NIXL cannot be used here, with the fix; None if it looks as if it could."""
    try:
        package = _package()
    except (ImportError, OSError) as error:
        return f"NIXL is installed and cannot be imported: {error}: {INSTALL} --force-reinstall"
    if package is None:
        return f"NIXL is not installed: {INSTALL}"
    try:
        found = version(DISTRIBUTIONS[package])
    except PackageNotFoundError:
        return f"{package} is there but not as a package of pip: {INSTALL}"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{DISTRIBUTIONS[package]} {found} is older than {oldest}: {INSTALL} --upgrade"
    return None


def shared_agent() -> NixlAgent:
    """This process's agent, made at the first call, which takes about half a second.

    Raises LocalError saying what to do when NIXL is missing or finds no way to carry anything.
    """
    with _lock:
        agent = _agents.get(os.getpid())
        if agent is None:
            agent = _agents[os.getpid()] = NixlAgent()
        return agent


class NixlPosted:
    """A posted transfer; ``is_done`` also drives the library."""

    def __init__(self, agent: NixlAgent, handle: Any, is_done: bool, peer: str) -> None:
        self._agent = agent
        self._handle = handle
        self._is_done = is_done
        self._peer = peer
        self._pool: NDArray[np.uint8] | None = None

    def keep(self, pool: NDArray[np.uint8]) -> None:
        """Hold a pool until the transfer is over, registered and mapped, whoever lets go of it meanwhile."""
        if not self._is_done:
            self._agent.register(address_of(pool), pool.nbytes)
            self._pool = pool

    def is_done(self) -> bool:
        """Raises TransportError when it failed; the library is through with the memory then too."""
        if self._is_done:
            return True
        try:
            with self._agent.telling(self._peer):
                try:
                    self._is_done = self._agent.api.check_xfer_state(self._handle) == "DONE"
                except self._agent.errors:
                    self._is_done = True
                    raise
                finally:
                    if self._is_done:
                        self._handle.release()
        finally:
            if self._is_done and self._pool is not None:
                pool, self._pool = self._pool, None
                self._agent.deregister(address_of(pool), pool.nbytes)
        return self._is_done


class NixlPeer(PoolMover):
    """What one connection moves bytes by: a Mover whose addresses are those of the peer's process."""

    min_piece_nbytes = MIN_PIECE_NBYTES

    def __init__(self, agent: NixlAgent, name: str, address: str) -> None:
        self.agent = agent
        self.name = name
        #: Ask the peer to drive its library for a second, where it may not be doing so by itself.
        self.nudge: Callable[[], None] = lambda: None
        self._address = address

    def read(self, here: int, there: int, nbytes: int) -> NixlPosted:
        return self.post("READ", _row(here, nbytes), _row(there, nbytes))

    def write(self, here: int, there: int, nbytes: int) -> NixlPosted:
        return self.post("WRITE", _row(here, nbytes), _row(there, nbytes))

    def write_from(
        self, pool: NDArray[np.uint8], offset: NDArray[np.int64], nbytes: NDArray[np.int64], there: int
    ) -> NixlPosted:
        """Pieces of a registered pool, one after the other, to address ``there``."""
        at = nbytes.cumsum() - nbytes
        posted = self.post("WRITE", rows(address_of(pool), offset, nbytes), rows(there, at, nbytes))
        posted.keep(pool)
        return posted

    def post(self, operation: str, here: NDArray[np.uint64], there: NDArray[np.uint64]) -> NixlPosted:
        """Start one transfer. Rows are address, bytes, device: uint64, one a piece.

        Over cma it is over when this returns. Raises TransportError; nothing moves then.
        """
        api = self.agent.api
        with self.agent.telling(self._address):
            handle = api.initialize_xfer(
                operation, api.get_xfer_descs(here, "DRAM"), api.get_xfer_descs(there, "DRAM"), self.name
            )
            is_done = api.transfer(handle) == "DONE"
            if is_done:
                handle.release()
        return NixlPosted(self.agent, handle, is_done, self._address)

    def progress(self) -> None:
        self.agent.progress()


class NixlAgent:
    """Registered memory and known peers of this process. Thread-safe; never ends before the process."""

    def __init__(self) -> None:
        problem = missing()
        if problem:
            raise LocalError(problem, next_step=INSTALL)
        package = _package()
        assert package is not None
        self.name = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
        self.paths = PathLog()
        with self.paths.recording():
            self.api: Any = _make(package, self.name)
        bindings = importlib.import_module(f"{package}._bindings")
        #: What the library raises; it has no common base of its own.
        self.errors: tuple[type[Exception], ...] = tuple(
            value for name, value in vars(bindings).items() if re.fullmatch("nixl.*Error", name)
        )
        # Held in each call of the library, which takes one at a time anyway; after ``_lock``.
        self.calling = threading.Lock()
        self.is_over = False
        self._process = os.getpid()
        atexit.register(self._end)
        self._lock = threading.Lock()
        self._peers: Counter[str] = Counter()
        self._part_until, self._is_parting = 0.0, False
        self._registered: Counter[tuple[int, int]] = Counter()
        #: Windows of copies, and places for a few bytes, which are read by those who hold windows.
        self.arena, self.peeks = Arena("NIXL"), Arena("NIXL", PEEK_NBYTES)
        #: Held while a connection finds out its path, so that the log's news are its own.
        self.proving = threading.Lock()
        #: Known bytes, by which a peer sees that it reads the right process; no pair's window is theirs.
        self.cookie = secrets.token_bytes(16)
        self.cookie_address = self.arena.keep(self.cookie)
        self.register(self.arena.address, self.arena.nbytes)
        self.register(self.peeks.address, self.peeks.nbytes)

    def telling(self, peer: str, phase: str = "move") -> _Telling:
        """Turn the library's exceptions into TransportError, for the time of a block."""
        return _Telling(self, peer, phase)

    def _end(self) -> None:
        """No thread is in the library, or comes into it, when Python ends.

        One that came back out of it then would find no Python to come back to, and its end within the
        library's code is an abort of the process.
        """
        if os.getpid() == self._process and self.calling.acquire(timeout=_END_SECONDS):
            self.is_over = True
            self.calling.release()

    def register(self, address: int, nbytes: int) -> None:
        """Make one region known to the library; counted, so that several may ask for the same one."""
        with self._lock:
            self._registered[address, nbytes] += 1
            if self._registered[address, nbytes] == 1:
                with self.telling("this process", "register"):
                    self.api.register_memory(_region(address, nbytes), "DRAM")

    def deregister(self, address: int, nbytes: int) -> None:
        """Undo one ``register``. Nothing may be moving in the region."""
        with self._lock:
            self._registered[address, nbytes] -= 1
            if not self._registered[address, nbytes]:
                del self._registered[address, nbytes]
                with self.calling, contextlib.suppress(*self.errors):
                    self.api.deregister_memory(self.api.get_reg_descs(_region(address, nbytes), "DRAM"))

    def metadata(self, *regions: tuple[int, int]) -> bytes:
        """What a peer's agent needs to reach this one, its windows, and regions of it."""
        every = (*regions, (self.arena.address, self.arena.nbytes))
        rows = [row for region in every for row in _region(*region)]
        with self._lock, self.telling("this process", "connect"):
            descs = self.api.get_reg_descs(rows, "DRAM")
            return bytes(self.api.get_partial_agent_metadata(descs, True, ["UCX"]))

    def meet(self, name: str, metadata: bytes, address: str) -> NixlPeer:
        """Get to know a peer's agent; counted by ``part``. Raises TransportError."""
        with self._lock:
            if name != self.name:
                with self.telling(address, "connect"):
                    found = self.api.add_remote_agent(metadata)
                found = found.decode() if isinstance(found, bytes) else found
                if found != name:
                    raise TransportError(
                        f"the metadata is of agent {found!r}, not of {name!r}",
                        phase="connect",
                        peer=address,
                        now_true="nothing is held",
                        next_step="run the same kvferry on both sides",
                    )
            self._peers[name] += 1
        return NixlPeer(self, name, address)

    def part(self, peer: NixlPeer) -> None:
        """One connection to the peer is over."""
        with self._lock:
            self._peers[peer.name] -= 1
            if not self._peers[peer.name]:
                del self._peers[peer.name]
                if peer.name != self.name:
                    with self.calling, contextlib.suppress(*self.errors):
                        self.api.remove_remote_agent(peer.name)
                    self._part_until = time.monotonic() + PARTING_SECONDS
                    if not self._is_parting:
                        self._is_parting = True
                        threading.Thread(target=self._parting, name="kvferry parts nixl", daemon=True).start()

    def _parting(self) -> None:
        """Sockets to a peer that was let go of are closed only while the library is driven."""
        while True:
            self.progress()
            time.sleep(1e-3)
            with self._lock:
                if time.monotonic() >= self._part_until:
                    self._is_parting = False
                    return

    def progress(self) -> None:
        """Let the library do what peers wait for."""
        with self.calling, contextlib.suppress(*self.errors):  # of a peer that is gone; its transfers say so
            if not self.is_over:
                self.api.get_new_notifs()


class _Telling:
    """No generator: each small copy goes through two of these."""

    def __init__(self, agent: NixlAgent, peer: str, phase: str) -> None:
        self._agent = agent
        self._peer = peer
        self._phase = phase

    def __enter__(self) -> None:
        self._agent.calling.acquire()
        if self._agent.is_over:
            self._agent.calling.release()
            raise TransportError("this process ends", phase=self._phase, peer=self._peer)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._agent.calling.release()
        if isinstance(error, self._agent.errors):
            raise TransportError(
                f"NIXL reports {type(error).__name__.removeprefix('nixl')}: {error}",
                phase=self._phase,
                peer=self._peer,
                now_true="some of the destination bytes may have changed",
                next_step="see whether the peer is alive, then connect again",
            ) from error


def _package() -> str | None:
    return next((name for name in PACKAGES if _has_api(name)), None)


def _has_api(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{name}._api") is not None
    except ModuleNotFoundError:
        return False


def _make(package: str, name: str) -> Any:
    try:
        api = importlib.import_module(f"{package}._api")
    except ImportError as error:
        raise LocalError(f"NIXL cannot be imported: {error}", next_step=INSTALL) from error
    _quiet(package)
    _end_without_unloading()
    config = api.nixl_agent_config(
        enable_prog_thread=False,
        enable_listen_thread=False,
        backends=["UCX"],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    try:
        agent = api.nixl_agent(name, config)
    except Exception as error:  # the library raises what it likes
        raise _no_backend(error) from error
    if "UCX" not in agent.backends:
        raise _no_backend(None)
    return agent


def _end_without_unloading() -> None:
    """Have the process end, with its own status, before the loader runs the exit code of libraries.

    NIXL's wheel brings libnl-route; where the system's is there too (libibverbs loads it), the two
    end each other's tables and every exit of a process with an agent is a segmentation fault. Python's
    own exit is over by then, and what C has buffered is written first: handlers run last to first.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not glibc: its exit was not seen to fail
        libc.on_exit(libc["_exit"], None)
        libc["__cxa_atexit"](libc.fcloseall, None, None)


def _quiet(package: str) -> None:
    """Its loggers write to standard output, which is for results: they go where kvferry's go."""
    for name in list(logging.Logger.manager.loggerDict):
        if name.split(".")[0] in {package, "nixl"}:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.WARNING)


def _no_backend(error: Exception | None) -> KVFerryError:
    tls = os.environ.get("UCX_TLS")
    why = f" (UCX_TLS={tls})" if tls else ""
    return LocalError(
        f"NIXL's UCX finds no way to carry anything{why}: {error or 'the plugin did not load'}",
        phase="connect",
        peer="this process",
        next_step="unset UCX_TLS, or let it name a network transport such as tcp or rc beside shm",
    )


def _region(address: int, nbytes: int) -> list[tuple[int, int, int, str]]:
    return [(address, nbytes, 0, "")]


def _row(address: int, nbytes: int) -> NDArray[np.uint64]:
    return np.array([[address, nbytes, 0]], np.uint64)


def rows(base: int, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Address, bytes and device of each piece, as NIXL takes them: uint64, [pieces, 3]."""
    if len(nbytes) <= FEW:
        pieces = zip(offset.tolist(), nbytes.tolist(), strict=True)
        return np.array([(base + at, size, 0) for at, size in pieces], np.uint64)
    table = np.zeros((len(nbytes), 3), np.uint64)
    table[:, 0] = offset.astype(np.uint64) + np.uint64(base)
    table[:, 1] = nbytes
    return table
