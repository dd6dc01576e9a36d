"""Run the proxy until it is told to end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.link.load import load_links
from kvferry.proxy.options import ProxyOptions, check_options, shown_name
from kvferry.proxy.pays import Costs
from kvferry.serve.listening import bound_socket, missing_extra

__all__ = ["Proxying", "run_proxy"]


class Proxying(msgspec.Struct, frozen=True):
    """What a proxy says once it serves.

    ``thresholds``: for each pair with a measured link and a profile, from which prompt length on it
    hands over (None: never).
    """

    url: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    thresholds: dict[str, int | None]
    pid: int


def run_proxy(options: ProxyOptions, on_ready: Callable[[Proxying], None]) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is under way for 5 s at most, and return.

    Raises InputError naming the option, LocalError for a package that is missing, TransportError
    where the address cannot be listened at.
    """
    check_options(options)
    make_app, make_state, run_app = _parts()
    links = None if options.links is None else load_links(options.links)
    costs = Costs(options, links)
    with bound_socket(options.listen) as (sock, url):
        thresholds = {}
        if options.links is not None and options.profile is not None:
            thresholds = {
                " -> ".join(
                    (shown_name(giver, options.prefill), shown_name(taker, options.decode))
                ): costs.threshold(giver, taker)
                for giver in options.prefill
                for taker in options.decode
            }
        said = Proxying(
            url=url,
            prefill=tuple(place.url for place in options.prefill),
            decode=tuple(place.url for place in options.decode),
            thresholds=thresholds,
            pid=os.getpid(),
        )
        state = make_state(options, costs)
        run_app(make_app(state, links), sock, lambda: on_ready(said), state.upstream.end)


def _parts() -> tuple[Any, Any, Any]:
    try:
        from kvferry.proxy.app import make_app  # noqa: PLC0415
        from kvferry.proxy.state import ProxyState  # noqa: PLC0415
        from kvferry.serve.running import run_app  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra(error) from error
    return make_app, ProxyState, run_app
