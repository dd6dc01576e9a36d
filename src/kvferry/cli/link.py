"""``kvferry link``: what link files say, how they drifted, and several runs as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from kvferry.cli.options import Flag
from kvferry.cli.output import write_whole
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.link import LinkFile

__all__ = ["diff", "link", "merge", "show"]

link = App(
    name="link",
    help="Say what link files hold, how links drifted between two dates, and merge several runs.",
    help_format="plaintext",
    result_action="return_value",
)

Json = Annotated[bool, Parameter(name="--json", negative="")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The copy that every pair is shown for."""

    nbytes: Annotated[str | None, Parameter(name="--bytes")] = None
    "Bytes of a handoff (64MiB, 1.34GB). Default: the largest that all pairs were measured with."
    block_bytes: str | None = None
    "Bytes of one piece on the wire (64KiB). Default: the largest pieces that were measured."

    def parsed(self) -> tuple[int | None, int | None]:
        """Both in bytes, None where not given."""
        from kvferry.units import parse_bytes

        numbers = []
        for field, text in (("bytes", self.nbytes), ("block_bytes", self.block_bytes)):
            number = None if text is None else parse_bytes(text, field)
            if number == 0:
                raise InputError(f"{field}: must be 1 or more")
            numbers.append(number)
        return numbers[0], numbers[1]


@link.command
def show(
    *files: Annotated[str, Parameter(name="FILE")], payload: Payload | None = None, as_json: Json = False
) -> None:
    """Show each pair: what a copy takes, the fit behind it, and the slow pairs with a likely reason.

    Parameters
    ----------
    files
        Link files, or presets by name (nvlink4, ib-ndr400, eth100, ...): brochure rates, unmeasured.
    as_json
        Print one JSON object.
    """
    from kvferry.cli.link_show import Shown, print_json, print_show
    from kvferry.link import PRESETS, find_outliers, summarise

    nbytes, block_bytes = (payload or Payload()).parsed()
    shown = [
        Shown(
            file=name,
            pairs=summarise(links, nbytes, block_bytes),
            outliers=find_outliers(links),
            published=PRESETS[name].published if name in PRESETS else (),
        )
        for name, links in zip(files, _load(files), strict=True)
    ]
    if as_json:
        print_json({"files": shown})
    else:
        print_show(shown)


@link.command
def diff(
    old: Annotated[str, Parameter(name="OLD")],
    new: Annotated[str, Parameter(name="NEW")],
    *,
    as_json: Json = False,
) -> None:
    """Say which pairs drifted between two measurements, and whether that is beyond their noise.

    Parameters
    ----------
    old
        The earlier link file.
    new
        The later one.
    as_json
        Print one JSON object.
    """
    from kvferry.cli.link_show import print_diff, print_json
    from kvferry.link import diff_links

    before, after = _load((old, new))
    result = diff_links(before, after)
    if as_json:
        print_json(result)
    else:
        print_diff(result)


@link.command
def merge(
    *files: Annotated[str, Parameter(name="FILE")],
    out: Path,
    pool: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> None:
    """Write one link file from several: of each pair and condition the newest measurement.

    Parameters
    ----------
    files
        Link files; of equal dates, the later one counts.
    out
        Where to write; replaced only when the whole file is written.
    pool
        Fit the samples of all files together instead; needs files that kept their samples.
    as_json
        Print one JSON object.
    """
    from kvferry.cli.link_show import print_json, print_merged
    from kvferry.link import How, encode_links, merge_links

    merged = merge_links(_load(files), How.POOL if pool else How.NEWEST)
    for note in merged.notes:
        print(f"kvferry: {note}", file=sys.stderr)
    write_whole(out, encode_links(merged.links), "out")
    if as_json:
        print_json({"out": str(out), "pairs": len(merged.links.pairs), "notes": merged.notes})
    else:
        print_merged(out, merged, len(files))


def _load(files: Sequence[str]) -> list[LinkFile]:
    from kvferry.link import load_links

    if not files:
        raise InputError("FILE: give a link file or the name of a preset")
    return [load_links(name) for name in files]
