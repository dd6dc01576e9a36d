"""``kvferry size``: how many bytes a request's state is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvferry.cli.options import Flag, Whole
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.model import ModelShape
    from kvferry.size import KVSize


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """What is asked about every model given."""

    tokens: Whole
    "Tokens with KV: prompt and output so far."
    cached: Whole = 0
    "Prefix tokens that decode holds already; counted in whole blocks."
    kv_dtype: str | None = None
    "Dtype of K and V (bf16, fp8_e4m3, nvfp4, q8_0, fp8_ds_mla, ...). Default, and auto: the config's own."
    k_dtype: str | None = None
    "Dtype of K, over --kv-dtype."
    v_dtype: str | None = None
    "Dtype of V, over --kv-dtype."
    tp: Whole = 1
    "Tensor-parallel ranks."
    pp: Whole = 1
    "Pipeline-parallel stages."
    block_size: Whole | None = None
    "Tokens per block. Default: not paged, sizes are exact."
    draft: str | None = None
    "Add the draft's cache: mtp, eagle, or the draft model's own config."
    draft_layers: Whole | None = None
    "Draft layers with a cache. Default: what the config declares (mtp), 1 (eagle)."
    encoder_tokens: Whole | None = None
    "Length of what cross attention reads, where the model does not fix it."
    wire_format: str | None = None
    "K and V cross the wire as this, with scales by (block, head): float8_e4m3fn or int8. Default: as is."
    last_logits: Annotated[bool, Flag] = False
    "The state carries a row of logits instead of a pending token."

    def size_of(self, shape: ModelShape, tokens: int | None = None) -> KVSize:
        """The size as asked; at another number of tokens (``tokens``), with nothing cached."""
        from kvferry.size import kv_size

        return kv_size(
            shape,
            self.tokens if tokens is None else tokens,
            cached_tokens=self.cached if tokens is None else 0,
            kv_dtype=self.kv_dtype,
            k_dtype=self.k_dtype,
            v_dtype=self.v_dtype,
            tp=self.tp,
            pp=self.pp,
            block_size=self.block_size,
            encoder_tokens=self.encoder_tokens,
            last_logits=self.last_logits,
            wire_format=self.wire_format,
        )


def size(
    *models: Annotated[str, Parameter(name="MODEL")],
    options: SizeOptions,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    plot: Path | None = None,
) -> None:
    """Say how many bytes a request's state is, by layer group, and what of it crosses the wire.

    What crosses is the payload and the record of the execution state. The record is in no pool,
    so for a short prompt more may cross than is allocated; the payload alone never is more.

    Parameters
    ----------
    models
        A config.json, a folder with one, or shape:LAYERSxKV_HEADSxHEAD_DIM; several are compared.
        Names of models on a hub are not downloaded.
    as_json
        Print one JSON object; for several models {"models": [...]}, one object for each.
    plot
        Draw bytes over tokens to this file (.svg, .png, .pdf); needs the extra `plot`.
    """
    from kvferry.cli.output import Picture
    from kvferry.cli.size_models import size_models
    from kvferry.cli.size_plot import draw
    from kvferry.cli.size_table import print_json, print_tables
    from kvferry.cli.streams import say

    if not models:
        raise InputError("MODEL: give a config.json, a folder with one, or shape:LAYERSxKV_HEADSxHEAD_DIM")
    if options.draft_layers is not None and options.draft is None:
        raise InputError("draft_layers: given without --draft")
    picture = None if plot is None else Picture(plot)
    sized = size_models(models, options)
    for entry in sized:
        for warning in entry.size.warnings:
            say(f"{entry.name}: {warning}")
    if picture is not None:
        draw(picture, sized)
        say(f"drew {plot}")
    if as_json:
        print_json(sized)
    else:
        print_tables(sized)
