"""Tiny random models with a tokenizer, 10 MB on disk, whose greedy tokens depend on the whole prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 512


def make_model(folder: Path, kind: str = "llama") -> None:
    """Write the checkpoint, a llama or a gemma; always the same weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: at for at, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.2,  # large, so that logits differ clearly
    }
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, tie_word_embeddings=False, **common))
    else:  # windows of 64 tokens, and every third layer without
        layers = (["sliding_attention"] * 2 + ["full_attention"]) * 2
        gemma = Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=64, layer_types=layers, query_pre_attn_scalar=32, **common
        )
        model = Gemma3ForCausalLM(gemma)
    model.to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), *sys.argv[2:])
