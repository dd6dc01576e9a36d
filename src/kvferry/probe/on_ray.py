"""Agents as Ray actors, one on every node of a cluster, for as long as one probe lasts.

The actors are this driver's: Ray ends them with it, however it ends. Off loopback they speak encrypted,
by certificates of an authority that is made for this probe and kept nowhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError, TransportError
from kvferry.probe.addresses import is_loopback
from kvferry.probe.agent import Agent
from kvferry.transport.security import Identity, Plain

__all__ = ["START_SECONDS", "RayAgents", "ray_agents"]

#: A worker process of Ray imports kvferry and makes a certificate's files: a second or two where it is quiet.
START_SECONDS = 60.0
# Of `ray status`: a second or two where it is quiet.
_REACH_SECONDS = 20.0
_ME = "kvferry-probe"


class RayAgents(msgspec.Struct, frozen=True):
    """Agents that answer, who this side is to them, and the nodes on which none came up, with the reason."""

    addresses: tuple[str, ...]
    identity: Identity | None
    failed: dict[str, str]


class _Start(msgspec.Struct, frozen=True):
    """What the agent of one node is told; without ``pem`` and ``authority`` it sends in plain only."""

    listen: str
    name: str
    plain: Plain | None
    pem: bytes = b""
    authority: bytes = b""


class _Told(msgspec.Struct, frozen=True):
    """What each node's agent is told, by Ray's id of the node, and who this side is."""

    starts: dict[str, _Start]
    identity: Identity | None


class _NodeAgent:
    """The actor: an agent in the event loop that Ray gives it."""

    async def start(self, told: _Start) -> str:
        """Listen; returns the address, or ``! `` and why not: errors come back inside Ray's own."""
        identity = None
        try:
            if told.pem:
                # Files as long as this process, which ends with the probe.
                files = [_in_memory(data) for data in (told.pem, told.authority)]
                identity = Identity.load(*map(_path_of, files))
            self._agent = await Agent.listen(told.listen, name=told.name, tls=identity, plain=told.plain)
        except KVFerryError as error:
            return f"! {error}"
        return self._agent.address


