"""``kvferry check``: does a TTFT promise hold over this link?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token

from kvferry.cli.options import Flag, Whole
from kvferry.errors import InputError
from kvferry.units import parse_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvferry.link import LinkProfile, Mode
    from kvferry.model import ModelShape
    from kvferry.plan.compute import ComputeProfile
    from kvferry.plan.handoff import Way
    from kvferry.plan.promise import GivenPrefill, Promise

EXIT = {"holds": 0, "does not hold": 3, "unknown": 4}


def _seconds(_type: object, tokens: Sequence[Token]) -> float:
    try:
        return parse_seconds(tokens[0].value, "time")
    except InputError as error:
        raise ValueError(error.message) from None


Time = Annotated[float, Parameter(converter=_seconds)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The promise, and what is known of prefill and of the link."""

    link: str
    "A file that `kvferry probe` wrote, or a preset (eth100, ib-ndr400, ...: unmeasured)."
    ttft: Time
    "The TTFT to keep: 200ms, 1.5s."
    prompt_tokens: Whole | None = None
    "Tokens of the prompt."
    prompt_lengths: Path | None = None
    "A trace: its p95 prompt is checked; its lengths, and its times if it has them, give the waits."
    cached_tokens: Whole = 0
    "Prefix tokens that decode holds already; with --profile prefill holds them too."
    prefill_seconds: Time | None = None
    "Measured prefill time of this prompt: 80ms, 0.08."
    profile: str | None = None
    "Compute profile: a JSON or CSV file, or a published one by name (splitwise-llama2-70b-h100-tp8, ...)."
    profile_model: str | None = None
    "Which model of the profile's file."
    profile_gpu: str | None = None
    "Which GPU of the profile's file."
    profile_tp: Whole | None = None
    "Which TP of the profile's file."
    decode_seconds: Time | None = None
    "The first decode step. Default: from the profile; else counted as 0, with a warning."
    decode_batch: Whole = 1
    "Requests in that step, for the profile."
    rate: float | None = None
    "Requests a second that this prefill worker and this link serve: adds the waits."
    queue_seconds: Time | None = None
    "The wait before prefill, where you measured it. Default: from --rate."
    overlap: Literal["none", "layer", "chunk"] = "none"
    "What leaves while prefill still computes."
    chunk_tokens: Whole = 2048
    "Chunked prefill size, for --overlap chunk."
    sync_seconds: Time = 0.0
    "A fixed cost of each handoff beyond the link's own start cost."
    first_token: Literal["decode", "prefill"] = "decode"  # noqa: S105 - a token of text
    "Who emits the first token; from prefill, the move lies in the second token's gap."
    quantile: float = 0.95
    "Share of the handoffs that the answer covers, 0.5 to 0.99."
    kv_dtype: str | None = None
    "Dtype of K and V. Default: the config's own."
    tp: Whole = 1
    "Tensor-parallel ranks."
    pp: Whole = 1
    "Pipeline-parallel stages."
    block_size: Whole = 16
    "Tokens per block."
    encoder_tokens: Whole | None = None
    "Length of what cross attention reads, where the model does not fix it."
    links: Whole = 1
    "Links of this kind side by side; the payload is split over them."
    from_node: str | None = None
    "The prefill node, where the file holds several pairs."
    to_node: str | None = None
    "The decode node."
    transport: str | None = None
    "The transport, where a pair was measured over several."
    mode: Literal["push", "pull"] | None = None
    "Who starts the copy. Default: what was measured; pull, where both were."
    tls: Annotated[bool, Flag] = False
    "The measurement with encryption."
    incast: Whole = 1
    "The measurement with so many senders at once."
    under_load: Annotated[bool, Flag] = False
    "The measurement beside other traffic."


