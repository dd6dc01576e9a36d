"""Families that store a latent vector instead of K and V: MLA, and the DSA indexer beside it.

A latent row has no heads, so every tensor-parallel rank holds all of it (vLLM's
``MLAAttentionSpec`` has ``max_tp_shards=1``), and one copy crosses the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.model.families.heads import (
    FULL_WORDS,
    agreed_layers,
    full_layers,
    head_width,
    listed_layers,
)
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, group, heads_group, layer_count
from kvferry.model.shape import CacheTensor, LayerGroup, LayerKind, TensorRole

__all__ = ["latent_group"]

# vLLM 0.33.0, flashmla_sparse: 512 fp8 + 4 float32 scales + 64 bf16 rope; nvfp4: 256 + 64 + 32.
# The packed rows exist for the DeepSeek V3 widths only.
_PACKED_WIDTHS = (512, 64)
_PACKED_MLA = (("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352))


def latent_group(f: Fields, layers: Iterable[int]) -> LayerGroup:
    """The MLA group: one row of ``kv_lora_rank + qk_rope_head_dim`` values per token."""
    # The second names are openPangu's.
    rank = f.count("kv_lora_rank", "attention_kv_lora_dim")
    rope = f.count("qk_rope_head_dim", "attention_qk_rope_dim")
    # Widths of the projections; what is cached is the latent and the rope part.
    f.understands("attention_q_lora_dim", "attention_qk_dim", "attention_v_dim")
    f.understands("head_dim", "num_key_value_heads", "qk_head_dim", "qk_nope_head_dim", "v_head_dim")
    packed = _PACKED_MLA if (rank, rope) == _PACKED_WIDTHS else ()
    row = CacheTensor(TensorRole.LATENT, 1, rank + rope, packed=packed)
    return group(LayerKind.MLA, layers, row, query_heads=f.optional("num_attention_heads"))


# The model types that vLLM runs as MLA (ModelConfig.is_deepseek_mla lists them one by one: a
# kv_lora_rank alone does not say that the latent is what is cached).
@family("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe")
def mla(f: Fields) -> FamilyShape:
    """Multi-head latent attention in every layer; with ``use_mla`` false K and V heads instead."""
    num_layers = layer_count(f)
    layers = full_layers(f, num_layers)
    if f.flag("use_mla", default=True):
        return FamilyShape(num_layers, (latent_group(f, layers),))
    # DeepSeek-VL2-tiny: every field of MLA is zero or null.
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if f.raw.get(name):
            raise f.error(name, f"{f.raw[name]!r}, but use_mla is false")
    f.understands("v_head_dim")
    heads = f.count("num_attention_heads")
    width = f.optional("head_dim") or head_width(f, heads)
    shape = Heads(f.optional("num_key_value_heads") or heads, width, width, heads)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, layers, shape),))


@family("longcat_flash")
def longcat(f: Fields) -> FamilyShape:
    """LongCat-Flash: two MLA sub-layers, hence two caches, in each of ``num_layers``."""
    num_layers = f.count("num_layers")
    f.one_of("attention_method", f.text("attention_method") or "MLA", {"MLA": None})
    f.understands("mla_scale_kv_lora", "mla_scale_q_lora")
    latent = latent_group(f, [i for i in range(num_layers) for _ in range(2)])
    return FamilyShape(num_layers, (latent,), caches_per_layer=2)


@family("minicpm3")
def expanded_mla(f: Fields) -> FamilyShape:
    """MiniCPM 3: has ``kv_lora_rank``, but vLLM and llama.cpp cache the expanded K and V heads."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads")
    k_dim = f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim")
    v_dim = f.optional("v_head_dim") or head_width(f, heads)
    # Of the projections; nothing of these widths is cached.
    f.understands("kv_lora_rank", "num_key_value_heads", "qk_head_dim", "head_dim")
    f.notes.append(
        "minicpm3: counted as expanded K and V heads, as vLLM and llama.cpp cache it; transformers: latent"
    )
    return FamilyShape(
        num_layers,
        (heads_group(LayerKind.FULL, full_layers(f, num_layers), Heads(heads, k_dim, v_dim, heads)),),
    )


_SPARSE_WORDS: dict[str | int, LayerKind | None] = {
    **FULL_WORDS,
    "deepseek_sparse_attention": LayerKind.FULL,
    "indexed_attention": LayerKind.FULL,
}


@family("deepseek_v32", "glm_moe_dsa")
def sparse_mla(f: Fields) -> FamilyShape:
    """DeepSeek V3.2 and GLM-5: MLA, and an fp8 indexer row in the layers that own an indexer."""
    num_layers = layer_count(f)
    # All of one type; indexer_types tells the layers apart.
    listed_layers(f, num_layers, _SPARSE_WORDS, "layer_types")
    f.understands("index_n_heads", "index_topk", "indexer_rope_interleave", "index_share_for_mtp_iteration")
    owners = _indexer_owners(f, num_layers)
    row = CacheTensor(TensorRole.INDEXER, 1, f.count("index_head_dim"), dtype="fp8_group128")
    latent = latent_group(f, range(num_layers))
    indexer = group(LayerKind.INDEXER, owners, row)
    draft = (latent_group(f, (0,)), group(LayerKind.INDEXER, (0,), row))
    return FamilyShape(num_layers, (latent, indexer), draft_layer=draft)


_INDEXER_WORDS: dict[str | int, LayerKind | None] = {
    "full": LayerKind.INDEXER,
    "F": LayerKind.INDEXER,
    "shared": None,
    "S": None,
}


def _indexer_owners(f: Fields, num_layers: int) -> Sequence[int]:
    """Layers that run an indexer; the others reuse the last one's choice and store no rows."""
    _, pattern = f.get("index_topk_pattern")
    letters = (
        Fields({**f.raw, "index_topk_pattern": list(pattern)}, f.path) if isinstance(pattern, str) else f
    )
    told = agreed_layers(
        f,
        listed_layers(f, num_layers, _INDEXER_WORDS, "indexer_types"),
        listed_layers(letters, num_layers, _INDEXER_WORDS, "index_topk_pattern"),
    )
    every = f.optional("index_topk_freq") or 1
    offset = f.optional("index_skip_topk_offset", minimum=0)
    if told is not None:
        return told[1][LayerKind.INDEXER]
    first = 2 if offset is None else offset
    return [i for i in range(num_layers) if max(i - first + 1, 0) % every == 0]
