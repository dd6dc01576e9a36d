"""Bodies of /v1/completions and /v1/chat/completions -> what the engine is asked. Pure.

A field that would change the answer and that this server does not have is refused by name; so is
one that it does not know. Nothing is left out in silence.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.engines.reference import Model, chat_text, check_sampling
from kvferry.errors import InputError, KVFerryError
from kvferry.protocol.ticket import Ticket, read_ticket
from kvferry.serve.limit import asked_tokens
from kvferry.state import Limits, LogitBias, SamplingParameters

__all__ = ["Ask", "Handoff", "read_chat", "read_completion"]

CHAT_TOKENS = 256
COMPLETION_TOKENS = 16
_MAX_TOKENS = 1 << 20

Count = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both bodies have. Fields with one literal are known, and have only that meaning here."""

    model: str = ""
    max_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    n: Literal[1] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[int | str]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None


class ChatBody(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[_Turn], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: None = None
    response_format: None = None


class Handoff(msgspec.Struct, frozen=True):
    """What ``kv_transfer_params`` asks for; see docs/proxy.md.

    Args:
        kind: ``prefill``: give the request to a decode worker; ``decode``: take it from prefill;
            ``reserve``: hold blocks that prefill will push into; ``withdraw``: hold them no longer.
        ticket: prefill's offer, or decode's reservation; None where prefill is to offer.
        says: the same, read.
        may_emit: prefill samples the first token, and it counts as given to the client.
    """

    kind: Literal["prefill", "decode", "reserve", "withdraw"]
    ticket: bytes | None = None
    says: Ticket | None = None
    may_emit: bool = False


class Ask(msgspec.Struct, frozen=True):
    """One request, resolved as far as its body goes."""

    model: str
    is_chat: bool
    prompt_ids: list[int]
    sampling: SamplingParameters
    limits: Limits
    stream: bool
    include_usage: bool
    return_token_ids: bool
    handoff: Handoff | None


def read_completion(body: bytes, model: Model) -> Ask:
    """The body of /v1/completions. Raises InputError naming the field."""
    given = _decode(body, CompletionBody)
    ids = _prompt_ids(given.prompt, model)
    max_tokens = COMPLETION_TOKENS if given.max_tokens is None else given.max_tokens
    return _ask(given, ids, max_tokens, model, is_chat=False)


def read_chat(body: bytes, model: Model) -> Ask:
    """The body of /v1/chat/completions. Raises InputError naming the field."""
    given = _decode(body, ChatBody)
    turns = [
        (
            turn.role,
            turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content),
        )
        for turn in given.messages
    ]
    ids = model.tokenizer.encode(chat_text(turns))
    asked = asked_tokens(given.max_tokens, given.max_completion_tokens, is_chat=True)
    room = max(1, model.config.max_context - len(ids))
    return _ask(given, ids, min(CHAT_TOKENS, room) if asked is None else asked, model, is_chat=True)


def _prompt_ids(prompt: str | list[int | str], model: Model) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) < len(prompt):
        raise InputError("prompt: is a list, but not of token ids alone, and not of one text")
    return ids


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        field = path.rstrip("`").removeprefix("$").lstrip(".")
        raise InputError(f"{field}: {reason}" if field else reason) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"body: is not JSON: {error}") from None


def _ask(given: Any, ids: list[int], max_tokens: int, model: Model, *, is_chat: bool) -> Ask:
    config = model.config
    if not ids:
        raise InputError("prompt: it has no tokens")
    if max_tokens < 1:
        raise InputError("max_tokens: 0 is less than 1")
    if len(ids) + max_tokens > config.max_context:
        raise InputError(
            f"max_tokens: {len(ids)} prompt tokens and {max_tokens} to come do not fit the context of "
            f"{config.max_context} tokens"
        )
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise InputError(f"prompt: token ids from {min(ids)} to {max(ids)}, not below {config.vocab_size}")
    sampling = _sampling(given)
    check_sampling(sampling, config.vocab_size)
    return Ask(
        model=given.model,
        is_chat=is_chat,
        prompt_ids=ids,
        sampling=sampling,
        limits=_limits(given, max_tokens, config.vocab_size),
        stream=given.stream,
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        return_token_ids=bool(given.return_token_ids),
        handoff=None if given.kv_transfer_params is None else _handoff(given.kv_transfer_params),
    )


