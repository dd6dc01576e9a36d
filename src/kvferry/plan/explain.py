"""Every equation of an answer with its numbers filled in, so that a reader can do the sum again."""

from __future__ import annotations

import math

import msgspec

from kvferry.errors import NoPlanError
from kvferry.link import Line, LinkFit
from kvferry.plan.check import Answer, last_chunk
from kvferry.plan.compute import ComputeProfile, PrefillLaw
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise
from kvferry.plan.queue import Service
from kvferry.plan.waits import has_arrivals, link_service, prefill_service

__all__ = ["Equation", "explain_check", "number"]


class Equation(msgspec.Struct, frozen=True):
    """One step of an answer.

    Args:
        name: what is computed.
        formula: in words and letters.
        filled: the same with its numbers; arithmetic that can be evaluated as it stands.
        value: the result.
        unit: of the result.
    """

    name: str
    formula: str
    filled: str
    value: float
    unit: str


def number(value: float) -> str:
    """Seven significant digits, so that the sum comes out to five."""
    return f"{value:.7g}" if math.isfinite(value) else "math.inf"


def explain_check(promise: Promise, found: Answer) -> tuple[Equation, ...]:
    """The equations of a check, in the order in which they are used."""
    return (
        *_payload(promise, found),
        *_prefill(promise, found),
        *_prefill_queue(promise, found),
        _transfer(promise, found),
        *_link_queue(promise, found),
        _exposed(promise, found),
        *_step(promise, found),
        *_ttft(promise, found),
    )


def _payload(promise: Promise, found: Answer) -> list[Equation]:
    size = promise.pool.size(promise.shape, promise.prompt_tokens, promise.cached_tokens)
    groups = " + ".join(str(group.wire_bytes) for group in size.groups)
    pieces = " + ".join(str(group.descriptors) for group in size.groups)
    wire = Equation(
        "bytes on the wire",
        "V = sum over layer groups of the blocks that decode lacks + the state record",
        f"{groups} + {size.state_bytes}",
        size.wire_bytes,
        "bytes",
    )
    return [
        wire,
        Equation("pieces", "n = sum over layer groups", pieces, found.payload.descriptors, "pieces"),
    ]


def _prefill(promise: Promise, found: Answer) -> list[Equation]:
    seconds = found.split.prefill_seconds
    given = promise.prefill
    if given is None:
        return []
    if isinstance(given, GivenPrefill):
        return [Equation("prefill", "as given", number(seconds), seconds, "s")]
    assert isinstance(given, ComputeProfile)
    cached = min(promise.cached_tokens, promise.prompt_tokens - 1)
    law = given.prefill
    if not isinstance(law, PrefillLaw):
        return [Equation("prefill", f"read from the table of {given.name}", number(seconds), seconds, "s")]
    tokens = promise.prompt_tokens
    filled = (
        f"{number(law.a_seconds)} + {number(law.b_seconds_per_token)} * ({tokens} - {cached}) + "
        f"{number(law.c_seconds_per_square_token)} * ({tokens}**2 - {cached}**2)"
    )
    formula = "T_prefill = a + b * (P - q) + c * (P^2 - q^2)"
    return [Equation("prefill", formula, filled, seconds, "s")]


def _line_for(fit: LinkFit, nbytes: int) -> Line:
    return fit.knee if fit.knee is not None and nbytes >= fit.knee.from_nbytes else fit


