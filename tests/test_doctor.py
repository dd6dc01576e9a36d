"""The doctor tries transports for real, says why those fail that do, and of each problem the fix."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli import run
from kvferry.cli.doctor import _show, _show_transports
from kvferry.errors import LocalError
from kvferry.probe import doctor
from kvferry.probe.doctor import Examination, TransportState
from kvferry.probe.facts import host_facts, transport_facts
from kvferry.probe.findings import Finding, compare_nodes, findings_of
from kvferry.transport import mooncake_engine, nixl_agent, registry
from probe_kit import AgentProcess, agents

GOOD = {
    "cpu": "AMD EPYC",
    "machine": "x86_64",
    "cpu_features": "aes avx2",
    "cpus": "16",
    "huge_pages": "yes",
    "memory_available_bytes": str(64 << 30),
    "process_vm_readv": "yes",
    "cubic": "yes",
    "congestion_control": "cubic",
    "tcp_rmem": "4096 131072 33554432",
    "tcp_wmem": "4096 16384 33554432",
    "open_files": "65536",
    "locked_memory": "unlimited",
    "interface": "eth0",
    "mtu": "9000",
    "speed_mbit": "100000",
}


def test_a_good_node_has_no_findings() -> None:
    """Nor has one of which nothing could be read."""
    assert findings_of(GOOD) == []
    assert findings_of({}) == []


@pytest.mark.parametrize(
    ("change", "about", "word"),
    [
        ({"huge_pages": "no"}, "hugepages", "shmem_enabled"),
        ({"memory_available_bytes": str(1 << 30)}, "memory", "smaller payload"),
        ({"cpu_features": "avx2"}, "cpu", "host-passthrough"),
        ({"cpus": "1"}, "cpu", "cpuset"),
        ({"open_files": "1024"}, "ulimits", "ulimit -n"),
        ({"rdma_devices": "mlx5_0", "locked_memory": "65536"}, "ulimits", "ulimit -l"),
        ({"cubic": "no", "congestion_control": "bbr"}, "tcp", "tcp_cubic"),
        ({"tcp_rmem": "4096 87380 212992"}, "tcp", "tcp_rmem"),
        ({"mtu": "1500"}, "mtu", "mtu 9000"),
        ({"process_vm_readv": "no"}, "permissions", "ptrace_scope"),
        ({"ucx_tls": "rc,cuda_copy"}, "devices", "/dev/infiniband"),
        ({"ucx_net_devices": "mlx5_0:1,eth0", "interfaces": "lo eth0"}, "devices", "eth0 lo"),
        ({"rdma_devices": "mlx5_0", "rdma_access": "no"}, "devices", "the group that owns it"),
    ],
)
def test_each_problem_has_its_fix(change: dict[str, str], about: str, word: str) -> None:
    """One fact that is not good is one finding, with something to do about it."""
    (finding,) = findings_of(GOOD | change)
    assert finding.about == about
    assert word in finding.fix


@pytest.mark.parametrize(
    "change",
    [
        {"ucx_tls": "tcp"},
        {"ucx_tls": "cuda_copy,cma,tcp"},
        {"ucx_tls": "all"},
        {"ucx_tls": "rc", "rdma_devices": "mlx5_0", "rdma_access": "yes"},
        {"ucx_net_devices": "mlx5_0:1", "rdma_devices": "mlx5_0", "interfaces": "lo"},
        {"ucx_net_devices": "lo", "interfaces": "lo"},
    ],
)
def test_devices_that_are_there_are_no_problem(change: dict[str, str]) -> None:
    """What UCX may use, and finds."""
    assert findings_of(GOOD | change) == []


NIXL_FIX, MOONCAKE_FIX = nixl_agent.INSTALL, mooncake_engine.INSTALL


@pytest.mark.parametrize(
    ("spec", "found", "why"),
    [
        (None, None, f"NIXL is not installed: {NIXL_FIX}"),
        (ImportError("libucp.so.0: no such file"), None, f"libucp.so.0: no such file: {NIXL_FIX} --force"),
        ("nixl_cu12", None, f"not as a package of pip: {NIXL_FIX}"),
        ("nixl_cu12", "1.3.1", f"nixl-cu12 1.3.1 is older than 1.4: {NIXL_FIX} --upgrade"),
        ("nixl_cu13", "1.10.0", ""),
    ],
)
def test_what_is_wrong_with_nixl_is_told_with_the_fix(
    spec: Any,
    found: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not there, broken, not pip's, too old."""

    def find(name: str) -> object:
        if isinstance(spec, Exception):
            raise spec
        return object() if name == f"{spec}._api" else None

    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", find)
    monkeypatch.setattr(nixl_agent, "version", versions({"nixl-cu12": found, "nixl-cu13": found}))
    assert (why in told_of("nixl", capsys)) if why else told_of("nixl", capsys) == ""