def _sampling(given: Any) -> SamplingParameters:
    bias = tuple(
        LogitBias(token=_token_id(token), bias=value)
        for token, value in sorted((given.logit_bias or {}).items())
    )
    top_k = given.top_k
    if top_k is not None and top_k < -1:
        raise InputError(f"top_k: {top_k} is not -1, 0 or above")
    return SamplingParameters(
        temperature=1.0 if given.temperature is None else given.temperature,
        top_k=None if top_k in (None, -1, 0) else top_k,
        top_p=1.0 if given.top_p is None else given.top_p,
        min_p=given.min_p or 0.0,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=given.seed,
    )


def _limits(given: Any, max_tokens: int, vocab_size: int) -> Limits:
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    ids = given.stop_token_ids or []
    if not all(stop):
        raise InputError("stop: an empty string would stop at once")
    if len(stop) > 64 or any(len(text) > 4096 for text in stop):
        raise InputError("stop: more than 64 strings, or one longer than 4096 characters")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(f"stop_token_ids: not all from 0 to {vocab_size - 1}")
    if given.min_tokens > max_tokens:
        raise InputError(f"min_tokens: {given.min_tokens} is more than max_tokens, {max_tokens}")
    return Limits(
        max_tokens_left=max_tokens,
        min_tokens_left=given.min_tokens,
        stop_token_ids=tuple(ids),
        stop_strings=tuple(stop),
        ignore_eos=given.ignore_eos,
    )


def _handoff(given: dict[str, Any]) -> Handoff | None:
    """Keys that are not ours are another connector's, and pass."""
    for key in ("do_remote_decode", "do_remote_prefill", "kvferry_reserve"):
        if not isinstance(given.get(key, False), bool):
            raise InputError(f"kv_transfer_params.{key}: is not true or false")
    wanted = [key for key in ("do_remote_decode", "do_remote_prefill", "kvferry_reserve") if given.get(key)]
    if (withdrawn := given.get("kvferry_withdraw")) is not None:
        if wanted:
            raise InputError(f"kv_transfer_params: kvferry_withdraw beside {wanted[0]}")
        return Handoff("withdraw", *_ticket(withdrawn, "kvferry_withdraw"))
    if not wanted:
        return None
    if len(wanted) > 1:
        raise InputError(f"kv_transfer_params: {' and '.join(wanted)} are both true")
    if wanted == ["kvferry_reserve"]:
        return Handoff("reserve")
    ticket, says = _ticket(given.get("kvferry_ticket"))
    if wanted == ["do_remote_decode"]:
        return Handoff("prefill", ticket, says, may_emit=given.get("kvferry_first_token") == "emit")
    if ticket is None:
        raise InputError("kv_transfer_params.kvferry_ticket: missing; pass on what prefill answered")
    return Handoff("decode", ticket, says)


def _ticket(text: object, key: str = "kvferry_ticket") -> tuple[bytes | None, Ticket | None]:
    if text is None:
        return None, None
    if not isinstance(text, str):
        raise InputError(f"kv_transfer_params.{key}: is not a text")
    bare = text.rstrip("=")
    try:
        padded = (bare + "=" * (-len(bare) % 4)).encode("ascii")
        ticket = base64.b64decode(padded, altchars=b"-_", validate=True)
        return ticket, read_ticket(ticket)
    except (UnicodeEncodeError, binascii.Error, KVFerryError) as error:
        raise InputError(f"kv_transfer_params.{key}: is not a ticket in base64url") from error


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InputError(f"logit_bias: {text[:40]!r} is not a token id")
    return int(text)
