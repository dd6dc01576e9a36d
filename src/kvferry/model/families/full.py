"""Families with full attention only: which layers own K and V, and how many heads of what width."""

from __future__ import annotations

from kvferry.model.families.heads import (
    full_layers,
    head_shape,
    head_width,
    listed_layers,
    split_evenly,
)
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__ = ["plain"]


_PLAIN = """
    apertus arcee aria_text baichuan bitnet bloom code_llama codegen cohere deepseek diffllama
    ernie4_5 ernie4_5_moe exaone gemma glm glm4 glm4_moe glm4v_moe_text glm4v_text glm_ocr_text gpt2
    gpt_neox gpt_neox_japanese gptj granite granitemoe granitemoeshared helium internlm internlm2
    internlm3 llama nanochat nemotron olmo olmo2 olmoe opt orion persimmon phi seed_oss solar_open
    stablelm xverse Yi
"""


@family(_PLAIN)
def plain(f: Fields) -> FamilyShape:
    """Full attention in every layer, one head shape."""
    num_layers = layer_count(f)
    layers = full_layers(f, num_layers)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, layers, head_shape(f)),))


@family("minimax_m2")
def minimax_m2(f: Fields) -> FamilyShape:
    """MiniMax-M2: full attention in every layer; ``attn_type_list`` says so with a 1 for each."""
    num_layers = layer_count(f)
    listed_layers(f, num_layers, {1: LayerKind.FULL}, "attn_type_list")
    return plain(f)


@family("step3_text", "step3", "step1")
def step3(f: Fields) -> FamilyShape:
    """Step 1 and 3: the KV heads are ``num_attention_groups`` (vllm-project/vllm#39796)."""
    num_layers = layer_count(f)
    heads, kv_heads = f.count("num_attention_heads"), f.count("num_attention_groups", "num_key_value_heads")
    split_evenly(f, "num_attention_heads", heads, kv_heads, "KV heads")
    width = f.optional("head_dim") or head_width(f, heads)
    f.understands("share_q_dim")  # the rank of the query projection
    f.one_of("att_impl_type", f.text("att_impl_type") or "GQA", {"GQA": None, "MFA": None})
    layers = full_layers(f, num_layers)
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, layers, Heads(kv_heads, width, width, heads)),)
    )


@family("falcon", "RefinedWeb", "RefinedWebModel")
def falcon(f: Fields) -> FamilyShape:
    """Falcon: ``num_kv_heads`` counts only in the new decoder; else ``multi_query`` means one head."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads", "n_head")
    is_multi_query = f.flag("multi_query", default=True)
    if f.flag("new_decoder_architecture", default=f.has("n_head_kv")):
        kv_heads = f.count("num_kv_heads", "n_head_kv")
        split_evenly(f, "num_attention_heads", heads, kv_heads, "KV heads")
    else:
        f.understands("num_kv_heads", "n_head_kv")
        kv_heads = 1 if is_multi_query else heads
    width = head_width(f, heads)
    return FamilyShape(
        num_layers,
        (heads_group(LayerKind.FULL, full_layers(f, num_layers), Heads(kv_heads, width, width, heads)),),
    )


@family("gpt_bigcode")
def gpt_bigcode(f: Fields) -> FamilyShape:
    """StarCoder and SantaCoder: ``multi_query`` (true in its class) means one KV head."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads", "n_head")
    width = head_width(f, heads)
    kv_heads = 1 if f.flag("multi_query", default=True) else heads
    f.understands("num_key_value_heads", "pad_key_length")  # the first is written back, from multi_query
    return FamilyShape(
        num_layers,
        (heads_group(LayerKind.FULL, full_layers(f, num_layers), Heads(kv_heads, width, width, heads)),),
    )


