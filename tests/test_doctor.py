"""The doctor tries transports for real, says why those fail that do, and of each problem the fix."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from kvferry.cli import run
from kvferry.cli.doctor import _show
from kvferry.probe import doctor
from kvferry.probe.doctor import Examination
from kvferry.probe.facts import host_facts
from kvferry.probe.findings import Finding, compare_nodes, findings_of
from kvferry.transport import registry
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
    ],
)
def test_each_problem_has_its_fix(change: dict[str, str], about: str, word: str) -> None:
    """One fact that is not good is one finding, with something to do about it."""
    (finding,) = findings_of(GOOD | change)
    assert finding.about == about
    assert word in finding.fix


def test_two_nodes_that_do_not_fit() -> None:
    """Unlike versions, unlike MTUs."""
    same = ({"mtu": "9000"}, {"mtu": "9000"}, {"kvferry": "1"}, {"kvferry": "1"})
    assert compare_nodes(*same) == []
    found = compare_nodes({"mtu": "9000"}, {"mtu": "1500"}, {"kvferry": "1"}, {"kvferry": "2"})
    assert [each.about for each in found] == ["versions", "mtu"]
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
