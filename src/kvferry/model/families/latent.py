"""Families that store a latent vector instead of K and V: MLA, the DSA indexer, DeepSeek V4.

A latent row has no heads, so every tensor-parallel rank holds all of it (vLLM's
``MLAAttentionSpec`` has ``max_tp_shards=1``), and one copy crosses the wire.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, group, heads_group, layer_count
from kvferry.model.shape import CacheTensor, LayerGroup, LayerKind, TensorRole

__all__ = ["latent_group"]

# vLLM 0.33.0, flashmla_sparse: 512 fp8 + 4 float32 scales + 64 bf16 rope; nvfp4: 256 + 64 + 32.
# The packed rows exist for the DeepSeek V3 widths only.
_PACKED_WIDTHS = (512, 64)
_PACKED_MLA = (("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352))
# vLLM 0.33.0, DeepSeek V4: 448 fp8 + 64 bf16 rope + 8 bytes of scales; indexer 128 fp8 + scale.
_PACKED_V4 = (("fp8_ds_mla", 584),)
_PACKED_V4_INDEXER = (("fp8_ds_mla", 132),)
_V4_PACKED_WIDTH, _V4_PACKED_INDEXER_WIDTH = 512, 128


def latent_group(f: Fields, layers: Iterable[int]) -> LayerGroup:
    """The MLA group: one row of ``kv_lora_rank + qk_rope_head_dim`` values per token."""
    rank, rope = f.count("kv_lora_rank"), f.count("qk_rope_head_dim")
    packed = _PACKED_MLA if (rank, rope) == _PACKED_WIDTHS else ()
    return group(LayerKind.MLA, layers, CacheTensor(TensorRole.LATENT, 1, rank + rope, packed=packed))


# The model types that vLLM runs as MLA (ModelConfig.is_deepseek_mla lists them one by one: a
# kv_lora_rank alone does not say that the latent is what is cached).
@family("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe")
def mla(f: Fields) -> FamilyShape:
    """Multi-head latent attention in every layer."""
    num_layers = layer_count(f)
    return FamilyShape(num_layers, (latent_group(f, range(num_layers)),))


@family("longcat_flash")
def longcat(f: Fields) -> FamilyShape:
    """LongCat-Flash: two MLA sub-layers, hence two caches, in each of ``num_layers``."""
    num_layers = f.count("num_layers")
    return FamilyShape(num_layers, (latent_group(f, [i for i in range(num_layers) for _ in range(2)]),))


@family("minicpm3")
def expanded_mla(f: Fields) -> FamilyShape:
    """MiniCPM 3: has ``kv_lora_rank``, but vLLM and llama.cpp cache the expanded K and V heads."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads")
    k_dim = f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim")
    v_dim = f.optional("v_head_dim") or f.count("hidden_size") // heads
    f.read.add("kv_lora_rank")  # of the projection; nothing of that width is cached
    f.notes.append(
        "minicpm3: counted as expanded K and V heads, as vLLM and llama.cpp cache it; transformers: latent"
    )
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(heads, k_dim, v_dim)),)
    )


@family("deepseek_v32", "glm_moe_dsa")
def sparse_mla(f: Fields) -> FamilyShape:
    """DeepSeek V3.2 and GLM-5: MLA, and an fp8 indexer row in the layers that own an indexer."""
    num_layers = layer_count(f)
    f.read.add("layer_types")  # all of one type; indexer_types tells the layers apart
    owners = _indexer_owners(f, num_layers)
    row = CacheTensor(TensorRole.INDEXER, 1, f.count("index_head_dim"), dtype="fp8_group128")
    latent = latent_group(f, range(num_layers))
    indexer = group(LayerKind.INDEXER, owners, row)
    draft = (latent_group(f, (0,)), group(LayerKind.INDEXER, (0,), row))
    return FamilyShape(num_layers, (latent, indexer), draft_layer=draft)


