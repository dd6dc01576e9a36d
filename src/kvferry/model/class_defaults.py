"""What a model's own config class fills in where a config leaves a field out.

A text config inside a wrapper is written as its difference from the class, so what is left out is
the class's value. A flat config has all fields of its time; of those, the ones that would otherwise
be made from others (a head width from the hidden width, KV heads from query heads, no window) are
the class's too. Every use is said in a warning.

Source: the config classes of transformers 5.24.0; a test compares them where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

__all__ = ["CLASS_DEFAULTS", "class_defaults"]

_FLAT = frozenset({"head_dim", "num_key_value_heads", "sliding_window", "v_head_dim"})

# Model types: the fields that their families read and that have a whole number in the class.
_TABLE = """\
afmoe: global_attn_every_n_layers=4 head_dim=128 hidden_size=2048 num_attention_heads=16
    num_hidden_layers=32 sliding_window=1024
apertus aria_text granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe llama olmo
    olmo2: hidden_size=4096 num_attention_heads=32 num_hidden_layers=32
arcee gpt_neox_japanese: hidden_size=2560 num_attention_heads=32 num_hidden_layers=32
bamba: hidden_size=4096 mamba_d_conv=4 mamba_d_state=256 mamba_n_groups=1 mamba_n_heads=128
    num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=8
bart m2m_100 marian mbart nllb-moe pegasus: d_model=1024 decoder_attention_heads=16 decoder_layers=12
bitnet: hidden_size=2560 num_attention_heads=20 num_hidden_layers=30 num_key_value_heads=5
blenderbot: d_model=2560 decoder_attention_heads=32 decoder_layers=24
bloom: hidden_size=64 n_head=8 n_layer=2
codegen gptj: n_embd=4096 n_head=16 n_layer=28
cohere: hidden_size=8192 num_attention_heads=64 num_hidden_layers=40
cohere2: hidden_size=8192 num_attention_heads=64 num_hidden_layers=40 sliding_window=4096
cwm: head_dim=128 num_attention_heads=48 num_hidden_layers=64 num_key_value_heads=8 sliding_window=8192
dbrx mpt: d_model=2048 n_heads=16 n_layers=24
deepseek_v2: kv_lora_rank=512 num_attention_heads=32 num_hidden_layers=32 qk_rope_head_dim=64
deepseek_v3: kv_lora_rank=512 num_attention_heads=128 num_hidden_layers=61 qk_rope_head_dim=64
deepseek_v32: index_head_dim=128 kv_lora_rank=512 num_attention_heads=128 num_hidden_layers=61
    qk_rope_head_dim=64
deepseek_v4: head_dim=512 index_head_dim=128 num_attention_heads=64 num_hidden_layers=43 sliding_window=128
diffllama: hidden_size=2048 num_attention_heads=32 num_hidden_layers=16
ernie4_5: head_dim=128 hidden_size=1024 num_attention_heads=16 num_hidden_layers=18 num_key_value_heads=2
ernie4_5_moe: hidden_size=2560 num_attention_heads=20 num_hidden_layers=28 num_key_value_heads=4
exaone minimax mixtral phimoe: hidden_size=4096 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=8
exaone4: hidden_size=4096 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=32
    sliding_window=4096 sliding_window_pattern=4
falcon: hidden_size=4544 num_attention_heads=71 num_hidden_layers=32
falcon_h1: hidden_size=4096 mamba_d_conv=4 mamba_d_ssm=1024 mamba_d_state=256 mamba_n_groups=1
    mamba_n_heads=128 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=8
falcon_mamba mamba: conv_kernel=4 num_hidden_layers=32 state_size=16
gemma: head_dim=256 hidden_size=3072 num_attention_heads=16 num_hidden_layers=28 num_key_value_heads=16
gemma2 gemma3_text vaultgemma: head_dim=256 num_attention_heads=8 num_hidden_layers=26
    num_key_value_heads=4 sliding_window=4096
gemma3n_text: head_dim=256 num_attention_heads=8 num_hidden_layers=35 num_key_value_heads=2
    num_kv_shared_layers=15 sliding_window=512
gemma4_text: head_dim=256 num_attention_heads=8 num_hidden_layers=30 num_key_value_heads=4
    num_kv_shared_layers=0 sliding_window=512
gemma4_unified_text: head_dim=256 num_attention_heads=8 num_hidden_layers=30 num_key_value_heads=4
    num_kv_shared_layers=0 sliding_window=1024
