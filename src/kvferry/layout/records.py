"""Where the bytes of a cache lie in one rank's pool: tensors in groups in a pool.

The byte of (block b, token t, head h, element d) of a tensor is

    offset + b * block_stride + t * token_stride + h * head_stride + d * dim_stride

so every axis order, K and V joined or apart, one region for each layer or one for all, and keys that
are stored transposed inside a block are the same record with other numbers. Recurrent state has a slot
instead of a block and no token axis. Layouts come from the peer in a handshake, so each record checks
itself when it is made, decoded ones too, in exact integers and without allocating by what it says.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.errors import InputError
from kvferry.layout.bounds import MAX_NBYTES, Region, check_apart, check_int, extent
from kvferry.layout.words import ITEMSIZE, LayerKind, Role

__all__ = ["MAX_TENSORS", "GroupLayout", "PoolLayout", "TensorLayout"]

# Far above any model (DeepSeek V4: 62 layers of at most 9 tensors), low enough that checking a
# hostile layout costs a fraction of a second.
MAX_TENSORS = 1 << 14
MAX_LAYER = 1 << 20
MAX_HEADS = 1 << 16
MAX_PART = 255
MAX_COUNT = (1 << 31) - 1  # blocks and tokens: ids are int32


class _Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, cache_hash=True):
    """Fields at their default are not sent, so a field added later is refused only where it is used."""


class TensorLayout(_Record, frozen=True):
    """Where one role of one layer lies. Strides and offset are bytes.

    ``dim_stride`` 0: the ``head_dim`` elements of a row touch, as in most pools. vLLM's CPU pool keeps
    keys transposed inside a block: ``token_stride`` is the item size and ``dim_stride`` a row of tokens.

    ``head_start`` is the model's number of the first head that is here, so that ranks of unlike
    tensor parallelism can be matched; a replicated head has the same number in every rank.
    ``part`` tells several tensors of one role in one layer apart.
    For recurrent state ``block_stride`` is the distance of two slots and ``token_stride`` is 0;
    ``head_dim`` is all that belongs to one head, flattened. Raises InputError.
    """

    layer: int
    role: Role
    dtype: str
    offset: int
    block_stride: int
    token_stride: int
    head_stride: int
    heads: int
    head_dim: int
    head_start: int = 0
    part: int = 0
    dim_stride: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise InputError(f"dtype: {self.dtype!r} is not known; known are {', '.join(ITEMSIZE)}")
        if not isinstance(self.role, Role):
            raise InputError(f"role: {self.role!r} is not a Role")
        check_int("layer", self.layer, 0, MAX_LAYER)
        check_int("part", self.part, 0, MAX_PART)
        check_int("heads", self.heads, 1, MAX_HEADS)
        check_int("head_start", self.head_start, 0, MAX_HEADS)
        check_int("head_dim", self.head_dim, 1, MAX_NBYTES)
        for name in ("offset", "block_stride", "token_stride", "head_stride", "dim_stride"):
            check_int(name, getattr(self, name), 0, MAX_NBYTES)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one head of one token (or of one head of a slot)."""
        return self.head_dim * ITEMSIZE[self.dtype]

    @property
    def is_split(self) -> bool:
        """The elements of a row do not touch (keys stored transposed)."""
        return self.head_dim > 1 and self.dim_stride not in (0, ITEMSIZE[self.dtype])

    @property
    def inner(self) -> tuple[int, int, int]:
        """(count, stride, nbytes) of the contiguous runs of a row: one, or one for each element."""
        if self.is_split:
            return self.head_dim, self.dim_stride, self.itemsize
        return 1, 0, self.row_nbytes

    @property
    def head_stop(self) -> int:
        """One past the last head that is here."""
        return self.head_start + self.heads

    def __str__(self) -> str:
        return f"layer {self.layer} {self.role.value}" + (f" part {self.part}" if self.part else "")