def _indexer_owners(f: Fields, num_layers: int) -> list[int]:
    """Layers that run an indexer; the others reuse the last one's choice and store no rows."""
    types = f.texts("indexer_types") or _pattern_names(f)
    if types is None:
        every = f.optional("index_topk_freq") or 1
        offset = f.optional("index_skip_topk_offset", minimum=0)
        first = 2 if offset is None else offset
        return [i for i in range(num_layers) if max(i - first + 1, 0) % every == 0]
    if len(types) != num_layers or set(types) - {"full", "shared"}:
        raise f.error(
            "indexer_types", f"one of 'full' and 'shared' is needed for each of {num_layers} layers"
        )
    return [i for i, name in enumerate(types) if name == "full"]


def _pattern_names(f: Fields) -> list[str] | None:
    _, pattern = f.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    return f.texts("index_topk_pattern")


@family("deepseek_v4", "deepseek_ref")
def deepseek_v4(f: Fields) -> FamilyShape:
    """DeepSeek V4: a window everywhere, compressed rows at the layer's ratio, the compressor's state."""
    num_layers = layer_count(f)
    ratios = _ratios(f, num_layers)
    groups = _v4_window(f, range(num_layers))
    for ratio in sorted({r for r in ratios[:num_layers] if r}):
        groups += _v4_compressed(f, [i for i in range(num_layers) if ratios[i] == ratio], ratio)
    draft_ratio = ratios[num_layers] if len(ratios) > num_layers else 0
    draft = _v4_window(f, (0,)) + (_v4_compressed(f, (0,), draft_ratio) if draft_ratio else [])
    return FamilyShape(num_layers, tuple(groups), draft_layer=tuple(draft))


_V4_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _ratios(f: Fields, num_layers: int) -> list[int]:
    """Tokens per compressed row, by layer; entries past the last layer are the draft's."""
    ratios = f.counts("compress_ratios")
    if ratios is None:
        types = f.texts("layer_types")
        if types is None:
            raise f.error("compress_ratios", "missing, and so is layer_types")
        unknown = next((name for name in types if name not in _V4_RATIOS), None)
        if unknown is not None:
            raise f.error("layer_types", f"{unknown!r} is not one of {', '.join(_V4_RATIOS)}")
        ratios = [_V4_RATIOS[name] for name in types]
    if len(ratios) < num_layers:
        raise f.error("compress_ratios", f"{len(ratios)} entries for {num_layers} layers")
    return ratios


def _v4_window(f: Fields, layers: Iterable[int]) -> list[LayerGroup]:
    window = f.count("sliding_window")
    return [group(LayerKind.WINDOW, layers, _v4_row(f), limit_tokens=window)]


def _v4_row(f: Fields) -> CacheTensor:
    width = f.count("head_dim")
    packed = _PACKED_V4 if width == _V4_PACKED_WIDTH else ()
    return CacheTensor(TensorRole.COMPRESSED, 1, width, packed=packed)


def _v4_compressed(f: Fields, layers: Iterable[int], ratio: int) -> list[LayerGroup]:
    """Compressed rows, indexer rows (ratio 4 only), and the compressor's open rows.

    The compressor keeps, in float32, the values and the gates of the tokens that are not
    yet folded: ``ratio`` of them, twice as many and twice as wide where windows overlap
    (ratio 4). Published model code and vLLM's CompressorStateCache agree on this for the
    ratios 4 and 128; for another ratio only the slope is known.
    """
    layers = tuple(layers)
    groups = [group(LayerKind.COMPRESSED, layers, _v4_row(f), ratio=ratio)]
    widths = [f.count("head_dim")]
    if ratio == 4:
        width = f.count("index_head_dim")
        packed = _PACKED_V4_INDEXER if width == _V4_PACKED_INDEXER_WIDTH else ()
        row = CacheTensor(TensorRole.INDEXER, 1, width, packed=packed)
        groups.append(group(LayerKind.COMPRESSED, layers, row, ratio=ratio))
        widths.append(width)
    if ratio not in {4, 128}:
        f.notes.append(
            f"compress_ratios: the compressor state of ratio {ratio} is not known, so the constant part "
            "is incomplete; only the slope per token is"
        )
        return groups
    overlap = 2 if ratio == 4 else 1
    # values and gates, each overlap * width wide
    tensors = [CacheTensor(TensorRole.STATE, 1, 2 * overlap * width, dtype="fp32") for width in widths]
    groups.append(group(LayerKind.COMPRESSOR, layers, *tensors, limit_tokens=overlap * ratio))
    return groups
