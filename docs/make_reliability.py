"""Write ``docs/reliability.md``: play every case of the fault matrix on this machine and tabulate it.

Run ``python docs/make_reliability.py`` as root on Linux with iproute2 (seven minutes). It ends with an
error, and writes nothing, when a case does not end as it must. A case that fails is played a second
time, alone, and the page names it: a machine that is busy with other work misses a deadline.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.errors import ERROR_KINDS
from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode
from kvferry.testing.namespaces import why_no_namespaces
from kvferry.transfer.retry import RULES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reliability.md"
sys.path.insert(0, str(ROOT / "tests"))

import full_disk_worker  # noqa: E402
from fault_kit import CASES, DEADLINE_SECONDS, GRACE_SECONDS, WIRES, Case, Ending, Fault, Result, play  # noqa: E402
from fault_worker import TIMEOUTS  # noqa: E402

LANES = 2
SCHEMES = ("tcp", "shm")

HEAD = """\
<!-- Written by docs/make_reliability.py from a run of tests/test_faults.py's matrix. -->
# Reliability

One worker of two is killed (`kill -9`) or stopped (SIGSTOP), its engine or its transfer process, at
each point of a transfer. The tables say what the other worker, the *survivor*, was told, after how
long, and what its transfer process held then. [A cut link](#a-link-is-cut), which both survive, and
[a full disk](#a-disk-is-full-for-logs) have tables of their own. In each of the {count} cases, further:

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

CUT = """
## A link is cut

The two workers are on hosts of their own: network namespaces with a cable each to one switch. When
one of them is at the point, its cable is pulled (`ip link set down` at the switch), so that nothing
passes either way and nobody is told. Nobody dies, and in each of the {count} cases:

- Both workers are told within {limit} s of the cut, each by an error as above, or their part was done.
- Where decode goes on, prefill's error is never one that says the request is prefill's again.
- Both have their blocks back and hold nothing, not even a socket, while the cable is still out.
- When it is in again, the same two workers hand the same request over, and every token and every
  bit of the logits is that of one process.

Plain tcp between hosts needs `?plain=yes` in the address and `plain="anywhere"` at both ends; sealed
is the default, with TLS identities. "held then" is of both together. *aborting*: the other worker
gave up, and its word had arrived before the cut.
"""

DISK = """
## A disk is full for logs

The log file of the engine's process and stderr of all processes are `/dev/full`. Peers that
speak something else are dropped meanwhile, which is logged. "lines refused" is of the engine's log.

| transfers run in | mode | transport | outcome | held then | lines refused |
| --- | --- | --- | --- | --- | --- |
"""

TWICE = """\
Played twice, because the first time something came too late for its deadline or in another order,
beside whatever else this machine did: {count}.

{names}
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


def run_all() -> tuple[dict[Case, Result], list[Case]]:
    """Every case, and those that had to be played twice; raises what one raises the second time."""
    results, again = run(CASES, LANES)
    for case, error in again.items():
        print(f"{case} is played again, alone: {error!r}", file=sys.stderr)
        once_more, failed = run([case], 1)
        for again_error in failed.values():
            raise again_error
        results |= once_more
    return {case: results[case] for case in CASES}, list(again)


def run(cases: Sequence[Case], lanes: int) -> tuple[dict[Case, Result], dict[Case, Exception]]:
    """Results, and what went wrong."""
    results, failed = {}, {}
    with tempfile.TemporaryDirectory() as folder, play(cases, Path(folder), lanes) as playing:
        for number, (case, future) in enumerate(playing.items(), 1):
            try:
                results[case] = future.result()
            except Exception as error:  # noqa: BLE001 - whatever a case raises is its failure
                failed[case] = error
            print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results, failed


def rows(results: dict[Case, Result]) -> dict[tuple[str, ...], dict[str, Result]]:
    """What stands in one line: the results of a seat, point and fault by scheme."""
    found: dict[tuple[str, ...], dict[str, Result]] = {}
    for case, result in results.items():
        key = (case.victim, case.mode, case.point, case.fault)
        found.setdefault(key, {})[case.scheme] = result
    return found


def tables(results: dict[Case, Result]) -> Iterator[str]:
    """One table a seat."""
    for role in Role:
        for mode in Mode:
            yield f"\n## {role.capitalize()} is struck, {mode}\n"
            yield "| point | fault | tcp: outcome | s | shm: outcome | s | held then |"
            yield "| --- | --- | --- | --- | --- | --- | --- |"
            for (*seat, point, fault), of in rows(results).items():
                if seat == [role, mode] and fault != Fault.CUT_LINK:
                    cells = [cell for scheme in SCHEMES for cell in outcome(of[scheme].survivor)]
                    endings = [result.survivor for result in of.values()]
                    yield f"| {point} | {fault} | {' | '.join(cells)} | {held(endings)} |"


def cut_tables(results: dict[Case, Result]) -> Iterator[str]:
    """One table a seat, with a line a wire, where the link was cut."""
    for role in Role:
        for mode in Mode:
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            yield f"\n### {role.capitalize()}'s cable is pulled, {mode}\n"
            yield f"| {role} at | tcp | {role}: outcome | s | {other}: outcome | s | held then |"
            yield "| --- | --- | --- | --- | --- | --- | --- |"
            for (*seat, point, fault), of in rows(results).items():
                if seat == [role, mode] and fault == Fault.CUT_LINK:
                    for path in WIRES:
                        ends = [end for end in (of[path].victim, of[path].survivor) if end is not None]
                        cells = [cell for end in ends for cell in outcome(end)]
                        sealed = path.removeprefix("tcp-")
                        yield f"| {point} | {sealed} | {' | '.join(cells)} | {held(ends)} |"


def full_disk() -> Iterator[str]:
    """A line for each way to run a transfer while nothing can be logged."""
    for where, mode, scheme in itertools.product(("process", "threads"), Mode, SCHEMES):
        said = full_disk_worker.play(where, mode, scheme)
        assert said["arrived"] is True, said
        assert said["held"] == 0, said
        run_in = "a process of their own" if where == "process" else "threads of the engine"
        yield f"| {run_in} | {mode} | {scheme} | ok | nothing | {said['refused_lines']} |"


def outcome(ending: Ending) -> tuple[str, str]:
    """What a worker was told, and the seconds until it was."""
    error = ending.error
    if error is None:
        return "ok", ""
    doubt = "; decode may have it" if error.in_doubt else ""
    return f"{ERROR_KINDS[error.kind].__name__}, {error.phase}{doubt}", f"{max(0.0, ending.seconds):.2f}"


def held(endings: list[Ending]) -> str:
    names = ("transfers", "holds", "grants", "copies", "digesting")
    counts = {name: max(getattr(ending.held, name) for ending in endings) for name in names}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def page(results: dict[Case, Result], again: list[Case]) -> str:
    cuts = sum(case.fault is Fault.CUT_LINK for case in results)
    head = HEAD.format(
        count=len(results) - cuts,
        lost=TIMEOUTS.lost,
        handshake=TIMEOUTS.handshake,
        abort=TIMEOUTS.abort,
        deadline=DEADLINE_SECONDS,
    )
    rules = (f"| {rule.errors} | {rule.first} | {rule.last} | {rule.why} |" for rule in RULES)
    parts = [
        head,
        machine(),
        *([TWICE.format(count=len(again), names="\n".join(f"- {case}" for case in again))] if again else []),
        *tables(results),
        CUT.format(count=cuts, limit=DEADLINE_SECONDS + GRACE_SECONDS).rstrip(),
        *cut_tables(results),
        DISK + "\n".join(full_disk()),
        "\n" + RETRY + "\n".join(rules),
        RETRY_WORDS,
    ]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    if why := why_no_namespaces():
        sys.exit(f"the links of this page cannot be cut here: {why}")
    TARGET.write_text(page(*run_all()), "utf-8")
