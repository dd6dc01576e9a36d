"""``kvferry probe``: what a pair of endpoints does with payloads of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.cli.options import Flag, Whole
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.link import Mode

__all__ = ["ProbeFlags", "probe"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFlags:
    """What is measured."""

    loopback: Annotated[bool, Flag] = False
    "Measure this host against itself: two endpoints, each with its transfer process."
    transport: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")
    "Give it once for each transport to measure."
    mode: Literal["push", "pull", "both"] = "both"
    "Who starts the move."
    payload: Annotated[str, Parameter(name="--bytes")] = "64MiB"
    "The largest payload; smaller ones are measured too, so that the model can be fitted."
    block_bytes: str = "32KiB"
    "Bytes of one block in one layer; smaller blocks are measured too."
    repeat: Whole = 5
    "Warm copies of each shape, after one cold."
    integrity: Literal["on", "off"] = "on"
    "Digests at export and arrival, compared before commit."

    def modes(self) -> tuple[Mode, ...]:
        from kvferry.link import Mode

        return tuple(Mode) if self.mode == "both" else (Mode(self.mode),)


def probe(
    *,
    flags: ProbeFlags | None = None,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measure what moving KV blocks costs, fit it, and write a link file.

    Parameters
    ----------
    out
        Write the link file here, for `kvferry link`, `check` and `plan`.
    as_json
        Print one JSON object.
    """
    flags = flags or ProbeFlags()
    if not flags.loopback:
        raise InputError("loopback: give --loopback; probing other nodes is not in this release")
    if not 1 <= flags.repeat <= 1000:
        raise InputError(f"repeat: {flags.repeat} is not from 1 to 1000")

    from kvferry.cli.probe_show import TransportBars, print_json, show, write
    from kvferry.probe import Payload, probe_loopback
    from kvferry.units import parse_bytes

    largest = Payload(parse_bytes(flags.payload, "bytes"), parse_bytes(flags.block_bytes, "block_bytes"))
    with TransportBars() as bars:
        links = probe_loopback(
            flags.transport,
            flags.modes(),
            largest,
            flags.repeat,
            integrity=flags.integrity == "on",
            on_progress=bars.update,
        )
    if out is not None:
        write(links, out)
    if as_json:
        print_json(links)
    else:
        show(links, largest)
