"""``kvferry probe --ray`` on a real Ray of several node processes; `make test-ray` has a venv for it.

Whatever becomes of the probe, no agent is left on any node.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import wait_until
from kvferry.cli import run
from kvferry.errors import DeadlineError
from probe_kit import children, probe, probing

pytestmark = [
    # Ray's own code opens files and sockets that it leaves to the collector.
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

NODES = 3
SMALL = ("--bytes", "64KiB", "--mode", "pull", "--json")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of Ray on this host: each a raylet with worker processes of its own."""
    pytest.importorskip("ray", reason="needs Ray: make test-ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # asks nobody outside
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            found.add_node(num_cpus=1)
        found.wait_for_nodes()
        yield found
    finally:
        found.shutdown()


def actors() -> list[psutil.Process]:
    """Worker processes of Ray that are agents now: Ray names a process by its actor."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("_NodeAgent" in word for word in process.info["cmdline"] or ())
    ]


def none_left() -> bool:
    return not actors()


def under_way(process: subprocess.Popen[str], count: int) -> bool:
    """So many agents, each with the transfer process of a probe."""
    assert process.poll() is None, process.communicate()
    try:
        return sum(bool(children(actor.pid)) for actor in actors()) == count
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("more", "sealed"), [((), {True}), (("--tls", "off"), {False}), (("--tls", "both"), {True, False})]
)
def test_all_pairs_of_the_nodes_encrypted_or_as_said(
    cluster: Any, more: tuple[str, ...], sealed: set[bool]
) -> None:
    """Six ordered pairs of three nodes, one object on stdout, and no agent left."""
    if not more and cluster.address.startswith("127."):
        more = ("--tls", "on")  # on loopback nobody needs it
    done = probe("--ray", cluster.address, *SMALL, "--repeat", "1", *more)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == "" or sealed == {False}  # then a line for each agent that it is in plain
    rows = json.loads(done.stdout)["pairs"]
    assert len({(row["from"], row["to"]) for row in rows}) == NODES * (NODES - 1)
    assert {row["tls"] for row in rows} == sealed
    wait_until(none_left, 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_probe_that_is_ended_leaves_no_agent(cluster: Any, number: signal.Signals) -> None:
    """Ctrl-C, a scheduler's end, and a crash: Ray ends the actors of a driver that is gone."""
    long = ("--bytes", "256MiB", "--seconds", "600", "--repeat", "1000", "--json")
    before = set(Path(tempfile.gettempdir()).glob("kvferry-probe-*"))
    with probing("--ray", cluster.address, *long) as process:
        wait_until(lambda: under_way(process, NODES), 90)
        transfer = [child for actor in actors() for child in children(actor.pid)]
        process.send_signal(number)
        status = process.wait(60)
        assert status == (-number if number is signal.SIGKILL else 128 + number)
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert set(Path(tempfile.gettempdir()).glob("kvferry-probe-*")) <= before  # no key is left
    wait_until(none_left, 60)
    wait_until(lambda: not any(child.is_running() for child in transfer), 30)


def test_a_node_that_dies_is_told_and_the_rest_is_measured(cluster: Any) -> None:
    """Its raylet is killed in the middle: exit 1, its pairs are not measured, by name; all others are."""
    doomed = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with probing("--ray", cluster.address, *SMALL, "--seconds", "60", "--repeat", "200") as process:
        wait_until(lambda: under_way(process, NODES + 1), 90)
        cluster.remove_node(doomed, allow_graceful=False)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    told = json.loads(out)
    lost = set.intersection(*({row["from"], row["to"]} for row in told["failed"]))
    assert len(lost) == 1
    whole = {(row["from"], row["to"]) for row in told["pairs"]}
    assert len({pair for pair in whole if not lost & set(pair)}) == NODES * (NODES - 1)
    wait_until(none_left, 30)


def test_agents_that_do_not_come_up_in_time_are_ended(cluster: Any) -> None:
    """The deadline of the start: nothing is measured, and nothing that comes up late stays."""
    code = (
        "from kvferry.probe.on_ray import ray_agents\n"
        f"with ray_agents({cluster.address!r}, start_seconds=0.0): raise SystemExit('came up')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    # Ray may count a node that has just died.
    assert re.search(
        rf"{DeadlineError.__name__}: ray: agents on 0 nodes of [{NODES}{NODES + 1}],", done.stderr
    )
    wait_until(none_left, 60)


def test_what_is_no_cluster_is_one_line_within_a_deadline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and says nothing: Ray alone would try for minutes. Exit 1."""
    pytest.importorskip("ray", reason="needs Ray: make test-ray")
    monkeypatch.setattr("kvferry.probe.on_ray._REACH_SECONDS", 4.0)
    with socket.create_server(("0.0.0.0", 0)) as silent:  # noqa: S104 - Ray asks by this host's own address
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        assert run(["probe", "--ray", address]) == 1
        assert time.monotonic() - started < 40
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"no cluster answers at {address}: nothing within 4 s" in err
