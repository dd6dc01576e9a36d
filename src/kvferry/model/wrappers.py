"""Which part of a config is the language model, and whether it is one that keeps a KV cache at all."""

from __future__ import annotations

import re

from kvferry.model.fields import Fields

__all__ = ["TEXT_CONFIGS", "WRAPPERS", "check_generates"]

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Names under which a wrapper keeps its language model; only that part holds KV."""

WRAPPERS: dict[str, str] = {
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_v2": "deepseek_v2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "granite_speech": "granite",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "internlm2",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paligemma": "gemma",
    "pixtral": "mistral",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "step3_vl": "step3_text",
    "step3p7": "step3p5",
    "ultravox": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""Wrapper types whose other parts (vision and audio towers) are known to hold no KV, and the model
type of the text config that leaves its own out (as in transformers 5.24.0, where it has the class)."""

# An encoder reads all its input at once and keeps nothing per token. Its config shows it by one of
# these: sentence pairs (BERT and its kin), a space shared with images (CLIP), pixels or sound.
_ENCODER_FIELDS = (
    "type_vocab_size",
    "projection_dim",
    "image_size",
    "patch_size",
    "num_channels",
    "num_mel_bins",
)
_ENCODER_TYPES = re.compile(
    r"bert|^(?:esmc?|mpnet|timesfm)$|(?:^|[_-])(?:clip\w*|dino\w*|encoder|siglip2?|vision|vit)(?:[_-]|$)"
)
_GENERATES = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForGeneration",
    "ForCausalGeneration",
)


def check_generates(f: Fields, model_type: str, label: str, outer: Fields) -> None:
    """Raise InputError for an unknown model that is, by its config, an encoder."""
    for fields in (f, outer):
        classes = fields.raw.get("architectures")
        if isinstance(classes, list) and classes and not any(_is_generator(name) for name in classes):
            shown = ", ".join(str(name)[:40] for name in classes[:3])
            raise fields.error(
                "architectures", f"{label}, and {shown} generates no text, so it keeps no KV cache"
            )
    if f.flag("is_decoder", default=False):
        return
    if _ENCODER_TYPES.search(model_type):
        raise f.error("model_type", f"{label}: an encoder, which keeps no KV cache")
    if f.flag("is_causal", default=True) is False:
        raise f.error("is_causal", f"{label}, and not causal: an encoder keeps no KV cache")
    for fields, names in ((f, _ENCODER_FIELDS), (outer, ("projection_dim",))):
        found = next((name for name in names if fields.raw.get(name)), None)
        if found is not None:
            raise fields.error(found, f"{label}, and this field is an encoder's, which keeps no KV cache")


def _is_generator(name: object) -> bool:
    return isinstance(name, str) and name.endswith(_GENERATES)
