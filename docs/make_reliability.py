"""Write ``docs/reliability.md``: play every case of the fault matrix on this machine and tabulate it.

Run ``python docs/make_reliability.py`` (five minutes). It ends with an error, and writes nothing,
when a case does not end as it must.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import ERROR_KINDS
from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode
from kvferry.transfer.retry import RULES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reliability.md"
sys.path.insert(0, str(ROOT / "tests"))

from fault_kit import CASES, DEADLINE_SECONDS, Case, Fault, Result, play  # noqa: E402
from fault_worker import TIMEOUTS  # noqa: E402

LANES = 2
SCHEMES = ("tcp", "shm")

HEAD = """\
<!-- Written by docs/make_reliability.py from a run of tests/test_faults.py's matrix. -->
# Reliability

One worker of two is killed (`kill -9`) or stopped (SIGSTOP), its engine or its transfer process, at
each point of a transfer. The tables say what the other worker, the *survivor*, was told, after how
long, and what its transfer process held then. In each of the {count} cases, further:

- The error names the request, the phase and the peer, says what is true and what to do next.
- The survivor has its blocks back, and no thread, descriptor or map more than before.
- The survivor then hands the same request over with a fresh worker, and every token and every bit of
  the logits is that of one process. The same holds for a handoff that went through in spite of the
  fault, and for whatever the stopped worker decodes after SIGCONT.
- A worker whose transfer process was killed is told so, opens another, and serves again.

A point is where the struck worker was. *handshake*: amid the handshake. *held*: before anyone
claimed. *copying*: half of the bytes have moved. *published*: decode's engine has imported the
state. *aborting*: the survivor gives up while its peer does not answer. Every other point is the
entry into that phase of [the protocol](protocol.md): nothing of it has been done or said.

"ok": the handoff went through; the dead or stopped process was not needed any more. "decode may
have it": the error is in doubt, see below. Timeouts of this run: silence for {lost} s is a lost
peer, handshake {handshake} s, abort {abort} s; every lease and every transfer's timeout
{deadline} s. So a kill is known when the socket breaks, a stopped transfer process after {lost} s
of silence, and a stopped engine, whose transfer process lives, when the lease or the timeout ends.
"""

RETRY = """\
## What to do next

`kvferry.transfer.retry.advice(error, attempts_left, seconds_left)` reads it from the error. The
first line that fits is the one; with no attempt left, or no time to wait for it, the last column
holds, and with no time left at all the request is given up.

| error | next try | else | because |
| --- | --- | --- | --- |
"""

RETRY_WORDS = """
*retry same*: the same peer, after a while, with the same ticket where it stays good. *retry other*:
another prefill worker for decode, another decode worker for prefill. *recompute*: decode prefills
the prompt itself, prefill decodes on. *give up*: nothing that this worker could do is right.
"""


def machine() -> str:
    """Where and when the figures were taken."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    today = dt.datetime.now(dt.UTC).date()
    return (
        f"Machine: {os.cpu_count()} cores of {cpu}, Linux {platform.release()}, "
        f"Python {platform.python_version()}; {today}.\n"
    )


def run_all() -> dict[Case, Result]:
    """Every case; raises the AssertionError of the first that fails."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, play(CASES, Path(folder), LANES) as playing:
        for number, (case, future) in enumerate(playing.items(), 1):
            results[case] = future.result()
            print(f"\r{number} of {len(CASES)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def tables(results: dict[Case, Result]) -> Iterator[str]:
    """One table a seat."""
    for role in Role:
        for mode in Mode:
            yield f"\n## {role.capitalize()} is struck, {mode}\n"
            yield "| point | fault | tcp: outcome | s | shm: outcome | s | held then |"
            yield "| --- | --- | --- | --- | --- | --- | --- |"
            rows: dict[tuple[str, Fault], list[Result]] = {}
            for case, result in results.items():
                if (case.victim, case.mode) == (role, mode):
                    rows.setdefault((case.point, case.fault), []).append(result)
            for (point, fault), both in rows.items():
                by_scheme = {result.case.scheme: result for result in both}
                cells = [cell for scheme in SCHEMES for cell in outcome(by_scheme[scheme])]
                yield f"| {point} | {fault} | {' | '.join(cells)} | {held(both)} |"


def outcome(result: Result) -> tuple[str, str]:
    """What the survivor was told, and the seconds until it was."""
    error = result.error
    if error is None:
        return "ok", ""
    doubt = "; decode may have it" if error.in_doubt else ""
    return f"{ERROR_KINDS[error.kind].__name__}, {error.phase}{doubt}", f"{max(0.0, result.seconds):.2f}"


def held(results: list[Result]) -> str:
    names = ("transfers", "holds", "grants", "copies", "digesting")
    counts = {name: max(getattr(result.held, name) for result in results) for name in names}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def page(results: dict[Case, Result]) -> str:
    head = HEAD.format(
        count=len(results),
        lost=TIMEOUTS.lost,
        handshake=TIMEOUTS.handshake,
        abort=TIMEOUTS.abort,
        deadline=DEADLINE_SECONDS,
    )
    rules = (f"| {rule.errors} | {rule.first} | {rule.last} | {rule.why} |" for rule in RULES)
    parts = [head, machine(), *tables(results), "\n" + RETRY + "\n".join(rules), RETRY_WORDS]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(run_all()), "utf-8")
