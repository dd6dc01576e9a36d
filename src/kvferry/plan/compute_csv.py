"""CSV texts of measured steps -> compute profiles, one an instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from kvferry.errors import InputError
from kvferry.plan.cells import Cells, columns_of, fields_of
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.compute_fit import ComputeSample, fit_profile

__all__ = ["Instance", "profiles_from_csv"]

Instance = tuple[str, str, int, int]
"""model, gpu, tp, pp"""


def profiles_from_csv(text: str, source: str) -> Mapping[Instance, Callable[[], ComputeProfile]]:
    """Each instance of a text with the function that fits its profile."""
    rows = fields_of(text.splitlines(), source)
    columns = columns_of(next(rows), source)
    reader = _SPLITWISE if "prompt_time" in columns else _OWN
    for name in reader.needs:
        if name not in columns:
            raise InputError(f"{source}, line 1: column {name} is missing; needed: {', '.join(reader.needs)}")
    by_instance: dict[Instance, list[ComputeSample]] = {}
    for line, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(columns):
            raise InputError(f"{source}, line {line}: {len(row)} fields, the header has {len(columns)}")
        cells = Cells(dict(zip(columns, row, strict=True)), source, line)
        instance = (
            cells.text("model", "model"),
            cells.text(reader.gpu, "gpu"),
            cells.count(reader.tp, 1),
            cells.count("pp", 1),
        )
        by_instance.setdefault(instance, []).extend(reader.read(cells))
    if not by_instance:
        raise InputError(f"{source}, line 2: no measurement follows the header")
    return {
        instance: partial(_fitted, instance, samples, source) for instance, samples in by_instance.items()
    }


def _fitted(instance: Instance, samples: list[ComputeSample], source: str) -> ComputeProfile:
    model, gpu, tp, pp = instance
    try:
        return fit_profile(samples, model=model, gpu=gpu, tp=tp, pp=pp, source=source)
    except InputError as error:
        raise InputError(f"{source}: {model} on {gpu} tp{tp}: {error.message}") from error


class _Reader(msgspec.Struct, frozen=True):
    needs: tuple[str, ...]
    gpu: str
    tp: str
    read: Callable[[Cells], Iterable[ComputeSample]]


def _read_own(cells: Cells) -> Iterable[ComputeSample]:
    phase = cells.text("phase", "")
    if phase not in {"prefill", "decode"}:
        raise InputError(f"{cells.where}: phase: {phase[:40]!r} is not prefill or decode")
    batch, tokens, seconds = cells.count("batch"), cells.number("tokens"), cells.number("seconds")
    return [ComputeSample(phase == "prefill", batch, tokens, seconds)]


def _read_splitwise(cells: Cells) -> Iterable[ComputeSample]:
    prompt, batch = cells.count("prompt_size"), cells.count("batch_size")
    # token_time is the mean over token_size steps, whose context grows by one a step.
    context = prompt + cells.count("token_size") / 2
    return [
        ComputeSample(
            is_prefill=True, batch=batch, tokens=prompt, seconds=cells.number("prompt_time") / 1000
        ),
        ComputeSample(
            is_prefill=False, batch=batch, tokens=context, seconds=cells.number("token_time") / 1000
        ),
    ]


_OWN = _Reader(("phase", "batch", "tokens", "seconds"), "gpu", "tp", _read_own)
_SPLITWISE = _Reader(
    (
        "model",
        "hardware",
        "prompt_size",
        "batch_size",
        "token_size",
        "prompt_time",
        "token_time",
        "tensor_parallel",
    ),
    "hardware",
    "tensor_parallel",
    _read_splitwise,
)
