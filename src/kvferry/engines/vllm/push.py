"""Pushes: prefill's side of one, beside the forward; and how decode asks a prefill server for it.

Decode reserves its blocks and asks prefill's HTTP interface itself, with the reservation's ticket
in the request. So prefill has the ticket before it computes, and each layer leaves when it is done.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.vllm.identity import prompt_state
from kvferry.engines.vllm.step import REFUSED_KEY, TICKET_KEY, PushSave, ticket_text
from kvferry.errors import DeadlineError, KVFerryError, LocalError, PeerError, TransportError
from kvferry.layout import BlockTable
from kvferry.protocol.ticket import read_ticket
from kvferry.state import Requirements, unpack_ids
from kvferry.transfer import Endpoint, Push, TransferRecord

__all__ = ["Pusher", "ask_prefill"]

_MAX_ANSWER_NBYTES = 16 << 20
# By no proxy that the environment names: the allowed URLs are servers beside this one.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Pusher:
    """One prompt on its way, in order, in a thread of its own: the forward never waits for it.

    ``ended`` is called once, with the outcome or the error, when the blocks are vLLM's again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        save: PushSave,
        ticket: bytes,
        tables: tuple[BlockTable, ...],
        *,
        needs: Requirements,
        timeout_seconds: float,
        transport: str,
        ended: Callable[[TransferRecord | KVFerryError], None],
    ) -> None:
        self._endpoint, self._save, self._ticket, self._tables = endpoint, save, ticket, tables
        self._needs, self._timeout_seconds, self._transport = needs, timeout_seconds, transport
        self._ended = ended
        self._tokens = len(save.ids) // 4 - 1
        self._push: Push | None = None
        self._failed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-push")
        self._do(self._begin)

    def layer_done(self, layer: int) -> None:
        """The forward has written what this step adds to a layer."""
        self._do(lambda: self._layers(layer, layer + 1, self._save.computed_tokens, self._tokens))

    def finish(self) -> None:
        """The forward is over: commit, with the state."""
        self._do(self._commit)
        self._thread.shutdown(wait=False)

    def _do(self, action: Callable[[], None]) -> None:
        self._thread.submit(self._guarded, action)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._failed.is_set():
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it was, the blocks have to come back
            self._failed.set()
            failure = error if isinstance(error, KVFerryError) else LocalError(f"kvferry failed: {error!r}")
            if self._push is None:
                self._ended(failure)
            else:  # its outcome says when nothing reads the blocks any more
                self._endpoint.cancel(self._ticket, failure)

    def _begin(self) -> None:
        self._push = self._endpoint.push(
            self._ticket,
            self._tables,
            tokens=self._tokens,
            prompt_ids=unpack_ids(self._save.ids).tolist(),
            timeout_seconds=self._timeout_seconds,
            transport=self._transport,
        )
        self._endpoint.outcome(self._ticket).add_done_callback(self._outcome)
        layers = self._endpoint.pool.layout.layers
        self._layers(layers[0], layers[-1] + 1, 0, min(self._save.computed_tokens, self._tokens))

    def _layers(self, first: int, stop: int, first_token: int, stop_token: int) -> None:
        assert self._push is not None
        if first_token < stop_token:
            self._push.layers(first, stop, first_token=first_token, stop_token=stop_token)

    def _commit(self) -> None:
        assert self._push is not None
        request_id = read_ticket(self._ticket).request_id
        self._push.commit(prompt_state(request_id, self._save.ids, self._needs, self._tables))

    def _outcome(self, done: Future[TransferRecord]) -> None:
        error = done.exception()
        assert error is None or isinstance(error, KVFerryError)
        self._ended(done.result() if error is None else error)


def ask_prefill(
    url: str, ids: NDArray[np.int32], ticket: bytes, timeout_seconds: float, *, cache_salt: str = ""
) -> None:
    """Have a prefill server compute a prompt and push it into a reservation; returns when it has answered.

    Raises PeerError when it refuses, TransportError or DeadlineError when it does not answer.
    """
    params = {"do_remote_decode": True, "do_remote_prefill": False, TICKET_KEY: ticket_text((ticket,))}
    body = {
        "model": _model(url, timeout_seconds),
        "prompt": ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": params,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    try:
        answer = _request(f"{url}/v1/completions", json.dumps(body).encode(), timeout_seconds)
    except KVFerryError:
        _model.cache_clear()  # it may serve another model since then
        raise
    back = answer.get("kv_transfer_params") or {}
    if not back.get("do_remote_prefill"):
        reason = str(back.get(REFUSED_KEY, "it does not say why"))[:1000]
        raise PeerError(f"prefill does not push: {reason}", peer=url, phase="prefill")


@lru_cache(maxsize=256)
def _model(url: str, timeout_seconds: float) -> str:
    """The name under which a server serves its model; the first, if it has several."""
    try:
        return str(_request(f"{url}/v1/models", None, timeout_seconds)["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise PeerError(f"prefill names no model: {error!r}", peer=url, phase="prefill") from error


def _request(url: str, body: bytes | None, timeout_seconds: float) -> dict[str, Any]:
    # The URL is one of those that the operator has allowed (option prefill_urls).
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
    failure: KVFerryError
    try:
        deadline = time.monotonic() + timeout_seconds
        with _OPENER.open(request, timeout=timeout_seconds) as response:
            return dict(json.loads(_read(response, deadline)))
    except urllib.error.HTTPError as error:
        failure = PeerError(f"prefill answered {error.code}: {_beginning(error)}")
    except TimeoutError:
        failure = DeadlineError(f"prefill gave no answer in {timeout_seconds} s")
    except OSError as error:
        failure = TransportError(f"prefill is not reached: {error}")
    except http.client.HTTPException as error:
        failure = PeerError(f"prefill's answer is no HTTP: {error!r}")
    except (ValueError, TypeError) as error:
        failure = PeerError(f"prefill's answer is not understood: {error!r}")
    raise failure.with_context(peer=url, phase="prefill")


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. Raises TimeoutError where it comes byte by byte."""
    body = bytearray()
    while part := response.read1(1 << 16):
        body += part
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(body) > _MAX_ANSWER_NBYTES:
            raise ValueError(f"more than {_MAX_ANSWER_NBYTES} bytes")
    return bytes(body)


def _beginning(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"(and no more: {broken!r})"
