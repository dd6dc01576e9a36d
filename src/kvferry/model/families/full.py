"""Families with full attention only: which layers own K and V, and how many heads of what width."""

from __future__ import annotations

from kvferry.model.families.heads import head_shape
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__ = ["plain"]


_PLAIN = """
    apertus arcee baichuan bitnet bloom code_llama codegen cohere deepseek diffllama ernie4_5
    ernie4_5_moe exaone gemma glm glm4 glm4_moe gpt2 gpt_neox gpt_neox_japanese gptj granite
    granitemoe granitemoeshared helium internlm internlm2 internlm3 llama minimax_m2 nanochat
    nemotron olmo olmo2 olmoe opt orion persimmon phi seed_oss solar_open stablelm xverse Yi
"""


@family(_PLAIN)
def plain(f: Fields) -> FamilyShape:
    """Full attention in every layer, one head shape."""
    num_layers = layer_count(f)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, range(num_layers), head_shape(f)),))


@family("falcon", "RefinedWeb", "RefinedWebModel")
def falcon(f: Fields) -> FamilyShape:
    """Falcon: ``num_kv_heads`` counts only in the new decoder; else ``multi_query`` means one head."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads", "n_head")
    is_multi_query = f.flag("multi_query", default=True)
    if f.flag("new_decoder_architecture", default=f.has("n_head_kv")):
        kv_heads = f.count("num_kv_heads", "n_head_kv")
    else:
        kv_heads = 1 if is_multi_query else heads
    width = f.count("hidden_size") // heads
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width)),)
    )


@family("gpt_bigcode")
def gpt_bigcode(f: Fields) -> FamilyShape:
    """StarCoder and SantaCoder: ``multi_query`` (true in its class) means one KV head."""
    num_layers = layer_count(f)
    heads = f.count("num_attention_heads", "n_head")
    width = f.count("hidden_size", "n_embd") // heads
    kv_heads = 1 if f.flag("multi_query", default=True) else heads
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width)),)
    )


@family("chatglm", "qwen")
def kv_channels(f: Fields) -> FamilyShape:
    """ChatGLM and Qwen 1: ``kv_channels`` is the head width, ``multi_query_group_num`` the KV heads."""
    num_layers = f.count("num_hidden_layers", "num_layers")
    heads = f.count("num_attention_heads")
    groups = f.optional("multi_query_group_num")
    kv_heads = groups if groups is not None and f.flag("multi_query_attention", default=False) else heads
    width = f.optional("kv_channels") or f.count("hidden_size") // heads
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width)),)
    )


@family("dbrx", "mpt")
def attn_config(f: Fields) -> FamilyShape:
    """DBRX and MPT: the KV heads are in the nested ``attn_config``."""
    num_layers = f.count("n_layers", "num_hidden_layers")
    heads = f.count("n_heads", "num_attention_heads")
    width = f.count("d_model", "hidden_size") // heads
    inner = f.nested("attn_config")
    kv_heads = heads
    if inner is not None:
        kv_heads = inner.optional("kv_n_heads") or (
            1 if inner.text("attn_type") == "multiquery_attention" else heads
        )
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, range(num_layers), Heads(kv_heads, width, width)),)
    )


@family("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
def hunyuan(f: Fields) -> FamilyShape:
    """Hunyuan: with ``use_cla`` only every ``cla_share_factor``-th layer owns a cache."""
    num_layers = layer_count(f)
    factor = f.optional("cla_share_factor") or 1
    factor = factor if f.flag("use_cla", default=False) else 1
    owners = range(0, num_layers, factor)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, owners, head_shape(f)),))


@family("nemotron-nas", "deci")
def nemotron_nas(f: Fields) -> FamilyShape:
    """Nemotron NAS: ``block_configs`` says per layer how many query heads share a KV head, or none at all."""
    num_layers = layer_count(f)
    blocks = f.objects("block_configs")
    if blocks is None or len(blocks) != num_layers:
        raise f.error("block_configs", f"one entry for each of the {num_layers} layers is needed")
    heads = f.count("num_attention_heads")
    width = f.optional("head_dim") or f.count("hidden_size") // heads
    owners: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        attention = block.nested("attention")
        if attention is None:
            raise block.error("attention", "missing")
        if attention.flag("no_op", default=False) or attention.flag("replace_with_linear", default=False):
            continue
        kv_heads = attention.optional("num_key_value_heads")
        owners.setdefault(kv_heads or heads // attention.count("n_heads_in_group"), []).append(i)
    groups = [
        heads_group(LayerKind.FULL, layers, Heads(n, width, width)) for n, layers in sorted(owners.items())
    ]
    return FamilyShape(num_layers, tuple(groups))
