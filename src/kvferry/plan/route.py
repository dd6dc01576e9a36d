"""Which prefill instance a request goes to, and which decode instance takes its KV.

- round_robin: the next one.
- load: prefill with the shortest queue; decode with the fewest tokens wanted of it.
- cache: prefill with the earliest end, hits and queue counted; decode with the largest hit, then the load.
- network_cost: prefill as cache; decode where the KV will be soonest: wait for room, what the tier costs
  for what the hit leaves, and the rate that is left on the way now.

With the last, an instance that is full, or whose step would break the TPOT target, is taken only when
all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvferry.plan.fleet import Wires
from kvferry.plan.payload import PayloadTable
from kvferry.plan.prefix import PrefixIndex
from kvferry.plan.sim_colocated import ColocatedWorker
from kvferry.plan.sim_request import Request
from kvferry.plan.sim_workers import DecodeWorker, PrefillWorker
from kvferry.plan.trace import PREFIX_BLOCK_TOKENS

__all__ = ["Policy", "Router"]


class Policy(StrEnum):
    """How prefill and decode are paired."""

    ROUND_ROBIN = "round_robin"
    LOAD = "load"
    CACHE = "cache"
    NETWORK_COST = "network_cost"


class Router:
    """The policy with what it may look at."""

    def __init__(
        self,
        policy: Policy,
        prefill: Sequence[PrefillWorker | ColocatedWorker],
        decode: Sequence[DecodeWorker],
        *,
        prefixes: tuple[PrefixIndex, PrefixIndex],
        payload: PayloadTable,
        wires: Wires,
        tpot_seconds: float | None,
    ) -> None:
        self.policy = policy
        self._prefill = prefill
        self._decode = decode
        self._prefill_prefixes, self._decode_prefixes = prefixes
        self._payload = payload
        self._wires = wires
        self._tpot = tpot_seconds
        self._turns = [0, 0]

    def to_prefill(self, now: float, request: Request) -> PrefillWorker | ColocatedWorker | None:
        """The prefill instance; None where no live one could ever hold the request."""
        whole = isinstance(self._prefill[0], ColocatedWorker) if self._prefill else False
        needs = request.context_tokens + (request.tokens_left if whole else 0)
        fit = [worker for worker in self._prefill if worker.alive and _could_hold(worker, needs)]
        if not fit:
            return None
        if self.policy is Policy.ROUND_ROBIN:
            self._turns[0] += 1
            return fit[self._turns[0] % len(fit)]
        if self.policy is Policy.LOAD or not request.hashes:
            return min(fit, key=lambda worker: max(now, worker.ready_at))
        hits = self._prefill_prefixes.hits(request.hashes)

        def end(worker: PrefillWorker | ColocatedWorker) -> float:
            hit = min(hits.get(worker.number, 0) * PREFIX_BLOCK_TOKENS, request.context_tokens - 1)
            return max(worker.ready_at, now) + worker.instance.profile.prefill.seconds(
                request.context_tokens, hit
            )

        return min(fit, key=end)

    def to_decode(self, request: Request, sender: PrefillWorker) -> DecodeWorker | None:
        """The decode instance, and its hit in the request; None where no live one could ever hold it."""
        needs = request.context_tokens + request.tokens_left
        fit = [worker for worker in self._decode if worker.alive and _could_hold(worker, needs)]
        if not fit:
            return None
        hits = self._decode_prefixes.hits(request.hashes) if request.hashes else {}
        if self.policy is Policy.ROUND_ROBIN:
            self._turns[1] += 1
            chosen = fit[self._turns[1] % len(fit)]
        elif self.policy is Policy.NETWORK_COST:
            chosen = self._cheapest(request, sender, fit, hits)
        elif self.policy is Policy.CACHE and hits:
            chosen = min(fit, key=lambda worker: (-hits.get(worker.number, 0), worker.wanted_tokens))
        else:
            chosen = min(fit, key=lambda worker: worker.wanted_tokens)
        blocks = hits.get(chosen.number, 0)
        request.decode_hit_tokens = max(
            request.decode_hit_tokens, min(blocks * PREFIX_BLOCK_TOKENS, request.context_tokens)
        )
        return chosen

    def _cheapest(
        self, request: Request, sender: PrefillWorker, fit: list[DecodeWorker], hits: dict[int, int]
    ) -> DecodeWorker:
        best, best_cost = fit[0], (True, float("inf"), 0)
        for worker in fit:
            hit = min(hits.get(worker.number, 0) * PREFIX_BLOCK_TOKENS, request.context_tokens)
            nbytes, descriptors = self._payload.pair(request.context_tokens, hit)
            cost, path = self._wires.between(sender.instance, worker.instance)
            rate = min([cost.rate, *[link.fair_share() for link in path]])
            seconds = cost.posting_seconds(descriptors) + nbytes / rate
            is_full = worker.free_tokens < request.context_tokens + request.tokens_left or bool(
                worker.wants_room
            )
            batch = worker.batch
            if not is_full and self._tpot is not None:
                context = batch.context + request.context_tokens
                is_full = worker.instance.profile.decode_seconds(batch.count + 1, context) > self._tpot
            found = (is_full, worker.wanted_tokens if is_full else seconds, worker.wanted_tokens)
            if found < best_cost:
                best, best_cost = worker, found
        return best


def _could_hold(worker: PrefillWorker | DecodeWorker | ColocatedWorker, tokens: int) -> bool:
    pool = worker.instance.pool_tokens
    return pool is None or tokens <= pool
