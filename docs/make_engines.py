"""Write the table of docs/engines.md from the results of ``make test-engines``, or check that it is fresh.

    python docs/make_engines.py build/engines.jsonl [--check]

Each line of the results is a continuation that was exact (``kvferry.testing.engine_results.Result``);
what failed has no line, and is then missing in the table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from kvferry.testing.engine_results import Result

PAGE = Path(__file__).parent / "engines.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = """\
| engine | model | dtypes | greedy | sampled | what moves | bytes |
| --- | --- | --- | --- | --- | --- | ---: |
"""


def table(results: list[Result]) -> str:
    """One row a model of an engine."""
    rows: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.engine, result.model].append(result)
    return HEAD + "".join(_row(*key, rows[key]) for key in sorted(rows, key=_order))


def _order(key: tuple[str, str]) -> tuple[bool, str, str]:
    return key[0] != "transformers", key[0], key[1].lower()


def _row(engine: str, model: str, results: list[Result]) -> str:
    dtypes = sorted({result.dtype for result in results}, reverse=True)
    shown = {
        name: sorted({result.dtype for result in results if result.sampling == name}, reverse=True)
        for name in ("greedy", "sampled")
    }
    borders = {tuple(result.borders) for result in results}
    after = ", ".join(map(str, sorted({border for one in borders for border in one})))
    exact = {
        name: f"bits, after {after}" if found == dtypes else f"only {', '.join(found) or 'none'}"
        for name, found in shown.items()
    }
    narrow = min(results, key=lambda result: (result.dtype, result.sampling))
    cells = [engine, model, ", ".join(dtypes), exact["greedy"], exact["sampled"], narrow.moves]
    return f"| {' | '.join(cells)} | {narrow.nbytes:,} |\n"


def main() -> int:
    """Entry of the command."""
    path, *options = sys.argv[1:]
    lines = Path(path).read_bytes().splitlines()
    fresh = table([msgspec.json.decode(line, type=Result) for line in lines])
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = before + BEGIN + fresh + END + after
    if "--check" in options:
        if written != page:
            print(f"{PAGE.name} is not what these results say:\n{fresh}", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(written, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