glm glm4: head_dim=128 hidden_size=4096 num_attention_heads=32 num_hidden_layers=40 num_key_value_heads=2
glm4_moe glm4v_moe_text: hidden_size=4096 num_attention_heads=96 num_hidden_layers=46 num_key_value_heads=8
glm4_moe_lite: kv_lora_rank=512 num_attention_heads=20 num_hidden_layers=47 qk_rope_head_dim=64
glm4v_text: hidden_size=4096 num_attention_heads=32 num_hidden_layers=40 num_key_value_heads=2
glm_moe_dsa: index_head_dim=128 kv_lora_rank=512 num_attention_heads=64 num_hidden_layers=78
    qk_rope_head_dim=64
glm_ocr_text: hidden_size=1024 num_attention_heads=16 num_hidden_layers=16 num_key_value_heads=8
gpt2 gpt_bigcode: n_embd=768 n_head=12 n_layer=12
gpt_neox: hidden_size=6144 num_attention_heads=64 num_hidden_layers=44
gpt_oss: head_dim=64 num_attention_heads=64 num_hidden_layers=36 num_key_value_heads=8 sliding_window=128
granitemoehybrid: hidden_size=4096 mamba_d_conv=4 mamba_d_state=256 mamba_n_groups=1
    mamba_n_heads=128 num_attention_heads=32 num_hidden_layers=32
helium: head_dim=128 hidden_size=2560 num_attention_heads=20 num_hidden_layers=24 num_key_value_heads=20
internlm3: head_dim=128 hidden_size=4096 num_attention_heads=32 num_hidden_layers=48 num_key_value_heads=2
jamba: attn_layer_offset=4 attn_layer_period=8 hidden_size=4096 mamba_d_conv=4 mamba_d_state=16
    mamba_expand=2 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=8
kimi_linear: kv_lora_rank=512 linear_conv_kernel_dim=4 linear_head_dim=128 linear_num_heads=32
    num_attention_heads=32 num_hidden_layers=27 qk_rope_head_dim=64
lfm2: conv_L_cache=3 hidden_size=2560 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=8
lfm2_moe: conv_L_cache=3 hidden_size=2048 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=8
llama4_text: attention_chunk_size=8192 head_dim=128 no_rope_layer_interval=4 num_attention_heads=40
    num_hidden_layers=48 num_key_value_heads=8
longcat_flash: kv_lora_rank=512 num_attention_heads=64 num_layers=28 qk_rope_head_dim=64
longt5 t5: d_kv=64 num_heads=8
mamba2: conv_kernel=4 head_dim=64 n_groups=8 num_heads=128 num_hidden_layers=64 state_size=128
mimo_v2_flash: head_dim=192 num_attention_heads=64 num_hidden_layers=48 num_key_value_heads=4
    sliding_window=129 v_head_dim=128
minicpm3: hidden_size=2560 num_attention_heads=40 num_hidden_layers=62 qk_nope_head_dim=64
    qk_rope_head_dim=32
minimax_m2: head_dim=128 num_attention_heads=48 num_hidden_layers=62 num_key_value_heads=8
ministral mistral: hidden_size=4096 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=8 sliding_window=4096
ministral3: head_dim=128 hidden_size=4096 num_attention_heads=32 num_hidden_layers=34 num_key_value_heads=8
mllama_text_model: hidden_size=4096 num_attention_heads=32 num_hidden_layers=40 num_key_value_heads=8
mt5 umt5: d_kv=64 num_heads=6
nanochat: hidden_size=768 num_attention_heads=6 num_hidden_layers=12
nemotron: hidden_size=6144 num_attention_heads=48 num_hidden_layers=32
nemotron_h: conv_kernel=4 head_dim=128 mamba_head_dim=64 mamba_num_heads=128 n_groups=8
    num_attention_heads=32 num_key_value_heads=8 ssm_state_size=128
