"""Compute profiles from aiconfigurator's operator tables (extra ``aiconfigurator``, pinned: they change).

``aiconfigurator:MODEL@SYSTEM/tpN[/ppN][/BACKEND]``, for example
``aiconfigurator:Qwen/Qwen3-32B@h200_sxm/tp4/trtllm``. The tables were measured operator by operator on
its makers' machines; the profile's source says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvferry.errors import InputError, LocalError
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.compute_fit import ComputeSample, fit_profile

__all__ = ["PREFIX", "aiconfigurator_profile"]

PREFIX = "aiconfigurator:"
_NAME = re.compile(r"aiconfigurator:(.+)@([^/]+)/tp([0-9]{1,4})(?:/pp([0-9]{1,4}))?(?:/([a-z]+))?")
_PROMPTS = (128, 512, 2048, 8192, 16384)
_STEPS = tuple((batch, context) for batch in (1, 8, 32, 64) for context in (512, 4096))


def aiconfigurator_profile(name: str, estimate: Callable[..., Any] | None = None) -> ComputeProfile:
    """Ask for single steps at a few lengths and batches, and fit them as measurements.

    Args:
        name: as above.
        estimate: aiconfigurator's ``cli_estimate``; None: from the package.

    Raises InputError for a name that cannot be read and for what it refuses, LocalError without the package.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(f"profile: {name!r} is not aiconfigurator:MODEL@SYSTEM/tpN[/ppN][/BACKEND]")
    model, system, tp, pp, backend = match.groups()
    version = "given"
    if estimate is None:
        estimate, version = _load()
    options = {"tp_size": int(tp), "pp_size": int(pp or 1), "backend_name": backend or "trtllm", "osl": 2}

    def seconds(mode: str, batch: int, tokens: int) -> float:
        try:
            found = estimate(model, system, mode=mode, isl=tokens, batch_size=batch, **options)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"profile: {name}: aiconfigurator: {reason}") from error
        return float(found.ttft if mode == "static_ctx" else found.tpot) / 1000

    samples = [ComputeSample(True, 1, tokens, seconds("static_ctx", 1, tokens)) for tokens in _PROMPTS]
    samples += [
        ComputeSample(False, batch, tokens, seconds("static_gen", batch, tokens)) for batch, tokens in _STEPS
    ]
    return fit_profile(
        samples,
        model=model,
        gpu=system,
        tp=int(tp),
        pp=int(pp or 1),
        source=f"aiconfigurator {version}, operator tables of {options['backend_name']} on {system}",
    )


def _load() -> tuple[Callable[..., Any], str]:
    try:
        from importlib.metadata import version  # noqa: PLC0415 - with the extra only

        from aiconfigurator.cli.api import cli_estimate  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise LocalError(
            "profile: needs aiconfigurator", next_step="pip install 'kvferry[aiconfigurator]'"
        ) from error
    return cli_estimate, version("aiconfigurator")
