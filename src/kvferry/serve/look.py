"""What a server lets others see of itself: metrics, and on loopback the live page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvferry.observe.prometheus import Metrics
from kvferry.observe.samples import Sample
from kvferry.transfer import Endpoint, Tally
from kvferry.web.app import LivePage
from kvferry.web.view import endpoint_source

__all__ = ["Look"]

_STATES = ("waiting", "prefilling", "arriving", "running")


class Look:
    """``metrics`` and ``tally`` are observers of the server's endpoint; ``page``: None without one."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.tally = Tally()
        self.page: LivePage | None = None

    def at_engine(self, stats: Callable[[], Mapping[str, int]]) -> None:
        """Show what is in the server, as /health says it."""
        self.metrics.show(lambda: _samples(stats()))

    def at_endpoint(self, name: str, endpoint: Endpoint, *, page: bool) -> None:
        """Show what the endpoint holds, and ``page``: all of it at /live."""
        self.metrics.watch(endpoint.stats)
        if page:
            self.page = LivePage(endpoint_source(name, "server", endpoint, self.tally))

    def close(self) -> None:
        """End the page's streams."""
        if self.page is not None:
            self.page.close()


def _samples(now: Mapping[str, int]) -> Iterable[Sample]:
    for state in _STATES:
        labels = (("state", state),)
        yield Sample("kvferry_server_requests", "Requests in the server now.", now[state], labels)
    yield Sample("kvferry_server_blocks", "Blocks of the pool.", now["num_blocks"])
    yield Sample("kvferry_server_free_blocks", "Blocks of the pool that are free.", now["free_blocks"])
