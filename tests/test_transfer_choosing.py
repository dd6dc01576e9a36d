"""transport="auto": the measured one first, then the order; what works is taken, and the record says why."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from conftest import fill_random, unique_address
from device_kit import FakeDevice
from kvferry.errors import TransportError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.protocol.ticket import read_ticket
from kvferry.transfer import Endpoint, Pool
from kvferry.transfer.choosing import DESCRIPTORS, NBYTES, measured_seconds, rank
from kvferry.transport import shm_offer
from link_kit import line, links, profile, sweep

pytestmark = pytest.mark.usefixtures("nothing_left")

Opened = Callable[..., Endpoint]
LAYOUT = PoolLayout.paged(range(2), kv_heads=1, head_dim=8, dtype="float32", block_size=8, num_blocks=16)
ADDRESSES = ("tcp://127.0.0.1:1", "odd://x", "mooncake://127.0.0.1:2", "shm://x", "nixl://127.0.0.1:3")


def test_the_order_of_what_was_not_measured() -> None:
    """Fewer copies first; a transport that the order does not name is last; what was measured is first."""
    assert [each.scheme for each in rank(ADDRESSES, {})] == ["shm", "nixl", "mooncake", "tcp", "odd"]
    ranked = rank(ADDRESSES, {"tcp": 0.02, "odd": 0.01})
    assert [each.scheme for each in ranked] == ["odd", "tcp", "shm", "nixl", "mooncake"]
    assert "measured" in ranked[0].why
    assert "not measured" in ranked[2].why


def test_what_a_link_file_says_of_a_peer() -> None:
    """By peer and transport, the slower direction; other pairs of the file are left out."""
    fast, slow = (sweep(line(1e-4, 1e-7, rate)) for rate in (4e9, 1e9))
    file = links(
        profile(fast, from_node="a", to_node="b", transport="tcp"),
        profile(slow, from_node="b", to_node="a", transport="tcp"),
        profile(fast, from_node="b", to_node="a", transport="shm"),
        profile(fast, from_node="b", to_node="c", transport="tcp"),
    )
    found = measured_seconds(file, "a")
    assert set(found) == {"b"}
    assert found["b"]["tcp"] == pytest.approx(1e-4 + DESCRIPTORS * 1e-7 + NBYTES / 1e9, rel=0.05)
    assert found["b"]["shm"] < found["b"]["tcp"]


@pytest.mark.parametrize("measured", [False, True])
def test_the_best_transport_is_taken_and_said(opened: Opened, measured: bool) -> None:
    """Unmeasured, shm on one host; tcp where it was measured and shm was not."""
    file = links(
        profile(sweep(line(1e-4, 1e-7, 1e9)), from_node="prefill", to_node="decode", transport="tcp")
    )
    prefill = opened(LAYOUT, ("tcp://127.0.0.1:0", unique_address("shm")), name="prefill")
    decode = opened(LAYOUT, name="decode", links=file if measured else None)
    fill_random(prefill.pool, 1)
    ticket = prefill.offer(None, BlockTable(0, [1]), tokens=8, request_id="r")
    move = decode.pull(ticket, BlockTable(0, [2]), transport="auto")
    move.result()
    move.started()
    assert move.record.transport == ("tcp" if measured else "shm")
    assert move.record.chosen.startswith("tcp, measured" if measured else "shm, not measured")


def test_a_transport_that_does_not_work_is_passed_over_and_named(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is taken; where none works the error has every reason."""
    prefill = opened(LAYOUT, "tcp://127.0.0.1:0", name="prefill")
    decode = opened(LAYOUT, name="decode")
    node_addresses = (f"shm://gone-{os.getpid()}", *prefill.addresses)
    from kvferry.transfer import directory

    monkeypatch.setattr(directory.Directory, "addresses", property(lambda _: node_addresses))
    ticket = prefill.offer(None, BlockTable(0, [1]), tokens=8, request_id="r")
    assert read_ticket(ticket).addresses == node_addresses
    move = decode.pull(ticket, BlockTable(0, [2]), transport="auto")
    move.result()
    move.started()
    assert move.record.transport == "tcp"
    assert "shm: cannot connect" in move.record.chosen
    assert [why[:19] for why in move.record.passed_over] == ["shm: cannot connect"]
    node_addresses = node_addresses[:1]
    with pytest.raises(TransportError, match=r"no transport works with prefill: shm: cannot connect"):
        decode.pull(
            prefill.offer(None, BlockTable(0, [3]), tokens=8, request_id="q"),
            BlockTable(0, [4]),
            transport="auto",
        ).result()


def test_another_users_process_is_reached_by_tcp(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users on one host: shm is for one of them, and auto takes the next."""
    prefill = opened(LAYOUT, ("tcp://127.0.0.1:0", unique_address("shm")), name="prefill")
    decode = opened(LAYOUT, name="decode")
    monkeypatch.setattr(shm_offer.os, "geteuid", lambda: 12_345)
    ticket = prefill.offer(None, BlockTable(0, [1]), tokens=8, request_id="r")
    move = decode.pull(ticket, BlockTable(0, [2]), transport="auto")
    move.result()
    move.started()
    assert move.record.transport == "tcp"
    assert "shm: shm is for processes of one user" in move.record.chosen


def test_what_this_side_may_not_use_is_passed_over_too(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address out of a ticket that this side's own rules forbid, as a plain one off the host is."""
    prefill = opened(LAYOUT, "tcp://127.0.0.1:0", name="prefill")
    decode = opened(LAYOUT, name="decode")
    from kvferry.transfer import directory

    node_addresses = ("tcp://192.0.2.1:9?plain=yes", *prefill.addresses)
    monkeypatch.setattr(directory.Directory, "addresses", property(lambda _: node_addresses))
    ticket = prefill.offer(None, BlockTable(0, [1]), tokens=8, request_id="r")
    move = decode.pull(ticket, BlockTable(0, [2]), transport="auto")
    move.result()
    move.started()
    (why,) = move.record.passed_over
    assert "plain" in why


def test_a_pool_on_a_device_takes_no_transport_of_host_memory(opened: Opened) -> None:
    """Each is named with the reason; nothing moved."""
    prefill = opened(LAYOUT, ("tcp://127.0.0.1:0", unique_address("shm")), name="prefill")
    ticket = prefill.offer(None, BlockTable(0, [1]), tokens=8, request_id="r")
    device = FakeDevice(np.zeros(LAYOUT.nbytes, np.uint8))
    with Endpoint.open(pool=Pool(device, LAYOUT), name="decode") as decode:
        moving = decode.pull(ticket, BlockTable(0, [2]), transport="auto")
        with pytest.raises(TransportError, match=r"shm: .*lies on fake:3; tcp: .*lies on fake:3"):
            moving.result()
    assert not device.show().any()
