"""Between two hosts, which are network namespaces here: encrypted by default, plain only when both said so.

Every packet is read on the wire, so that "encrypted" is not the program's own word.
"""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from conftest import wait_until
from off_host_kit import Wire, handoff, identified_hosts, identity, start
from probe_kit import Namespaces

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with identified_hosts() as made:
        yield made


def test_by_default_nothing_crosses_in_clear(hosts: Namespaces) -> None:
    """An address of the network, with no word about encryption: sealed, and the wire shows nothing of it."""
    wire = Wire(hosts)
    given, taken = handoff(
        hosts,
        {"address": f"tcp://{hosts.hosts[0]}:0", "identity": identity(0)},
        {"identity": identity(1)},
    )
    total, found = wire.stop()
    assert taken.get("path") == "tcp-sealed", taken
    assert taken["arrived"] is True
    assert total > 1000
    assert found == 0
    assert "plain" not in json.dumps([given, taken])


def test_without_an_identity_nothing_is_listened_at(hosts: Namespaces) -> None:
    """The error names both ways out; loopback would have worked."""
    given, _ = handoff(hosts, {"address": f"tcp://{hosts.hosts[0]}:0"}, {})
    assert given["kind"] == "input"
    assert "kvferry certs" in str(given["error"])
    assert "?plain=yes" in str(given["error"])


def test_plain_needs_the_word_of_both_sides_and_is_named_everywhere(hosts: Namespaces) -> None:
    """A ticket's plain address is refused by default; allowed, logs, records and the wire show it."""
    address = {"address": f"tcp://{hosts.hosts[0]}:0?plain=yes"}
    _, refused = handoff(hosts, address, {"identity": identity(1)})
    assert refused["kind"] == "input"
    assert "talks plain on loopback only" in str(refused["error"])
    wire = Wire(hosts)
    given, taken = handoff(hosts, address, {"plain": "anywhere"})
    _, found = wire.stop()
    assert taken.get("path") == "tcp-plain", taken
    assert "?plain=yes" in str(taken["peer"])
    assert "?plain=yes" in str(given["peer"])
    for said in (given, taken):
        lines = [line for line in said["log"] if hosts.hosts[0] in line or hosts.hosts[1] in line]  # type: ignore[attr-defined]
        assert lines
        assert all("plain" in line for line in lines), lines
        assert any("without encryption" in line for line in lines)
    assert found > 0, "the wire was not read: the other tests would prove nothing"


def test_an_identity_of_another_host_is_refused(hosts: Namespaces) -> None:
    """The certificate must be for the address that decode connects to."""
    _, taken = handoff(
        hosts,
        {"address": f"tcp://{hosts.hosts[0]}:0", "identity": identity(1)},
        {"identity": identity(1)},
    )
    assert taken["kind"] == "peer"
    assert "IP address mismatch" in str(taken["error"])


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_cut_link_ends_both_sides_in_time(hosts: Namespaces, mode: str) -> None:
    """Amid the copy the cable is pulled: silence is loss for both, and each says so without being asked."""
    options = {"tokens": 60_000}
    holder, claimant = ("prefill", "decode") if mode == "pull" else ("decode", "prefill")
    for number in (0, 1):
        hosts.shape(number, 40e6)
    address = {"address": f"tcp://{hosts.hosts[0]}:0", "identity": identity(0)}
    before = carried(hosts)
    holding = start(hosts, 0, holder, options | address)
    assert holding.stdout is not None
    ticket = json.loads(holding.stdout.readline())["ticket"]
    claiming = start(hosts, 1, claimant, options | {"identity": identity(1), "ticket": ticket})
    wait_until(lambda: carried(hosts) - before > 1 << 20, 30.0)
    hosts.unplug(0)
    cut_at = time.time()
    try:
        answers = [answer(process) for process in (claiming, holding)]
    finally:
        hosts.plug(0)
    for said in answers:
        assert said.get("kind") in ("deadline", "transport", "peer"), said
        assert said["next"]
        print(f"{mode}, link cut: {said['kind']}, {said['phase']}, {said['at'] - cut_at:.2f} s")  # type: ignore[operator]


def answer(process: subprocess.Popen[str]) -> dict[str, object]:
    """How it ended for a worker, who is not told that anybody waits."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 40.0)[0], "a worker did not end"
    said = json.loads(process.stdout.readline())
    process.communicate(timeout=20)
    return said


def carried(hosts: Namespaces) -> int:
    """Bytes that host 0 has sent and received."""
    folder = "/sys/class/net/eth0/statistics"
    command = [*hosts.inside(0), "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes"]
    return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))
