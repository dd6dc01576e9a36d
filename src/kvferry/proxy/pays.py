"""Does handing a prompt over one pair pay? From the link's measurement, never from its brochure alone."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvferry.link import LinkFile, Mode
from kvferry.plan.check import Verdict, answer
from kvferry.plan.handoff import Way, link_time
from kvferry.plan.payload import PayloadTable
from kvferry.plan.promise import FirstToken, Promise
from kvferry.proxy.options import Place, ProxyOptions

__all__ = ["Costs"]

_LONGEST = 1 << 20


class Costs:
    """What each pair's link takes for a prompt, and whether ``check`` says that the move pays.

    Raises InputError where the link file has no pair, or several, for two of the workers.
    """

    def __init__(self, options: ProxyOptions, links: LinkFile | None) -> None:
        self._options = options
        self._ways: dict[tuple[str, str], Way] = {}
        self._payload = None if options.shape is None else PayloadTable(options.shape, options.pool)
        if links is not None:
            for prefill in options.prefill:
                for decode in options.decode:
                    link = links.select(prefill.name, decode.name)
                    measured = {entry.mode for entry in link.fits}
                    mode = Mode(options.mode)
                    if mode not in measured and link.measured:
                        mode = next(iter(measured))
                    self._ways[prefill.name, decode.name] = Way(link=link, mode=mode)
        self._why_not = lru_cache(maxsize=4096)(self._judge)

    def move_seconds(self, prefill: Place, decode: Place, tokens: int) -> float:
        """The p95 of the move over that pair; 0 where no links were given: then pairs differ by load only."""
        way = self._ways.get((prefill.name, decode.name))
        if way is None or self._payload is None:
            return 0.0
        payload = self._payload.at(tokens)
        return link_time(way, payload.nbytes, payload.descriptors).seconds

    def why_not(self, prefill: Place, decode: Place, tokens: int) -> str | None:
        """Why this prompt is not handed over that pair, or None."""
        reason: str | None = self._why_not(prefill, decode, tokens)
        return reason

    def threshold(self, prefill: Place, decode: Place) -> int | None:
        """The shortest prompt that is handed over that pair, or None: of powers of two and what lies between.

        Right where longer prompts are worth a handoff as soon as shorter ones are.
        """
        high = 1
        while self.why_not(prefill, decode, high) is not None:
            high *= 2
            if high > _LONGEST:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.why_not(prefill, decode, middle) is None:
                high = middle
            else:
                low = middle
        return high

    def _judge(self, prefill: Place, decode: Place, tokens: int) -> str | None:
        options = self._options
        if tokens < options.min_prompt_tokens:
            return "shorter than --min-prompt-tokens"
        way = self._ways.get((prefill.name, decode.name))
        if way is None or options.profile is None or options.shape is None:
            return None
        # Computed where it is wanted, the prompt takes the prefill; handed over, decode waits for the move.
        here = options.profile.prefill.seconds(tokens)
        if self.move_seconds(prefill, decode, tokens) >= here:
            return "the move takes longer than the prefill"
        if options.target_seconds is None:
            return None
        promise = Promise(
            shape=options.shape,
            pool=options.pool,
            prompt_tokens=tokens,
            cached_tokens=0,
            target_seconds=options.target_seconds,
            prefill=options.profile,
            way=way,
            first_token=FirstToken(options.first_token),
            decode_step_seconds=options.profile.decode_seconds(1, tokens),
        )
        with_move = answer(promise)
        without = msgspec.structs.replace(promise, first_token=FirstToken.PREFILL)
        if with_move.verdict is Verdict.DOES_NOT_HOLD and answer(without).verdict is Verdict.HOLDS:
            return "the TTFT would hold without the move only"
        return None
