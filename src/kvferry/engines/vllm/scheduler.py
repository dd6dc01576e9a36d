"""The scheduler side: which requests are offered, which are loaded, and what the response says.

Prefill: a request that asks for it is offered by the step that computes the last of its prompt;
when it finishes, its ticket goes into the response and its blocks stay until decode has them, or
the lease ends. Decode: a request that brings a ticket waits for its KV, and starts at the
prompt's last token, which it computes itself.

It knows vLLM only by the fields that it reads of requests and steps. A request that cannot be
handed over is answered with the reason, and decode computes it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.engines.vllm.first_token import EMIT_KEY, UNKNOWN, FirstToken
from kvferry.engines.vllm.step import (
    MODEL_KEY,
    PUSH_URL_KEY,
    REFUSED_KEY,
    TICKET_KEY,
    WITHDRAW_KEY,
    Load,
    PushSave,
    Save,
    Step,
    Tickets,
    ticket_text,
    tickets_from,
)
from kvferry.errors import IncompatibleError, InputError, KVFerryError
from kvferry.protocol.ticket import Mode, Ticket, read_ticket
from kvferry.state import pack_ids

__all__ = ["TOKENS_KEY", "SchedulerSide"]

_HANDED_OVER = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
TOKENS_KEY = "kvferry_tokens"
_REFUSED_BY_SERVER = (
    "request {}: this server's answer to it was an error before the engine had it, or its client left; "
    "nothing is fetched, and prefill keeps its blocks until its caller gives the ticket up or its lease ends"
)
# vLLM has no way for a connector to refuse a request.
_ANOTHER_MODEL = (
    "request {}: it goes on after a token of another model than this server runs; it is not computed here, "
    "and stays until its caller leaves. See which of the two servers has the wrong model"
)


@dataclass
class _Prefill:
    """``tickets``: decode's reservation, where it asked for a push. ``is_emitted``: the caller would give
    the first token to its client at once."""

    request: Any
    offered: bool = False
    tickets: Tickets = ()
    is_emitted: bool = False


@dataclass(frozen=True)
class _Decode:
    tickets: Tickets
    tokens: int
    prefill_url: str = ""


class SchedulerSide:
    """One engine's bookkeeping. ``window``: tokens that sliding layers keep, 0 where there are none.

    ``fetch_tickets(request_id)`` asks the ranks, and raises KVFerryError.
    """

    def __init__(
        self,
        fetch_tickets: Callable[[str], Tickets],
        log: Callable[[str], None],
        *,
        ranks: int = 1,
        window: int = 0,
        prefill_urls: tuple[str, ...] = (),
        first_token: FirstToken = UNKNOWN,
    ) -> None:
        #: A digest of the model that the workers run, once they have said it.
        self.model = ""
        self._first_token = first_token
        self._prefill_urls = prefill_urls
        self._ranks = ranks
        self._window = window
        self._fetch_tickets = fetch_tickets
        self._log = log
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, _Decode] = {}
        self._refused: dict[str, str] = {}
        self._held_tokens: dict[str, int] = {}
        self._in_use: dict[str, Tickets] = {}
        self._misfits: set[str] = set()
        self._step = Step()

    def added(self, request: Any) -> None:
        """A request has arrived; what its parameters ask for is checked now, once."""
        params = request.kv_transfer_params or {}
        request_id = request.request_id
        if getattr(request, "abort_immediately", False):
            # vLLM's stand-in for a request that its server has refused: its prompt is a made-up token.
            if TICKET_KEY in params:
                self._log(_REFUSED_BY_SERVER.format(request_id))
            return
        if params.get(MODEL_KEY, "?") not in ("?", self.model):
            self._misfits.add(request_id)
            self._log(_ANOTHER_MODEL.format(request_id))
            return
        try:
            if WITHDRAW_KEY in params:
                self._step.given_up.append(tickets_from(params, WITHDRAW_KEY))
            elif params.get("do_remote_decode"):
                self._prefills[request_id] = self._prefill(request, params)
            elif params.get("do_remote_prefill") and PUSH_URL_KEY in params:
                self._accept_push(request, params[PUSH_URL_KEY])
            elif params.get("do_remote_prefill") and TICKET_KEY in params:
                self._accept(request, tickets_from(params))
        except KVFerryError as error:
            if params.get("do_remote_decode"):
                self._refused[request_id] = error.message
            else:
                self._log(f"request {request_id} is computed here alone: {error}")

    def _prefill(self, request: Any, params: dict[str, Any]) -> _Prefill:
        _check_request(request)
        is_emitted = params.get(EMIT_KEY) == "emit"
        if TICKET_KEY not in params:
            return _Prefill(request, is_emitted=is_emitted)
        tickets = tickets_from(params)
        opened = self._opened(tickets, Mode.PUSH)
        if opened.tokens != request.num_prompt_tokens - 1:
            raise InputError(
                f"{TICKET_KEY}: decode reserved {opened.tokens} tokens, the prompt has"
                f" {request.num_prompt_tokens - 1} before its last"
            )
        return _Prefill(request, tickets=tickets, is_emitted=is_emitted)

    def _opened(self, tickets: Tickets, mode: Mode) -> Ticket:
        if len(tickets) != self._ranks:
            raise IncompatibleError(f"ranks: the ticket is of {len(tickets)}, there are {self._ranks} here")
        opened = read_ticket(tickets[0])
        if opened.mode is not mode:
            raise InputError(f"{TICKET_KEY}: it is for a {opened.mode}, not for a {mode}")
        return opened

    def _accept_push(self, request: Any, url: Any) -> None:
        _check_request(request)
        if url not in self._prefill_urls:
            raise InputError(f"{PUSH_URL_KEY}: {url!r} is not one of the option prefill_urls")
        if self._ranks > 1:
            raise InputError(f"{PUSH_URL_KEY}: pushes are for one rank, there are {self._ranks} here")
        self._decodes[request.request_id] = _Decode((), request.num_prompt_tokens - 1, url)

    def _accept(self, request: Any, tickets: Tickets) -> None:
        opened = self._opened(tickets, Mode.PULL)
        if tickets in self._in_use.values():
            raise InputError(f"{TICKET_KEY}: another request here has it (n > 1?), and it is good once")
        _check_request(request)
        self._decodes[request.request_id] = _Decode(tickets, opened.tokens)
        self._in_use[request.request_id] = tickets

    def loadable_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens that prefill has beyond the ``local_tokens`` of the prefix cache; may be asked again.

        None: not to be scheduled.
        """
        if request.request_id in self._misfits:
            return None
        decode = self._decodes.get(request.request_id)
        if decode is None:
            return 0
        prompt_tokens: int = request.num_prompt_tokens
        if self._window and local_tokens > max(0, decode.tokens - self._window):
            return 0  # the window's tail moves whole, into blocks that others read: compute the few left
        self._held_tokens[request.request_id] = local_tokens
        return max(0, min(decode.tokens, prompt_tokens - 1) - local_tokens)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], load_tokens: int) -> None:
        """Blocks exist now: fetch into them, or tell prefill that nothing is needed."""
        decode = self._decodes.pop(request.request_id, None)
        held = self._held_tokens.pop(request.request_id, 0)
        if decode is None:
            return
        if load_tokens <= 0:
            self._give_back(request, decode)
            return
        self._step.loads.append(
            Load(
                request.request_id,
                decode.tickets,
                pack_ids(request.prompt_token_ids),
                held,
                tuple(tuple(ids) for ids in blocks),
                decode.prefill_url,
                getattr(request, "cache_salt", None) or "",
            )
        )

    def _give_back(self, request: Any, decode: _Decode) -> None:
        if not decode.tickets:
            return  # nothing was reserved, and prefill was not asked
        ids = pack_ids(request.prompt_token_ids)
        self._step.unwanted.append(Load(request.request_id, decode.tickets, ids, decode.tokens, ()))

    def end_step(self, scheduler_output: Any) -> Step:
        """The step's message to the workers; the next one starts empty."""
        for request_id, prefill in self._prefills.items():
            request = prefill.request
            if prefill.offered and request.status.name == "PREEMPTED":
                prefill.offered = False
                self._step.preempted.append(request_id)
            scheduled = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            computed = request.num_computed_tokens + scheduled
            if scheduled and not prefill.offered and computed >= request.num_prompt_tokens:
                prefill.offered = True
                found = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                ids, blocks = pack_ids(request.prompt_token_ids), tuple(tuple(ids) for ids in found)
                if prefill.tickets:
                    self._step.pushes.append(
                        PushSave(request_id, prefill.tickets, ids, blocks, request.num_computed_tokens)
                    )
                else:
                    self._step.saves.append(Save(request_id, ids, blocks))
        step, self._step = self._step, Step()
        return step

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether the workers hold the request's blocks, and what the response says about it."""
        request_id = request.request_id
        self._held_tokens.pop(request_id, None)
        self._in_use.pop(request_id, None)
        self._misfits.discard(request_id)
        if (decode := self._decodes.pop(request_id, None)) is not None:
            self._give_back(request, decode)  # ended before it got blocks
        if (reason := self._refused.pop(request_id, None)) is not None:
            return False, _nothing_to_fetch(reason)
        if (prefill := self._prefills.pop(request_id, None)) is not None:
            return self._hand_over(request_id, prefill)
        is_asked = MODEL_KEY in (request.kv_transfer_params or {})
        return False, {MODEL_KEY: self.model} if is_asked else None

    def _hand_over(self, request_id: str, prefill: _Prefill) -> tuple[bool, dict[str, Any] | None]:
        status = prefill.request.status.name
        if not prefill.offered:
            return False, _nothing_to_fetch(f"it ended as {status} before its prompt was done")
        if status not in _HANDED_OVER:
            self._step.withdrawn.append(request_id)
            return True, None
        if prefill.is_emitted and not prefill.tickets and self._first_token.is_whole(prefill.request):
            self._step.withdrawn.append(request_id)
            return True, _nothing_to_fetch("it ended with its first token")
        try:
            tickets = prefill.tickets or self._fetch_tickets(request_id)
        except KVFerryError as error:
            self._log(f"request {request_id} is not handed over: {error}")
            self._step.withdrawn.append(request_id)
            return True, _nothing_to_fetch(str(error))
        told = {}
        if prefill.is_emitted:
            told = self._first_token.told(prefill.request) | {MODEL_KEY: self.model}
        return True, told | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            TICKET_KEY: ticket_text(tickets),
            TOKENS_KEY: prefill.request.num_prompt_tokens - 1,
        }


def _nothing_to_fetch(reason: str) -> dict[str, Any]:
    return {"do_remote_prefill": False, "do_remote_decode": False, REFUSED_KEY: reason}


def _check_request(request: Any) -> None:
    """Raise InputError for what decides a request's KV besides its ids, which decode could not compare."""
    if reason := _why_not(request):
        raise InputError(reason)


def _why_not(request: Any) -> str:
    if getattr(request, "lora_request", None) is not None:
        return f"it uses the LoRA adapter {request.lora_request.lora_name!r}"
    if getattr(request, "mm_features", None):
        return "it has multimodal input"
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "its prompt is given as embeddings"
    if getattr(request, "resumable", False):
        return "its input is a stream"
    if request.num_prompt_tokens < 2:
        return "its prompt is one token, which decode computes anyway"
    return ""
