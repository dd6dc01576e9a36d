"""DeepSeek V4: a window in every layer, and one row per group of tokens at the layer's ratio.

All of it is one vector for K and V, without heads: every tensor-parallel rank holds it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, family, group, layer_count
from kvferry.model.shape import CacheTensor, LayerGroup, LayerKind, TensorRole

__all__: list[str] = []

# vLLM 0.33.0, DeepSeek V4: 448 fp8 + 64 bf16 rope + 8 bytes of scales; indexer 128 fp8 + scale.
_PACKED_V4 = (("fp8_ds_mla", 584),)
_PACKED_V4_INDEXER = (("fp8_ds_mla", 132),)
_V4_PACKED_WIDTH, _V4_PACKED_INDEXER_WIDTH = 512, 128


@family("deepseek_v4", "deepseek_ref")
def deepseek_v4(f: Fields) -> FamilyShape:
    """DeepSeek V4: a window everywhere, compressed rows at the layer's ratio, the compressor's state."""
    num_layers = layer_count(f)
    ratios = _ratios(f, num_layers)
    # Of the queries and the indexer's choice; K and V are one vector of head_dim.
    f.understands("num_key_value_heads", "qk_rope_head_dim", "index_n_heads", "index_topk", "o_groups")
    groups = [_v4_window(f, range(num_layers))]
    for ratio in sorted({r for r in ratios[:num_layers] if r}):
        groups += _v4_compressed(f, [i for i in range(num_layers) if ratios[i] == ratio], ratio)
    draft_ratio = ratios[num_layers] if len(ratios) > num_layers else 0
    draft = [_v4_window(f, (0,))] + (_v4_compressed(f, (0,), draft_ratio) if draft_ratio else [])
    return FamilyShape(num_layers, tuple(groups), draft_layer=tuple(draft))


_V4_RATES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# vLLM: a compressor's state and the window share pages with 64 compressed rows, which makes
# their blocks 4, 8 and 64 rows, whatever the block size is (vllm/models/deepseek_v4/compressor.py).
_V4_WINDOW_BLOCK, _V4_STATE_BLOCKS = 64, {4: 4, 128: 8}


def _ratios(f: Fields, num_layers: int) -> list[int]:
    """Tokens per compressed row, by layer; entries past the last layer are the draft's."""
    found, named = f.entries("compress_ratios"), f.entries("layer_types")
    by_name = None if named is None else _named_ratios(f, named[1])
    if found is None and by_name is None:
        raise f.error("compress_ratios", "missing, and so is layer_types")
    if found is None:
        f.understands("compress_rates")
        ratios = by_name or []
    else:
        ratios = [f.whole(f"compress_ratios[{i}]", entry, 0) for i, entry in enumerate(found[1])]
    if len(ratios) < num_layers or (by_name is not None and len(by_name) < num_layers):
        name = "layer_types" if found is None or len(ratios) >= num_layers else "compress_ratios"
        raise f.error(name, f"too few entries for {num_layers} layers")
    if by_name is not None and by_name[:num_layers] != ratios[:num_layers]:
        raise f.error("layer_types", "names other layers than compress_ratios does")
    return ratios


def _named_ratios(f: Fields, names: Sequence[object]) -> list[int]:
    """The ratio of each layer by its type's name; ``compress_rates`` may set the rate of a type."""
    own = f.nested("compress_rates")
    rates = dict(_V4_RATES)
    for name in () if own is None else own.raw:
        if name not in rates:
            raise f.error(f"compress_rates.{name[:40]}", "is not a layer type of this model")
        rates[name] = own.count(name) if own is not None else 0
    return [rates[f.one_of(f"layer_types[{i}]", name, _V4_RATES)] for i, name in enumerate(names)]


def _v4_window(f: Fields, layers: Iterable[int]) -> LayerGroup:
    window = f.count("sliding_window")
    return group(
        LayerKind.WINDOW,
        layers,
        _v4_row(f),
        limit_tokens=window,
        own_block=_V4_WINDOW_BLOCK,
        query_heads=f.optional("num_attention_heads"),
    )


def _v4_row(f: Fields) -> CacheTensor:
    width = f.count("head_dim")
    packed = _PACKED_V4 if width == _V4_PACKED_WIDTH else ()
    return CacheTensor(TensorRole.COMPRESSED, 1, width, packed=packed)


def _v4_compressed(f: Fields, layers: Sequence[int], ratio: int) -> list[LayerGroup]:
    """Compressed rows, indexer rows (ratio 4 only), and the compressor's open rows.

    The compressor keeps, in float32, the values and the gates of the tokens that are not
    yet folded: ``ratio`` of them, twice as many and twice as wide where windows overlap
    (ratio 4). Published model code and vLLM's CompressorStateCache agree on this for the
    ratios 4 and 128; for another ratio only the slope is known.
    """
    groups = [group(LayerKind.COMPRESSED, layers, _v4_row(f), ratio=ratio)]
    widths = [f.count("head_dim")]
    if ratio == 4:
        width = f.count("index_head_dim")
        packed = _PACKED_V4_INDEXER if width == _V4_PACKED_INDEXER_WIDTH else ()
        row = CacheTensor(TensorRole.INDEXER, 1, width, packed=packed)
        groups.append(group(LayerKind.COMPRESSED_INDEXER, layers, row, ratio=ratio))
        widths.append(width)
    f.understands("index_head_dim")
    if ratio not in _V4_STATE_BLOCKS:
        f.notes.append(
            f"compress_ratios: the compressor state of ratio {ratio} is not known, so the constant part "
            "is incomplete; only the slope per token is"
        )
        return groups
    overlap = 2 if ratio == 4 else 1
    # values and gates, each overlap * width wide
    tensors = [CacheTensor(TensorRole.STATE, 1, 2 * overlap * width, dtype="fp32") for width in widths]
    groups.append(
        group(
            LayerKind.COMPRESSOR,
            layers,
            *tensors,
            limit_tokens=overlap * ratio,
            own_block=_V4_STATE_BLOCKS[ratio],
        )
    )
    return groups
