"""Check 13: no NaN and no infinity in recurrent state or logits. Cheap, and a NaN never goes away there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CorruptError
from kvferry.layout import ITEMSIZE, Role
from kvferry.state.cache import TensorEntry, TensorKey
from kvferry.state.check import Refusal
from kvferry.state.check_complete import name_tensor
from kvferry.state.record import ExecutionState
from kvferry.state.values import InlineTensor

__all__ = ["check_finite", "first_not_finite"]

_RECURRENT_ROLES = (Role.SSM, Role.CONV)
# NumPy lacks these dtypes. Their bits that are all set in NaN and infinity: the exponent; e4m3fn has
# no infinity and one NaN, so there it is the whole magnitude.
_ALL_SET = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F}


def check_finite(
    state: ExecutionState, recurrent: Mapping[TensorKey, InlineTensor | NDArray[np.generic]]
) -> Iterator[Refusal]:
    """Recurrent tensors from the pool, as the adapter read them back, and what the record holds itself."""
    for name, tensor in _inline(state):
        yield from _refusals(name, tensor)
    sections = {section.name: section.data for section in state.sections}
    for entry in state.tensors:
        if entry.role not in _RECURRENT_ROLES or entry.alias_of is not None:
            continue
        name = name_tensor("tensors", entry.key)
        if entry.key in recurrent:
            yield from _refusals(name, recurrent[entry.key])
        elif (inline := _from_section(entry, sections)) is not None:
            yield from _refusals(name, inline)
        else:
            yield Refusal(name, "not shown to this check", "read back")


def first_not_finite(tensor: InlineTensor | NDArray[np.generic]) -> int | None:
    """Flat index of the first NaN or infinity; None when there is none. Integers have none."""
    array = tensor.array() if isinstance(tensor, InlineTensor) else tensor
    if isinstance(tensor, InlineTensor) and tensor.dtype in _ALL_SET:
        mask = _ALL_SET[tensor.dtype]
        bad = (array.astype(np.uint16) & mask) == mask
    elif np.issubdtype(array.dtype, np.inexact):
        bad = ~np.isfinite(array)
    else:
        return None
    return int(bad.argmax()) if bad.any() else None


def _inline(state: ExecutionState) -> Iterator[tuple[str, InlineTensor]]:
    if state.tokens.last_logits is not None:
        yield "tokens.last_logits", state.tokens.last_logits
    if state.draft is not None:
        for name, tensor in (("draft.probs", state.draft.probs), ("draft.hidden", state.draft.hidden)):
            if tensor is not None:
                yield name, tensor


def _from_section(entry: TensorEntry, sections: Mapping[str, bytes]) -> InlineTensor | None:
    if entry.section is None or entry.section not in sections:
        return None
    if entry.quantisation is not None or entry.dtype not in ITEMSIZE:
        return None
    return InlineTensor(dtype=entry.dtype, shape=entry.shape, data=sections[entry.section])


def _refusals(name: str, tensor: InlineTensor | NDArray[np.generic]) -> Iterator[Refusal]:
    if (at := first_not_finite(tensor)) is not None:
        yield Refusal(f"{name}, flat index {at}", "NaN or infinite", "finite", error=CorruptError)
