"""Two hosts with a cable each, for the faults of a link: network namespaces, see ``Namespaces``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.testing.namespaces import Namespaces
from tls_kit import FOLDER, issue

__all__ = ["Wire", "wires"]


@dataclass(frozen=True, slots=True)
class Wire:
    """The survivor's host, and after it the victim's; both talk plain tcp, or both sealed."""

    hosts: Namespaces
    survivor: int
    is_sealed: bool

    @property
    def victim(self) -> int:
        return self.survivor + 1

    def site(self, number: int) -> tuple[str, str]:
        """Where a worker of that host listens, and the identity that it needs."""
        address = f"tcp://{self.hosts.hosts[number]}:0"
        return (
            (address, str(FOLDER / f"wire-{number}.pem")) if self.is_sealed else (f"{address}?plain=yes", "")
        )

    def cut(self) -> None:
        """Nothing passes any more, either way, and nobody is told."""
        self.hosts.unplug(self.victim)

    def mend(self) -> None:
        """It is as it was; also when it was never cut."""
        self.hosts.plug(self.victim)


@contextlib.contextmanager
def wires(paths: Sequence[str]) -> Iterator[list[Wire]]:
    """One for each path of tcp, with hosts and identities of its own."""
    if not paths:
        yield []
        return
    with Namespaces(2 * len(paths)) as hosts:
        for number, host in enumerate(hosts.hosts):
            issue(FOLDER, f"wire-{number}", hosts=[host])
        yield [Wire(hosts, 2 * number, path == "tcp-sealed") for number, path in enumerate(paths)]
