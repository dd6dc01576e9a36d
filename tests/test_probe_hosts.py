"""Probes between hosts: network namespaces with shaped, asymmetric and cut links (root and iproute2)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from conftest import wait_until
from kvferry.link import Mode, load_links
from probe_kit import agent_options, agents, children, namespaces, probe, probing

# Few and small copies: the links are what is slow here, and two cores run all of it.
SMALL = ("--mode", "pull", "--repeat", "2", "--seconds", "300", "--json")


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert 0.5 < shares["n0"] <= 1.2  # the token bucket's burst goes at once
    assert shares["n1"] > 2 * shares["n0"]
