"""The measurement: fitness of the server, prefill alone, decode alone, decode beside prompts; then fits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import mean, median

import httpx
import msgspec

from kvferry.errors import DeadlineError, InputError, NoPlanError
from kvferry.interference.client import Budget, Client, Reply, UniquePrompts
from kvferry.interference.options import InterferenceOptions, check_options, measured_lengths
from kvferry.interference.result import Alone, Measured, bunched
from kvferry.interference.streams import Decoding, arrive, decode_alone, decoding
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.compute_fit import ComputeSample, fit_profile
from kvferry.plan.interference_fit import GapSummary, Window, check_tail, fit_mixed

__all__ = ["OnProgress", "measure"]

OnProgress = Callable[[str, int, int], None]
"""``on_progress(stage, done, total)``; stages are check, prefill, decode, mixed."""

_DEFAULT_SHARE = 0.3
_MAX_SHARE = 0.9
_MIN_GAPS = 8
_ALONE_STEPS = 24
# Streams of a window begin anew after so many tokens: longer ones would want more room than they use.
_MAX_OUTPUT_TOKENS = 1024
# Of a prompt that nobody has seen, more than this from a cache means that times are of something else.
_MAX_CACHED_SHARE = 0.05
_PARTS = 4
_STREAM_ATTEMPTS = 3
"""A window is cut into so many, whose spread is the error of the fit."""


async def measure(
    options: InterferenceOptions,
    on_progress: OnProgress = lambda *_: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Measured:
    """Measure a running server, streamed, within the bounds of the options.

    ``transport``: instead of HTTP, for tests. Raises InputError naming the option; NoPlanError for a
    server whose times would mean something else (it does not stream, caches, puts several tokens
    into an event); TransportError; DeadlineError when the bounds end it before laws can be fitted.
    """
    check_options(options)
    loop = asyncio.get_running_loop()
    began = loop.time()
    budget = Budget(began + options.max_seconds, options.max_requests)
    client = Client(options, budget, transport)
    try:
        found = _Measuring(options, client, UniquePrompts(options.seed), budget, on_progress)
        await found.check()
        await found.prefill()
        await found.decode()
        profile = found.fit()
        windows = await found.mixed(profile)
    finally:
        await client.close()
    return found.result(profile, windows, options.max_requests - budget.requests_left, loop.time() - began)


@dataclass(slots=True)
class _Measuring:
    options: InterferenceOptions
    client: Client
    prompts: UniquePrompts
    budget: Budget
    on_progress: OnProgress
    longest: int | None = None
    step_seconds: float = 0.0
    samples: list[ComputeSample] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def check(self) -> None:
        """Refuse a server whose times would not be what they are taken for."""
        total = 4
        self.on_progress("check", 0, total)
        self.longest = await self.client.find_model()
        room = max(self.options.prompt_lengths) + self.options.output_tokens
        if self.longest is not None and room > self.longest:
            raise InputError(
                f"prompt_lengths: up to {max(self.options.prompt_lengths)} tokens and "
                f"{self.options.output_tokens} to come, the server takes {self.longest}"
            )
        await self.client.learn_extras(self.prompts)  # and connections, and what a first request warms up
        self.on_progress("check", 1, total)
        middle = int(median(self.options.prompt_lengths))
        one = await self.fresh(middle, 1)
        self.on_progress("check", 2, total)
        many = await self._streamed(middle, one)
        self.on_progress("check", 3, total)
        self.step_seconds = max(1e-6, mean(many.gaps))
        longest = max(self.options.prompt_lengths)
        ids = self.prompts.make(longest)
        first, second = [await self.client.stream(ids, 1) for _ in range(2)]
        if second.cached_tokens > 0 or second.first_seconds < 0.5 * first.first_seconds:
            self.notes.append(
                "the server caches prefixes: every prompt was new, so the times are without hits"
            )
        self.on_progress("check", total, total)

    async def _streamed(self, tokens: int, one: Reply) -> Reply:
        """A reply whose tokens came one by one: on a busy machine one may come all at once, but not each."""
        for left in reversed(range(_STREAM_ATTEMPTS)):
            many = await self.fresh(tokens, self.options.output_tokens)
            try:
                _refuse_bursts(one, many)
            except NoPlanError:
                if not left:
                    raise
            else:
                break
        return many

    async def fresh(self, tokens: int, max_tokens: int) -> Reply:
        """A prompt that nobody has seen. Raises NoPlanError where the server has it cached all the same."""
        reply = await self.client.stream(self.prompts.make(tokens), max_tokens)
        counted = reply.counted_prompt_tokens
        if counted is not None and abs(counted - tokens) > max(2, 0.02 * tokens):
            raise NoPlanError(f"the server counts {counted} tokens in a prompt of {tokens} token ids")
        if reply.cached_tokens > _MAX_CACHED_SHARE * tokens:
            raise NoPlanError(
                f"the server had {reply.cached_tokens} of {tokens} tokens of a new prompt in its cache",
                now_true="such prefill times are of the cache, not of prefill",
                next_step="turn its prefix cache off for the measurement",
            )
        return reply

    async def prefill(self) -> None:
        """Time to the only token, over prompt length, one request at a time, in mixed order."""
        wanted = measured_lengths(self.options.prompt_lengths) * self.options.repeats
        random.Random(self.options.seed).shuffle(wanted)  # noqa: S311 - an order
        for done, tokens in enumerate(wanted):
            self.on_progress("prefill", done, len(wanted))
            reply = await self.fresh(tokens, 1)
            self.samples.append(
                ComputeSample(is_prefill=True, batch=1, tokens=tokens, seconds=reply.first_seconds)
            )
        self.on_progress("prefill", len(wanted), len(wanted))

    async def decode(self) -> None:
        """Gaps of several streams side by side, at several batches and two contexts."""
        lengths = measured_lengths(self.options.prompt_lengths)
        batches = sorted({1, max(1, self.options.concurrency // 4), self.options.concurrency, 2})
        points = [(batch, tokens) for batch in batches for tokens in (lengths[0], lengths[-1])]
        longest = median(sample.seconds for sample in self.samples if sample.tokens == lengths[-1])
        for done, (batch, tokens) in enumerate(points):
            self.on_progress("decode", done, len(points))
            # The first stream has to last until the last one has its prompt in.
            steps = self.options.output_tokens + int(1.5 * (batch - 1) * longest / self.step_seconds)
            output = self._room(tokens, min(steps, _MAX_OUTPUT_TOKENS))
            try:
                gaps, context = await decode_alone(self.client, self.prompts, batch, tokens, output)
            except DeadlineError as error:
                self.skipped.append(f"decode of {batch} at {tokens} tokens: {error.message}")
                break
            if len(gaps) < _MIN_GAPS:
                self.skipped.append(f"decode of {batch} at {tokens} tokens: too few steps with all of them")
                continue
            self.samples.append(
                # The mean: events that a busy host delivers together have gaps of nearly nothing.
                ComputeSample(is_prefill=False, batch=batch, tokens=context, seconds=mean(gaps))
            )
            self.alone.append(Alone(batch, context, GapSummary.of(gaps)))
        self.on_progress("decode", len(points), len(points))

    def fit(self) -> ComputeProfile:
        """The laws, without ``mixed_share``."""
        try:
            profile = fit_profile(
                self.samples,
                model=self.client.model,
                gpu=self.options.gpu,
                tp=self.options.tp,
                source=f"kvferry interference, {datetime.now(UTC):%Y-%m-%d}",
            )
        except InputError as error:
            why = "; ".join((error.message, *self.skipped))
            raise DeadlineError(why, next_step="give more with --max-seconds or --max-requests") from error
        return msgspec.structs.replace(profile, engine=self.options.url)

    async def mixed(self, profile: ComputeProfile) -> list[Window]:
        """Decode beside arriving prompts, at each rate; one that cannot be sustained is left out by name."""
        each = mean(profile.prefill.seconds(tokens) for tokens in self.options.prompt_lengths)
        rates = self.options.rates or (_DEFAULT_SHARE / each,)
        windows: list[Window] = []
        for done, rate in enumerate(rates):
            self.on_progress("mixed", done, len(rates))
            if rate * each > _MAX_SHARE:
                self.skipped.append(
                    f"{rate:.3g} a second: prefill alone would take {rate * each:.0%} of the time"
                )
                continue
            seconds = min(self.options.window_seconds, self.budget.seconds_left() - 1.0)
            try:
                windows += await self._windows(profile, (rate, seconds), self.options.seed + done)
            except DeadlineError as error:
                self.skipped.append(f"{rate:.3g} a second: {error.message}")
        self.on_progress("mixed", len(rates), len(rates))
        return windows

    async def _windows(self, profile: ComputeProfile, load: tuple[float, float], seed: int) -> list[Window]:
        seconds = load[1]
        if seconds < 20 * self.step_seconds:
            raise DeadlineError("no time is left for it")
        batch, tokens = self.options.concurrency, int(median(self.options.prompt_lengths))
        wanted = self.options.output_tokens + int(2 * seconds / self.step_seconds)
        output = self._room(tokens, min(wanted, _MAX_OUTPUT_TOKENS))
        loop = asyncio.get_running_loop()
        async with decoding(self.client, self.prompts, batch, tokens, output) as streams:
            start = loop.time()
            await asyncio.sleep(max(_ALONE_STEPS * 2 * self.step_seconds, 0.05 * seconds))
            between = loop.time()
            alone, context = streams.between(start, between)
            came = await self._arrive(load, seed)
            end = loop.time()
        if len(alone) < _MIN_GAPS:
            raise DeadlineError("too few steps came before the first prompt")
        # What the streams took alone, beside what the law says of them: it follows their contexts from here.
        scale = mean(alone) / profile.decode_seconds(batch, context)
        return _cut(
            streams, came, (between, end), lambda tokens: scale * profile.decode_seconds(batch, tokens)
        )

    async def _arrive(self, load: tuple[float, float], seed: int) -> list[tuple[float, float, int]]:
        try:
            return await arrive(self.client, self.prompts, self.options.prompt_lengths, load, seed)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _room(self, tokens: int, wanted: int) -> int:
        """Output tokens that fit beside a prompt."""
        return wanted if self.longest is None else max(2, min(wanted, self.longest - tokens - 1))

    def result(
        self, profile: ComputeProfile, windows: Sequence[Window], requests: int, seconds: float
    ) -> Measured:
        """Fit the mixed steps and hold the laws against the windows."""
        fitted = fit_mixed(profile, windows, self.options.chunk_tokens)
        profile = msgspec.structs.replace(profile, mixed_share=fitted.identified)
        if (why := fitted.why_unknown()) is not None:
            self.notes.append(f"{why}; mixed_share is left out, so that plans try both ends")
        if (doubt := profile.doubt) is not None:
            self.notes.append(f"{doubt}: the machine may be busy with something else; measure again")
        if (why := bunched(self.alone)) is not None:
            self.notes.append(why)
        joined = [_join(windows[at : at + _PARTS]) for at in range(0, len(windows), _PARTS)]
        tails = [
            check_tail(profile, window, self.options.prompt_lengths, self.options.chunk_tokens)
            for window in joined
            if window.prompts
        ]
        return Measured(
            profile=profile,
            alone=tuple(self.alone),
            mixed=fitted,
            tails=tuple(tails),
            chunk_tokens=self.options.chunk_tokens,
            skipped=tuple(self.skipped),
            notes=tuple(self.notes),
            requests=requests,
            seconds=seconds,
        )


def _refuse_bursts(one: Reply, many: Reply) -> None:
    """Raise NoPlanError for tokens that come together: several an event, or all at the end."""
    if many.tokens < 8:
        raise NoPlanError(
            f"the server ended after {many.tokens} tokens",
            next_step="it has to take ignore_eos, or a model that does not stop so soon",
        )
    if len(many.times) < 0.9 * many.tokens:
        raise NoPlanError(
            f"the server sent {many.tokens} tokens in {len(many.times)} events",
            now_true="gaps between events are not inter-token latencies",
            next_step="set its stream interval to 1, and turn speculative decoding off",
        )
    rest = many.times[-1] - many.sent - one.first_seconds
    if rest > 0 and many.times[-1] - many.times[0] < 0.2 * rest:
        raise NoPlanError(
            f"the server does not stream: {len(many.times)} tokens came within "
            f"{many.times[-1] - many.times[0]:.3g} s, after {many.first_seconds:.3g} s",
            now_true="something between here and the engine collects them",
            next_step="measure the engine itself, or turn the buffering off",
        )


def _cut(
    streams: Decoding,
    came: Sequence[tuple[float, float, int]],
    window: tuple[float, float],
    alone: Callable[[float], float],
) -> list[Window]:
    """The window in equal parts; a prompt belongs to the part in which it was answered."""
    start, end = window
    each = (end - start) / _PARTS
    prompts = [(first, tokens) for _, first, tokens in came] + streams.began
    parts = []
    for part in range(_PARTS):
        low, high = start + part * each, start + (part + 1) * each
        gaps, context = streams.between(low, high)
        inside = [(tokens, streams.share_at(at)) for at, tokens in prompts if low < at <= high]
        if gaps:
            lengths, shares = tuple(tokens for tokens, _ in inside), tuple(share for _, share in inside)
            parts.append(Window(each, alone(context), tuple(gaps), lengths, shares, streams.batch, context))
    return parts if len(parts) == _PARTS else []


def _join(parts: Sequence[Window]) -> Window:
    return msgspec.structs.replace(
        parts[0],
        seconds=sum(part.seconds for part in parts),
        context_tokens=mean(part.context_tokens for part in parts),
        gaps=tuple(gap for part in parts for gap in part.gaps),
        prompts=tuple(tokens for part in parts for tokens in part.prompts),
        shares=tuple(share for part in parts for share in part.shares),
    )
