"""An agent with its live page."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvferry.observe.prometheus import Metrics
from kvferry.probe import Agent
from kvferry.web.app import LivePage
from kvferry.web.run import PageOptions, serving_page
from kvferry.web.view import agent_source

__all__ = ["agent_with_page"]


@contextlib.asynccontextmanager
async def agent_with_page(
    address: str, options: Mapping[str, Any], page: PageOptions
) -> AsyncIterator[tuple[Agent, str]]:
    """An agent as ``Agent.listen`` makes it, and the URL of its page. Raises as both."""
    metrics = Metrics()
    async with await Agent.listen(address, **options, observers=[metrics]) as agent:
        metrics.watch(agent.stats)
        live = LivePage(agent_source(agent), metrics.text, page.token)
        async with serving_page(live, page) as url:
            yield agent, url
