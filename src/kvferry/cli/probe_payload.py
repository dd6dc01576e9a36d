"""Which payloads a probe is about: given in bytes, or those of a model's prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import InputError
from kvferry.probe import Payload
from kvferry.units import parse_bytes

if TYPE_CHECKING:
    from kvferry.cli.probe import PayloadFlags
    from kvferry.model import ModelShape

__all__ = ["Named", "Wanted", "wanted_payloads"]

_DEFAULT_BYTES, _DEFAULT_BLOCK = "64MiB", "32KiB"
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Named:
    """A payload by its name: what the matrix is shown for."""

    name: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Wanted:
    """The payloads that are asked about; the largest is the largest that is measured."""

    named: tuple[Named, ...]

    @property
    def largest(self) -> Payload:
        """The one with the most bytes."""
        return max((each.payload for each in self.named), key=lambda payload: payload.nbytes)


def wanted_payloads(flags: PayloadFlags) -> Wanted:
    """The payloads of the options. Raises InputError naming the option."""
    if flags.model is None:
        if flags.tokens is not None or flags.prompt_lengths is not None:
            raise InputError("model: needed with --tokens or --prompt-lengths: how large is a token of it?")
        block = parse_bytes(flags.block_bytes or _DEFAULT_BLOCK, "block_bytes")
        nbytes = parse_bytes(flags.payload or _DEFAULT_BYTES, "bytes")
        return Wanted((Named("largest", Payload(nbytes, block)),))
    if flags.payload is not None or flags.block_bytes is not None:
        raise InputError("bytes: --bytes and --block-bytes are the model's where one is given")
    if (flags.tokens is None) == (flags.prompt_lengths is None):
        raise InputError("tokens: give --tokens or --prompt-lengths with --model, one of them")

    from kvferry.model import load_shape

    shape = load_shape(flags.model)
    if flags.tokens is not None:
        return Wanted((Named(f"{flags.tokens} tokens", _of_model(shape, flags.tokens, flags)),))
    return Wanted(
        tuple(
            Named(f"p{100 * q:.0f}: {tokens} tokens", _of_model(shape, tokens, flags))
            for q, tokens in _lengths(flags)
        )
    )


def _lengths(flags: PayloadFlags) -> list[tuple[float, int]]:
    import numpy as np

    from kvferry.cli.plan_files import open_trace

    assert flags.prompt_lengths is not None
    rows = open_trace(flags.prompt_lengths, "prompt_lengths", wants_output=False)
    lengths = np.fromiter((row.prompt_tokens for row in rows), np.int64)
    found = np.quantile(lengths, _QUANTILES, method="higher").astype(int).tolist()
    return list(zip(_QUANTILES, found, strict=True))


def _of_model(shape: ModelShape, tokens: int, flags: PayloadFlags) -> Payload:
    """A payload with the model's bytes, pieces and layers: one rank's share, in pieces of their mean size."""
    from kvferry.size import kv_size

    size = kv_size(shape, tokens, kv_dtype=flags.kv_dtype, block_size=flags.block_size, tp=flags.tp)
    nbytes = -(-(size.wire_bytes - size.state_bytes) // flags.tp)
    descriptors = max(1, size.descriptors // flags.tp)
    block = max(64, -(-nbytes // descriptors // 4) * 4)
    regions = -(-descriptors // max(1, -(-tokens // flags.block_size)))
    return Payload(max(nbytes, 2 * block), block, max(1, -(-regions // 2)))
