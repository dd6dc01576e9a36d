"""Retry: what an engine can do about each error, and that the errors say enough to know it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import (
    ERROR_KINDS,
    CapacityError,
    CorruptError,
    DeadlineError,
    IncompatibleError,
    InputError,
    KVFerryError,
    LocalError,
    NoPlanError,
    PeerError,
    TransportError,
)
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint
from kvferry.transfer.ledger import Ledger
from kvferry.transfer.retry import RULES, Advice, NextTry, advice

SAME, OTHER, RECOMPUTE, GIVE_UP = NextTry


@pytest.mark.parametrize(
    ("error", "with_attempts", "without"),
    [
        (TransportError("cut", phase="moving"), OTHER, RECOMPUTE),
        (TransportError("refused", phase="connect"), OTHER, RECOMPUTE),
        (DeadlineError("frozen", phase="claiming"), OTHER, RECOMPUTE),
        (DeadlineError("the ticket is no longer good", phase="claim"), OTHER, RECOMPUTE),
        (PeerError("gave up", phase="moving"), OTHER, RECOMPUTE),
        (CorruptError("digest", phase="verifying"), OTHER, RECOMPUTE),
        (IncompatibleError("weights", phase="handshake"), OTHER, RECOMPUTE),
        (IncompatibleError("logits row", phase="checking"), RECOMPUTE, RECOMPUTE),
        (LocalError("the transfer process is gone"), RECOMPUTE, RECOMPUTE),
        (DeadlineError("the transfer process says nothing"), RECOMPUTE, RECOMPUTE),
        (CapacityError("busy", phase="claiming", retry_after_seconds=0.05), SAME, RECOMPUTE),
        (CapacityError("no block", phase="checking"), SAME, GIVE_UP),
        (InputError("tokens: 0"), GIVE_UP, GIVE_UP),
        (NoPlanError("unmeasured"), GIVE_UP, GIVE_UP),
        (TransportError("cut", phase="committing", in_doubt=True), GIVE_UP, GIVE_UP),
        (LocalError("the transfer process is gone", in_doubt=True), GIVE_UP, GIVE_UP),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else None,
)
def test_the_next_try_after_an_error(error: KVFerryError, with_attempts: NextTry, without: NextTry) -> None:
    """With attempts left and without, and the same for the error that crossed a process."""
    for told in (error, KVFerryError.from_record(error.to_record())):
        assert advice(told, 1, 10.0).next_try is with_attempts
        assert advice(told, 0, 10.0).next_try is without
        assert advice(told, 1, 0.0).next_try is GIVE_UP


some_errors = st.builds(
    lambda kind, **fields: ERROR_KINDS[kind]("it failed", **fields),
    st.sampled_from(sorted(ERROR_KINDS)),
    phase=st.sampled_from(["", "handshake", "claiming", "moving", "committing"]),
    retry_after_seconds=st.sampled_from([0.0, 0.05, 2.0]),
    in_doubt=st.booleans(),
)


@given(some_errors, st.integers(-1, 3), st.floats(-1.0, 5.0))
def test_advice_can_be_followed(error: KVFerryError, attempts: int, seconds: float) -> None:
    """A retry has an attempt and the time to wait for it; nothing that is in doubt is started again."""
    advised = advice(error, attempts, seconds)
    if advised.next_try in (SAME, OTHER):
        assert attempts > 0
        assert advised.after_seconds < seconds
    else:
        assert advised == Advice(advised.next_try)
    if error.in_doubt or seconds <= 0:
        assert advised.next_try is GIVE_UP


def test_every_rule_is_reached() -> None:
    """No rule hides behind those before it: each is the first that applies to some error."""
    errors = [
        kind("it failed", phase=phase, retry_after_seconds=after, in_doubt=in_doubt)
        for kind in ERROR_KINDS.values()
        for phase in ("", "handshake", "moving")
        for after in (0.0, 1.0)
        for in_doubt in (False, True)
    ]
    first = {next(rule.errors for rule in RULES if rule.applies(error)) for error in errors}
    assert first == {rule.errors for rule in RULES}


@pytest.mark.usefixtures("nothing_left")
def test_a_busy_peer_says_when_and_the_ticket_stays_good(
    opened: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill has as many transfers moving as it may: retry the same ticket when it said; then it works."""
    layout = PoolLayout.paged(range(2), kv_heads=2, head_dim=16, dtype="float32", block_size=8, num_blocks=16)
    prefill, decode = opened(layout, "tcp://127.0.0.1:0"), opened(layout)
    ticket = prefill.offer(None, BlockTable(0, range(4)), tokens=32, request_id="r")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "num_working", property(lambda _: 64))
        with pytest.raises(CapacityError, match="no room now") as caught:
            decode.pull(ticket, BlockTable(0, range(4))).result()
    assert advice(caught.value, 1, 1.0) == Advice(SAME, caught.value.retry_after_seconds)
    assert caught.value.retry_after_seconds == 0.05
    move = decode.pull(ticket, BlockTable(0, range(4)))
    assert move.result() is None
    move.started()
