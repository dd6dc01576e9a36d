"""What an engine may get wrong in a call: it is told so, the node lives on, and no byte has moved."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import fill_random, unique_address, wait_until
from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, client
from test_transfer import TOKENS, is_idle, layout, live, move, table

Opened = Callable[..., Endpoint]
Wrong = tuple[str, str, dict[str, Any]]

pytestmark = pytest.mark.usefixtures("nothing_left")

SRC, DST = table(8, 2), table(8, 3)


def _offer(**wrong: Any) -> Wrong:
    right = {"state": None, "tables": SRC, "tokens": TOKENS, "request_id": "a"}
    return "prefill", "offer", right | wrong


def _pull(**wrong: Any) -> Wrong:
    return "decode", "pull", {"tables": DST} | wrong


def _renew(lease_seconds: Any) -> Wrong:
    return "prefill", "renew", {"lease_seconds": lease_seconds}


WRONG = [
    _offer(tokens=37.5),
    _offer(tokens="37"),
    _offer(tokens=-1),
    _offer(tokens=2**70),
    _offer(request_id=7),
    _offer(request_id="\ud800"),
    _offer(lease_seconds="5"),
    _pull(transport=3),
    _pull(timeout_seconds=math.nan),
    _pull(have=5),
    _pull(ticket="ticket"),
    _renew(math.nan),
    _renew(-5),
    _renew(1e9),
    ("decode", "reserve", {"request_id": "a", "tokens": 3.5, "tables": DST}),
    ("prefill", "outcome", {"ticket": 5}),
]


@pytest.mark.parametrize("process", [False, True])
def test_a_wrong_argument_is_told_and_changes_nothing(opened: Opened, process: bool) -> None:
    """InputError at the call; the offer and the reservation made before go on as if it had not been."""
    prefill = opened(layout(8), unique_address("shm"), process=process)
    decode = opened(layout(8), unique_address("shm"), process=process)
    fill_random(prefill.pool, 1)
    offer = prefill.offer(None, SRC, tokens=TOKENS, request_id="r")
    held = decode.reserve("s", TOKENS, table(8, 4))
    for side, method, wrong in WRONG:
        arguments = {"ticket": offer} | wrong if method in ("pull", "renew") else wrong
        try:
            getattr(prefill if side == "prefill" else decode, method)(**arguments)
        except InputError:
            continue
        pytest.fail(f"{side}.{method} took {wrong}")
    with pytest.raises(InputError):
        prefill.push(held, SRC, tokens=[37])  # type: ignore[arg-type]
    arrived = decode.pull(offer, DST)
    arrived.result()
    arrived.started()
    assert live(decode, DST) == live(prefill, SRC)
    decode.withdraw(held)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_layers_and_tokens_out_of_range(opened: Opened, scheme: str) -> None:
    """Negative ones are refused at the call, empty ranges move nothing, and what is beyond does not exist."""
    prefill, decode = (opened(layout(8), unique_address(scheme)) for _ in range(2))
    fill_random(prefill.pool, 1)
    ticket = decode.reserve("r", TOKENS, DST)
    arrived = decode.arrival(ticket)
    push = prefill.push(ticket, SRC, tokens=TOKENS)
    for wrong in ((-1, 3), (0, -3), (0, 2**40), (0.0, 3)):
        with pytest.raises(InputError):
            push.layers(*wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        push.layers(0, 3, first_token=-1)
    push.layers(2, 2)
    push.layers(0, 2**31 - 1)  # as many as there are, and no time for the rest
    push.commit(None)
    assert arrived.result() is None
    arrived.started()
    assert live(decode, DST) == live(prefill, SRC)
    assert arrived.record.nbytes == len(live(decode, DST))


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_an_empty_range_of_layers_is_not_all(opened: Opened, scheme: str) -> None:
    """Only empty parts were given: decode misses the rest and refuses."""
    prefill, decode = (opened(layout(8), unique_address(scheme)) for _ in range(2))
    ticket = decode.reserve("r", TOKENS, DST)
    arrived = decode.arrival(ticket)
    push = prefill.push(ticket, SRC, tokens=TOKENS)
    push.layers(0, 0)
    push.commit(None)
    with pytest.raises(KVFerryError):
        arrived.result()


@pytest.mark.slow
def test_a_frozen_process_that_reads_no_calls(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is full: the call that finds it so ends with the error, and closing does too.

    It says that what the process held is free only when the process, which is slow to die, is gone.
    """
    monkeypatch.setattr(client, "_SEND_SECONDS", 1)
    kill = subprocess.Popen.kill
    monkeypatch.setattr(
        subprocess.Popen, "kill", lambda process: threading.Timer(0.3, kill, (process,)).start()
    )
    endpoint = opened(PoolLayout.paged(range(1), kv_heads=1, head_dim=16, dtype="float32", block_size=1,
                                       num_blocks=1 << 17), unique_address("shm"), process=True)  # fmt: skip
    pid = endpoint.stats().pid
    blocks = BlockTable(0, np.arange(1 << 17))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LocalError, match=r"gone \(status -9\)"):  # and not only told to go
        endpoint.reserve("r", 1 << 17, blocks)
    with pytest.raises(LocalError):
        endpoint.stats()
    endpoint.close()


def test_after_arguments_were_refused_a_move_still_works(opened: Opened) -> None:
    """The same node, after every kind of refusal at once."""
    prefill, decode = (opened(layout(8), unique_address("tcp")) for _ in range(2))
    for tokens in (None, "x", -1, 1.5, 2**40):
        with pytest.raises(InputError):
            prefill.offer(None, SRC, tokens=tokens, request_id="r")  # type: ignore[arg-type]
    move(prefill, decode, SRC, DST, Mode.PUSH)
