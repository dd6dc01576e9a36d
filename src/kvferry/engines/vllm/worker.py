"""The worker side: one endpoint over this rank's pool, offers of finished prompts, loads of others'.

vLLM's thread only hands work over and collects results; offers and loads run in threads here, the
bytes in the endpoint's. A block is reported free only when the endpoint says that nothing touches
it any more, and a request is reported once, in the way and at the time that vLLM expects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from kvferry.engines.vllm.decode import Loads
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.prefill import Offers
from kvferry.engines.vllm.results import Outbox, Results
from kvferry.engines.vllm.step import Step
from kvferry.errors import DeadlineError, TransportError
from kvferry.state import Requirements
from kvferry.transfer import Endpoint, Pool, Timeouts
from kvferry.transport.security import Identity

__all__ = ["WorkerSide"]


class WorkerSide:
    """One rank's transfers, by step. Called by vLLM's worker thread, ``ticket`` by any.

    ``replica_rank``: ranks of the data-parallel replicas before this one; they listen beside it.
    """

    def __init__(
        self,
        pool: Pool,
        needs: Requirements,
        options: Options,
        *,
        rank: int,
        name: str,
        replica_rank: int = 0,
        log: Callable[[str], None],
    ) -> None:
        self.endpoint = Endpoint.listen(
            _addresses(options, replica_rank + rank),
            pool=pool,
            name=name,
            requirements=needs,
            integrity=options.integrity,
            copy_threads=options.copy_threads,
            timeouts=Timeouts(heartbeat=options.lost_seconds / 5, lost=options.lost_seconds),
            tls=Identity.load(options.identity) if options.identity else None,
        )
        self._outbox = Outbox(log)
        self._meet(_of_rank(options.peers, rank))
        self._offers = Offers(self.endpoint, needs, options, rank, self._outbox)
        self._loads = Loads(self.endpoint, needs, options, rank, self._outbox)

    def _meet(self, peers: tuple[str, ...]) -> None:
        """Compare this worker with its peers before any request. Raises IncompatibleError, all closed.

        A peer that does not answer yet makes the comparison when it starts and meets this one.
        """
        try:
            for address in peers:
                try:
                    self.endpoint.meet(address)
                except (TransportError, DeadlineError) as error:
                    self._outbox.note(f"peer {address} is not there yet, so its fit is not known: {error}")
        except BaseException:
            self.endpoint.close()
            raise

    def before_step(self, step: Step) -> None:
        """Before the step overwrites blocks of preempted requests: their offers have ended on return."""
        for request_id in step.preempted:
            self._offers.preempt(request_id)

    def begin_pushes(self, step: Step) -> None:
        """Before the step's forward: claim the reservations of the prompts that it finishes."""
        for save in step.pushes:
            self._offers.begin_push(save)

    def layer_done(self, layer: int) -> None:
        """The forward has written this layer."""
        self._offers.layer_done(layer)

    def begin_loads(self, step: Step) -> None:
        """Have come what this step asks for; take back and decline what nobody needs any more."""
        for request_id in step.withdrawn:
            self._offers.withdraw(request_id)
        for tickets in step.given_up:
            self._offers.give_up(tickets)
        for load in step.loads:
            self._loads.begin(load)
        for load in step.unwanted:
            self._loads.decline(load)

    def begin_saves(self, step: Step) -> None:
        """The forward is over: offer the prompts that it finished, commit what was pushed."""
        self._offers.finish_pushes()
        for save in step.saves:
            self._offers.begin(save)

    def collect(self, finished: set[str]) -> Results:
        """What ended; ``finished`` are requests that vLLM has ended since the last step."""
        for request_id in finished:
            self._loads.cancel(request_id)
        saved = self._offers.collect(finished)
        results = self._outbox.take()
        results.saved.update(saved)
        return results

    def ticket(self, request_id: str, timeout_seconds: float) -> bytes:
        """The ticket of an offered request. Raises what kept it from being offered."""
        return self._offers.ticket(request_id, timeout_seconds)

    def close(self) -> None:
        """Abort what is under way and release everything. Safe to call twice."""
        self.endpoint.close()
        self._offers.close()
        self._loads.close()


def _addresses(options: Options, rank: int) -> tuple[str, ...]:
    """Where this rank listens."""
    unique = f"shm://kvferry-vllm-{os.getpid()}-{os.urandom(6).hex()}"
    return _of_rank(options.listen, rank) or (unique,)


def _of_rank(addresses: tuple[str, ...], rank: int) -> tuple[str, ...]:
    """The first rank's addresses as this rank's: tcp ports other than 0 counted up, names numbered."""

    def port(found: re.Match[str]) -> str:
        return str(int(found[1]) + rank)

    return tuple(
        re.sub(r"(?<=:)([1-9]\d*)(?=$|\?)", port, address)
        if address.startswith("tcp:")
        else address + (f"-{rank}" if rank else "")
        for address in addresses
    )
