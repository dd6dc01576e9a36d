"""Families with sliding windows or chunks beside full attention: which layers are which."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.model.families.heads import (
    FULL_WORDS,
    Layers,
    agreed_layers,
    head_groups,
    head_shape,
    listed_layers,
    overridden_heads,
    split_evenly,
    split_layers,
)
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__: list[str] = []

_WORDS: dict[str | int, LayerKind | None] = {**FULL_WORDS, "sliding_attention": LayerKind.WINDOW}


def _sliding(num_layers: int, windows: Iterable[int]) -> Layers:
    return split_layers(num_layers, windows, LayerKind.WINDOW, LayerKind.FULL)


_WINDOW = ("sliding_window", "sliding_window_size")  # Gemma 2 was published with both


def sliding_or_full(f: Fields, windows: Callable[[int], Iterable[int]]) -> FamilyShape:
    """Window and full layers of one head shape: by ``layer_types``, else by ``windows(num_layers)``."""
    num_layers = layer_count(f)
    f.understands(*_WINDOW)  # may be present where no layer has one
    told = listed_layers(f, num_layers, _WORDS, "layer_types")
    layers = _sliding(num_layers, windows(num_layers)) if told is None else told[1]
    shape = head_shape(f)
    groups = [heads_group(LayerKind.FULL, layers[LayerKind.FULL], shape)]
    if layers[LayerKind.WINDOW]:
        if not f.flag("use_sliding_window", default=True):
            raise f.error("use_sliding_window", "is false, but layer_types names layers with a window")
        window = f.count(*_WINDOW)
        groups.append(heads_group(LayerKind.WINDOW, layers[LayerKind.WINDOW], shape, window))
    return FamilyShape(num_layers, tuple(groups))


@family("mistral", "mixtral", "ministral", "ministral3", "phi3", "phimoe", "starcoder2")
def all_sliding(f: Fields) -> FamilyShape:
    """Mistral and its kin: a ``sliding_window`` that is not null holds for every layer."""
    return sliding_or_full(f, lambda num_layers: range(num_layers if f.has("sliding_window") else 0))


_QWEN = """
    mimo qwen2 qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_audio_text qwen2_moe qwen2_vl
    qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text smollm3
