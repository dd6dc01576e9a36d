"""Families with sliding windows or chunks beside full attention: which layers are which."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.model.families.heads import LAYER_TYPES, head_shape, layers_of, typed_layers
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerGroup, LayerKind

__all__: list[str] = []


def sliding_or_full(
    f: Fields, is_sliding: Callable[[int], bool], default_window: int | None = None
) -> FamilyShape:
    """Window and full layers of one head shape: ``layer_types`` where present, else ``is_sliding(layer)``."""
    num_layers = layer_count(f)
    f.read.update({"sliding_window", "attention_chunk_size"})  # present, and unused, where no layer is such
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        types = ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(num_layers)]
    by_kind = typed_layers(f, types, LAYER_TYPES)
    shape = head_shape(f)
    groups = [heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), shape)]
    if LayerKind.WINDOW in by_kind:
        window = f.count("sliding_window", default=default_window)
        groups.append(heads_group(LayerKind.WINDOW, by_kind[LayerKind.WINDOW], shape, window))
    if LayerKind.CHUNKED in by_kind:
        chunk = f.count("attention_chunk_size")
        groups.append(heads_group(LayerKind.CHUNKED, by_kind[LayerKind.CHUNKED], shape, chunk))
    return FamilyShape(num_layers, tuple(groups))


@family("mistral", "mixtral", "ministral", "ministral3", "phi3", "phimoe", "starcoder2")
def all_sliding(f: Fields) -> FamilyShape:
    """Mistral and its kin: a ``sliding_window`` that is not null holds for every layer."""
    has_window = f.has("sliding_window")
    return sliding_or_full(f, lambda _layer: has_window)


_QWEN = """
    mimo qwen2 qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_audio_text qwen2_moe qwen2_vl
    qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text smollm3
