"""What a user may set in ``kv_connector_extra_config``: one record, checked when vLLM starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.errors import InputError

__all__ = ["Options", "read_options"]

_Seconds = Annotated[float, Meta(gt=0, le=3600)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See docs/vllm.md for each.

    ``listen``: addresses of this worker's endpoint, best first; empty for shared memory under a
    name of its own. A tcp port other than 0 is the first rank's; rank r listens at port + r.
    ``peers``: addresses of workers that have to fit; compared at start, before any request.
    ``same_model``: every decode server that gets this server's tickets runs the same model, so the token
    that prefill sampled may be given out before decode has looked. ``peers`` say so too.
    ``transport``: scheme that decode claims by; empty for the first of prefill's addresses.
    ``prefill_urls``: base URLs of prefill servers that decode may ask to push; a request names one.
    ``identity``: certificate and key of this worker (``kvferry certs``), for tcp off loopback.
    ``lost_seconds``: silence after which a peer counts as gone. A busy Python thread in vLLM's
    worker holds up the endpoint's, so it is longer than an endpoint's own default.
    """

    listen: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    same_model: bool = False
    transport: str = ""
    prefill_urls: tuple[str, ...] = ()
    identity: str = ""
    integrity: bool = True
    lost_seconds: Annotated[float, Meta(ge=1, le=600)] = 5.0
    lease_seconds: _Seconds = 30.0
    pull_timeout_seconds: _Seconds = 10.0
    push_timeout_seconds: _Seconds = 60.0
    ticket_timeout_seconds: _Seconds = 5.0
    max_pulls: Annotated[int, Meta(ge=1, le=256)] = 32
    copy_threads: Annotated[int, Meta(ge=1, le=64)] = 2


def read_options(extra_config: Mapping[str, Any]) -> Options:
    """The options out of vLLM's configuration. Raises InputError naming the field."""
    try:
        return msgspec.convert(dict(extra_config), Options, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"kv_connector_extra_config: {error}") from error
