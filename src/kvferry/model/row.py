"""The row of a layer's cache: its bytes in given dtypes, on one rank and in one copy, and its pieces.

This is where dtypes, heads and tensor parallelism meet; how many rows there are is not its matter.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvferry.dtypes import DTYPES, DtypeClass, KVDtype, dtype_named
from kvferry.errors import InputError
from kvferry.model.shape import CacheTensor, LayerGroup, LayerKind, TensorRole

__all__ = ["Dtypes", "Row", "assumed_dtypes", "resolve_dtypes", "row_of", "tp_error"]

_MODEL_ROLES = frozenset({TensorRole.CONV, TensorRole.STATE})
_SCALED_ROLES = frozenset({TensorRole.K, TensorRole.V})


class Dtypes(msgspec.Struct, frozen=True):
    """The dtypes in force: of K, of V, and the model's own (convolutions, states without a rule).

    ``is_asked``: those of K and V were asked for, not taken from the model.
    """

    k: KVDtype
    v: KVDtype
    model: KVDtype
    is_asked: bool


class Row(msgspec.Struct, frozen=True):
    """One row of one layer: bytes of one copy, bytes on a rank, pieces that a block has over all ranks.

    In a wire format it is ``narrow_nbytes``, and each block adds a scale for each of ``scaled_heads``.
    """

    nbytes: int
    rank_nbytes: int
    pieces: int
    dtypes: tuple[str, ...]
    narrow_nbytes: int
    scaled_heads: int


@lru_cache(maxsize=256)
def resolve_dtypes(own: str | None, kv: str | None, k: str | None, v: str | None) -> Dtypes:
    """The dtypes in force.

    Args:
        own: the config's dtype, which K and V have unless told otherwise. Where the config has
            none, a floating-point K dtype stands for it, else bf16; see :func:`assumed_dtypes`.
        kv, k, v: what was asked for both sides, and for one.
    """
    both = dtype_named(kv, "kv_dtype") if kv is not None else None
    k_type = dtype_named(k, "k_dtype") if k is not None else both
    v_type = dtype_named(v, "v_dtype") if v is not None else both
    if own is not None:
        model = dtype_named(own, "dtype")
    elif k_type is not None and k_type.dtype_class is DtypeClass.FLOAT:
        model = k_type
    else:
        model = dtype_named("bf16")
    return Dtypes(k_type or model, v_type or model, model, is_asked=k_type is not None and v_type is not None)


@lru_cache(maxsize=256)
def assumed_dtypes(dtypes: Dtypes, tensors: tuple[CacheTensor, ...]) -> tuple[str, ...]:
    """For a config without a dtype: what was counted in an assumed one."""
    warnings = []
    if not dtypes.is_asked:
        warnings.append(f"dtype: not in the config; K and V counted in {dtypes.model.name}")
    if any(tensor.dtype is None and tensor.role in _MODEL_ROLES for tensor in tensors):
        warnings.append(f"dtype: not in the config; convolution and state counted in {dtypes.model.name}")
    return tuple(warnings)


@lru_cache(maxsize=4096)
def row_of(
    kind: LayerKind,
    tensors: tuple[CacheTensor, ...],
    dtypes: Dtypes,
    tp: int,
    query_heads: int | None = None,
) -> Row | None:
    """The row of a layer with these tensors on ``tp`` ranks; None where ``tp`` does not split its heads.

    Raises InputError for a dtype that this kind of cache has no layout for.
    """
    if not _splits(tensors, query_heads, tp):
        return None
    nbytes = rank_nbytes = narrow_nbytes = scaled_heads = 0
    names = []
    for tensor in tensors:
        dtype = _dtype_of(tensor, dtypes)
        head_nbytes = _head_nbytes(kind, tensor, dtype)
        nbytes += tensor.heads * head_nbytes
        rank_nbytes += (_heads_per_rank(tensor, tp) or 0) * head_nbytes
        names.append(dtype.name)
        is_scaled = tensor.role in _SCALED_ROLES and dtype.dtype_class is DtypeClass.FLOAT
        narrow_nbytes += tensor.heads * (tensor.width if is_scaled else head_nbytes)
        scaled_heads += tensor.heads if is_scaled else 0
    pieces = _pieces(tensors, names, tp)
    return Row(nbytes, rank_nbytes, pieces, tuple(dict.fromkeys(names)), narrow_nbytes, scaled_heads)


def _pieces(tensors: tuple[CacheTensor, ...], dtypes: list[str], tp: int) -> int:
    """Contiguous pieces that one block of one layer has over all ranks: the rule of ``descriptors``.

    The layout is vLLM's (0.33): each layer has its own pool, a block of it is contiguous, and K
    and V lie in it together where they have one dtype; the parts of a convolution too. Any other
    tensor has a pool of its own. Each rank that holds other heads adds a piece; replicated heads
    are sent once.
    """
    shards: dict[str, int] = {}
    for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.role in {TensorRole.K, TensorRole.V}:
            region = f"kv {dtype}"
        else:
            region = "conv" if tensor.role is TensorRole.CONV else str(i)
        shards[region] = max(shards.get(region, 0), min(tp, tensor.heads))
    return sum(shards.values())


def _heads_per_rank(tensor: CacheTensor, tp: int) -> int | None:
    """Heads on each rank: an even share, or one copy where ranks are a multiple of heads; else None."""
    if tensor.heads % tp == 0:
        return tensor.heads // tp
    return 1 if tensor.is_replicable and tp % tensor.heads == 0 else None


def _splits(tensors: tuple[CacheTensor, ...], query_heads: int | None, tp: int) -> bool:
    """Whether ``tp`` divides the query heads, and divides or is a multiple of those that are cached."""
    if query_heads is not None and query_heads % tp:
        return False
    return all(_heads_per_rank(tensor, tp) is not None for tensor in tensors)


def tp_error(groups: tuple[LayerGroup, ...], group: LayerGroup, tp: int) -> InputError:
    """The InputError for a ``tp`` that does not split this group, with the nearest that split all groups."""

    def fits(degree: int) -> bool:
        return all(_splits(one.tensors, one.query_heads, degree) for one in groups)

    if group.query_heads is not None and group.query_heads % tp:
        heads = f"{group.query_heads} query"
    else:
        heads = " and ".join(str(n) for n in dict.fromkeys(tensor.heads for tensor in group.tensors))
    near = [next(n for n in range(tp - 1, 0, -1) if fits(n))] if tp > 1 else []
    near += [n for n in range(tp + 1, max(2 * tp, 512) + 1) if fits(n)][:1]
    whose = f"the draft's {group.kind}" if group.is_draft else str(group.kind)
    return InputError(
        f"tp: {tp} does not split the {heads} heads of {whose}; "
        f"nearest for this model: {' and '.join(map(str, near))}"
    )


def _dtype_of(tensor: CacheTensor, dtypes: Dtypes) -> KVDtype:
    if tensor.dtype is not None:
        return dtype_named(tensor.dtype)
    if tensor.role in _MODEL_ROLES:
        return dtypes.model
    if tensor.role is TensorRole.V:
        return dtypes.v
    if tensor.role is not TensorRole.K and dtypes.k != dtypes.v:
        raise InputError(
            f"v_dtype: {dtypes.v.name} beside k_dtype {dtypes.k.name}, "
            "but this model stores one vector for K and V"
        )
    return dtypes.k


# Dtypes with a known layout, by role; K and V take all but the rows made for one kind of cache.
_K_OR_V = frozenset(DtypeClass) - {DtypeClass.MLA_PACKED, DtypeClass.INDEXER}
_ALLOWED = {
    TensorRole.K: _K_OR_V,
    TensorRole.V: _K_OR_V,
    TensorRole.LATENT: frozenset({DtypeClass.FLOAT, DtypeClass.BYTE, DtypeClass.GGML}),
}
_FLOATS = frozenset({DtypeClass.FLOAT})


def _head_nbytes(kind: LayerKind, tensor: CacheTensor, dtype: KVDtype) -> int:
    """Bytes of one head's row in this dtype, scales included."""
    for name, nbytes in tensor.packed:
        if name == dtype.name:
            return nbytes
    allowed = _ALLOWED.get(tensor.role, _FLOATS)
    if tensor.dtype is None and dtype.dtype_class not in allowed:
        known = [name for name, entry in DTYPES.items() if entry.dtype_class in allowed]
        known += [name for name, _ in tensor.packed]
        raise InputError(
            f"kv_dtype: {dtype.name} has no known layout for {kind}; these have: {', '.join(known)}"
        )
    if tensor.width % dtype.group_values:
        raise InputError(
            f"kv_dtype: {dtype.name} packs {dtype.group_values} values together, "
            f"and {kind} has rows of {tensor.width}, no multiple of that"
        )
    return tensor.width // dtype.group_values * dtype.group_nbytes + dtype.row_nbytes