olmo3: hidden_size=4096 num_attention_heads=32 num_hidden_layers=32 sliding_window=4096
olmo_hybrid: hidden_size=3840 linear_conv_kernel_dim=4 num_attention_heads=30 num_hidden_layers=32
olmoe: hidden_size=2048 num_attention_heads=16 num_hidden_layers=16
opt: hidden_size=768 num_attention_heads=12 num_hidden_layers=12
persimmon: hidden_size=4096 num_attention_heads=64 num_hidden_layers=36
phi: hidden_size=2048 num_attention_heads=32 num_hidden_layers=24
phi3: hidden_size=3072 num_attention_heads=32 num_hidden_layers=32
plbart: d_model=768 decoder_attention_heads=12 decoder_layers=6
qwen2: hidden_size=4096 max_window_layers=28 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=32 sliding_window=4096
qwen2_5_omni_text: hidden_size=3584 max_window_layers=28 num_attention_heads=28 num_hidden_layers=28
    num_key_value_heads=4 sliding_window=32768
qwen2_5_vl_text qwen2_vl_text: hidden_size=8192 max_window_layers=80 num_attention_heads=64
    num_hidden_layers=80 num_key_value_heads=8 sliding_window=4096
qwen2_moe: hidden_size=2048 max_window_layers=28 num_attention_heads=16 num_hidden_layers=24
    num_key_value_heads=16 sliding_window=4096
qwen3: head_dim=128 hidden_size=4096 max_window_layers=28 num_attention_heads=32
    num_hidden_layers=32 num_key_value_heads=32 sliding_window=4096
qwen3_5_moe_text: head_dim=256 hidden_size=2048 linear_conv_kernel_dim=4 linear_key_head_dim=128
    linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
    num_attention_heads=16 num_hidden_layers=40 num_key_value_heads=2
qwen3_5_text: head_dim=256 hidden_size=4096 linear_conv_kernel_dim=4 linear_key_head_dim=128
    linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
    num_attention_heads=16 num_hidden_layers=32 num_key_value_heads=4
qwen3_moe: hidden_size=2048 num_attention_heads=32 num_hidden_layers=24 num_key_value_heads=4
    sliding_window=4096
qwen3_next: head_dim=256 hidden_size=2048 linear_conv_kernel_dim=4 linear_key_head_dim=128
    linear_num_key_heads=16 linear_num_value_heads=32 linear_value_head_dim=128
    num_attention_heads=16 num_hidden_layers=48 num_key_value_heads=2
qwen3_omni_moe_text: hidden_size=2048 num_attention_heads=28 num_hidden_layers=28 num_key_value_heads=4
qwen3_vl_moe_text: hidden_size=2048 num_attention_heads=16 num_hidden_layers=24 num_key_value_heads=16
qwen3_vl_text: head_dim=128 hidden_size=4096 num_attention_heads=32 num_hidden_layers=32
    num_key_value_heads=32
seed_oss: head_dim=128 hidden_size=4096 num_attention_heads=80 num_hidden_layers=64 num_key_value_heads=8
smollm3: hidden_size=2048 num_attention_heads=16 num_hidden_layers=36 num_key_value_heads=4
solar_open: head_dim=128 hidden_size=4096 num_attention_heads=64 num_hidden_layers=48 num_key_value_heads=8
stablelm: hidden_size=2560 num_attention_heads=32 num_hidden_layers=32 num_key_value_heads=32
starcoder2: hidden_size=3072 num_attention_heads=24 num_hidden_layers=30 num_key_value_heads=2
step3p5: head_dim=128 num_attention_heads=64 num_hidden_layers=45 num_key_value_heads=8
switch_transformers: d_kv=64 num_decoder_layers=12 num_heads=12
whisper: d_model=384 decoder_attention_heads=6 decoder_layers=4 max_source_positions=1500
zamba2: hidden_size=2560 mamba_d_conv=4 mamba_d_state=64 mamba_expand=2 mamba_ngroups=1
    n_mamba_heads=8 num_attention_heads=32 num_hidden_layers=54
"""


def _parse(table: str) -> dict[str, dict[str, int]]:
    defaults = {}
    for line in table.replace("\n    ", " ").splitlines():
        model_types, fields = line.split(": ")
        values = dict(field.split("=") for field in fields.split())
        for model_type in model_types.split():
            defaults[model_type] = {name: int(value) for name, value in values.items()}
    return defaults


CLASS_DEFAULTS = _parse(_TABLE)


@cache
def class_defaults(model_type: str, is_nested: bool) -> Mapping[str, int]:
    """What stands in for a field that is left out of a config of this type, by field."""
    defaults = CLASS_DEFAULTS.get(model_type, {})
    return defaults if is_nested else {name: defaults[name] for name in _FLAT & defaults.keys()}
