"""Probes between hosts: network namespaces with shaped, asymmetric and cut links (root and iproute2)."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import wait_until
from kvferry.link import Mode, load_links
from kvferry.testing.namespaces import Namespaces
from kvferry.transport.certificates import init_authority, issue
from probe_kit import agent_options, agents, children, namespaces, probe, probing

pytestmark = pytest.mark.slow
# Few and small copies: the links are what is slow here, and two cores run all of it.
SMALL = ("--mode", "pull", "--repeat", "2", "--seconds", "200", "--json")


@pytest.mark.timeout(300)
def test_eight_hosts_the_slow_the_cut_and_the_dead_are_named(tmp_path: Path) -> None:
    """56 ordered pairs: one node is slow to all, one pair is cut, one agent dies; the rest is measured."""
    out = tmp_path / "links.json"
    with namespaces(8) as hosts:
        for number in range(8):
            hosts.shape(number, 1e9)
        hosts.shape(3, 10e6)  # n3 sends slowly
        hosts.cut(5, hosts.hosts[6])  # n5 -> n6, and with it every word of that pair
        options = [agent_options(hosts, number) for number in range(8)]
        with agents(*options, inside=[hosts.inside(number) for number in range(8)]) as found:
            addresses = [agent.address for agent in found]
            command = (*addresses, "--bytes", "256KiB", "--out", str(out), *SMALL)
            with probing(*command, inside=hosts.inside(0)) as process:
                wait_until(lambda: bool(children(found[7].process.pid)), 120)
                found[7].kill()
                stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 1, stderr
    told = json.loads(stdout)
    names = [f"n{number}" for number in range(8)]
    measured = {(row["from"], row["to"]) for row in told["pairs"]}
    failed = {(row["from"], row["to"]) for row in told["failed"]}
    assert measured | failed == set(itertools.permutations(names, 2))
    assert not measured & failed
    cut = {("n5", "n6"), ("n6", "n5")}
    dead = {pair for pair in itertools.permutations(names, 2) if "n7" in pair}
    assert failed >= cut
    assert failed - cut <= dead
    assert len(failed - cut) > 7, "it died before its pairs were measured"
    slow = {outlier["pair"].partition(" over")[0]: outlier for outlier in told["outliers"]}
    for name in names[:3] + names[4:7]:
        assert "this node sends slowly to all" in slow[f"n3 -> {name}"]["reasons"]
    for pair in load_links(out).pairs:
        assert pair.path == "tcp-plain"
        if pair.from_node == "n3":  # 256 KiB need 184 ms at 10 Mb/s, beyond the burst; others 2 ms
            assert pair.fit(Mode.PULL).at_least(256 << 10, 8) > 0.15


@pytest.mark.timeout(300)
def test_an_asymmetric_pair_has_two_rates() -> None:
    """Each direction is its own pair; the larger rate is of the direction that has it."""
    with namespaces(2) as hosts:
        hosts.shape(0, 20e6)
        hosts.shape(1, 500e6)
        options = [agent_options(hosts, number) for number in range(2)]
        with agents(*options, inside=[hosts.inside(number) for number in range(2)]) as found:
            addresses = [agent.address for agent in found]
            done = probe(
                *addresses, "--bytes", "512KiB", "--line-rate", "20 Mb/s", *SMALL, inside=hosts.inside(0)
            )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (predicted,) = told["predicted"]
    shares = {row["from"]: row["share_of_line_rate"] for row in predicted["pairs"]}
    # The token bucket's burst goes at once; how much of the rate is reached is the load of this machine.
    assert 0 < shares["n0"] <= 1.2
    assert shares["n1"] > 2 * shares["n0"]


@pytest.mark.timeout(300)
def test_a_real_proxy_between_two_hosts_is_measured_and_named(tmp_path: Path) -> None:
    """Data goes through stunnel and nowhere else; the profile says so, and bytes are those that were sent."""
    if shutil.which("stunnel") is None:
        pytest.skip("no stunnel here: apt-get install stunnel4")
    out = tmp_path / "links.json"
    with namespaces(2) as hosts, contextlib.ExitStack() as stack:
        options = [agent_options(hosts, number, "--data", f"tcp://{BEHIND}") for number in range(2)]
        found = stack.enter_context(agents(*options, inside=[hosts.inside(n) for n in range(2)]))
        command = (*(agent.address for agent in found), "--via", PROXY, "--bytes", "256KiB", *SMALL)
        done = probe(*command, inside=hosts.inside(0))
        assert done.returncode == 1
        told = json.loads(done.stdout)
        assert told["pairs"] == []
        assert all("cannot connect" in row["reason"] for row in told["failed"])
        init_authority(tmp_path)
        for number in range(2):
            stack.enter_context(stunnel(hosts, number, tmp_path))
        done = probe(*command, "--out", str(out), inside=hosts.inside(0))
        assert done.returncode == 0, done.stderr + done.stdout
    links = load_links(out)
    assert {(pair.from_node, pair.to_node, pair.via) for pair in links.pairs} == {
        ("n0", "n1", PROXY),
        ("n1", "n0", PROXY),
    }
    assert f"via {PROXY}" in links.pairs[0].pair


def test_a_program_that_is_ended_leaves_no_namespace() -> None:
    """SIGTERM in the middle: exit status 143, and every namespace that it made is gone."""
    with namespaces(1):
        program = (
            "import sys, time; from kvferry.testing.namespaces import Namespaces\n"
            "with Namespaces(2) as hosts: print(*hosts.names, flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            names = process.stdout.readline().split()
            assert len(names) == 2
            assert all(Path("/run/netns", name).exists() for name in names)
            process.terminate()
            assert process.wait(30) == 143
    assert not any(Path("/run/netns", name).exists() for name in names)


PROXY, BEHIND, TUNNEL = "127.0.0.1:9000", "127.0.0.1:7401", 9443


@contextlib.contextmanager
def stunnel(hosts: Namespaces, number: int, folder: Path) -> Iterator[None]:
    """On each host a proxy that encrypts to the other's, and one that opens what comes from there."""
    pem = issue(folder, f"tunnel-{number}", hosts=(hosts.hosts[number],))
    config = folder / f"stunnel-{number}.conf"
    config.write_text(
        f"foreground = yes\npid =\ncert = {pem}\n"
        f"[in]\naccept = {hosts.hosts[number]}:{TUNNEL}\nconnect = {BEHIND}\n"
        f"[out]\nclient = yes\naccept = {PROXY}\nconnect = {hosts.hosts[1 - number]}:{TUNNEL}\n"
        f"verifyChain = yes\nCAfile = {folder / 'ca.pem'}\n"
    )
    command = [*hosts.inside(number), "stunnel", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = itertools.takewhile(lambda line: "Configuration successful" not in line, process.stderr)
            assert "[!]" not in "".join(said)
            assert process.poll() is None
            yield
        finally:
            process.terminate()
            process.communicate(timeout=20)