@family("chatglm", "qwen")
def kv_channels(f: Fields) -> FamilyShape:
    """ChatGLM and Qwen 1: ``kv_channels`` is the head width, ``multi_query_group_num`` the KV heads."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads")
    groups = f.optional("multi_query_group_num")
    kv_heads = groups if groups is not None and f.flag("multi_query_attention", default=False) else heads
    split_evenly(f, "num_attention_heads", heads, kv_heads, "KV heads")
    width = f.optional("kv_channels") or head_width(f, heads)
    f.understands("apply_query_key_layer_scaling", "use_logn_attn")
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width, heads)),)
    )


@family("dbrx", "mpt")
def attn_config(f: Fields) -> FamilyShape:
    """DBRX and MPT: the KV heads are in the nested ``attn_config``."""
    num_layers = layer_count(f)
    heads = f.count("n_heads", "num_attention_heads")
    width = head_width(f, heads)
    inner = f.nested("attn_config")
    kv_heads = heads
    if inner is not None:
        words = {"multihead_attention": heads, "grouped_query_attention": None, "multiquery_attention": 1}
        kind = inner.text("attn_type")
        by_kind = None if kind is None else words[inner.one_of("attn_type", kind, words)]
        kv_heads = inner.optional("kv_n_heads") or by_kind or heads
        split_evenly(f, "n_heads", heads, kv_heads, "KV heads")
        # transformers writes a field of the base class here that DBRX does not read
        inner.understands("num_key_value_heads", "attn_uses_sequence_id")
        f.understands("num_key_value_heads")
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width, heads)),)
    )


@family("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
def hunyuan(f: Fields) -> FamilyShape:
    """Hunyuan: with ``use_cla`` only every ``cla_share_factor``-th layer owns a cache."""
    num_layers = layer_count(f)
    factor = f.optional("cla_share_factor") or 1
    factor = factor if f.flag("use_cla", default=False) else 1
    layers = full_layers(f, num_layers)
    if f.flag("use_mla", default=False):
        raise f.error("use_mla", "true: which of its layers cache what is not known")
    f.understands("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")  # unused without it
    cacheless = tuple(i for i in layers if i % factor)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, layers[::factor], head_shape(f)),), cacheless)


@family("nemotron-nas", "deci")
def nemotron_nas(f: Fields) -> FamilyShape:
    """Nemotron NAS: ``block_configs`` says per layer how many query heads share a KV head, or none at all."""
    num_layers = layer_count(f)
    blocks = f.objects("block_configs")
    if blocks is None or len(blocks) != num_layers:
        raise f.error("block_configs", f"one entry for each of the {num_layers} layers is needed")
    heads = f.count("num_attention_heads")
    width = f.optional("head_dim") or head_width(f, heads)
    f.understands("num_key_value_heads")  # null in the published files: each block has its own
    owners: dict[int, list[int]] = {}
    cacheless = []
    for i, block in enumerate(blocks):
        kv_heads = _nas_kv_heads(block, heads)
        if kv_heads is None:
            cacheless.append(i)
        else:
            owners.setdefault(kv_heads, []).append(i)
    groups = [
        heads_group(LayerKind.FULL, layers, Heads(n, width, width, heads))
        for n, layers in sorted(owners.items())
    ]
    return FamilyShape(num_layers, tuple(groups), tuple(cacheless))


def _nas_kv_heads(block: Fields, heads: int) -> int | None:
    """KV heads of one block; None where attention is replaced and owns no cache."""
    attention = block.nested("attention")
    if attention is None:
        raise block.error("attention", "missing")
    is_gone = attention.flag("no_op", default=False)
    is_linear = attention.flag("replace_with_linear", default=False)  # a matrix, not linear attention
    if is_gone or is_linear:
        return None
    shared = attention.optional("n_heads_in_group")
    kv_heads = attention.optional("num_key_value_heads")
    if kv_heads is None:
        shared = attention.count("n_heads_in_group")
        return split_evenly(attention, "n_heads_in_group", heads, shared, "query heads in a group")
    if shared is not None and kv_heads * shared != heads:
        raise attention.error("n_heads_in_group", f"{shared} x {kv_heads} KV heads are not {heads} heads")
    return kv_heads
