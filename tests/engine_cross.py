"""One Llama in two engines: a model of the reference engine, and the same weights in transformers."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import transformers as tf

from kvferry.engines.reference import Model, ReferenceEngine
from kvferry.engines.transformers import Identity, TransformersEngine, TransformersModel
from kvferry.layout import PoolLayout
from kvferry.state import config_digest

TOKENS = 1024


def reference_engine(model: Model) -> ReferenceEngine:
    """Blocks of 16, token by token."""
    config = model.config
    layout = PoolLayout.paged(
        range(config.layers),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        block_size=16,
        num_blocks=TOKENS // 16,
    )
    return ReferenceEngine(model, layout)


def transformers_engine(model: Model) -> TransformersEngine:
    """Blocks of 32, head by head; it says that it is the same model, and stores keys in the same order."""
    torch.set_num_threads(1)
    identity = Identity(
        weights=model.weights_digest,
        config=config_digest(msgspec.structs.asdict(model.config)),
        interleaved_keys=True,
    )
    own = TransformersModel(
        as_transformers(model),
        tokenizer=model.tokenizer,
        identity=identity,
        max_context=model.config.max_context,
    )
    return TransformersEngine(own, own.layout(tokens=TOKENS, block_size=32))


def as_transformers(model: Model) -> tf.LlamaForCausalLM:
    """The same numbers, rows of queries and keys in transformers' order: halves instead of neighbours."""
    c = model.config
    config = tf.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden,
        intermediate_size=c.feed_forward,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_context,
        rms_norm_eps=c.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=False,
    )
    tensors = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.output_norm,
        "lm_head.weight": model.output,
    }
    for number, layer in enumerate(model.layers):
        at = f"model.layers.{number}"
        query, key, value = np.split(layer.qkv, np.cumsum([c.heads * c.head_dim, c.kv_heads * c.head_dim]))
        gate, up = np.split(layer.gate_up, 2)
        tensors |= {
            f"{at}.input_layernorm.weight": layer.attn_norm,
            f"{at}.self_attn.q_proj.weight": halves(query, c.head_dim),
            f"{at}.self_attn.k_proj.weight": halves(key, c.head_dim),
            f"{at}.self_attn.v_proj.weight": value,
            f"{at}.self_attn.o_proj.weight": layer.attn_out,
            f"{at}.post_attention_layernorm.weight": layer.ffn_norm,
            f"{at}.mlp.gate_proj.weight": gate,
            f"{at}.mlp.up_proj.weight": up,
            f"{at}.mlp.down_proj.weight": layer.down,
        }
    made = tf.LlamaForCausalLM(config).to(torch.float32).eval()
    made.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})
    return made


def halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head: first all that are even, then all that are odd."""
    by_head = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return by_head.transpose(0, 2, 1, 3).reshape(rows.shape)
