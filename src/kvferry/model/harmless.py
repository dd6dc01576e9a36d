"""Fields that say nothing of what is cached, though their names might.

Found in the configs of transformers 5.24.0 and in published ``config.json`` files: how attention
is computed, not what it keeps; other parts of the model; how text is generated; how the file was
made. A field that is not here, and that a family neither reads nor states to understand, is refused.
"""

from __future__ import annotations

import re

__all__ = ["is_harmless", "is_other_part"]

# What a number is for, whatever it belongs to: arithmetic, not shape.
_ENDINGS = re.compile(
    r"_(?:act|act_fn|activation|bias|dropout|dropout_prob|dropout_rate|drop_rate|eps|epsilon|fp32|"
    r"init_range|initializer_range|layer_norm|layernorms?|logit_cap|loss_coef|loss_weight|multiplier|norm|"
    r"output_gate|pdrop|prob|softcap|softcapping|temperature|theta|token_id|token_ids|token_index|"
    r"tokens_id)$"
)
# What a field is about, where that is not the cache: experts and MLPs, rotary positions, MTP layers
# (which count only where they are asked for), images and sound.
_TOPICS = re.compile(
    r"^(?:activation|audio|expert|ffn|image|img|mlp|mm|moe|mrope|mtp|partial_rotary|projector|rope|"
    r"rotary|router|swiglu|tokenizer|video|vision|yarn)(?:_|$)"
)
_ABOUT_EXPERTS = re.compile(
    r"^(?:n|num|top_k|share|shared|n_shared|num_shared|n_routed|num_local|interleave)_(?:experts?|moe)(?:_|$)"
)
# These words say that a field is about the cache after all.
_BUT = re.compile(r"attn|attention|cache|kv|head|cross|window|sliding|mamba|ssm|conv")

_NAME_LIST = """
    use_cache cache_implementation
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_impl
    attn_implementation flash_attention use_flash_attention use_flash_attention_2 use_flash_attn
    _flash_attn_2_enabled

    attention_in_multiplier attention_invalid_logits_value attention_multiplier
    attention_out_multiplier attention_value_scale attn_scale attn_temperature_tuning attn_uses_sequence_id
    attn_rotary_emb clip_qkv key_multiplier parallel_attn num_ln_in_parallel_attn qk_layernorm qk_ln
    qk_norm qk_norm_type skip_bias_add skip_bias_add_qkv query_pre_attn_scalar
    relative_attention_max_distance relative_attention_num_buckets
    reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights scale_query_by_inverse_norm
    use_head_wise_attn_gate attn_res_block_size position_embedding_type

    output_attentions output_hidden_states pruned_heads
    lm_head rm_head num_reward_heads summary_first_dropout tie_encoder_decoder chunk_size_feed_forward
    is_decoder forced_decoder_ids decoder_start_token_id decoder_vocab_size encoder_no_repeat_ngram_size
    no_repeat_ngram_size num_beam_groups exponential_decay_length_penalty begin_suppress_tokens

    add_bias_linear decoder_sparse_step first_k_dense_replace num_dense_layers topk_group topk_method
    n_group use_grouped_topk num_expert_group norm_topk_prob num_hash_layers shared_intermediate_size
    o_groups ep_size scoring_func latent_moe_use_norm enable_moe_block
    vocab_size_per_layer_input hidden_size_per_layer_input

    no_rope_layers no_rope_layer_interval nope_layer_interval use_conv_bias
    num_hidden_layers num_layers n_layer n_layers intermediate_size

    auto_map id2label label2id task_specific_params generation_config finetuning_task
    ignore_index pad_index bos_index eos_index
    do_layer_norm_before layer_norm_elementwise_affine layer_norm_type layer_scale_init_value
"""
_NAMES = frozenset(_NAME_LIST.split())
# Fields that say nothing at one value only; at another they are refused.
_NEUTRAL: dict[str, object] = {
    "compression_ratio": 1,  # ERNIE 4.5: of rotary positions
    "full_attn_mod": 1,  # Phi-4-mini: every layer is full
    "order_of_interleaved_layers": "local_attn_first",  # Command R7B: as its class has it
}
# Objects that configure another part of a model, or how its weights are stored.
_OTHER_PARTS = re.compile(
    r"(?:^|[_.])(?:aligner|audio|code2wav|compression|connector|eagle|ffn|js|image|img|mlp|moe|perceiver|projector|"
    r"qformer|quantization|resampler|rope|rotary|sound|speech|talker|token2wav|tokenizer|vae|video|"
    r"vision|visual|vq|vqmodel|vqvae)(?:_|$)"
)


def is_harmless(name: str, value: object) -> bool:
    """Whether a field of this name, with this value, says nothing of what is cached."""
    if name in _NAMES or _ENDINGS.search(name):
        return True
    if name in _NEUTRAL:
        return value == _NEUTRAL[name]
    return bool(_TOPICS.search(name) or _ABOUT_EXPERTS.search(name)) and not _BUT.search(name)


def is_other_part(name: str, value: object) -> bool:
    """Whether this is an object that configures a part of the model which keeps nothing per token."""
    return isinstance(value, dict) and bool(_OTHER_PARTS.search(name)) and not _BUT.search(name)
