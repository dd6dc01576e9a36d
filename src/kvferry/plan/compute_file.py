"""Texts that hold compute times -> compute profiles. Opening the files belongs to the command line.

Four kinds are read:

- ``.json`` of kvferry: one object, the fields of ComputeProfile; times in seconds.
- ``.json`` of DistServe's profiler: ``{model: {tp: {prefill, decoding_smallbs, ...}}}``; milliseconds.
- ``.csv`` with the columns ``phase,batch,tokens,seconds``, and ``model,gpu,tp,pp`` where it holds
  several instances. phase is prefill or decode; tokens is the length of each prompt, or the context
  of each request.
- ``.csv`` of splitwise-sim (``prompt_size,batch_size,token_size,prompt_time,token_time,...``); milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from kvferry.errors import InputError
from kvferry.plan.compute import (
    ComputeProfile,
    DecodeLaw,
    MeasuredRange,
    PrefillLaw,
    PrefillTable,
    check_profile,
)
from kvferry.plan.compute_csv import Instance, profiles_from_csv
from kvferry.plan.where import json_place

__all__ = ["ProfileChoice", "parse_profile"]


class ProfileChoice(msgspec.Struct, frozen=True):
    """Which profile of a file is meant; None: whatever it has."""

    model: str | None = None
    gpu: str | None = None
    tp: int | None = None
    pp: int | None = None

    def fits(self, model: str, gpu: str, tp: int, pp: int) -> bool:
        """Whether an instance is one that is meant."""
        return all(
            asked in (None, value)
            for asked, value in ((self.model, model), (self.gpu, gpu), (self.tp, tp), (self.pp, pp))
        )

    def __str__(self) -> str:
        asked = [f"{name} {getattr(self, name)}" for name in self.__struct_fields__ if getattr(self, name)]
        return ", ".join(asked) or "no selection"


class _ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form; what ``kvferry interference`` measured beside it is kept for the reader only."""

    model: str
    gpu: str
    tp: int
    decode: DecodeLaw
    prefill: PrefillLaw | None = None
    prefill_table: PrefillTable | None = None
    pp: int = 1
    engine: str = ""
    decode_large: DecodeLaw | None = None
    large_batch: int = 0
    mixed_share: float | None = None
    kv_tokens: int | None = None
    worst_error: float | None = None
    covers: MeasuredRange | None = None
    source: str = ""
    itl_alone: object = None
    itl_mixed: object = None
    tail: object = None


def parse_profile(text: str, source: str, choice: ProfileChoice) -> ComputeProfile:
    """The only profile of a text that fits ``choice``.

    ``source`` is its file name, which also tells JSON from CSV. Raises InputError naming the file,
    the line where there is one, and the key or column; and one that lists the profiles where none
    or several fit.
    """
    if not text.strip():
        raise InputError(f"{source}, line 1: is empty")
    if source.lower().endswith(".csv"):
        candidates = profiles_from_csv(text, source)
    else:
        candidates = _from_json(text, source)
    fitting = [make for instance, make in candidates.items() if choice.fits(*instance)]
    if len(fitting) == 1:
        return fitting[0]()
    names = "; ".join(f"{model} on {gpu} tp{tp} pp{pp}" for model, gpu, tp, pp in list(candidates)[:12])
    raise InputError(f"{source}: {len(fitting)} profiles fit {choice}; it has: {names}")


def _from_json(text: str, source: str) -> Mapping[Instance, Callable[[], ComputeProfile]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{source}, line 1: holds a JSON {type(data).__name__}, not an object")
    if data and all(isinstance(value, dict) for value in data.values()) and "decode" not in data:
        return _from_distserve(data, text, source)
    profile = _from_own(text, source)
    return {(profile.model, profile.gpu, profile.tp, profile.pp): lambda: profile}


def _from_own(text: str, source: str) -> ComputeProfile:
    try:
        file = msgspec.json.decode(text, type=_ProfileFile)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        key = path.rstrip("`").removeprefix("$").lstrip(".")
        if "unknown field" in reason:
            key = ".".join([key, reason.split("`")[1]]).lstrip(".")
        raise InputError(f"{json_place(source, text, key)}: {reason}") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{source}: is not JSON: {error}") from error
    if (file.prefill is None) == (file.prefill_table is None):
        raise InputError(
            f"{json_place(source, text, 'prefill')}: needs exactly one of prefill and prefill_table"
        )
    fields = {
        name: getattr(file, name)
        for name in ComputeProfile.__struct_fields__
        if name not in {"prefill", "source"}
    }
    prefill = file.prefill or file.prefill_table
    return _checked(
        lambda: check_profile(
            ComputeProfile(prefill=prefill, source=file.source or source, **fields)  # type: ignore[arg-type]
        ),
        text,
        source,
    )


def _checked(make: Callable[[], ComputeProfile], text: str, source: str, prefix: str = "") -> ComputeProfile:
    try:
        return make()
    except InputError as error:
        key, _, reason = error.message.partition(": ")
        raise InputError(f"{json_place(source, text, prefix + key)}: {reason}") from error


def _from_distserve(
    data: Mapping[str, object], text: str, source: str
) -> Mapping[Instance, Callable[[], ComputeProfile]]:
    # An entry is read when it is asked for: of the public files one has a negative coefficient.
    makers: dict[Instance, Callable[[], ComputeProfile]] = {}
    for model, by_tp in data.items():
        assert isinstance(by_tp, dict)
        for tp, entry in by_tp.items():
            if not str(tp).isdigit() or not isinstance(entry, dict):
                key = f"{model}.{tp}"
                raise InputError(
                    f"{json_place(source, text, key)}: is not DistServe's {{model: {{tp: ...}}}}"
                )
            makers[model, _gpu_of(source), int(tp), 1] = partial(
                _distserve_entry, model, int(tp), entry, text, source
            )
    return makers


def _distserve_entry(
    model: str, tp: int, entry: Mapping[str, object], text: str, source: str
) -> ComputeProfile:
    known = {"prefill", "decoding_smallbs", "decoding_largebs", "decoding_large_small_bs_threshold"}
    for name in entry:
        if name not in known:
            raise InputError(
                f"{json_place(source, text, f'{model}.{tp}.{name}')}: unknown; known: {sorted(known)}"
            )
    laws = {}
    for name in ("prefill", "decoding_smallbs", "decoding_largebs"):
        law = entry.get(name)
        if not isinstance(law, list) or len(law) != 3 or not all(isinstance(x, int | float) for x in law):
            raise InputError(
                f"{json_place(source, text, f'{model}.{tp}.{name}')}: is not a list of 3 numbers"
            )
        laws[name] = [float(number) / 1000 for number in law]
    threshold = entry.get("decoding_large_small_bs_threshold")
    if not isinstance(threshold, int):
        key = f"{model}.{tp}.decoding_large_small_bs_threshold"
        raise InputError(f"{json_place(source, text, key)}: is not a whole number")
    return _checked(
        lambda: check_profile(
            ComputeProfile(
                model=model,
                gpu=_gpu_of(source),
                tp=tp,
                prefill=PrefillLaw(*laws["prefill"]),
                decode=DecodeLaw(*laws["decoding_smallbs"]),
                decode_large=DecodeLaw(*laws["decoding_largebs"]),
                large_batch=threshold,
                source=source,
            )
        ),
        text,
        source,
        f"{model}.{tp}.",
    )


def _gpu_of(source: str) -> str:
    return "a100-80gb" if "a100" in source.lower() else "gpu"