"""


@family(_QWEN)
def sliding_if_used(f: Fields) -> FamilyShape:
    """Qwen 2 and 3: windows only with ``use_sliding_window``, and from ``max_window_layers`` on."""
    is_used = f.has("sliding_window") and f.flag("use_sliding_window", default=False)
    first = f.optional("max_window_layers", minimum=0)
    if is_used and first is None and not f.has("layer_types"):
        raise f.error("max_window_layers", "missing, and use_sliding_window is true")
    return sliding_or_full(f, lambda layer: is_used and first is not None and layer >= first)


@family("step3p5", "step3p7", "cwm")
def listed(f: Fields) -> FamilyShape:
    """Step 3.5 and 3.7, CWM: ``layer_types`` says which layers are windows."""
    f.read.add("num_sliding_attention_heads")  # query heads only
    if not f.has("layer_types"):
        raise f.error("layer_types", "missing from the config")
    return sliding_or_full(f, lambda _layer: False)


@family("gemma2", "gpt_oss", "vaultgemma")
def every_second(f: Fields) -> FamilyShape:
    """Window and full layers in turn, the first one a window."""
    return sliding_or_full(f, lambda layer: layer % 2 == 0)


@family("cohere2", "exaone4", "olmo3", "afmoe")
def every_fourth(f: Fields) -> FamilyShape:
    """Every n-th layer is full (``sliding_window_pattern``, 4 in these classes), the rest are windows."""
    # Exaone 4 writes its pattern as letters ("LLLG"); the length is the period.
    _, raw = f.get("sliding_window_pattern", "global_attn_every_n_layers")
    period = len(raw) if isinstance(raw, str) and raw else None
    if period is None:
        period = f.optional("sliding_window_pattern", "global_attn_every_n_layers") or 4
    has_window = f.has("sliding_window")
    return sliding_or_full(f, lambda layer: has_window and (layer + 1) % period != 0)


@family("gemma3_text", "gemma3")
def gemma3(f: Fields) -> FamilyShape:
    """Gemma 3: five windows to one full layer; the published files leave much to the class defaults."""
    num_layers = f.count("num_hidden_layers", default=26)
    period = f.optional("sliding_window_pattern", "_sliding_window_pattern") or 6
    heads = _gemma_heads(f, default_kv_heads=4)
    return _gemma(f, _gemma_types(f, num_layers, period), heads, heads, default_window=4096)


@family("gemma3n_text", "gemma3n")
def gemma3n(f: Fields) -> FamilyShape:
    """Gemma 3n: four windows to one full layer; the last ``num_kv_shared_layers`` own no cache."""
    num_layers = f.count("num_hidden_layers", default=35)
    heads = _gemma_heads(f, default_kv_heads=2)
    shared = f.count("num_kv_shared_layers", default=15, minimum=0)
    return _gemma(f, _gemma_types(f, num_layers, 5), heads, heads, default_window=512, num_shared=shared)


@family("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")
def gemma4(f: Fields) -> FamilyShape:
    """Gemma 4: full layers have their own head width and count; shared layers as in Gemma 3n."""
    num_layers = f.count("num_hidden_layers", default=30)
    # The class makes the last layer full, whatever the list says.
    types = [*_gemma_types(f, num_layers, 6)[:-1], "full_attention"]
    heads = _gemma_heads(f, default_kv_heads=4)
    full_heads = f.optional("num_global_key_value_heads")
    if full_heads is None or not f.flag("attention_k_eq_v", default=True):
        full_heads = heads.kv_heads
    width = f.count("global_head_dim", default=512)
    shared = f.count("num_kv_shared_layers", default=0, minimum=0)
    full = Heads(full_heads, width, width)
    return _gemma(f, types, full, heads, default_window=512, num_shared=shared)


def _gemma_heads(f: Fields, default_kv_heads: int) -> Heads:
    width = f.count("head_dim", default=256)
    return Heads(f.count("num_key_value_heads", default=default_kv_heads), width, width)


def _gemma_types(f: Fields, num_layers: int, period: int) -> list[str]:
    types = layers_of(f, num_layers, "layer_types")
    if types is not None:
        return types
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _gemma(
    f: Fields, types: Sequence[str], full: Heads, window: Heads, *, default_window: int, num_shared: int = 0
) -> FamilyShape:
    num_owners = len(types) - num_shared
    if num_owners < 1:
        raise f.error("num_kv_shared_layers", f"{num_shared} of {len(types)} layers leave none with a cache")
    by_kind = typed_layers(f, types[:num_owners], LAYER_TYPES)
    tokens = f.count("sliding_window", default=default_window)
    groups = (
        heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), full),
        heads_group(LayerKind.WINDOW, by_kind.get(LayerKind.WINDOW, ()), window, tokens),
    )
    return FamilyShape(len(types), groups)


@family("llama4_text", "llama4")
def llama4(f: Fields) -> FamilyShape:
    """Llama 4: layers with RoPE attend inside chunks, every fourth one (no RoPE) to everything."""
    num_layers = layer_count(f)
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        rope = f.counts("no_rope_layers")  # 1 means that the layer has RoPE
        if not rope:
            period = f.optional("no_rope_layer_interval") or 4
            rope = [int((i + 1) % period != 0) for i in range(num_layers)]
        if len(rope) != num_layers:
            raise f.error("no_rope_layers", f"{len(rope)} entries for {num_layers} layers")
        chunk = f.has("attention_chunk_size")
        types = ["chunked_attention" if chunk and has_rope else "full_attention" for has_rope in rope]
    by_kind = typed_layers(f, types, LAYER_TYPES)
    shape = head_shape(f)
    groups: list[LayerGroup] = [heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), shape)]
    if LayerKind.CHUNKED in by_kind:
        chunk_tokens = f.count("attention_chunk_size")
        groups.append(heads_group(LayerKind.CHUNKED, by_kind[LayerKind.CHUNKED], shape, chunk_tokens))
    return FamilyShape(num_layers, tuple(groups))


@family("mimo_v2_flash", "mimo_v2")
def mimo_v2(f: Fields) -> FamilyShape:
    """MiMo-V2: ``hybrid_layer_pattern`` (1 = window); window layers, and the draft, have their own heads."""
    num_layers = layer_count(f)
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        pattern = f.counts("hybrid_layer_pattern")
        if pattern is None or len(pattern) != num_layers:
            raise f.error("hybrid_layer_pattern", f"one entry for each of the {num_layers} layers is needed")
        types = ["sliding_attention" if entry else "full_attention" for entry in pattern]
    by_kind = typed_layers(f, types, LAYER_TYPES)
    heads = head_shape(f)
    swa = Heads(
        f.count("swa_num_key_value_heads", default=2 * heads.kv_heads),
        f.optional("swa_head_dim") or heads.k_dim,
        f.optional("swa_v_head_dim") or heads.v_dim,
    )
    f.read.add("attention_chunk_size")  # in the published file, read by no engine
    window = f.count("sliding_window_size", "sliding_window")
    full = heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), heads)
    sliding = heads_group(LayerKind.WINDOW, by_kind.get(LayerKind.WINDOW, ()), swa, window)
    draft = heads_group(LayerKind.WINDOW, (0,), swa, window)
    return FamilyShape(num_layers, (full, sliding), draft_layer=(draft,))
