"""Workers that come and go: files and names are looked at again while the proxy runs."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvferry.errors import KVFerryError
from kvferry.link import LinkFile
from kvferry.proxy.options import ProxyOptions, check_options, find_places
from kvferry.proxy.pays import Costs
from kvferry.proxy.state import ProxyState
from kvferry.transport.peers import LOOK_SECONDS

__all__ = ["watch_workers"]

# Of a name server; a proxy that is told to end waits for a look that is under way.
_PATIENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


async def watch_workers(state: ProxyState, links: LinkFile | None) -> None:
    """Until it is cancelled. A list that cannot be read, or of which no proxy can be made, changes nothing.

    It is told once, on the log and in /health, and the workers stay those of the last good one.
    """
    while state.options.prefill_entries or state.options.decode_entries:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            found = await asyncio.to_thread(_look, state.options)
            if (found.prefill, found.decode) != (state.options.prefill, state.options.decode):
                state.replace(found, Costs(found, links))
                _log.warning("workers: %d prefill, %d decode now", len(found.prefill), len(found.decode))
        except KVFerryError as error:
            if str(error) != state.problem:
                _log.warning("workers: as before, because of %s", error)
            state.problem = str(error)
        else:
            state.problem = ""


def _look(options: ProxyOptions) -> ProxyOptions:
    fields = {}
    for field in ("prefill", "decode"):
        entries = getattr(options, f"{field}_entries")
        if entries:
            fields[field] = find_places(entries, field, _PATIENCE_SECONDS)
    return check_options(msgspec.structs.replace(options, **fields))
