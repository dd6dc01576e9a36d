"""What most families share: the head shape, and per-layer lists of what each layer is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvferry.model.draft_count import draft_count
from kvferry.model.fields import Fields
from kvferry.model.registry import Heads, heads_group
from kvferry.model.shape import LayerGroup, LayerKind

__all__ = [
    "FULL_WORDS",
    "HIDDEN",
    "Layers",
    "agreed_layers",
    "check_same",
    "full_layers",
    "head_groups",
    "head_shape",
    "head_width",
    "listed_layers",
    "overridden_heads",
    "split_evenly",
    "split_layers",
]

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")

FULL_WORDS: dict[str | int, LayerKind | None] = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
}
"""The words for a layer of full attention: of transformers 5 and of those before it."""

Layers = Mapping[LayerKind | None, Sequence[int]]
"""Layer indices by the kind of cache that they own; None: no cache."""


def head_shape(f: Fields) -> Heads:
    """The heads by the ordinary fields.

    The explicit head width wins over hidden_size / heads, which is wrong for Qwen3-4B,
    Gemma-7B and many more (LMCache/LMCache#688).
    """
    heads = f.count("num_attention_heads", "n_head", "n_heads")
    kv_name, _ = f.get(*KV_HEADS)
    kv_heads = f.optional(*KV_HEADS) or heads
    if heads % kv_heads:
        raise f.error(kv_name, f"{kv_heads} does not divide the {heads} attention heads")
    k_dim = f.optional("head_dim", "attention_head_dim") or head_width(f, heads)
    return Heads(kv_heads, k_dim, f.optional("v_head_dim") or k_dim, heads)


def head_width(f: Fields, heads: int, *names: str) -> int:
    """The hidden width (``names``, else any name of it) over the heads; a rest is an error."""
    name, _ = f.get(*(names or HIDDEN))
    hidden = f.count(*(names or HIDDEN))
    return split_evenly(f, name, hidden, heads, "heads")


def split_evenly(f: Fields, name: str, value: int, parts: int, what: str) -> int:
    """``value / parts``; a rest, or nothing left, is an error that names the field."""
    if value % parts:
        raise f.error(name, f"{value} is not a multiple of {parts} {what}")
    return value // parts


def overridden_heads(f: Fields, num_layers: int, base: Heads) -> dict[int, Heads]:
    """The heads of the layers that ``per_layer_config`` sets apart, by layer index.

    transformers (from 5.24) writes what a layer has unlike the rest under its index.
    """
    config = f.nested("per_layer_config")
    overrides = {}
    for key in () if config is None else config.raw:
        if not (key.isascii() and key.isdecimal() and len(key) < 9 and int(key) < num_layers):
            raise f.error("per_layer_config", f"{key[:40]!r} is no layer; there are {num_layers}")
        own = config.nested(key) if config is not None else None
        if own is not None:
            k_dim = own.optional("head_dim") or base.k_dim
            overrides[int(key)] = Heads(
                own.optional(*KV_HEADS) or base.kv_heads,
                k_dim,
                own.optional("v_head_dim") or (base.v_dim if k_dim == base.k_dim else k_dim),
                own.optional("num_attention_heads") or base.query_heads,
            )
    return overrides


def head_groups(
    kind: LayerKind, layers: Iterable[int], heads_of: Mapping[int, Heads], base: Heads, limit_tokens: int = 0
) -> list[LayerGroup]:
    """The groups of these layers, one for each shape of heads that they have."""
    by_heads: dict[Heads, list[int]] = {}
    for layer in layers:
        by_heads.setdefault(heads_of.get(layer, base), []).append(layer)
    return [heads_group(kind, group, heads, limit_tokens) for heads, group in by_heads.items()]


def listed_layers(
    f: Fields, num_layers: int, words: Mapping[str | int, LayerKind | None], *names: str
) -> tuple[str, Layers] | None:
    """The layers by kind, as a per-layer list says, with the list's name; None where the config has none.

    Args:
        words: every entry that this family handles. Any other is an error that lists them.

    Published lists may go on into the draft's layers (huggingface/transformers#46658): just as
    many entries more as the config declares draft layers are cut off.
    """
    found = f.entries(*names)
    if found is None or not found[1]:  # an empty list tells nothing, as published files have it
        return None
    name, entries = found
    if len(entries) != num_layers and len(entries) != num_layers + draft_count(f):
        raise f.error(name, f"{len(entries)} entries for {num_layers} layers")
    layers: dict[LayerKind | None, list[int]] = defaultdict(list)
    for i, entry in enumerate(entries[:num_layers]):
        layers[words[f.one_of(f"{name}[{i}]", entry, words)]].append(i)
    return name, layers


def agreed_layers(f: Fields, *found: tuple[str, Layers] | None) -> tuple[str, Layers] | None:
    """The layers that several fields tell alike; None where none does, an error where two disagree."""
    told = [entry for entry in found if entry is not None]
    for name, layers in told[1:]:
        check_same(f, name, layers, *told[0])
    return told[0] if told else None


def split_layers(num_layers: int, chosen: Iterable[int], kind: LayerKind, rest: LayerKind | None) -> Layers:
    """``chosen`` layers of one kind, all others of another."""
    indices = set(chosen)
    layers: dict[LayerKind | None, list[int]] = defaultdict(list)
    for i in range(num_layers):
        layers[kind if i in indices else rest].append(i)
    return layers


def check_same(f: Fields, name: str, layers: Layers, other: str, other_layers: Layers) -> None:
    """Raise InputError unless both name the same layers for every kind."""
    for kind in {*layers, *other_layers}:
        if list(layers.get(kind, ())) != list(other_layers.get(kind, ())):
            raise f.error(name, f"names other layers ({kind or 'no cache'}) than {other} does")


def full_layers(f: Fields, num_layers: int) -> range:
    """All layers, after a check that a ``layer_types``, where present, calls them all full attention."""
    listed_layers(f, num_layers, FULL_WORDS, "layer_types")
    return range(num_layers)
