"""Many simulations at once: in this process, in parallel processes, or on Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import LocalError
from kvferry.plan.sim_result import Result
from kvferry.plan.simulate import Kill

__all__ = ["Scenario", "run_scenario", "run_scenarios"]


class Scenario(msgspec.Struct, frozen=True):
    """One simulation, by names of files: small enough to send anywhere that sees the same files."""

    cluster: str
    trace: str | None
    rate: float | None
    policy: str
    prefill_policy: str | None = None
    requests: int | None = None
    kills: tuple[Kill, ...] = ()
    seed: int = 0
    with_spread: bool = True


def run_scenario(scenario: Scenario) -> Result:
    """Open its files and simulate it."""
    from kvferry.cli.simulate_run import simulate_files

    return simulate_files(scenario)


def run_scenarios(scenarios: Sequence[Scenario], jobs: int, ray_address: str | None) -> Iterator[Result]:
    """The results in the order of the scenarios. Raises InputError without Ray where an address is given."""
    if ray_address is not None:
        yield from _on_ray(scenarios, ray_address)
    elif jobs == 1 or len(scenarios) == 1:
        yield from map(run_scenario, scenarios)
    else:
        with ProcessPoolExecutor(min(jobs, len(scenarios), os.cpu_count() or 1)) as pool:
            yield from pool.map(run_scenario, scenarios)


def _on_ray(scenarios: Sequence[Scenario], address: str) -> Iterator[Result]:
    try:
        import ray
    except ImportError as error:
        raise LocalError("ray: needs Ray", next_step="pip install 'kvferry[ray]'") from error
    ray.init(address=None if address == "local" else address, log_to_driver=False)
    try:
        remote: Callable[..., Any] = ray.remote(run_scenario)
        for reference in [remote.remote(scenario) for scenario in scenarios]:  # type: ignore[attr-defined]
            yield ray.get(reference)
    finally:
        ray.shutdown()


def absolute(path: Path | None) -> str | None:
    """A path that means the same in another process."""
    return None if path is None else str(path.resolve())
