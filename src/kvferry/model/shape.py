"""What a model keeps per request: layer groups, their cache tensors, and how each grows.

A *layer group* is the set of layers that own the same kind of cache. Every cache, attention
or not, is written the same way: for each layer so many rows, and in each row so many heads
of so many values per tensor. Attention has one row per token, a window at most W, a
recurrent state exactly one. Heads are what tensor parallelism splits, so the same record
answers the size on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

__all__ = ["CacheTensor", "Growth", "LayerGroup", "LayerKind", "ModelShape", "TensorRole"]


class Growth(StrEnum):
    """How the number of rows follows the number of tokens S."""

    TOKENS = "per token"  # S
    WINDOW = "up to a window"  # min(S, W)
    CHUNK = "up to a chunk"  # S modulo C: a finished chunk is never read again
    COMPRESSED = "per group of tokens"  # floor(S / ratio)
    ENCODER = "per encoder token"  # fixed once the prompt is encoded
    CONSTANT = "constant"  # 1


class LayerKind(StrEnum):
    """The kinds of cache, as printed and as in JSON."""

    FULL = "full_attention"
    WINDOW = "sliding_window"
    CHUNKED = "chunked_local"
    MLA = "mla"
    INDEXER = "indexer"
    COMPRESSED = "compressed"
    COMPRESSED_INDEXER = "compressed_indexer"
    COMPRESSOR = "compressor_state"
    CROSS = "cross_attention"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta_net"
    KDA = "kda"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"

    @property
    def growth(self) -> Growth:
        return _GROWTH.get(self, Growth.CONSTANT)


_GROWTH = {
    LayerKind.FULL: Growth.TOKENS,
    LayerKind.WINDOW: Growth.WINDOW,
    LayerKind.CHUNKED: Growth.CHUNK,
    LayerKind.MLA: Growth.TOKENS,
    LayerKind.INDEXER: Growth.TOKENS,
    LayerKind.COMPRESSED: Growth.COMPRESSED,
    LayerKind.COMPRESSED_INDEXER: Growth.COMPRESSED,
    LayerKind.COMPRESSOR: Growth.WINDOW,
    LayerKind.CROSS: Growth.ENCODER,
}


class TensorRole(StrEnum):
    """What a cache tensor holds; the role decides which dtype applies to it."""

    K = "k"
    V = "v"
    LATENT = "latent"  # MLA: one vector for K and V, no heads
    COMPRESSED = "compressed"  # DeepSeek V4: one vector for K and V, per window or per group
    INDEXER = "indexer"
    CONV = "conv"
    STATE = "state"


class CacheTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache.

    Args:
        role: what it holds.
        heads: units that tensor parallelism splits (1 for a latent vector).
        width: values per head and row.
        dtype: set where the model fixes it (a float32 state); None means that the role decides.
        is_replicable: whether more ranks than heads may each hold a copy of one head.
        packed: bytes of a whole row in the packed dtypes that exist for this tensor only.
    """

    role: TensorRole
    heads: int
    width: int
    dtype: str | None = None
    is_replicable: bool = True
    packed: tuple[tuple[str, int], ...] = ()


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers that own the same kind of cache.

    Args:
        kind: the kind of cache.
        layers: indices of the owning layers, ascending; a layer with two such caches is listed twice.
        tensors: the tensors of one layer.
        limit_tokens: the window or chunk, for the kinds that have one.
        ratio: tokens per row, for compressed attention.
        is_draft: the layers belong to the draft model (MTP, EAGLE), not to the target.
        query_heads: attention heads that tensor parallelism must divide too; None: not known.
        own_block: rows per block of a pool that is paged in its own way; None: as the request says.
        dtype: the dtype of the draft's own config, where it has one.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    tensors: tuple[CacheTensor, ...]
    limit_tokens: int = 0
    ratio: int = 1
    is_draft: bool = False
    query_heads: int | None = None
    own_block: int | None = None
    dtype: str | None = None


class ModelShape(msgspec.Struct, frozen=True):
    """A model as far as its per-request state goes; no weights.

    Args:
        model_type: the config's ``model_type``, or ``shape``.
        num_layers: layers that pipeline parallelism splits, with or without a cache.
        groups: the layer groups of the target, then those of the draft if one was added.
        dtype: the config's own dtype; None where the config names none.
        draft_layer: the groups of one draft layer, for :func:`kvferry.model.with_draft`.
        num_draft_layers: draft layers that the config declares (0: none).
        encoder_tokens: the encoder's length, where the model fixes it (Whisper: 1500).
        vocab_size: length of a logits row, where the config gives it.
        warnings: every assumption that was made, one sentence each.
    """

    model_type: str
    num_layers: int
    groups: tuple[LayerGroup, ...]
    dtype: str | None = None
    draft_layer: tuple[LayerGroup, ...] = ()
    num_draft_layers: int = 0
    encoder_tokens: int | None = None
    vocab_size: int | None = None
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_config(config: Mapping[str, object]) -> ModelShape:
        """Read a Hugging Face ``config.json`` that is already parsed.

        Raises InputError naming the field for a value that is missing or unusable, for an
        unknown model whose fields suggest a cache that is not understood, and for a known
        one with fields that its family does not read. Nothing is guessed in silence: each
        assumption is in ``warnings``.
        """
        from kvferry.model.source import shape_from_config  # noqa: PLC0415 - the reader needs this record

        return shape_from_config(config)
