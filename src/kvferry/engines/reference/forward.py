"""The Llama decoder in NumPy, written so that a row's bits depend on that row's request alone.

Two forms, one code. Prefill runs the tokens of one request together. Decode runs tokens of several
requests, or several of one: every matrix product is then one vector-matrix product a row (NumPy
calls the same BLAS routine with the same sizes for each), and attention is done row by row. So
neither who else is in the batch nor how many can change a bit, and drafts that are verified
together give the bits that they would give one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.weights import Model
from kvferry.layout import BlockTable

__all__ = ["Decoder", "Span"]

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one request: their ids, the position of the first, where its KV lies."""

    ids: NDArray[np.int32]
    start: int
    table: BlockTable


class Decoder:
    """Runs ``model`` over the KV in ``pool``, whose layers from ``first_layer`` on are the model's."""

    def __init__(self, model: Model, pool: PagedPool, first_layer: int = 0) -> None:
        self._model = model
        self._pool = pool
        self._first_layer = first_layer
        config = model.config
        turns = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.arange(config.max_context)[:, None, None] * turns
        # (max_context, 1, head_dim / 2); float64 until here, so that far positions are exact too.
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def prefill(self, span: Span, on_layer: Callable[[int], None] | None = None) -> Float32:
        """Compute and store KV of ``span``'s tokens. Returns hidden rows, shape (tokens, hidden).

        ``on_layer(layer)`` is called when that layer's KV of all of them is in the pool.
        """
        rows: Float32 = self._layers(self._model.embedding[span.ids][None], [span], on_layer)[0]
        return rows

    def decode(self, spans: Sequence[Span]) -> Float32:
        """One token a span. Returns hidden rows, shape (spans, hidden).

        Spans of one request that follow each other see each other's KV, as if run one by one.
        """
        ids = np.concatenate([span.ids for span in spans])
        rows: Float32 = self._layers(self._model.embedding[ids][:, None], spans, None)[:, 0]
        return rows

    def logits(self, hidden: Float32) -> Float32:
        """(hidden,) -> (vocab_size,)."""
        normed = _norm(hidden, self._model.output_norm, self._model.config.norm_epsilon)
        logits: Float32 = normed @ self._model.output.T
        return logits

    def _layers(
        self, rows: Float32, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> Float32:
        """(spans, tokens, hidden) -> the same shape. The first axis makes each product one a span."""
        epsilon = self._model.config.norm_epsilon
        for index, layer in enumerate(self._model.layers, self._first_layer):
            qkv = _norm(rows, layer.attn_norm, epsilon) @ layer.qkv.T
            attended = np.stack([self._attend(index, *pair) for pair in zip(spans, qkv, strict=True)])
            rows = rows + attended @ layer.attn_out.T
            gate, up = np.split(_norm(rows, layer.ffn_norm, epsilon) @ layer.gate_up.T, 2, axis=-1)
            rows = rows + (_silu(gate) * up) @ layer.down.T
            if on_layer is not None:
                on_layer(index)
        return rows

    def _attend(self, layer: int, span: Span, qkv: Float32) -> Float32:
        """Store k and v of the new tokens, then attend to all so far. (tokens, q+k+v) -> (tokens, q)."""
        config = self._model.config
        tokens, end = len(qkv), span.start + len(qkv)
        heads = qkv.reshape(tokens, config.heads + 2 * config.kv_heads, config.head_dim)
        rotated = self._rotate(heads[:, : -config.kv_heads], span.start)
        self._pool.write(
            layer, span.table, span.start, rotated[:, config.heads :], heads[:, -config.kv_heads :]
        )
        keys, values = self._pool.read(layer, span.table, end)  # (kv_heads, end, head_dim)
        # Query heads of one KV head side by side: (kv_heads, group * tokens, head_dim).
        queries = rotated[:, : config.heads].transpose(1, 0, 2).reshape(config.kv_heads, -1, config.head_dim)
        scores: Float32 = (queries @ keys.transpose(0, 2, 1)) * np.float32(config.head_dim**-0.5)
        if tokens > 1:
            later = np.arange(end) > np.arange(span.start, end)[:, None]
            np.copyto(scores.reshape(-1, tokens, end), -np.inf, where=later)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        attended: Float32 = (scores @ values).reshape(config.heads, tokens, config.head_dim)
        return attended.transpose(1, 0, 2).reshape(tokens, -1)

    def _rotate(self, heads: Float32, start: int) -> Float32:
        """Rotary embedding of (tokens, heads, head_dim) from position ``start``; pairs are neighbours."""
        cos, sin = self._cos[start : start + len(heads)], self._sin[start : start + len(heads)]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        out = np.empty_like(heads)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out


def _norm(rows: Float32, weight: Float32, epsilon: float) -> Float32:
    scale: Float32 = np.sqrt(np.square(rows).mean(-1, keepdims=True) + np.float32(epsilon))
    return rows / scale * weight


def _silu(x: Float32) -> Float32:
    with np.errstate(
        over="ignore"
    ):  # exp of a very negative x is infinite, and the quotient 0, which is right
        return np.asarray(x / (1 + np.exp(-x)))
