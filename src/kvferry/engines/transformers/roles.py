"""Which attribute of a transformers cache layer is what: the only place that knows their names.

The table is ours. A peer names roles, and nothing is ever set by a name that came from outside.
An attribute that holds a tensor and is not in the table makes the model unknown: it is refused,
because a state without that tensor would decode on, wrongly and in silence.

Written for the cache classes of transformers 5.24 (``cache_utils``, and those that DeepSeek-V4 and
MiniMax-M3 define beside their models).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import LocalError
from kvferry.layout import LayerKind, Role

__all__ = ["Growth", "Held", "attention_kind", "held_by", "read", "write"]

Path = tuple[str, int | str | None]
"""Attribute, and the key where the attribute is a dict."""


class Growth(enum.Enum):
    """How the rows of a tensor follow from the number of tokens that the cache has seen."""

    TOKENS = "one row a token"
    WINDOW = "one row a token, the last ``window`` of them"
    ENTRIES = "one row for ``rate`` tokens"
    REMAINDER = "the tokens that have not filled an entry yet"
    CONSTANT = "one size"
    AFTER_ENTRY = "one size, once there is an entry"


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of one layer. ``token_axis``: of the tensor as transformers has it, batch included.

    ``rate``: tokens an entry; ``window``: rows kept.
    """

    path: Path
    role: Role
    growth: Growth
    part: int = 0
    token_axis: int | None = None
    window: int | None = None
    rate: int = 1

    def rows(self, tokens: int) -> int:
        """Rows on the token axis after ``tokens`` tokens."""
        if self.growth is Growth.WINDOW:
            assert self.window is not None
            return min(tokens, self.window)
        return {
            Growth.TOKENS: tokens,
            Growth.ENTRIES: tokens // self.rate,
            Growth.REMAINDER: tokens % self.rate,
        }[self.growth]


# Not tensors of the request: made by the class itself, or of the device.
_DERIVED = {"_sliding_window_tensor"}
_DICTS = {
    # attribute: role, growth, token axis
    "conv_states": (Role.CONV, Growth.CONSTANT, None),
    "recurrent_states": (Role.SSM, Growth.CONSTANT, None),
    "buffer_kv": (Role.BUFFER, Growth.REMAINDER, 1),
    "buffer_gate": (Role.GATE, Growth.REMAINDER, 1),
    "compressed_kv": (Role.COMPRESSED, Growth.ENTRIES, 1),
    "overlap_kv": (Role.OVERLAP, Growth.AFTER_ENTRY, None),
    "overlap_gate": (Role.OVERLAP, Growth.AFTER_ENTRY, None),
}
_GATE_PART = 128  # overlap_kv and overlap_gate share a role; the gate's parts start here
_INDEX = {"indexer_keys": 1, "idx_keys": 2}


def read(layer: Any, path: Path) -> torch.Tensor | None:
    """The tensor at a path; None where the layer has none there now."""
    attribute, key = path
    value = getattr(layer, attribute, None)
    tensor = value.get(key) if key is not None and value is not None else value
    assert tensor is None or isinstance(tensor, torch.Tensor)
    return tensor


def write(layer: Any, path: Path, tensor: torch.Tensor | None) -> None:
    """Set the tensor at a path, in a dict of the layer's own."""
    attribute, key = path
    if key is None:
        setattr(layer, attribute, tensor)
    else:
        getattr(layer, attribute)[key] = tensor


def attention_kind(layer: Any, latent_dim: int | None) -> LayerKind:
    """What kind of attention cache a filled layer with keys is."""
    if hasattr(layer, "sliding_window"):
        return LayerKind.SLIDING
    if any(read(layer, (name, None)) is not None for name in _INDEX):
        return LayerKind.INDEXED
    return LayerKind.MLA if _is_latent(layer, latent_dim) else LayerKind.FULL


def held_by(layer: Any, where: str, latent_dim: int | None, *, is_cross: bool = False) -> tuple[Held, ...]:
    """Every tensor of a filled layer. ``latent_dim``: width of an MLA latent, None without MLA.

    Raises LocalError naming the first attribute that the table does not know.
    """
    found = [*_attention(layer, latent_dim, is_cross=is_cross)]
    for attribute, value in vars(layer).items():
        if attribute in _INDEX and isinstance(value, torch.Tensor):
            found.append(Held((attribute, None), Role.INDEX, Growth.TOKENS, token_axis=_INDEX[attribute]))
        elif attribute in _DICTS:
            found += _dict_tensors(layer, attribute, value)
        elif attribute in {"keys", "values"} | _DERIVED:
            continue
        elif isinstance(value, torch.Tensor) or (isinstance(value, dict) and _holds_tensor(value)):
            raise LocalError(
                f"{where} ({type(layer).__name__}) keeps a tensor in {attribute!r}, which is unknown here",
                now_true="nothing of this model is handed over",
                next_step="file the model's name and the versions of transformers and kvferry as an issue",
            )
    return tuple(found)


def _attention(layer: Any, latent_dim: int | None, *, is_cross: bool) -> list[Held]:
    if getattr(layer, "keys", None) is None:
        return []
    roles = (Role.CROSS_KEY, Role.CROSS_VALUE) if is_cross else (Role.KEY, Role.VALUE)
    if _is_latent(layer, latent_dim):
        roles = (Role.LATENT, Role.ROPE)  # what transformers calls keys and values there
    window = getattr(layer, "sliding_window", None)
    growth = Growth.TOKENS if window is None else Growth.WINDOW
    kept = None if window is None else window - 1  # the newest token attends to these and to itself
    names = ("keys",) if layer.values is layer.keys else ("keys", "values")
    return [
        Held((name, None), role, growth, token_axis=2, window=kept)
        for name, role in zip(names, roles, strict=False)
    ]


def _is_latent(layer: Any, latent_dim: int | None) -> bool:
    keys = layer.keys
    return latent_dim is not None and keys.shape[1] == 1 and keys.shape[-1] == latent_dim


def _dict_tensors(layer: Any, attribute: str, value: dict[Any, Any]) -> list[Held]:
    role, growth, axis = _DICTS[attribute]
    first = _GATE_PART if attribute == "overlap_gate" else 0
    rate = getattr(layer, "compress_rate", 1)
    return [
        Held((attribute, key), role, growth, first + number, axis, rate=rate)
        for number, (key, tensor) in enumerate(value.items())
        if tensor is not None
    ]


def _holds_tensor(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in value.values())
