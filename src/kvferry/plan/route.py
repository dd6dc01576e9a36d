"""Which prefill instance a request goes to, and which decode instance takes its KV.

- round_robin: the next one.
- load: prefill with the shortest queue; decode with the fewest tokens wanted of it.
- cache: prefill with the earliest end, hits and queue counted; decode with the least load, where a token
  hit makes up for a token of load. (The largest hit alone sends everything to whoever has the system
  prompt.)
- network_cost: prefill as cache; decode where the next token will be soonest: what the tier costs for
  what the hit leaves, at the rate that is left on the way now, and a step of the batch there. An
  instance that is full, or whose step would break the TPOT target, is taken only when all are.

Colocated instances are chosen by the tokens wanted of them, hits counted by cache and network_cost.
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
        tpot_seconds: float,
        prefill_policy: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.prefill_policy = prefill_policy or policy
        self._prefill = prefill
        self._decode = decode
        self._prefill_prefixes, self._decode_prefixes = prefixes
        self._payload = payload
        self._wires = wires
        self._tpot = tpot_seconds
        self._turns = [0, 0]

    def to_prefill(self, now: float, request: Request) -> PrefillWorker | ColocatedWorker | None:
        """The prefill instance; None where no live one could ever hold the request."""
        fit = [worker for worker in self._prefill if worker.alive and _could_prefill(worker, request)]
        if not fit:
            return None
        if self.prefill_policy is Policy.ROUND_ROBIN:
            self._turns[0] += 1
            return fit[self._turns[0] % len(fit)]
        looks_at_hits = self.prefill_policy is not Policy.LOAD and request.hashes
        hits = self._prefill_prefixes.hits(request.hashes) if looks_at_hits else {}

        def cost(worker: PrefillWorker | ColocatedWorker) -> float:
            hit = hits.get(worker.number, 0) * PREFIX_BLOCK_TOKENS
            if isinstance(worker, ColocatedWorker):
                return worker.wanted_tokens - hit
            if not looks_at_hits:
                return max(now, worker.ready_at)
            hit = min(hit, request.context_tokens - 1)
            return max(now, worker.ready_at) + worker.instance.profile.prefill.seconds(
                request.context_tokens, hit
            )

        return min(fit, key=cost)

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
            chosen = min(
                fit,
                key=lambda worker: worker.wanted_tokens - hits.get(worker.number, 0) * PREFIX_BLOCK_TOKENS,
            )
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
            cost, path = self._wires.between(sender.instance, worker.instance)
            load = self._wires.load(cost, *self._payload.pair(request.context_tokens, hit))
            rate = min([load.bytes_per_second, *[link.fair_share() for link in path]])
            seconds = load.start_seconds + (load.work_nbytes / rate if load.work_nbytes else 0.0)
            batch = worker.batch
            context = batch.context + request.context_tokens
            step = worker.instance.profile.decode_seconds(batch.count + 1, context)
            is_full = (
                step > self._tpot
                or bool(worker.wants_room)
                or worker.free_tokens < request.context_tokens + request.tokens_left
            )
            seconds += step
            found = (is_full, worker.wanted_tokens if is_full else seconds, worker.wanted_tokens)
            if found < best_cost:
                best, best_cost = worker, found
        return best


def _could_prefill(worker: PrefillWorker | ColocatedWorker, request: Request) -> bool:
    later = request.tokens_left if isinstance(worker, ColocatedWorker) else 0
    return _could_hold(worker, request.context_tokens + later)


def _could_hold(worker: PrefillWorker | DecodeWorker | ColocatedWorker, tokens: int) -> bool:
    pool = worker.instance.pool_tokens
    return pool is None or tokens <= pool
