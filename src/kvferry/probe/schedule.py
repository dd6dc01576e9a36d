"""Which pairs are measured when: rounds of disjoint pairs, stages in which no host does two things. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvferry.link import Mode

__all__ = ["Group", "Stage", "incast_stages", "pair_stages", "rounds"]

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Copies that are measured together: from, to. More than one: at the same time, under that load.

    ``incast``: all go to one receiver, and are measured only while every one of them runs.
    """

    pairs: tuple[Pair, ...]
    mode: Mode
    transport: str
    incast: int = 1
    under_load: bool = False


#: Groups that run at the same time, on disjoint hosts.
Stage = tuple[Group, ...]


def rounds(count: int) -> list[list[Pair]]:
    """All pairs of ``count`` nodes in rounds of disjoint pairs: count - 1 rounds, or count where it is odd.

    The circle method: one node stays, the others move on by one each round.
    """
    circle: list[int | None] = list(range(count)) + ([None] if count % 2 else [])
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def pair_stages(
    hosts: Sequence[Hashable],
    transports: Sequence[str],
    modes: Sequence[Mode],
    *,
    under_load: bool = False,
    ways: Sequence[int] = (0, 1),
) -> list[Stage]:
    """Every ordered pair by every transport and mode.

    Disjoint pairs of a round share a stage where they share no host: processes of one host share its
    processors. ``under_load``: all pairs of a round, both ways, at the same time, as one group.
    """
    stages: list[Stage] = []
    for pairs in rounds(len(hosts)):
        if under_load:
            both = tuple(flow for a, b in pairs for flow in ((a, b), (b, a)))
            stages += [
                (Group(both, mode, transport, under_load=True),) for transport in transports for mode in modes
            ]
            continue
        for shared in _apart(pairs, hosts):
            for way in ways:
                flows = [(pair[way], pair[1 - way]) for pair in shared]
                stages += [
                    tuple(Group((flow,), mode, transport) for flow in flows)
                    for transport in transports
                    for mode in modes
                ]
    return stages


def incast_stages(count: int, incast: int, transports: Sequence[str], modes: Sequence[Mode]) -> list[Stage]:
    """For each receiver, the ``incast`` nodes after it in the circle send to it at the same time."""
    return [
        (
            Group(
                tuple(((receiver + step) % count, receiver) for step in range(1, incast + 1)),
                mode,
                transport,
                incast=incast,
            ),
        )
        for receiver in range(count)
        for transport in transports
        for mode in modes
    ]


def _apart(pairs: Sequence[Pair], hosts: Sequence[Hashable]) -> list[list[Pair]]:
    """The pairs in as few parts as greed finds, no host twice in a part."""
    parts: list[tuple[set[Hashable], list[Pair]]] = []
    for pair in pairs:
        mine = {hosts[node] for node in pair}
        for taken, part in parts:
            if not taken & mine:
                taken.update(mine)
                part.append(pair)
                break
        else:
            parts.append((mine, [pair]))
    return [part for _, part in parts]