"""


@family(_QWEN)
def sliding_if_used(f: Fields) -> FamilyShape:
    """Qwen 2 and 3: windows only with ``use_sliding_window``, and from ``max_window_layers`` on."""
    is_used = f.flag("use_sliding_window", default=False) and f.has("sliding_window")
    f.understands("max_window_layers")

    def windows(num_layers: int) -> range:
        first = f.optional("max_window_layers", minimum=0) if is_used else num_layers
        if first is None:
            raise f.error("max_window_layers", "missing, and use_sliding_window is true")
        return range(first, num_layers)

    return sliding_or_full(f, windows)


@family("cwm")
def listed(f: Fields) -> FamilyShape:
    """CWM: ``layer_types`` says which layers are windows."""
    if not f.has("layer_types"):
        raise f.error("layer_types", "missing from the config")
    return sliding_or_full(f, lambda _num_layers: ())


@family("step3p5", "step3p7")
def step(f: Fields) -> FamilyShape:
    """Step 3.5 and 3.7: ``layer_types``; the KV heads are published as ``num_attention_groups``.

    ``attention_other_setting`` has the heads of the window layers (vllm-project/vllm#39796,
    huggingface/transformers#46562).
    """
    num_layers = layer_count(f)
    told = listed_layers(f, num_layers, _WORDS, "layer_types")
    if told is None:
        raise f.error("layer_types", "missing from the config")
    heads, kv_heads = f.count("num_attention_heads"), f.count("num_attention_groups", "num_key_value_heads")
    f.one_of("att_impl_type", f.text("att_impl_type") or "GQA", {"GQA": None})
    width = f.count("head_dim")
    split_evenly(f, "num_attention_heads", heads, kv_heads, "KV heads")
    full = Heads(kv_heads, width, width, heads)
    windows = told[1][LayerKind.WINDOW]
    window = full._replace(query_heads=f.optional("num_sliding_attention_heads") or heads)
    other = f.nested("attention_other_setting")
    if other is not None:
        other.one_of("attention_type", other.text("attention_type") or "sliding_attention", _WORDS)
        width = other.optional("head_dim", "true_head_dim") or width
        kv_heads = other.optional("num_attention_groups", "num_key_value_heads") or kv_heads
        window = Heads(kv_heads, width, width, other.optional("num_attention_heads") or window.query_heads)
    own = overridden_heads(f, num_layers, full)
    f.understands("sliding_window")
    limit = f.count("sliding_window") if windows else 0
    groups = head_groups(LayerKind.FULL, told[1][LayerKind.FULL], own, full)
    return FamilyShape(num_layers, (*groups, *head_groups(LayerKind.WINDOW, windows, own, window, limit)))


@family("gemma2", "gpt_oss", "vaultgemma")
def every_second(f: Fields) -> FamilyShape:
    """Window and full layers in turn, the first one a window."""
    return sliding_or_full(f, lambda num_layers: range(0, num_layers, 2))


@family("cohere2", "exaone4", "olmo3", "afmoe")
def every_fourth(f: Fields) -> FamilyShape:
    """Every n-th layer is full (``sliding_window_pattern``, 4 in these classes), the rest are windows."""
    names = (
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
        "layer_switch",
    )
    _, pattern = f.get(*names)
    f.understands("use_embedding_sharing", "use_parallel_block", "num_limited_groups")

    def windows(num_layers: int) -> list[int]:
        if not f.has("sliding_window"):
            return []
        if isinstance(pattern, str):
            return _lettered(f, pattern, num_layers)
        period = f.optional(*names) or 4
        return [i for i in range(num_layers) if (i + 1) % period]

    return sliding_or_full(f, windows)


def _lettered(f: Fields, pattern: str, num_layers: int) -> list[int]:
    """Exaone 4 writes its pattern as letters, "LLLG": local and global; its last layer is global."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise f.error("sliding_window_pattern", f"{pattern[:40]!r} is neither a number nor letters L and G")
    return [i for i in range(num_layers - 1) if pattern[i % len(pattern)] == "L"]


@family("gemma3_text", "gemma3")
def gemma3(f: Fields) -> FamilyShape:
    """Gemma 3: five windows to one full layer; the published files leave much to the class defaults."""
    num_layers = f.count("num_hidden_layers", default=26)
    period = f.optional("sliding_window_pattern", "_sliding_window_pattern") or 6
    heads = _gemma_heads(f, default_kv_heads=4)
    return _gemma(f, num_layers, period, heads, heads, default_window=4096)


@family("gemma3n_text", "gemma3n")
def gemma3n(f: Fields) -> FamilyShape:
    """Gemma 3n: four windows to one full layer; the last ``num_kv_shared_layers`` own no cache."""
    num_layers = f.count("num_hidden_layers", default=35)
    heads = _gemma_heads(f, default_kv_heads=2)
    shared = f.count("num_kv_shared_layers", default=15, minimum=0)
    f.understands("activation_sparsity_pattern")  # of the MLPs
    return _gemma(f, num_layers, 5, heads, heads, default_window=512, num_shared=shared)


@family("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")
def gemma4(f: Fields) -> FamilyShape:
    """Gemma 4: full layers have their own head width and count; shared layers as in Gemma 3n."""
    num_layers = f.count("num_hidden_layers", default=30)
    heads = _gemma_heads(f, default_kv_heads=4)
    own = overridden_heads(f, num_layers, heads)
    full = heads
    if not f.has("per_layer_config"):
        full_heads = f.optional("num_global_key_value_heads")
        if full_heads is None or not f.flag("attention_k_eq_v", default=True):
            full_heads = heads.kv_heads
        width = f.count("global_head_dim", default=512)
        full = Heads(full_heads, width, width, heads.query_heads)
    f.understands("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads")
    shared = f.count("num_kv_shared_layers", default=0, minimum=0)
    return _gemma(
        f, num_layers, 6, full, heads, default_window=512, num_shared=shared, own=own, is_last_full=True
    )


def _gemma_heads(f: Fields, default_kv_heads: int) -> Heads:
    width = f.count("head_dim", default=256)
    kv_heads = f.count("num_key_value_heads", default=default_kv_heads)
    return Heads(kv_heads, width, width, f.optional("num_attention_heads"))


def _gemma(
    f: Fields,
    num_layers: int,
    period: int,
    full: Heads,
    window: Heads,
    *,
    default_window: int,
    num_shared: int = 0,
    own: dict[int, Heads] | None = None,
    is_last_full: bool = False,
) -> FamilyShape:
    """Groups of a Gemma model; ``is_last_full``: the class makes the last layer full, whatever is listed."""
    num_owners = num_layers - num_shared
    if num_owners < 1:
        raise f.error("num_kv_shared_layers", f"{num_shared} of {num_layers} layers leave none with a cache")
    _, bidirectional = f.get("use_bidirectional_attention")  # "vision": only inside an image
    if bidirectional is True or bidirectional == "all":
        raise f.error("use_bidirectional_attention", "of all tokens: an encoder, which keeps no KV cache")
    told = listed_layers(f, num_layers, _WORDS, "layer_types")
    layers = _sliding(num_layers, _not_every(num_layers, period)) if told is None else told[1]
    windows = {i for i in layers[LayerKind.WINDOW] if not (is_last_full and i == num_layers - 1)}
    owners = range(num_owners)
    tokens = f.count("sliding_window", default=default_window)
    own = own or {}
    groups = (
        *head_groups(LayerKind.FULL, (i for i in owners if i not in windows), own, full),
        *head_groups(LayerKind.WINDOW, (i for i in owners if i in windows), own, window, tokens),
    )
    return FamilyShape(num_layers, groups, tuple(range(num_owners, num_layers)))


def _not_every(num_layers: int, period: int) -> list[int]:
    return [i for i in range(num_layers) if (i + 1) % period]


@family("llama4_text", "llama4")
def llama4(f: Fields) -> FamilyShape:
    """Llama 4: layers with RoPE attend inside chunks, every fourth one (no RoPE) to everything."""
    num_layers = layer_count(f)
    words: dict[str | int, LayerKind | None] = {**FULL_WORDS, "chunked_attention": LayerKind.CHUNKED}
    f.understands("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval")
    told = listed_layers(f, num_layers, words, "layer_types")
    layers = _llama4_layers(f, num_layers) if told is None else told[1]
    shape = head_shape(f)
    groups = [heads_group(LayerKind.FULL, layers[LayerKind.FULL], shape)]
    if layers[LayerKind.CHUNKED]:
        chunk = f.count("attention_chunk_size")
        groups.append(heads_group(LayerKind.CHUNKED, layers[LayerKind.CHUNKED], shape, chunk))
    return FamilyShape(num_layers, tuple(groups))


def _llama4_layers(f: Fields, num_layers: int) -> Layers:
    """By ``no_rope_layers`` (1: the layer has RoPE, despite the name), else by the interval."""
    kind = LayerKind.CHUNKED if f.has("attention_chunk_size") else LayerKind.FULL
    words: dict[str | int, LayerKind | None] = {1: kind, 0: LayerKind.FULL}
    told = listed_layers(f, num_layers, words, "no_rope_layers")
    if told is not None:
        return told[1]
    period = f.optional("no_rope_layer_interval") or 4
    return split_layers(num_layers, _not_every(num_layers, period), kind, LayerKind.FULL)


@family("mimo_v2_flash", "mimo_v2")
def mimo_v2(f: Fields) -> FamilyShape:
    """MiMo-V2: ``hybrid_layer_pattern`` (1 = window); window layers, and the draft, have their own heads."""
    num_layers = layer_count(f)
    told = agreed_layers(
        f,
        listed_layers(f, num_layers, _WORDS, "layer_types"),
        listed_layers(f, num_layers, {1: LayerKind.WINDOW, 0: LayerKind.FULL}, "hybrid_layer_pattern"),
    )
    if told is None:
        raise f.error("hybrid_layer_pattern", "missing, and so is layer_types")
    heads = head_shape(f)
    swa = Heads(
        f.count("swa_num_key_value_heads", default=2 * heads.kv_heads),
        f.optional("swa_head_dim") or heads.k_dim,
        f.optional("swa_v_head_dim") or heads.v_dim,
        f.optional("swa_num_attention_heads") or heads.query_heads,
    )
    f.understands("attention_chunk_size")  # in the published file, read by no engine
    window = f.count("sliding_window_size", "sliding_window")
    full = heads_group(LayerKind.FULL, told[1][LayerKind.FULL], heads)
    sliding = heads_group(LayerKind.WINDOW, told[1][LayerKind.WINDOW], swa, window)
    draft = heads_group(LayerKind.WINDOW, (0,), swa, window)
    return FamilyShape(num_layers, (full, sliding), draft_layer=(draft,))
