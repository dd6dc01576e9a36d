"""The registry of model families: ``model_type`` -> one small function that reads its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from kvferry.model.fields import Fields
from kvferry.model.shape import CacheTensor, LayerGroup, LayerKind, TensorRole

__all__ = [
    "FAMILIES",
    "MAX_LAYERS",
    "Family",
    "FamilyShape",
    "Heads",
    "family",
    "group",
    "heads_group",
    "layer_count",
]


class Heads(NamedTuple):
    """KV heads of a layer, how many values of K and of V each has per token, and its query heads."""

    kv_heads: int
    k_dim: int
    v_dim: int
    query_heads: int | None = None


class FamilyShape(msgspec.Struct, frozen=True):
    """What a family function reads out of a config.

    Args:
        num_layers: layers that pipeline parallelism splits.
        groups: the layer groups; empty ones are dropped by the caller.
        cacheless: the layers that own no cache. With the layers of the groups they must be all layers,
            each in a group at most ``caches_per_layer`` times; the caller refuses anything else.
        draft_layer: the groups of one draft layer, where it is not simply the last attention layer.
        encoder_tokens: the encoder's length, where the model fixes it.
    """

    num_layers: int
    groups: tuple[LayerGroup, ...]
    cacheless: tuple[int, ...] = ()
    caches_per_layer: int = 1
    draft_layer: tuple[LayerGroup, ...] = ()
    encoder_tokens: int | None = None


MAX_LAYERS = 100_000
"""Far above any model; each layer is looked at one by one."""

Family = Callable[[Fields], FamilyShape]
FAMILIES: dict[str, Family] = {}


def family(*model_types: str) -> Callable[[Family], Family]:
    """Register a function for these ``model_type`` values; one string may hold several, with spaces between.

    Adding a family is one such function.
    """

    def register(function: Family) -> Family:
        for model_type in " ".join(model_types).split():
            FAMILIES[model_type] = function
        return function

    return register


def layer_count(f: Fields) -> int:
    """The number of layers, by whichever of its names the config uses."""
    num_layers = f.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if num_layers > MAX_LAYERS:
        raise f.error("num_hidden_layers", f"{num_layers} is more than {MAX_LAYERS}")
    return num_layers


def group(
    kind: LayerKind,
    layers: Iterable[int],
    *tensors: CacheTensor,
    limit_tokens: int = 0,
    ratio: int = 1,
    query_heads: int | None = None,
    own_block: int | None = None,
) -> LayerGroup:
    """A layer group of the target model."""
    return LayerGroup(
        kind, tuple(layers), tensors, limit_tokens, ratio, query_heads=query_heads, own_block=own_block
    )


def heads_group(kind: LayerKind, layers: Iterable[int], heads: Heads, limit_tokens: int = 0) -> LayerGroup:
    """A group of the target model that stores K and V rows per head."""
    k = CacheTensor(TensorRole.K, heads.kv_heads, heads.k_dim)
    v = CacheTensor(TensorRole.V, heads.kv_heads, heads.v_dim)
    return group(kind, layers, k, v, limit_tokens=limit_tokens, query_heads=heads.query_heads)
