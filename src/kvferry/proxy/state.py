"""What all requests of one proxy share."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvferry.proxy.body import Body
from kvferry.proxy.options import ProxyOptions
from kvferry.proxy.pays import Costs
from kvferry.proxy.upstream import Upstream
from kvferry.proxy.workers import Worker, Workers

__all__ = ["EVENTS", "ProxyState"]

# All that is counted.
EVENTS = ("handoffs", "streams", "ended_at_prefill", "alone", "failed", "retries", "restarts")
_FIRST_BYTES_PER_TOKEN = 4.0
_NEW_SHARE = 0.05


class ProxyState:
    """Workers, costs, the HTTP client, counts, and how many bytes a token of text has on average.

    ``problem``: why the workers are not those that were last looked for, or "".
    """

    def __init__(self, options: ProxyOptions, costs: Costs) -> None:
        self.options = options
        self.costs = costs
        self.workers = Workers(options, costs)
        self.problem = ""
        self.upstream = Upstream(options)
        self.bytes_per_token = _FIRST_BYTES_PER_TOKEN
        self._counts: Counter[str] = Counter()

    def replace(self, options: ProxyOptions, costs: Costs) -> None:
        """Other workers from now on; the rest of the options is what it was."""
        self.workers.replace(options, costs)
        self.options, self.costs = options, costs

    def count(self, what: str) -> None:
        """One more of these."""
        self._counts[what] += 1

    def counted(self, what: str) -> int:
        """How many there were."""
        return self._counts[what]

    def learn(self, body: Body, answer: dict[str, Any]) -> None:
        """A prompt's bytes, and the tokens that prefill counted in it."""
        usage = answer.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if body.text_nbytes and isinstance(tokens, int) and tokens > 0:
            self.bytes_per_token += _NEW_SHARE * (body.text_nbytes / tokens - self.bytes_per_token)

    def report(self) -> dict[str, Any]:
        """For /health."""
        return {
            "counts": dict(self._counts),
            "bytes_per_token": self.bytes_per_token,
            "problem": self.problem,
            "prefill": [_said(worker) for worker in self.workers.prefill],
            "decode": [_said(worker) for worker in self.workers.decode],
        }


def _said(worker: Worker) -> dict[str, Any]:
    return {
        "name": worker.place.name,
        "url": worker.place.url,
        "requests": worker.requests,
        "tokens": worker.tokens,
        "answered": worker.answered,
        "failed": worker.failed,
    }