def check(
    model: Annotated[str, Parameter(name="MODEL")],
    *,
    options: CheckOptions,
    explain: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say whether a TTFT promise holds: the split, what binds, and where the answer flips.

    Exit status: 0 holds, 3 does not hold, 4 unknown (link not measured, or no prefill time). Where prefill
    and its queue alone take longer than promised it does not hold, whatever the link.

    Parameters
    ----------
    model
        A config.json, a folder with one, or shape:LAYERSxKV_HEADSxHEAD_DIM.
    explain
        Print each equation with its numbers filled in.
    as_json
        Print one JSON object.
    """
    from kvferry.cli.check_table import print_json, print_tables
    from kvferry.model import load_shape
    from kvferry.plan.check import answer
    from kvferry.plan.explain import explain_check
    from kvferry.plan.flips import flips

    promise = promise_of(load_shape(model), options)
    found = answer(promise)
    turned = flips(promise, found)
    equations = explain_check(promise, found) if explain else ()
    if as_json:
        print_json(model, promise, found, turned, equations)
    else:
        print_tables(model, promise, found, turned, equations)
    return EXIT[found.verdict]


def promise_of(shape: ModelShape, options: CheckOptions) -> Promise:
    """The options as a question. Raises InputError naming the option."""
    from kvferry.plan.handoff import Overlap
    from kvferry.plan.payload import PoolFormat
    from kvferry.plan.promise import FirstToken, Promise

    tokens, lengths, arrivals = _prompt(options)
    prefill = _prefill(options, tokens)
    pool = PoolFormat(
        kv_dtype=options.kv_dtype,
        block_size=options.block_size,
        tp=options.tp,
        pp=options.pp,
        encoder_tokens=options.encoder_tokens,
    )
    return Promise(
        shape=shape,
        pool=pool,
        prompt_tokens=tokens,
        cached_tokens=options.cached_tokens,
        target_seconds=options.ttft,
        prefill=prefill,
        way=_way(options),
        overlap=Overlap(options.overlap),
        groups=shape.num_layers if options.overlap == "layer" else 1,
        chunk_tokens=options.chunk_tokens if options.overlap == "chunk" else None,
        sync_seconds=options.sync_seconds,
        first_token=FirstToken(options.first_token),
        decode_step_seconds=options.decode_seconds,
        decode_batch=options.decode_batch,
        queue_seconds=options.queue_seconds,
        requests_per_second=options.rate,
        prompt_lengths=lengths,
        arrival_seconds=arrivals,
    )


def _prompt(
    options: CheckOptions,
) -> tuple[int, NDArray[np.int64] | None, NDArray[np.float64] | None]:
    """The prompt to check, the workload's lengths, and its arrivals where the trace has times."""
    import numpy as np

    from kvferry.cli.plan_files import open_trace
    from kvferry.plan.workload import prompt_lengths, representative

    if options.prompt_lengths is None:
        if options.prompt_tokens is None:
            raise InputError("prompt_tokens: give --prompt-tokens N or --prompt-lengths FILE")
        return options.prompt_tokens, None, None
    rows = list(open_trace(options.prompt_lengths, "prompt_lengths", wants_output=False))
    lengths = prompt_lengths(rows)
    p95 = int(np.quantile(lengths, 0.95, method="higher"))
    tokens = p95 if options.prompt_tokens is None else options.prompt_tokens
    arrivals = None
    if rows[0].arrival_seconds is not None:
        arrivals = np.array([row.arrival_seconds for row in rows], dtype=np.float64)
    return tokens, representative(lengths), arrivals


def _prefill(options: CheckOptions, tokens: int) -> ComputeProfile | GivenPrefill | None:
    from kvferry.cli.plan_files import load_profile
    from kvferry.plan.compute_file import ProfileChoice
    from kvferry.plan.promise import GivenPrefill

    if options.profile is not None and options.prefill_seconds is not None:
        raise InputError("prefill_seconds: given beside --profile; give one of them")
    if options.prefill_seconds is not None:
        return GivenPrefill(options.prefill_seconds, tokens, options.cached_tokens)
    if options.profile is None:
        return None
    choice = ProfileChoice(options.profile_model, options.profile_gpu, options.profile_tp)
    return load_profile(options.profile, choice)


def _way(options: CheckOptions) -> Way:
    from kvferry.link.load import load_links
    from kvferry.plan.handoff import Way

    link = load_links(options.link).select(options.from_node, options.to_node, options.transport)
    return Way(
        link=link,
        mode=_mode(link, options),
        tls=options.tls,
        incast=options.incast,
        under_load=options.under_load,
        links=options.links,
        quantile=options.quantile,
    )


def _mode(link: LinkProfile, options: CheckOptions) -> Mode:
    from kvferry.link import Mode

    if options.mode is not None:
        return Mode(options.mode)
    measured = {entry.mode for entry in link.fits}
    return Mode.PULL if Mode.PULL in measured else Mode.PUSH
