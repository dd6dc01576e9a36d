"""Between two hosts, which are network namespaces here: encrypted by default, plain only when both said so.

Every packet is read on the wire, so that "encrypted" is not the program's own word.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import wait_until
from off_host_worker import NEEDLE
from probe_kit import Namespaces, namespaces
from tls_kit import FOLDER, issue

WORKER = str(Path(__file__).parent / "off_host_worker.py")
SNIFF = """
import select, socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
sock.bind(("eth0", 0))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
print("ready", flush=True)
needle, found, total = bytes.fromhex(sys.argv[1]), 0, 0
while True:
    ready, _, _ = select.select([sock, sys.stdin], [], [])
    if sock in ready:
        packet = sock.recv(1 << 17)
        total += len(packet)
        found += needle in packet
    elif sys.stdin in ready:
        break
print(total, found, flush=True)
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(2) as made:
        for number, host in enumerate(made.hosts):
            issue(FOLDER, f"host-{number}", hosts=[host])
        yield made


class Wire:
    """Reads every packet of a host while the block runs."""

    def __init__(self, hosts: Namespaces) -> None:
        command = [*hosts.inside(0), sys.executable, "-c", SNIFF, NEEDLE.hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> tuple[int, int]:
        """Bytes seen, and packets with the payload in clear."""
        said, _ = self._process.communicate("\n", timeout=20)
        total, found = said.split()
        return int(total), int(found)


def start(hosts: Namespaces, number: int, role: str, options: dict[str, object]) -> subprocess.Popen[str]:
    """A worker on that host."""
    command = [*hosts.inside(number), sys.executable, WORKER, role, json.dumps(options)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def handoff(
    hosts: Namespaces, prefill: dict[str, object], decode: dict[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """One pull from host 0 to host 1; what prefill and decode say of it."""
    giving = start(hosts, 0, "prefill", prefill)
    assert giving.stdout is not None
    first = json.loads(giving.stdout.readline())
    if "ticket" not in first:
        giving.communicate(timeout=20)
        return first, {}
    taking = start(hosts, 1, "decode", decode | {"ticket": first["ticket"]})
    taken, _ = taking.communicate(timeout=40)
    given, _ = giving.communicate(timeout=20)
    return json.loads(given), json.loads(taken)


def identity(number: int) -> str:
    return str(FOLDER / f"host-{number}.pem")


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
