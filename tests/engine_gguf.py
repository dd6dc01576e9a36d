"""Tiny random GGUF files of llama.cpp's memory kinds, and engines over them, the same in every process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvferry.engines.gguf import open_gguf
from kvferry.engines.llamacpp import ContextOptions, LlamaCppEngine, LlamaCppModel
from kvferry.engines.reference.weights import read_tokenizer, smollm2_path

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD, WIDE = 320, 64, 2, 1, 32, 96
STATE, INNER, SSM_HEADS = 16, 128, 8
LAYERS = {"llama": 4, "gemma3": 6, "lfm2": 4, "falcon-h1": 4, "mamba2": 4}
WINDOW = 16

Shapes = dict[str, tuple[int, ...]]


def _attention(at: str) -> Shapes:
    return {
        f"{at}.attn_q.weight": (HEADS * HEAD, HIDDEN),
        f"{at}.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{at}.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{at}.attn_output.weight": (HIDDEN, HEADS * HEAD),
    }


def _feed_forward(at: str) -> Shapes:
    return {
        f"{at}.ffn_gate.weight": (WIDE, HIDDEN),
        f"{at}.ffn_up.weight": (WIDE, HIDDEN),
        f"{at}.ffn_down.weight": (HIDDEN, WIDE),
    }


def _mamba2(at: str) -> Shapes:
    conv = INNER + 2 * STATE
    return {
        f"{at}.ssm_in.weight": (INNER + conv + SSM_HEADS, HIDDEN),
        f"{at}.ssm_conv1d.weight": (conv, 4),
        f"{at}.ssm_conv1d.bias": (conv,),
        f"{at}.ssm_dt.bias": (SSM_HEADS,),
        f"{at}.ssm_a": (SSM_HEADS, 1),
        f"{at}.ssm_d": (SSM_HEADS, 1),
        f"{at}.ssm_norm.weight": (1, INNER),
        f"{at}.ssm_out.weight": (HIDDEN, INNER),
    }


def _layer(family: str, number: int) -> Shapes:
    at = f"blk.{number}"
    norm = {f"{at}.attn_norm.weight": (HIDDEN,)}
    ffn_norm = {f"{at}.ffn_norm.weight": (HIDDEN,)}
    norms = {f"{at}.attn_{name}_norm.weight": (HEAD,) for name in "qk"}
    after = {f"{at}.post_attention_norm.weight": (HIDDEN,), f"{at}.post_ffw_norm.weight": (HIDDEN,)}
    if family == "llama":
        return norm | _attention(at) | ffn_norm | _feed_forward(at)
    if family == "gemma3":
        return norm | _attention(at) | norms | after | ffn_norm | _feed_forward(at)
    if family == "mamba2":
        return norm | _mamba2(at)
    if family == "falcon-h1":
        return norm | _mamba2(at) | _attention(at) | {f"{at}.ffn_norm": (HIDDEN,)} | _feed_forward(at)
    own = _attention(at) | norms
    if number != 2:
        own = {
            f"{at}.shortconv.conv.weight": (HIDDEN, 3),
            f"{at}.shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN),
            f"{at}.shortconv.out_proj.weight": (HIDDEN, HIDDEN),
        }
    return norm | own | ffn_norm | _feed_forward(at)


def _metadata(writer: gguf.GGUFWriter, family: str) -> None:
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS[family])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    if family != "mamba2":
        writer.add_feed_forward_length(WIDE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv([0, 0, KV_HEADS, 0] if family == "lfm2" else KV_HEADS)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_freq_base(10000.0)
    if family == "gemma3":
        writer.add_sliding_window(WINDOW)
    if family == "lfm2":
        writer.add_shortconv_l_cache(3)
    if family in ("falcon-h1", "mamba2"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(SSM_HEADS)
        writer.add_ssm_group_count(1)


def write_model(family: str, seed: int, path: Path) -> None:
    """A model whose matrices are wide enough that it does not repeat one token."""
    writer = gguf.GGUFWriter(path, family)
    _metadata(writer, family)
    last = "token_embd_norm.weight" if family == "lfm2" else "output_norm.weight"
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), last: (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    for number in range(LAYERS[family]):
        shapes |= _layer(family, number)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            values = 1 + values / 10
        elif name.endswith("ssm_a"):
            values = -np.exp(values)
        elif len(shape) == 2 and shape[1] > 4:
            values *= np.float32(0.5 if "embd" in name or name == "output.weight" else 0.12)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def model_path(family: str, seed: int) -> Path:
    """The file, made once a process; equal arguments give equal bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-gguf-"))
    path = folder / f"{family}-{seed}.gguf"
    write_model(family, seed, path)
    return path


def engine(family: str, seed: int = 7, **options: Any) -> LlamaCppEngine:
    """An engine over a context with these options; ``smollm2`` is the real model out of its package."""
    given = ContextOptions(**{"context_tokens": 512, "sequences": 6, "threads": 1} | options)
    if family == "smollm2":
        model = LlamaCppModel(smollm2_path(), given, tokenizer=read_tokenizer(open_gguf(smollm2_path())))
    else:
        model = LlamaCppModel(model_path(family, seed), given)
    return LlamaCppEngine(model, model.layout(tokens=1024, block_size=16))


def make(family: str, seed: str) -> LlamaCppEngine:
    """For the engine suite."""
    return engine(family, int(seed))