class GroupLayout(_Record, frozen=True):
    """Tensors that share one block table.

    ``block_size``: tokens of a block, or None for recurrent state, which has one slot a request.
    ``window``: how many of the last tokens are live in a sliding group, None elsewhere. It is
    what the cache holds at the handoff, so an engine that keeps window - 1 tokens says so.
    ``tokens_per_entry``: above 1 only where a compressed cache keeps one entry for that many
    tokens; a block then has ``block_size // tokens_per_entry`` entries. Raises InputError.
    """

    name: str
    kind: LayerKind
    block_size: int | None
    num_blocks: int
    tensors: tuple[TensorLayout, ...]
    window: int | None = None
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        where = f"group {self.name!r}: "
        if not isinstance(self.kind, LayerKind):
            raise InputError(f"{where}kind: {self.kind!r} is not a LayerKind")
        check_int(where + "num_blocks", self.num_blocks, 1, MAX_COUNT)
        check_int(where + "tokens_per_entry", self.tokens_per_entry, 1, MAX_COUNT)
        if not self.tensors:
            raise InputError(f"{where}tensors is empty")
        if self.block_size is not None:
            check_int(where + "block_size", self.block_size, 1, MAX_COUNT)
            if self.block_size % self.tokens_per_entry:
                raise InputError(
                    f"{where}block_size {self.block_size} is not a multiple of"
                    f" tokens_per_entry {self.tokens_per_entry}"
                )
        elif any(tensor.token_stride or tensor.is_split for tensor in self.tensors):
            raise InputError(f"{where}state slots have no token axis: token_stride and dim_stride must be 0")
        if self.tokens_per_entry != 1 and self.kind is not LayerKind.COMPRESSED:
            raise InputError(f"{where}tokens_per_entry {self.tokens_per_entry} needs kind compressed")
        if (self.window is not None) != (self.kind is LayerKind.SLIDING):
            raise InputError(f"{where}window is {self.window} in a group of kind {self.kind.value}")
        if self.window is not None:
            check_int(where + "window", self.window, 1, MAX_COUNT)
            if self.block_size is None:
                raise InputError(f"{where}a sliding group needs a block_size")

    @property
    def entries_per_block(self) -> int:
        """Length of the token axis inside a block; 1 for a state slot."""
        return 1 if self.block_size is None else self.block_size // self.tokens_per_entry

    @property
    def is_state(self) -> bool:
        """Recurrent state: a slot that moves whole, whatever the number of tokens."""
        return self.block_size is None

    def first_live_token(self, tokens: int) -> int:
        """The first of ``tokens`` that the cache still holds: of a window its tail's, else 0."""
        return 0 if self.window is None else max(0, tokens - self.window)


class PoolLayout(_Record, frozen=True):
    """All that one rank's pool holds; ``nbytes`` is the size of the pool's memory.

    ``groups_share_blocks``: the groups lie in the same memory, and a block id belongs to one of them
    at a time, as in engines with one pool of blocks for all kinds of layers.

    True after construction: every byte of every tensor lies in [0, nbytes), no two tensors
    share a byte (of one group, where groups share blocks), no (layer, role) and no group name comes
    twice. Raises InputError.
    """

    groups: tuple[GroupLayout, ...]
    nbytes: int
    groups_share_blocks: bool = False

    def __post_init__(self) -> None:
        check_int("nbytes", self.nbytes, 1, MAX_NBYTES)
        if sum(len(group.tensors) for group in self.groups) > MAX_TENSORS:
            raise InputError(f"groups: more than {MAX_TENSORS} tensors")
        _check_unique("group name", (group.name for group in self.groups))
        _check_unique("tensor", (str(tensor) for group in self.groups for tensor in group.tensors))
        regions: list[Region] = []
        for group in self.groups:
            if self.groups_share_blocks:
                check_apart(regions)
                regions = []
            for tensor in group.tensors:
                dims, dim_stride, inner_nbytes = tensor.inner
                axes = (
                    (group.num_blocks, tensor.block_stride, "block_stride"),
                    (group.entries_per_block, tensor.token_stride, "token_stride"),
                    (tensor.heads, tensor.head_stride, "head_stride"),
                    (dims, dim_stride, "dim_stride"),
                )
                where = f"group {group.name!r} {tensor}"
                region = extent(where, tensor.offset, axes, inner_nbytes)
                if region.stop > self.nbytes:
                    raise InputError(
                        f"{where}: ends at byte {region.stop}, the pool has nbytes {self.nbytes}"
                    )
                regions.append(region)
        check_apart(regions)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are here, ascending."""
        return tuple(sorted({tensor.layer for group in self.groups for tensor in group.tensors}))

    @staticmethod
    def paged(
        layers: Iterable[int],
        *,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        block_size: int,
        num_blocks: int,
        axis_order: str = "NHD",
        joined_kv: bool = False,
        cross_layer: bool = False,
        head_start: int = 0,
        alignment: int = 64,
        name: str = "full",
        window: int | None = None,
        transposed_keys: bool = False,
    ) -> PoolLayout:
        """One group of K and V blocks, the layout of most engines.

        ``axis_order``: order inside a block, NHD (token, head, element) or HND. ``joined_kv``: K and V
        of a block side by side, else a region each. ``cross_layer``: all layers of a block side by
        side, else a region each. Regions start at multiples of ``alignment`` bytes. With a
        ``window`` the group is a sliding one. ``transposed_keys`` (HND only): the keys of a (block, head)
        are stored element by token, as vLLM does on CPUs. Raises InputError naming the parameter.
        """
        from kvferry.layout.build import paged_pool  # noqa: PLC0415 - build makes these records

        return paged_pool(
            tuple(layers),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            axis_order=axis_order,
            joined_kv=joined_kv,
            cross_layer=cross_layer,
            head_start=head_start,
            alignment=alignment,
            name=name,
            window=window,
            transposed_keys=transposed_keys,
        )

    @staticmethod
    def beside(*pools: PoolLayout, alignment: int = 64) -> PoolLayout:
        """The groups of several pools in one, one pool after the other. Raises InputError on equal names."""
        from kvferry.layout.build import beside  # noqa: PLC0415 - build makes these records

        return beside(pools, alignment)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{what} {name!r} comes twice")
        seen.add(name)
