"""Two hosts, which are network namespaces here: handoffs between them, and what is seen on the wire."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from off_host_worker import NEEDLE
from probe_kit import Namespaces, namespaces
from tls_kit import FOLDER, issue

__all__ = ["Wire", "handoff", "identified_hosts", "identity", "start"]

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


@contextlib.contextmanager
def identified_hosts() -> Iterator[Namespaces]:
    """Two hosts, with a certificate for each."""
    with namespaces(2) as made:
        for number, host in enumerate(made.hosts):
            issue(FOLDER, f"host-{number}", hosts=[host])
        yield made


class Wire:
    """Reads every packet of a host while the block runs."""

    def __init__(self, hosts: Namespaces, needle: bytes = NEEDLE) -> None:
        command = [*hosts.inside(0), sys.executable, "-c", SNIFF, needle.hex()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> tuple[int, int]:
        """Bytes seen, and packets with the needle in clear."""
        said, _ = self._process.communicate("\n", timeout=20)
        total, found = said.split()
        return int(total), int(found)


def start(hosts: Namespaces, number: int, role: str, options: dict[str, object]) -> subprocess.Popen[str]:
    """A worker on that host, whose UCX, if it has one, may use the network between the two only."""
    command = [*hosts.inside(number), sys.executable, WORKER, role, json.dumps(options)]
    env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


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