@pytest.mark.parametrize(
    ("spec", "found", "why"),
    [
        (None, None, f"is not installed: {MOONCAKE_FIX}"),
        (ImportError("no symbol"), None, f"no symbol: {MOONCAKE_FIX} --force-reinstall"),
        (object(), "0.3.12", f"0.3.12 is older than 0.3.13: {MOONCAKE_FIX} --upgrade"),
        (OSError("libibverbs.so.1"), "0.3.13.post1", "libibverbs.so.1: apt-get install libibverbs1"),
        (object(), "0.10.0", ""),
    ],
)
def test_what_is_wrong_with_mooncake_is_told_with_the_fix(
    spec: Any,
    found: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same, and the system library that its wheel links against and does not bring."""

    def find(_name: str) -> object:
        if isinstance(spec, ImportError):
            raise spec
        return spec

    real = mooncake_engine.ctypes.CDLL

    def load(name: str | None, *more: Any, **fields: Any) -> object:
        if name != "libibverbs.so.1":
            return real(name, *more, **fields)
        if isinstance(spec, OSError):
            raise spec
        return object()

    monkeypatch.setattr(mooncake_engine.importlib.util, "find_spec", find)
    monkeypatch.setattr(mooncake_engine, "version", versions({mooncake_engine.DISTRIBUTIONS[0]: found}))
    monkeypatch.setattr(mooncake_engine.ctypes, "CDLL", load)
    told = told_of("mooncake", capsys)
    assert (why in told) if why else told == ""


def test_mooncake_is_not_told_rdma_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come up all the same and carry everything by tcp; no device, and another than is named."""
    monkeypatch.setattr(mooncake_engine, "DEVICES", str(tmp_path / "infiniband"))
    assert mooncake_engine.lacking("tcp", "") is None
    for device, fix in (("", "or use protocol=tcp"), ("mlx5_0", "or use protocol=tcp")):
        with pytest.raises(LocalError, match=fix):
            mooncake_engine.shared_engine("127.0.0.1", "rdma", device)
    (tmp_path / "infiniband" / "mlx5_1").mkdir(parents=True)
    assert mooncake_engine.lacking("rdma", "mlx5_1") is None
    with pytest.raises(LocalError, match="there is no mlx5_0, only mlx5_1"):
        mooncake_engine.shared_engine("127.0.0.1", "rdma", "mlx5_0")


def versions(known: dict[str, str | None]) -> Callable[[str], str]:
    def version(name: str) -> str:
        found = known.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    return version


def told_of(scheme: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the doctor says of a transport; "" where it works."""
    states = [
        TransportState(each.scheme, not each.unavailable, each.unavailable) for each in transport_facts()
    ]
    _show_transports([state for state in states if state.scheme == scheme], "")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    return "" if line.split(maxsplit=1)[1].strip() == "works" else line


def test_two_nodes_that_do_not_fit() -> None:
    """Unlike versions, unlike MTUs."""
    same = ({"mtu": "9000"}, {"mtu": "9000"}, {"kvferry": "1"}, {"kvferry": "1"})
    assert compare_nodes(*same) == []
    found = compare_nodes({"mtu": "9000"}, {"mtu": "1500"}, {"kvferry": "1"}, {"kvferry": "2"})
    assert [each.about for each in found] == ["versions", "mtu"]
    nixl = compare_nodes({}, {}, {"nixl-cu12": "1.5.1"}, {"nixl-cu12": "1.6.0"})
    assert [each.fix for each in nixl] == ["pip install nixl-cu12==1.5.1 on both"]
    assert all(isinstance(each, Finding) and each.fix for each in found)


def test_facts_of_this_host_can_be_read() -> None:
    """What findings are made from is there, by the same names."""
    facts = host_facts("tcp://127.0.0.1:1")
    assert facts["mtu"] == Path("/sys/class/net/lo/mtu").read_text().strip()
    assert {"kernel", "cpus", "open_files", "huge_pages", "tcp_rmem", "cubic"} <= facts.keys()
    assert all(facts.values())


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with agents(["--listen", "127.0.0.1:0", "--name", "there"]) as found:
        yield found[0]


@pytest.mark.slow
def test_a_peer_is_tried_by_every_transport(
    agent: AgentProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real handoffs say what works and by which path; what is missing here says why; the best is named."""
    known = registry.entry_points(group=registry.GROUP)
    pigeon = EntryPoint("pigeon", "no_such_module:Pigeon", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_group: [*known, pigeon])
    assert run(["doctor", agent.address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (peer,) = told["peers"]
    assert peer["name"] == "there"
    assert peer["would_use"] == "shm"
    states = {state["scheme"]: state for state in peer["transports"]}
    assert states["shm"] == {"scheme": "shm", "works": True, "why": "", "path": "mapped"}
    assert states["tcp"] == {"scheme": "tcp", "works": True, "why": "", "path": "tcp"}
    assert not states["pigeon"]["works"]
    assert "no_such_module" in states["pigeon"]["why"]
    # In words, too: each once, and the one that would be used.
    _show(msgspec.convert(told, Examination))
    text = capsys.readouterr().out
    assert "works, path mapped; this one would be used" in text
    assert "does not work: not here: transport 'pigeon'" in text


def test_a_ping_tells_who_answers_and_a_frozen_agent_does_not(
    agent: AgentProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a liveness probe needs: a stopped process, whose port still takes connections, is not alive."""
    gone = "tcp://127.0.0.1:1"
    assert run(["doctor", agent.address, "--ping"]) == 0
    assert capsys.readouterr().out == f"there at {agent.address} answers\n"
    assert run(["doctor", agent.address, gone, "--ping", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["answered"]] == ["there"]
    assert "cannot connect" in told["unreachable"][gone]
    monkeypatch.setattr(doctor.ping, "__kwdefaults__", {"tls": None, "timeout_seconds": 0.5})
    agent.process.send_signal(signal.SIGSTOP)
    try:
        assert run(["doctor", agent.address, "--ping"]) == 1
    finally:
        agent.process.send_signal(signal.SIGCONT)
    assert f"{agent.address}: not reached" in capsys.readouterr().out
    assert run(["doctor", "--ping"]) == 2


def test_a_peer_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1: nothing can be said about it."""
    assert run(["doctor", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "cannot connect" in err


@pytest.mark.parametrize("peer", ["nonsense", "pigeon://x", "127.0.0.1:99999"])
def test_a_peer_without_sense_is_bad_input(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line."""
    assert run(["doctor", peer]) == 2
    assert capsys.readouterr().err.count("\n") == 1
