"""The guard against a silent guess: every field of a config is read, harmless, or refused by name.

A config may have fields that change what is cached and that nothing here reads: a model newer
than the table of families, or a known one in a variant. A family reads its fields, or states
that it understands them. Of the rest a field is let pass only

- where its name says nothing of attention, heads, windows, states, or which layer is what, or
- where ``kvferry.model.harmless`` lists it, or
- where its value says nothing: null, false, zero, a negative number, empty, or nulls all through.

Anything else is refused by its path, whatever its JSON type and however deep it lies. Only names
are judged: reading the value of a field whose meaning is not known would be the guess itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kvferry.model.fields import Fields
from kvferry.model.harmless import is_harmless, is_other_part

__all__ = ["check_unread", "suspicious_fields"]

# Parts of a word that are about a cache wherever they stand.
_STEMS = re.compile(
    "attn|attention|head|cache|kv|qkv|window|slid|chunk|conv|mamba|rwkv|lstm|retention|recur|delta"
    "|hyena|hgrn|latent|compress|spars|hybrid|cross|indexer|yoco|lightning|per_layer|layerwise"
    "|alternat|interleav|bidirection|causal"
)
# Whole words; too short or too common to be looked for inside others.
_WORD_LIST = """
    att block blocks cla decoder dilated dilation encoder every full gdn gla global gqa group
    groups gru index indices interval iteration iterations key keys layer layers linear local loop loops
    lru mem memory mha mixer mla mqa noop op pattern patterns period pruned qk queries query repeat
    repeats reuse rnn share shared sharing shares sink sinks skip skipped span ssm state states swa types
    ut value values
"""
_WORDS = frozenset(_WORD_LIST.split())
_K_OR_V = re.compile(r"(?:^|_)(?:[kv]_(?:dim|size|width|rank)|(?:d|dim|n|num)_?[kv])(?:_|$)")
_FEWEST_LAYERS = 4  # a shorter list is more likely a pair of something
_DEEPEST = 32  # objects in objects; no published config comes near
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def check_unread(f: Fields, num_layers: int) -> None:
    """Raise InputError naming the fields that a family did not read though they may change the cache."""
    paths = suspicious_fields(f, num_layers)
    if paths:
        raise f.error(
            paths[0],
            f"this model type is not known to use {_and(paths)}, which may change what is cached; "
            "give the shape by hand (shape:LAYERSxKV_HEADSxHEAD_DIM) if it does not",
        )


def suspicious_fields(f: Fields, num_layers: int) -> list[str]:
    """Paths, from ``f`` on, of the fields that may change the cache and that nothing has read."""
    return list(_walk(f.raw, f, num_layers))


def _walk(raw: Mapping[str, object], f: Fields | None, num_layers: int, depth: int = 0) -> Iterator[str]:
    """Suspicious paths in one object; ``f`` is its reader, None where nothing has read in it."""
    for name, value in raw.items():
        if f is not None and name in f.read:
            for i, child in enumerate(f.children.get(name, ())):
                prefix = f"{name}[{i}]" if isinstance(value, list) else name
                yield from (f"{prefix}.{path}" for path in _walk(child.raw, child, num_layers, depth + 1))
        elif not _says_something(value) or is_harmless(name, value) or is_other_part(name, value):
            continue
        elif _is_hint(name) or _is_per_layer(value, num_layers) or depth == _DEEPEST:
            yield name
        elif isinstance(value, dict):
            yield from (f"{name}.{path}" for path in _walk(value, None, num_layers, depth + 1))
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, dict):
                    yield from (f"{name}[{i}].{path}" for path in _walk(entry, None, num_layers, depth + 1))


def _is_hint(name: str) -> bool:
    words = [part.lower() for part in _PARTS.findall(name)]
    joined = "_".join(words)
    return bool(_STEMS.search(joined) or _K_OR_V.search(joined) or not _WORDS.isdisjoint(words))


def _is_per_layer(value: object, num_layers: int) -> bool:
    """Whether a list has just one entry for each layer, which tells layers apart whatever its name."""
    return isinstance(value, list) and len(value) == num_layers >= _FEWEST_LAYERS


def _says_something(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict):
        return depth == _DEEPEST or any(_says_something(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return any(entry is not None for entry in value)  # a zero in a list is an entry like any other
    return not (value is None or value is False or value == "" or _is_at_most_zero(value))


def _is_at_most_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= 0


def _and(paths: list[str], shown: int = 6) -> str:
    more = f" and {len(paths) - shown} more" if len(paths) > shown else ""
    return ", ".join(path[:80] for path in paths[:shown]) + more
