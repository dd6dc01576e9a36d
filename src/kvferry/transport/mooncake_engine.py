"""The one Mooncake transfer engine of a process, and the rules that keep it safe; see docs/decisions/0132.

Only staging windows are registered with it, never a pool. Each transfer is one contiguous write
between two windows, submitted by itself: its status is its own, which that of a batch is not.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.errors import LocalError, TransportError
from kvferry.transport.windows import Arena

__all__ = ["INSTALL", "MooncakeEngine", "MooncakePeer", "MooncakePosted", "missing", "shared_engine"]

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
# Before it, a write over tcp was reported as done before its bytes had landed, or the import failed.
OLDEST = (0, 3, 13)
INSTALL = "pip install mooncake-transfer-engine-non-cuda"
# The engine's own limit of 1,024 queued transfers a peer fails what comes above it, at once.
SETTINGS = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
PENDING, DONE = 0, 1
DEVICES = "/sys/class/infiniband"

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_engines: dict[int, MooncakeEngine] = {}


def missing() -> str | None:
    """Why Mooncake cannot be used here, with the fix; None if it looks as if it could."""
    try:
        is_there = importlib.util.find_spec("mooncake.engine") is not None
    except ModuleNotFoundError:
        is_there = False
    except (ImportError, OSError) as error:
        return f"Mooncake is installed and cannot be imported: {error}: {INSTALL} --force-reinstall"
    if not is_there:
        return f"Mooncake's transfer engine is not installed: {INSTALL}"
    found = next((_version(name) for name in DISTRIBUTIONS if _version(name) is not None), None)
    if found is None or _numbers(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"Mooncake's transfer engine {found or ''} is older than {oldest}: {INSTALL} --upgrade"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"Mooncake's transfer engine cannot be loaded: {error}: apt-get install libibverbs1"
    return None


def lacking(protocol: str, device: str) -> str | None:
    """Which device is not there for a protocol, with the fix; None where nothing is lacking.

    The engine itself does not say: told rdma where there is none, it comes up and carries all by tcp.
    """
    if protocol != "rdma":
        return None
    there = sorted(os.listdir(DEVICES)) if os.path.isdir(DEVICES) else []
    if not there:
        return (
            f"protocol=rdma, and there is no RDMA device in {DEVICES}: load the driver, give the container "
            "the device, or use protocol=tcp"
        )
    absent = [name for name in device.split(",") if name and name not in there]
    return f"device={device}: there is no {absent[0]}, only {', '.join(there)}" if absent else None


def shared_engine(host: str, protocol: str, device: str) -> MooncakeEngine:
    """This process's engine, made at the first call.

    ``host`` is the address under which peers reach it. Raises LocalError when Mooncake is missing, does
    not come up, came up already in another way, or lacks the protocol's device.
    """
    wanted = host, protocol, device
    if problem := lacking(protocol, device):
        raise LocalError(
            f"Mooncake: {problem}",
            phase="connect",
            peer="this process",
            next_step="`kvferry doctor` tells what this node has",
        )
    with _lock:
        engine = _engines.get(os.getpid())
        if engine is None:
            engine = _engines[os.getpid()] = MooncakeEngine(*wanted)
        if engine.made_for != wanted:
            raise LocalError(
                f"this process's Mooncake engine is for {engine.made_for}, not for {wanted}",
                phase="connect",
                peer="this process",
                next_step="use one host address, protocol and device in a process",
            )
        return engine


class MooncakePosted:
    """One submitted write."""

    def __init__(self, engine: MooncakeEngine, batch: int, peer: str) -> None:
        self._engine = engine
        self._batch = batch
        self._peer = peer
        self._is_done = False

    def is_done(self) -> bool:
        """Raises TransportError when it failed; it is over then too."""
        if self._is_done:
            return True
        # The call frees a submission that is over: it must not be asked again.
        status = self._engine.api.transfer_check_status(self._batch)
        if status == PENDING:
            return False
        self._is_done = True
        if status != DONE:
            raise _failed(f"a write ended with status {status}", self._peer)
        return True


class MooncakePeer:
    """What one connection moves bytes by; the peer is known by its segment's name."""

    def __init__(self, engine: MooncakeEngine, segment: str, address: str) -> None:
        self._engine = engine
        self._segment = segment
        self._address = address

    def read_now(self, here: int, there: int, nbytes: int) -> None:
        """Read a few bytes, and wait for them. Raises TransportError."""
        if self._engine.api.transfer_sync_read(self._segment, here, there, nbytes) != 0:
            raise _failed(f"segment {self._segment} cannot be read", self._address)

    def write(self, here: int, there: int, nbytes: int) -> MooncakePosted:
        """From address ``here`` to ``there`` in the peer's memory; both lie in windows."""
        batch = self._engine.api.transfer_submit_write(self._segment, here, there, nbytes)
        # Numbers of submissions are addresses; a failure is -1 in whichever width.
        if batch in (0, -1, (1 << 64) - 1):
            raise _failed("a write was not taken", self._address)
        return MooncakePosted(self._engine, batch, self._address)


class MooncakeEngine:
    """The engine and the windows. Thread-safe; never ends before the process."""

    def __init__(self, host: str, protocol: str, device: str) -> None:
        problem = missing()
        if problem:
            raise LocalError(problem, next_step=INSTALL)
        for name, value in SETTINGS.items():  # read when the library is loaded
            os.environ.setdefault(name, value)
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise LocalError(f"Mooncake cannot be imported: {error}", next_step=INSTALL) from error
        self.made_for = host, protocol, device
        self.api: Any = library.TransferEngine()
        status = self.api.initialize(host, "P2PHANDSHAKE", protocol, device)
        if status != 0:
            raise LocalError(
                f"Mooncake's engine does not come up for {protocol} on {host}: status {status}",
                phase="connect",
                peer="this process",
                next_step="see that ports from 15000 to 17000 are free, or choose another protocol or device",
            )
        self.segment = f"{host}:{self.api.get_rpc_port()}"
        _log.warning("Mooncake listens on all addresses of this host, two ports from 15000 to 17000")
        self.arena = Arena("Mooncake")
        self.cookie = secrets.token_bytes(16)
        self.cookie_address = self.arena.keep(self.cookie)
        status = self.api.register_memory(self.arena.address, self.arena.nbytes)
        if status != 0:
            raise LocalError(
                f"Mooncake cannot register {self.arena.nbytes} bytes: status {status}",
                next_step="raise the limit on locked memory",
            )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _failed(what: str, peer: str) -> TransportError:
    return TransportError(
        f"Mooncake: {what}",
        phase="move",
        peer=peer,
        now_true="some of the destination bytes may have changed",
        next_step="see whether the peer is alive, then connect again",
    )
