"""Kill -9 and SIGSTOP of either side, and a cut link, at each phase, both modes: see ``fault_kit``.

One case for each point runs here, and three cut links. All of them, as for docs/reliability.md:
KVFERRY_FAULTS=all. KVFERRY_FAULT_SCHEMES=nixl plays them over another transport, without the links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from conftest import held_by_this_process, wait_until
from fault_kit import CASES, SCHEMES, Case, Fault, Result, play
from kvferry.protocol.table import Role, phases_of
from kvferry.protocol.ticket import Mode
from kvferry.testing.namespaces import why_no_namespaces

CUTS = (
    "prefill-pull-copying-cut-link-tcp-sealed",
    "decode-pull-verifying-cut-link-tcp-sealed",
    "decode-push-copying-cut-link-tcp-plain",
)


def chosen() -> list[Case]:
    """One case a point, faults and transports by turns; or all."""
    if os.environ.get("KVFERRY_FAULTS") == "all":
        return list(CASES)
    struck = [case for case in CASES if case.fault is not Fault.CUT_LINK]
    points = list(dict.fromkeys((case.victim, case.mode, case.point) for case in struck))
    cases = {(case.victim, case.mode, case.point, case.fault, case.scheme): case for case in struck}
    return [
        *(
            cases[*point, list(Fault)[index % 4], SCHEMES[index // 4 % len(SCHEMES)]]
            for index, point in enumerate(points)
        ),
        *(case for case in CASES if str(case) in CUTS),
    ]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future[Result]]]:
    """The cases of this run, played side by side; in the end nothing of any of them is left."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    found = [param.params["case"] for param in params if param is not None and "case" in param.params]
    cases = [case for case in found if isinstance(case, Case)]
    if any(case.fault is Fault.CUT_LINK for case in cases) and why_no_namespaces():
        cases = [case for case in cases if case.fault is not Fault.CUT_LINK]
    before = held_by_this_process()
    with play(cases, tmp_path_factory.mktemp("faults"), 3) as all_of:
        yield all_of
    wait_until(lambda: not held_by_this_process() - before, 5.0, lambda: held_by_this_process() - before)


def params() -> list[object]:
    """The chosen cases, of which `make test` plays some."""
    return [
        pytest.param(
            case,
            id=str(case),
            marks=[] if number % 14 == 3 and case.fault is not Fault.CUT_LINK else [pytest.mark.slow],
        )
        for number, case in enumerate(chosen())
    ]


@pytest.mark.parametrize("case", params())
def test_the_survivor_of_a_fault(results: dict[Case, Future[Result]], case: Case) -> None:
    """The right error in time, nothing held, the next request served, and never a wrong token."""
    if case not in results:
        pytest.skip(why_no_namespaces())
    results[case].result()


def test_the_matrix_has_every_phase_of_every_seat() -> None:
    """A point is in the matrix for each phase that a victim can be in."""
    for role in Role:
        for mode in Mode:
            points = {case.point for case in CASES if (case.victim, case.mode) == (role, mode)}
            cut = {
                case.point
                for case in CASES
                if (case.victim, case.mode) == (role, mode) and case.fault is Fault.CUT_LINK
            }
            assert cut == (points if "tcp" in SCHEMES else set())
            # ALONE is where a decode gets that has lost its peer: the survivor of "prefill, committed".
            assert {phase.value for phase in phases_of(role, mode)} - points <= {"alone", "done", "failed"}
