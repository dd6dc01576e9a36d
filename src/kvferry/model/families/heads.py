"""What most families share: the head shape, and per-layer lists of type names."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.model.fields import Fields
from kvferry.model.registry import Heads
from kvferry.model.shape import LayerKind

__all__ = ["LAYER_TYPES", "head_shape", "layers_of", "typed_layers"]

# Every spelling of a layer's type that is about attention, old and new names of transformers.
LAYER_TYPES = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "global_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "sliding_window_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.CHUNKED,
}


def head_shape(f: Fields) -> Heads:
    """The heads by the ordinary fields.

    The explicit head width wins over hidden_size / heads, which is wrong for Qwen3-4B,
    Gemma-7B and many more (LMCache/LMCache#688).
    """
    heads = f.count("num_attention_heads", "n_head", "n_heads")
    kv_heads = f.optional("num_key_value_heads", "num_kv_heads") or heads
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    k_dim = f.optional("head_dim", "attention_head_dim")
    if k_dim is None:
        hidden = f.count("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise f.error("head_dim", f"missing, and hidden_size {hidden} is not a multiple of {heads} heads")
        k_dim = hidden // heads
    return Heads(kv_heads, k_dim, f.optional("v_head_dim") or k_dim)


def layers_of(f: Fields, num_layers: int, *names: str) -> list[str] | None:
    """A per-layer list of type names, checked for length; None where the config has none."""
    types = f.texts(*names)
    if types is not None and len(types) != num_layers:
        raise f.error(names[0], f"{len(types)} entries for {num_layers} layers")
    return types


def typed_layers(f: Fields, types: Sequence[str], known: dict[str, LayerKind]) -> dict[LayerKind, list[int]]:
    """Layer indices by kind. A type name that is not known is an error that lists the known ones."""
    indices: dict[LayerKind, list[int]] = {}
    for i, name in enumerate(types):
        if name not in known:
            raise f.error(f"layer_types[{i}]", f"{name!r} is not one of {', '.join(sorted(known))}")
        indices.setdefault(known[name], []).append(i)
    return indices