@contextlib.contextmanager
def ray_agents(
    address: str = "auto", *, tls: Sequence[bool] | None = None, start_seconds: float = START_SECONDS
) -> Iterator[RayAgents]:
    """Agents on all living nodes of the Ray cluster at ``address``; every one is ended at the end.

    ``tls``: the passes of the probe, as in ProbePlan: None for encrypted where the nodes' addresses are off
    loopback. Nodes whose agent is not there after ``start_seconds`` are told in ``failed``.
    Raises LocalError without Ray, InputError for an address without sense, TransportError for a cluster that
    cannot be reached, or where fewer than two agents came up.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise LocalError("ray: Ray is not installed", next_step="pip install 'kvferry[ray]'") from error
    _connect(ray, address)
    # Each is ended, even where ending another failed.
    with contextlib.ExitStack() as ending:
        ending.callback(ray.shutdown)
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        with _ended_in_order(), _told(nodes, tls) as told:
            yield _started(ray, ending, told, start_seconds)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends this side like an exception does: Ray's own handler aborts, and leaves files behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _connect(ray: Any, address: str) -> None:
    if "://" in address:
        raise InputError(f"ray: {address!r}: give HOST:PORT of the cluster (or auto), on one of its nodes")
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"ray: {address!r} does not read HOST:PORT")
    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TransportError(
            f"ray: cannot join the cluster at {address}: {_cause(error)}",
            next_step="run this on a node of the cluster, with the Ray and Python that its nodes have",
        ) from error


def _check_answers(address: str) -> None:
    """Raise TransportError where no cluster answers in time.

    By a process of its own: inside this one Ray tries for minutes, and hears no deadline and no Ctrl-C.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    command += [] if address == "auto" else ["--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REACH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        why = f"nothing within {_REACH_SECONDS:g} s"
    else:
        if done.returncode == 0:
            return
        why = _cause(done.stderr or done.stdout)
    raise TransportError(
        f"ray: no cluster answers at {address}: {why}",
        next_step="see `ray status`; HOST:PORT is what `ray start --address` of the workers has",
    ) from None


@contextlib.contextmanager
def _told(nodes: dict[str, Any], tls: Sequence[bool] | None) -> Iterator[_Told]:
    """What to tell the agents; this side's identity is gone at the end."""
    hosts = {node_id: node["NodeManagerAddress"] for node_id, node in nodes.items()}
    away = any(not is_loopback(f"tcp://{_in_brackets(host)}:0") for host in hosts.values())
    sealed = away if tls is None else any(tls)
    plain = Plain.ANYWHERE if tls is not None and not all(tls) else None
    option = "" if sealed == away else f"?plain={'no' if sealed else 'yes'}"
    starts = {
        node_id: _Start(
            listen=f"tcp://{_in_brackets(host)}:0{option}", name=_name_of(nodes, node_id), plain=plain
        )
        for node_id, host in hosts.items()
    }
    if not sealed:
        yield _Told(starts, None)
        return
    pems, me, authority = _certificates(sorted(set(hosts.values())))
    files = [_in_memory(data) for data in (me, authority)]
    try:
        for node_id, start in starts.items():
            starts[node_id] = msgspec.structs.replace(start, pem=pems[hosts[node_id]], authority=authority)
        yield _Told(starts, Identity.load(*map(_path_of, files)))
    finally:
        for file in files:
            os.close(file)


def _certificates(hosts: Sequence[str]) -> tuple[dict[str, bytes], bytes, bytes]:
    """For each host, for this side, and the authority that signed them; the one that signs is forgotten."""
    from kvferry.transport.certificates import AUTHORITY, init_authority, issue  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory(prefix="kvferry-probe-") as name:
        folder = Path(name)
        init_authority(folder, days=1)
        pems = {
            host: issue(folder, f"node-{number}", hosts=(host,), days=1).read_bytes()
            for number, host in enumerate(hosts)
        }
        return pems, issue(folder, _ME, days=1).read_bytes(), (folder / AUTHORITY).read_bytes()


def _started(ray: Any, ending: contextlib.ExitStack, told: _Told, start_seconds: float) -> RayAgents:
    """Start them all at once; ``ending`` knows of each before it is waited for."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    pending: dict[Any, str] = {}
    starts = told.starts
    for node_id, start in starts.items():
        kind = ray.remote(num_cpus=0, max_restarts=0)(_NodeAgent)
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = kind.options(scheduling_strategy=here).remote()
        ending.callback(ray.kill, actor)
        pending[actor.start.remote(start)] = node_id
    addresses: list[str] = []
    failed: dict[str, str] = {}
    deadline = time.monotonic() + start_seconds
    while pending:
        left = max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=left)
        if not ready:
            break
        node_id = pending.pop(ready[0])
        try:
            said = str(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            said = f"! its actor failed: {_cause(error)}; is kvferry installed there, the same as here?"
        if said.startswith("! "):
            failed[starts[node_id].name] = said[2:]
        else:
            addresses.append(said)
    for node_id in pending.values():
        failed[starts[node_id].name] = f"no agent within {start_seconds:g} s; see `ray status` and its log"
    if len(addresses) < 2:
        _raise_too_few(len(addresses), failed, timed_out=bool(pending))
    return RayAgents(tuple(sorted(addresses)), told.identity, failed)


def _raise_too_few(count: int, failed: dict[str, str], *, timed_out: bool) -> None:
    reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
    kind = DeadlineError if timed_out else TransportError
    raise kind(
        f"ray: agents on {count} nodes of {count + len(failed)}, and a pair needs two"
        + (f" ({reasons})" if reasons else ""),
        phase="probe",
        now_true="none is left",
    )


def _name_of(nodes: dict[str, Any], node_id: str) -> str:
    """The host's name; with a piece of Ray's id where several nodes are of one host."""
    host = str(nodes[node_id]["NodeManagerHostname"])[:100]
    is_one = [node["NodeManagerHostname"] for node in nodes.values()].count(host) == 1
    return host if is_one else f"{host}-{node_id[:6]}"


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _in_memory(data: bytes) -> int:
    """A file that is on no disk, and gone with this process or its descriptor."""
    descriptor = os.memfd_create("kvferry-identity", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    return descriptor


def _path_of(descriptor: int) -> str:
    """Where this process and its transfer process open it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _cause(error: BaseException | str) -> str:
    """The last line of Ray's texts is the cause; what comes before it is a traceback of the other process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason is given")[:300]
