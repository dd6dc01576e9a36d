"""``kvferry report``: what other verbs found, as one page to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvferry.cli.output import check_out, write_whole
from kvferry.errors import InputError

__all__ = ["report"]


def report(
    files: Annotated[tuple[Path, ...], Parameter(negative=())],
    /,
    *,
    out: Path = Path("report.html"),
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Draw files of probe, check, plan, simulate and demo as one HTML page that needs no network.

    Parameters
    ----------
    files
        Link files, the --json output of check, plan, simulate and demo, records of simulate (.csv, .parquet).
    out
        Where the page goes.
    as_json
        Print one JSON object.
    """
    from kvferry.report import read_input, render

    if not files:
        raise InputError("files: give at least one")
    check_out(out, "out")
    inputs = [read_input(path) for path in files]
    page = render(inputs).encode()
    write_whole(out, page, "out")
    if as_json:
        sections = [{"file": str(given.path), "kind": given.kind} for given in inputs]
        print(json.dumps({"out": str(out), "bytes": len(page), "sections": sections}))
    else:
        kinds = ", ".join(given.kind for given in inputs)
        print(f"{out}: {kinds}; {len(page) / 1e6:.1f} MB, opens without a network")
    return 0
