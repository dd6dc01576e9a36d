"""One peer cannot take what is for all: connections, greetings, moving transfers, served copies."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from conftest import wait_until
from kvferry.errors import CapacityError, KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.transfer import Endpoint, directory
from kvferry.transfer.calls import NodeConfig
from kvferry.transport import listening, serving
from kvferry.transport.base import CancelToken
from kvferry.transport.wire import Kind
from transport_raw import (
    connection_token,
    greet,
    mark,
    new_pair,
    raw_socket,
    read_to_end,
    request,
    still_serves,
)

Opened = Callable[..., Endpoint]
LAYOUT = PoolLayout.paged(range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=64)


@pytest.fixture
def pair() -> Iterator[TransportPair]:
    pair = new_pair("tcp")
    yield pair
    pair.close()


def table(index: int) -> BlockTable:
    return BlockTable(0, np.array([index]))


def test_a_host_that_only_greets_pushes_nobody_else_out(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own oldest goes, not another host's; 127.0.0.2 is another host here."""
    monkeypatch.setattr(listening, "MAX_GREETING_PER_HOST", 3)
    host, _, port = pair.listener.address.removeprefix("tcp://").partition(":")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(raw_socket(pair.listener.address))
        flood = [
            stack.enter_context(
                socket.create_connection((host, int(port)), WAIT_SECONDS, source_address=("127.0.0.2", 0))
            )
            for _ in range(9)
        ]
        for sock in flood[:6]:
            assert read_to_end(sock) == b""
        other.sendall(greet(1))
        assert len(other.recv(25, socket.MSG_WAITALL)) == 25
        pair.loop.run(pair.next_accepted().close())
        still_serves(pair)


def test_connections_of_one_peer_are_bounded(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One more than it may have is dropped and named in the log; those that it has go on."""
    monkeypatch.setattr(directory, "MAX_CONNECTIONS_PER_PEER", 2)
    prefill = opened(LAYOUT, "tcp://127.0.0.1:0", name="prefill")
    decodes = [opened(LAYOUT, name=f"decode {number}") for number in range(3)]
    tickets = [prefill.offer(None, table(number), tokens=4, request_id=f"r{number}") for number in range(3)]
    for decode, ticket in zip(decodes[:2], tickets, strict=False):
        decode.pull(ticket, table(9)).result()
    with caplog.at_level(logging.WARNING, "kvferry"), pytest.raises(KVFerryError) as caught:
        decodes[2].pull(tickets[2], table(9), timeout_seconds=3.0).result()
    assert caught.value.next_step
    assert "2 connections here, the most that one peer may have" in caplog.text
    decodes[1].close()
    wait_until(lambda: prefill.stats().peers == 1)
    opened(LAYOUT, name="decode 3").pull(tickets[2], table(9)).result()


def test_one_peer_leaves_room_for_others_to_move(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four that may move it gets three; the fourth is told to come again, and its ticket stays good."""
    monkeypatch.setattr("kvferry.transfer.endpoint.c.NodeConfig", partial(NodeConfig, max_moving=4))
    decode = opened(LAYOUT, "tcp://127.0.0.1:0", name="decode")
    prefill = opened(LAYOUT, name="prefill")
    tickets = [decode.reserve(f"r{i}", 4, table(i)) for i in range(4)]
    pushes = [prefill.push(ticket, table(10 + i), tokens=4) for i, ticket in enumerate(tickets[:3])]
    for push in pushes:
        push.layer(0)  # granted: they move until they commit
    with pytest.raises(CapacityError, match="transfers of yours are moving") as caught:
        prefill.push(tickets[3], table(20), tokens=4).layer(0)
    assert caught.value.retry_after_seconds > 0
    move = decode.arrival(tickets[0])
    pushes[0].layer(1)
    pushes[0].commit(None)
    move.result()
    move.started()
    wait_until(lambda: decode.stats().transfers == 2)
    prefill.push(tickets[3], table(20), tokens=4).layer(0)


def test_copies_that_one_peer_has_served_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all of its connections; one more waits, and is told when it has waited too long."""
    monkeypatch.setattr(serving, "MAX_SERVED_PER_PEER", 2)
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.3)
    entered: list[CancelToken] = []
    may_go = threading.Event()

    def hold(token: CancelToken) -> None:
        entered.append(token)
        may_go.wait(WAIT_SECONDS)

    fresh = new_pair("tcp")
    fresh.listening.guard.on_enter = hold
    with contextlib.ExitStack() as stack:
        channels = []
        accepted = []
        for _ in range(3):
            control = stack.enter_context(raw_socket(fresh.listener.address))
            token = connection_token(control)
            accepted.append(fresh.next_accepted())
            channel = stack.enter_context(raw_socket(fresh.listener.address))
            channel.sendall(greet(2, token) + request())
            channels.append(channel)
            wait_until(lambda: len(entered) == min(len(channels), 2))
        answer = read_to_end(channels[2])
        assert answer[:16] == mark(Kind.ENDED, len(answer) - 16)
        assert b"2 copies of this peer are served at once" in answer
        may_go.set()
        for channel in channels[:2]:
            assert channel.recv(16) == mark(Kind.DATA, 4096)
    for connection in accepted:
        fresh.loop.run(connection.close())
    fresh.close()
