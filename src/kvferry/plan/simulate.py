"""Replay a trace on a fleet: queues, prefix hits, room, shared links, failures. One clock, one heap.

The result depends on the fleet, the trace, the rules and the seed, and on nothing else. Memory holds
what is in flight: the trace is read as it is needed, and records leave as requests end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvferry.errors import InputError
from kvferry.plan.events import Events
from kvferry.plan.fairshare import Flow, Network, SharedLink
from kvferry.plan.fleet import EngineRules, Fleet, Role, Wires
from kvferry.plan.payload import PayloadTable
from kvferry.plan.prefix import PrefixIndex
from kvferry.plan.promise import FirstToken
from kvferry.plan.route import Policy, Router
from kvferry.plan.sim_colocated import ColocatedWorker
from kvferry.plan.sim_metrics import Tally, Targets
from kvferry.plan.sim_request import Outcome, Request, RequestRecord
from kvferry.plan.sim_result import Result, result_of
from kvferry.plan.sim_workers import DecodeWorker, PrefillWorker
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import PREFIX_BLOCK_TOKENS, TraceRow

__all__ = ["Kill", "Simulation", "simulate"]


class Kill(msgspec.Struct, frozen=True):
    """An instance that dies at ``at_seconds`` and, where ``back_after_seconds`` is set, comes back empty."""

    instance: str
    at_seconds: float
    back_after_seconds: float | None = None


def simulate(
    fleet: Fleet,
    rows: Iterable[TraceRow],
    payload: PayloadTable,
    *,
    rules: EngineRules | None = None,
    policy: Policy = Policy.LOAD,
    prefill_policy: Policy | None = None,
    targets: Targets | None = None,
    kills: Sequence[Kill] = (),
    seed: int = 0,
    with_spread: bool = True,
    keep: Callable[[RequestRecord], None] | None = None,
) -> Result:
    """Run a trace to its end.

    Args:
        fleet: the instances and what lies between them.
        rows: requests in order of arrival, each with its time.
        payload: what a handoff weighs.
        rules, policy, targets: how the engines work, how they are paired, what counts as good.
        prefill_policy: how prefill is chosen, where it is not as ``policy`` says.
        kills: failures.
        seed: of the spread.
        with_spread: draw each handoff's time from the measured spread of its tier, where it has one;
            else all are typical.
        keep: called with the record of every request when it ends.

    Raises InputError for a fleet without instances, an unknown instance in ``kills``, rows without times.
    """
    run = Simulation(fleet, payload, rules or EngineRules(), targets or Targets(), policy, prefill_policy)
    run.keep = keep
    if with_spread and any(tier.fit.spreads for tier in fleet.tiers):
        run.luck = random.Random(seed)  # noqa: S311 - nothing secret
    run.plan_failures(kills)
    for number, row in enumerate(rows):
        if row.arrival_seconds is None:
            raise InputError("trace: its rows have no times; give a rate")
        run.arrive(number, row, row.arrival_seconds)
    return run.finish()


class Simulation:
    """One run. The workers call back: this is their Stage."""

    def __init__(
        self,
        fleet: Fleet,
        payload: PayloadTable,
        rules: EngineRules,
        targets: Targets,
        *policies: Policy | None,
    ) -> None:
        self.fleet = fleet
        self.rules = rules
        self.events = Events()
        self.network = Network(self.events)
        self.wires = Wires(fleet)
        self.tally = Tally(targets)
        self.keep: Callable[[RequestRecord], None] | None = None
        self.luck: random.Random | None = None
        self._payload = payload
        self._colocated = fleet.of_role(Role.COLOCATED)
        self._prefill, self._decode = self._workers()
        self._by_name = {w.instance.name: w for w in (*self._prefill, *self._decode)}
        prefixes = (_index(self._prefill), _index(self._decode))
        self._prefixes = prefixes
        self._router = Router(
            policies[0] or Policy.LOAD,
            self._prefill,
            self._decode,
            prefixes=prefixes,
            payload=payload,
            wires=self.wires,
            tpot_seconds=targets.tpot_seconds,
            prefill_policy=policies[1],
        )
        self._arrived = 0
        self._first_arrival = 0.0
        self._last_end = 0.0
        self._handoffs = self._sent_nbytes = self._dropped_nbytes = 0
        self._broken_off_nbytes = 0.0
        self._too_far = 0
        self._prompts = self._prompts_too_far = 0

    def _workers(self) -> tuple[list[PrefillWorker | ColocatedWorker], list[DecodeWorker]]:
        events, rules = self.events, self.rules
        if self._colocated:
            both = [ColocatedWorker(i, n, events, rules, self) for n, i in enumerate(self._colocated)]
            return list(both), []
        prefill = [
            PrefillWorker(i, n, events, rules, self) for n, i in enumerate(self.fleet.of_role(Role.PREFILL))
        ]
        decode = [
            DecodeWorker(i, n, events, rules, self) for n, i in enumerate(self.fleet.of_role(Role.DECODE))
        ]
        if not prefill or not decode:
            raise InputError("fleet: needs an instance for prefill and one for decode")
        return list(prefill), decode

    # --- Arrivals and the end ----------------------------------------------------------------------------

    def arrive(self, number: int, row: TraceRow, now: float) -> None:
        """Let everything happen that comes before, then take the request in.

        What happens at the very moment comes after it, so that requests of one moment meet.
        """
        events = self.events
        while events.next_seconds < now:
            events.run_next()
        if not self._arrived:
            self._first_arrival = now
        self._arrived += 1
        request = Request(number, now, row.prompt_tokens, row.output_tokens, row.prefix_hashes)
        if self.luck is not None:
            # Drawn here and not at the handoff: fleets that are compared see the same luck.
            request.luck = self.luck.random()
        self._route(now, request)

    def finish(self) -> Result:
        """Run until nothing is left to happen."""
        while self.events.next_seconds < float("inf"):
            self.events.run_next()
        return self._result()

    def _route(self, now: float, request: Request) -> None:
        worker = self._router.to_prefill(now, request)
        if worker is None:
            self._end(now, request, Outcome.FAILED)
            return
        worker.enqueue(now, request, worker.instance.profile.prefill.seconds(request.context_tokens))

    def _end(self, now: float, request: Request, outcome: Outcome) -> None:
        self._last_end = max(self._last_end, now)
        record = request.record(now, outcome)
        self.tally.add(record)
        if self.keep is not None:
            self.keep(record)

    # --- What the workers tell ---------------------------------------------------------------------------

    def begin_prefill(self, now: float, request: Request) -> int:
        """See Stage."""
        worker = self._by_name[request.prefill or ""]
        self._prompts += 1
        self._prompts_too_far += request.context_tokens > worker.instance.profile.reach[0]
        if self.rules.groups > 1 and isinstance(worker, PrefillWorker) and not self._ends_at_prefill(request):
            self.events.at(now, self._pair, (request, request.attempts))
        if not request.hashes:
            return 0
        return self._prefixes[0].hit(worker.number, request.hashes) * PREFIX_BLOCK_TOKENS

    def _ends_at_prefill(self, request: Request) -> bool:
        return self.rules.first_token is FirstToken.PREFILL and request.tokens_left == 1

    def end_prefill(self, now: float, request: Request) -> None:
        """See Stage."""
        worker = self._by_name[request.prefill or ""]
        if request.hashes:
            self._prefixes[0].insert(worker.number, request.hashes)
        if isinstance(worker, ColocatedWorker):
            return
        assert isinstance(worker, PrefillWorker)
        ends_here = self._ends_at_prefill(request)
        if self.rules.first_token is FirstToken.PREFILL:
            if request.first is None:
                request.first = now
            request.tokens_left -= 1
        if ends_here:
            request.room_asked = request.room_given = request.handed_over = now
            worker.release(now, request)
            self._end(now, request, Outcome.DONE)
        elif self.rules.groups == 1:
            self._pair(now, (request, request.attempts))

    def _pair(self, now: float, ticket: tuple[Request, int]) -> None:
        request, attempt = ticket
        if request.attempts != attempt:
            return
        sender = self._by_name[request.prefill or ""]
        assert isinstance(sender, PrefillWorker)
        worker = self._router.to_decode(request, sender)
        if worker is None:
            sender.release(now, request)
            self._end(now, request, Outcome.FAILED)
            return
        worker.reserve(now, request)

    def room_given(self, now: float, request: Request) -> None:
        """See Stage: post the handoff; it keeps the link busy after the start cost, once there is KV."""
        cost, _ = self._way(request)
        request.nbytes, pieces = self._payload.pair(request.context_tokens, request.decode_hit_tokens)
        request.pieces = pieces
        request.late = self._lateness(cost, request)
        if cost.too_far(request.nbytes, pieces) is not None:
            self._too_far += 1
        start = self.wires.load(cost, request.nbytes, pieces).start_seconds * request.late
        posted = now + start
        if self.rules.groups > 1:
            first_group = (request.prefill_end - request.prefill_start) / self.rules.groups
            posted = max(posted, request.prefill_start + first_group + start)
        self.events.at(posted, self._send, (request, request.attempts))

    def end_request(self, now: float, request: Request) -> None:
        """See Stage."""
        self._end(now, request, Outcome.DONE)

    # --- The handoff -------------------------------------------------------------------------------------

    def _way(self, request: Request) -> tuple[TierCost, tuple[SharedLink, ...]]:
        sender, receiver = self._by_name[request.prefill or ""], self._by_name[request.decode or ""]
        return self.wires.between(sender.instance, receiver.instance)

    def _lateness(self, cost: TierCost, request: Request) -> float:
        """How many times as long as the typical handoff this one takes."""
        if request.luck is None or not cost.fit.spreads:
            return 1.0
        typical = cost.seconds(request.nbytes, request.pieces)
        return (
            cost.quantile_seconds(request.luck, request.nbytes, request.pieces) / typical if typical else 1.0
        )

    def _send(self, now: float, ticket: tuple[Request, int]) -> None:
        request, attempt = ticket
        if request.attempts != attempt:
            return
        cost, path = self._way(request)
        load = self.wires.load(cost, request.nbytes, request.pieces)
        work = load.work_nbytes * request.late
        if not work:
            self._sent(now, request)
            return
        share = request.nbytes / work
        request.flow = Flow(work, load.bytes_per_second, path, self._sent, request, payload_share=share)
        self._handoffs += 1
        self._sent_nbytes += request.nbytes
        self.network.start(now, request.flow)

    def _sent(self, now: float, request: Request) -> None:
        request.flow = None
        rules = self.rules
        arrival = now + rules.sync_seconds
        if rules.groups > 1:
            cost, _ = self._way(request)
            last = cost.seconds(request.nbytes, request.pieces) * request.late / rules.groups
            arrival = max(arrival, request.prefill_end + last + rules.sync_seconds)
        if arrival > now:
            self.events.at(arrival, self._arrived_kv, (request, request.attempts))
        else:
            self._arrived_kv(now, (request, request.attempts))

    def _arrived_kv(self, now: float, ticket: tuple[Request, int]) -> None:
        request, attempt = ticket
        if request.attempts != attempt:
            return
        request.handed_over = now
        receiver, sender = self._by_name[request.decode or ""], self._by_name[request.prefill or ""]
        assert isinstance(receiver, DecodeWorker)
        assert isinstance(sender, PrefillWorker)
        if request.hashes:
            self._prefixes[1].insert(receiver.number, request.hashes)
        sender.release(now, request)
        receiver.arrive(now, request)

    # --- Failures ----------------------------------------------------------------------------------------

    def plan_failures(self, kills: Sequence[Kill]) -> None:
        """Put failures on the clock."""
        for kill in kills:
            if kill.instance not in self._by_name:
                known = ", ".join(self._by_name)
                raise InputError(f"kill: no instance {kill.instance!r}; known: {known}")
            self.events.at(kill.at_seconds, self._kill, kill.instance)
            if kill.back_after_seconds is not None:
                self.events.at(kill.at_seconds + kill.back_after_seconds, self._revive, kill.instance)

    def _kill(self, now: float, name: str) -> None:
        worker = self._by_name[name]
        if not worker.alive:
            return
        if isinstance(worker, PrefillWorker):
            lost = worker.kill()
            self._prefixes[0].clear(worker.number)
            for request in lost:
                receiver = self._by_name.get(request.decode or "")
                self._drop_flow(now, request)
                if isinstance(receiver, DecodeWorker):
                    receiver.cancel(now, request)
        else:
            lost = worker.kill(now)
            self._prefixes[0 if isinstance(worker, ColocatedWorker) else 1].clear(worker.number)
            for request in lost:
                sender = self._by_name.get(request.prefill or "")
                self._drop_flow(now, request)
                if isinstance(sender, PrefillWorker) and request in sender.held:
                    sender.release(now, request)
        for request in lost:
            request.begin_attempt()
            self._route(now, request)

    def _drop_flow(self, now: float, request: Request) -> None:
        if request.flow is not None:
            self.network.drop(now, request.flow)
            self._dropped_nbytes += request.nbytes
            self._broken_off_nbytes += request.nbytes - request.flow.left * request.flow.payload_share
            request.flow = None

    def _revive(self, now: float, name: str) -> None:
        worker = self._by_name[name]
        if worker.alive:
            return
        if isinstance(worker, DecodeWorker):
            worker.revive()
        else:
            worker.revive(now)

    # --- What comes out ----------------------------------------------------------------------------------

    def _result(self) -> Result:
        decoders = [w for w in (*self._prefill, *self._decode) if not isinstance(w, PrefillWorker)]
        return result_of(
            self.tally,
            self.wires,
            span_seconds=self._last_end - self._first_arrival,
            prefill_busy_seconds=[worker.busy_seconds for worker in self._prefill],
            handoffs=self._handoffs,
            sent_nbytes=self._sent_nbytes,
            # What a broken one had moved is with no one.
            delivered_nbytes=self.network.carried_nbytes - self._broken_off_nbytes,
            dropped_nbytes=self._dropped_nbytes,
            handoffs_too_far=self._too_far,
            prompts=(self._prompts, self._prompts_too_far),
            joined=(
                sum(worker.batch.joined for worker in decoders),
                sum(worker.batch.joined_too_far for worker in decoders),
            ),
        )


def _index(workers: Sequence[PrefillWorker | ColocatedWorker | DecodeWorker]) -> PrefixIndex:
    return PrefixIndex([worker.instance.prefix_tokens // PREFIX_BLOCK_TOKENS for worker in workers])
