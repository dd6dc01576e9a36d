"""Fields that hint at a cache: the guard against a silent guess.

A config may have fields that change what is cached and that nothing here reads: a model
newer than this table, or a known one in a variant. Such a field, present and not null,
false, zero or empty, is refused by name. Only the names are judged: reading the value of
a field whose meaning is not known would be the guess that this file exists to prevent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvferry.model.fields import Fields
from kvferry.model.shape import LayerGroup, LayerKind

__all__ = ["check_unread", "suspicious_fields"]

_RECURRENT = frozenset(
    {
        LayerKind.MAMBA1,
        LayerKind.MAMBA2,
        LayerKind.GATED_DELTA,
        LayerKind.KDA,
        LayerKind.LIGHTNING,
        LayerKind.SHORT_CONV,
    }
)
# Pattern over the field's name -> the kinds of cache that it belongs to. Where a family has
# one of those kinds, it knows the field or has no need of it.
_HINTS: tuple[tuple[re.Pattern[str], frozenset[LayerKind]], ...] = tuple(
    (re.compile(pattern), frozenset(kinds))
    for pattern, kinds in (
        (r"sliding|(^|_)swa_|window_size|attention_window|local_attention", {LayerKind.WINDOW}),
        (r"attention_chunk|chunked", {LayerKind.CHUNKED}),
        (r"kv_lora|kv_latent|latent_dim|qk_(rope|nope)_head_dim", {LayerKind.MLA, LayerKind.COMPRESSED}),
        (r"^index_(head|n_heads|topk)|indexer", {LayerKind.INDEXER, LayerKind.COMPRESSED}),
        (r"compress", {LayerKind.COMPRESSED}),
        (
            r"mamba|(^|_)ssm|state_size|d_state|(^|_)conv(_|$|1d)|rwkv|retention|recurrent|(^|_)lru",
            _RECURRENT,
        ),
        (
            r"linear_(attn|attention|num|key|value|conv|head)|delta_(net|rule)|kda|lightning",
            _RECURRENT,
        ),
        (r"cross_attention|is_encoder_decoder|^encoder_layers|^decoder_layers", {LayerKind.CROSS}),
        (r"kv_shar|use_cla|cla_share|kv_reuse|yoco", set()),
        (
            r"(?<!mlp_)layer_types|layers?_block_type|block_(configs|types|pattern)|layer_pattern|hybrid",
            set(),
        ),
        (r"attn_(layer|type)|attention_(types|layers|pattern)|full_att\w*_(interval|layers|idx)", set()),
        (r"multi_query|kv_channels|global_head_dim|num_global_key_value_heads|(^|_)d_kv$", set()),
        (r"(^|_)n?k?v_heads?_(per_layer|list)|sparse_att|block_sparse|blocksparse", set()),
    )
)
_PLAIN_TYPES = {"full_attention", "attention"}


def suspicious_fields(f: Fields, known: Iterable[LayerKind] = ()) -> list[str]:
    """Names of fields that hint at a cache of a kind not in ``known`` and that nothing has read."""
    kinds = frozenset(known)
    return [
        name
        for name, value in f.raw.items()
        if name not in f.read and value and not _is_plain(value) and _is_hint(name, kinds)
    ]


def check_unread(f: Fields, groups: Iterable[LayerGroup]) -> None:
    """Raise InputError naming the fields that a family did not read though they may change the cache."""
    names = suspicious_fields(f, {group.kind for group in groups})
    if names:
        raise f.error(
            names[0],
            f"this model type is not known to use {', '.join(names)}, which may change what is cached; "
            "give the shape by hand (shape:LAYERSxKV_HEADSxHEAD_DIM) if it does not",
        )


def _is_hint(name: str, known: frozenset[LayerKind]) -> bool:
    if name.startswith("mtp_"):  # the draft's layers, which count only when they are asked for
        return False
    return any(pattern.search(name) and not (kinds & known) for pattern, kinds in _HINTS)


def _is_plain(value: object) -> bool:
    return isinstance(value, list) and all(entry in _PLAIN_TYPES for entry in value if isinstance(entry, str))