def _transfer(promise: Promise, found: Answer) -> Equation:
    way, time = promise.way, found.transfer
    try:
        fit = way.fit()
    except NoPlanError:
        fit = way.link.fits[0].fit
    nbytes = -(-found.payload.nbytes // way.links)
    pieces = max(1, -(-found.payload.descriptors // way.links))
    line = _line_for(fit, nbytes)
    terms = f"{number(line.a_seconds or 0.0)} + {number(line.o_seconds or 0.0)} * {pieces}"
    if line.bytes_per_second is not None:
        terms += f" + {nbytes} / {number(line.bytes_per_second)}"
    formula = "T_x = a + o * n + V / B"
    typical = time.seconds - time.spread_seconds
    if time.unknown is None:
        formula = f"T_x = (a + o * n + V / B) * spread at p{100 * way.quantile:g}"
        terms = f"({terms}) * {number(time.seconds / typical)}"
    return Equation("transfer", formula, terms, time.seconds, "s")


def _link_queue(promise: Promise, found: Answer) -> list[Equation]:
    """The wait for the link: its load is the mean handoff times the rate, the quantile is the wait's."""
    rate, q = promise.requests_per_second, promise.way.quantile
    if not rate or promise.first_token is FirstToken.PREFILL:
        return []
    value = found.split.link_queue_seconds
    if has_arrivals(promise):
        formula = f"p{100 * q:g} of the waits behind the trace's own arrivals, handoffs drawn from the spread"
        return [Equation("link queue", formula, number(value), value, "s")]
    return _queue("link", link_service(promise), rate, q, value)


def _prefill_queue(promise: Promise, found: Answer) -> list[Equation]:
    rate, q, value = promise.requests_per_second, promise.way.quantile, found.split.queue_seconds
    if promise.queue_seconds is not None:
        return [Equation("prefill queue", "as given", number(value), value, "s")]
    if not rate or promise.prefill is None:
        return []
    if has_arrivals(promise):
        formula = f"p{100 * q:g} of the waits behind the trace's own arrivals"
        return [Equation("prefill queue", formula, number(value), value, "s")]
    return _queue("prefill", prefill_service(promise), rate, q, value)


def _queue(name: str, service: Service, rate: float, q: float, value: float) -> list[Equation]:
    mean, square, load = service.mean_seconds, service.mean_square, service.load(rate)
    busy = Equation(
        f"{name} load", "rho = rate * E[S]", f"{number(rate)} * {number(mean)}", load, "of its time"
    )
    formula = "W(q) = rate * E[S^2] / (2 (1 - rho) rho) * ln(rho / (1 - q)), E[S^2] = mean^2 + deviation^2"
    if load <= 1 - q:
        formula, filled = "0: no more than 1 - q of the handoffs wait at all", "0"
    elif load >= 1:
        formula, filled = "without end: rho is 1 or more", "math.inf"
    else:
        filled = (
            f"{number(rate)} * {number(square)} / (2 * (1 - {load!r}) * {load!r}) "
            f"* math.log({load!r} / (1 - {number(q)}))"
        )
    return [busy, Equation(f"{name} queue", formula, filled, value, "s")]


def _exposed(promise: Promise, found: Answer) -> Equation:
    transfer, prefill, groups = found.transfer.seconds, found.split.prefill_seconds, promise.groups
    sync = promise.sync_seconds
    value = found.split.exposed_transfer_seconds
    if promise.first_token is FirstToken.PREFILL:
        return Equation("exposed transfer", "the first token does not wait for it", "0", 0.0, "s")
    if promise.chunk_tokens is not None:
        last, left = last_chunk(promise).seconds, promise.left_after_first_chunk_seconds()
        return Equation(
            "exposed transfer",
            "max(t, T_x - r) + sync, t the last chunk's handoff, r the prefill left after the first",
            f"max({number(min(last, transfer))}, {number(transfer)} - {number(left)}) + {number(sync)}",
            value,
            "s",
        )
    each, compute = number(transfer / groups), number(prefill / groups)
    return Equation(
        "exposed transfer",
        "t_x + (g - 1) * max(0, t_x - t_p) + sync, with t_x = T_x / g and t_p = T_prefill / g",
        f"{each} + ({groups} - 1) * max(0, {each} - {compute}) + {number(sync)}",
        value,
        "s",
    )


def _step(promise: Promise, found: Answer) -> list[Equation]:
    """The first decode step, where the profile's law gives it."""
    given, batch = promise.prefill, promise.decode_batch
    if promise.first_token is FirstToken.PREFILL or promise.first_step_seconds() is None:
        return []
    value = found.split.first_decode_step_seconds
    if promise.decode_step_seconds is not None or batch is None or not isinstance(given, ComputeProfile):
        return [Equation("first decode step", "as given", number(value), value, "s")]
    law = given.decode_law(batch)
    filled = (
        f"{number(law.a_seconds)} + {number(law.b_seconds_per_context_token)} * "
        f"{batch * promise.prompt_tokens} + {number(law.c_seconds_per_request)} * {batch}"
    )
    return [Equation("first decode step", "tau = a + b * context + c * batch", filled, value, "s")]


def _ttft(promise: Promise, found: Answer) -> list[Equation]:
    if found.ttft_seconds is None:
        return []
    split = found.split
    parts = [split.queue_seconds, split.prefill_seconds]
    formula = "TTFT = prefill queue + prefill"
    if promise.first_token is FirstToken.DECODE:
        parts += [split.link_queue_seconds, split.exposed_transfer_seconds, split.first_decode_step_seconds]
        formula += " + link queue + exposed transfer + first decode step"
    filled = " + ".join(number(part) for part in parts)
    return [Equation("TTFT", formula, filled, found.ttft_seconds, "s")]
