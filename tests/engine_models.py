"""Tiny random models of the cache families of transformers, the same in every process that makes them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from kvferry.engines.transformers import Drafter, TransformersEngine, TransformersModel

VOCAB = 320
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    **_MLA,
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}
_THREE_SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_SLIDING = {"head_dim": 16, "sliding_window": 16}
_BARE = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 2}

# family: configuration class, fields beside the base (a field None is taken away).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SLIDING, "layer_types": _THREE_SLIDING},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_SLIDING,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**_DEEPSEEK, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **_EXPERTS,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 24,
            "n_routed_experts": 4,
            "sliding_window": 16,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 16,
            "hc_mult": 2,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "layer_types": _LINEAR,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_MLA,
            **_EXPERTS,
            "q_lora_rank": None,
            "layer_types": _LINEAR,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 4,
            "attn_layer_offset": 3,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
        },
    ),
    "bamba": (
        "BambaConfig",
        {**_MAMBA2, "attn_layer_indices": [3], "mamba_expand": 2},
    ),
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "head_dim": 16, "mamba_d_ssm": 128}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "chunk_size": 16,
            "head_dim": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            **_EXPERTS,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            **dict.fromkeys(_BASE),
            **_BARE,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "bos_token_id": 1,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}),
    "t5": (
        "T5Config",
        {
            **dict.fromkeys(_BASE),
            **_BARE,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
    "whisper": (
        "WhisperConfig",
        {
            **dict.fromkeys(_BASE),
            **_BARE,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "max_target_positions": 256,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
        },
    ),
}
_EAGER = {"gpt_oss", "mamba2", "deepseek_v4"}  # they have no other attention


def configuration(family: str) -> tf.PreTrainedConfig:
    """The family's configuration, four layers or so."""
    name, more = FAMILIES[family]
    fields = {key: value for key, value in (_BASE | more).items() if value is not None}
    return getattr(tf, name)(**fields)


def random_model(family: str, seed: int, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """A model whose matrices are wide enough that it does not repeat one token."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = configuration(family)
    if config.is_encoder_decoder:
        kind = {"t5": tf.T5ForConditionalGeneration, "whisper": tf.WhisperForConditionalGeneration}[family]
        model = kind(config)
    else:
        kernel = "eager" if family in _EAGER else "sdpa"
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if "embed" in name or "lm_head" in name else 0.08
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(dtype).eval()


def encoder_input(family: str) -> torch.Tensor | None:
    """What an encoder-decoder family is given to read or to hear."""
    generator = torch.Generator().manual_seed(11)
    if family == "t5":
        return torch.randint(3, VOCAB, (1, 29), generator=generator)
    return torch.randn(1, 16, 100, generator=generator) if family == "whisper" else None


def make(family: str, dtype: str, seed: str, block_size: str = "16") -> TransformersEngine:
    """For the engine suite."""
    model = TransformersModel(random_model(family, int(seed), getattr(torch, dtype)))
    layout = model.layout(tokens=1024, requests=16, block_size=int(block_size), encoder_tokens=512)
    return TransformersEngine(model, layout)


def make_assisted(family: str, dtype: str, seed: str) -> TransformersEngine:
    """The same with a draft model: the model itself, its matrices disturbed, so that some drafts hold."""
    kind = getattr(torch, dtype)
    draft = random_model(family, int(seed), kind)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std() * 0.1
                parameter.add_(noise.to(kind))
    model = TransformersModel(random_model(family, int(seed), kind))
    drafter = Drafter(model, TransformersModel(draft), 4)
    return TransformersEngine(model, drafter.layout(tokens=1024), drafter=drafter)
