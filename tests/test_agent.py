"""Agents: real processes that serve one probe at a time, over pools of their own, by their own tickets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from conftest import fill_random, wait_until
from kvferry.cli import run
from kvferry.errors import (
    CapacityError,
    IncompatibleError,
    InputError,
    KVFerryError,
    LocalError,
    PeerError,
    TransportError,
)
from kvferry.layout import BlockTable, PoolLayout
from kvferry.link import Mode, load_links
from kvferry.probe import Agent, AgentSite, Payload, Room, sizes_up_to
from kvferry.probe import words as w
from kvferry.transfer import Endpoint
from kvferry.transport.certificates import init_authority, issue
from probe_kit import agents, children, probe, probing

SMALL = Payload(256 << 10, 16 << 10)
ROOM = Room.of(sizes_up_to(SMALL))
LIMIT = 20.0
SMALL_RUN = ("--bytes", "256KiB", "--seconds", "60", "--repeat", "3", "--json")


async def open_probe(site: AgentSite, seconds: float = 60.0, **fields: Any) -> None:
    options = {"room": ROOM, "transports": ("tcp",), "integrity": True} | fields
    await site.open(seconds, **options)


@contextlib.asynccontextmanager
async def two_agents() -> AsyncIterator[tuple[Agent, Agent, AgentSite, AgentSite]]:
    """Two agents of this process, each with a coordinator's connection to it and a probe open."""
    async with contextlib.AsyncExitStack() as stack:
        both = [
            await stack.enter_async_context(await Agent.listen("tcp://127.0.0.1:0", name=name, process=False))
            for name in ("left", "right")
        ]
        sites = []
        for agent in both:
            site = await AgentSite.connect(agent.address)
            stack.push_async_callback(site.close)
            await open_probe(site)
            sites.append(site)
        yield both[0], both[1], sites[0], sites[1]


def hold(site: AgentSite, mode: Mode = Mode.PULL, count: int = 1) -> Awaitable[Any]:
    return site.call(w.HoldCall, LIMIT, mode=mode, payload=SMALL, slot=0, count=count, seconds=30.0)


def move(site: AgentSite, tickets: tuple[bytes, ...], mode: Mode = Mode.PULL) -> Awaitable[Any]:
    return site.call(
        w.MoveCall,
        LIMIT,
        mode=mode,
        tickets=tickets,
        payload=SMALL,
        slot=0,
        transport="tcp",
        seconds=10.0,
    )


@pytest.mark.slow
def test_all_pairs_of_three_agents(tmp_path: Path) -> None:
    """Six ordered pairs, push and pull, incast and load, one object on stdout, a file that others read."""
    out = tmp_path / "links.json"
    names = ("a", "b", "c")
    with agents(*(["--listen", "127.0.0.1:0", "--name", name, "--zone", "z"] for name in names)) as found:
        addresses = [agent.address for agent in found]
        more = ["--incast", "2", "--under-load", "--line-rate", "10 GB/s", "--repeat", "3"]
        done = probe(*addresses, "--bytes", "256KiB", "--seconds", "90", "--json", "--out", str(out), *more)
        assert done.returncode == 0, done.stderr + done.stdout
        wait_until(lambda: all(not children(agent.process.pid) for agent in found))
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["failed"] == []
    assert told["unreachable"] == {}
    pairs = {(row["from"], row["to"]) for row in told["pairs"]}
    assert pairs == {(a, b) for a in names for b in names if a != b}
    conditions = {(row["mode"], row["incast"], row["under_load"]) for row in told["pairs"]}
    assert conditions == {
        (mode, *rest) for mode in ("push", "pull") for rest in ((1, False), (2, False), (1, True))
    }
    links = load_links(out)
    assert [node.name for node in links.nodes] == list(names)
    for pair in links.pairs:
        assert pair.link_class == "same host"
        assert pair.line_rate == 10e9
        assert pair.registration is not None
        assert {entry.fit.samples for entry in pair.fits} != {0}
    # Each of the two nodes of a pair connected to the other once.
    assert sum(pair.first_contact_seconds is not None for pair in links.pairs) >= 3


@pytest.mark.slow
def test_encrypted_agents_and_the_price_of_it(tmp_path: Path) -> None:
    """``--tls both``: the same pairs in plain and sealed, by agents that know each other by certificates."""
    init_authority(tmp_path)
    certs = {name: str(issue(tmp_path, name, hosts=("127.0.0.1",))) for name in ("a", "b", "me")}
    options = [
        ["--listen", "tcp://127.0.0.1:0?plain=no", "--name", name, "--cert", certs[name]]
        for name in ("a", "b")
    ]
    with agents(*options) as found:
        addresses = [agent.address for agent in found]
        assert all(address.endswith("plain=no") for address in addresses)
        small = ("--bytes", "256KiB", "--seconds", "60", "--repeat", "2", "--json")
        done = probe(*addresses, *small)
        assert done.returncode == 2
        assert "has no identity" in done.stderr
        done = probe(*addresses, "--cert", certs["me"], "--tls", "both", "--mode", "pull", *small)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["pairs"]
        told = {(row["from"], row["mode"], row["tls"]) for row in rows}
        assert told == {(name, "pull", tls) for name in "ab" for tls in (True, False)}
        assert {row["path"] for row in rows} == {"tcp, tcp-sealed"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dead_and_frozen_agents_are_told_and_the_rest_is_measured(tmp_path: Path) -> None:
    """One is not there, one is killed and one stopped while probed; the rest is measured. Exit 1."""
    out = tmp_path / "links.json"
    options = (["--listen", "127.0.0.1:0", "--name", name] for name in ("a", "b", "dead", "frozen"))
    gone = "tcp://127.0.0.1:1"
    with agents(*options) as found:
        addresses = [agent.address for agent in found]
        options = (*SMALL_RUN, "--mode", "pull", "--out", str(out))
        with probing(*addresses, gone, *options) as process:
            # The transfer process of a probe is there: it has begun.
            wait_until(lambda: all(children(agent.process.pid) for agent in found), 60)
            dead, frozen = found[2:]
            stopped = [psutil.Process(frozen.process.pid), *children(frozen.process.pid)]
            try:
                for each in stopped:
                    each.suspend()
                dead.kill()
                stdout, stderr = process.communicate(timeout=100)
            finally:
                for each in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.resume()
        assert process.returncode == 1, stderr
    told = json.loads(stdout)
    assert list(told["unreachable"]) == [gone]
    assert "cannot connect" in told["unreachable"][gone]
    lost = {"dead", "frozen"}
    assert all({row["from"], row["to"]} & lost for row in told["failed"])
    assert {name for row in told["failed"] for name in (row["from"], row["to"])} >= lost
    measured = {(row["from"], row["to"]) for row in told["pairs"]}
    assert measured >= {("a", "b"), ("b", "a")}
    everything = {(a, b) for a in ("a", "b", *lost) for b in ("a", "b", *lost) if a != b}
    assert measured | {(row["from"], row["to"]) for row in told["failed"]} == everything
    assert {(pair.from_node, pair.to_node) for pair in load_links(out).pairs} == measured


@pytest.mark.slow
def test_a_coordinator_that_ends_leaves_nothing_at_the_agents() -> None:
    """Killed, then interrupted: the agents' pools and transfer processes go; they serve the next probe."""
    with agents(["--listen", "127.0.0.1:0"], ["--listen", "127.0.0.1:0"]) as found:
        for end, status, said in (
            (signal.SIGKILL, -signal.SIGKILL, ""),
            (signal.SIGINT, 130, "kvferry: interrupted\n"),
        ):
            with probing(*(agent.address for agent in found), *SMALL_RUN) as process:
                wait_until(lambda: all(children(agent.process.pid) for agent in found), 60)
                process.send_signal(end)
                _, stderr = process.communicate(timeout=60)
            assert (process.returncode, stderr) == (status, said)
            wait_until(lambda: not any(children(agent.process.pid) for agent in found), 60)
        assert all(agent.process.poll() is None for agent in found)


@pytest.mark.usefixtures("nothing_left")
def test_a_probe_serves_only_its_own_tickets() -> None:
    """A ticket works once; a forged one, an old one, one's own: refused."""

    async def check() -> None:
        async with two_agents() as (_, _, left, right):
            first, second = (await hold(left, count=2)).tickets
            copies = (await move(right, (first,))).copies
            assert copies[0].nbytes == SMALL.moved_nbytes
            await right.call(w.CompareCall, LIMIT, payload=SMALL, slot=0, seed=left.opened.seed)
            with pytest.raises(KVFerryError, match=r"no longer good|in use"):
                await move(right, (first,))
            # One bit of what the signature covers: the request's name.
            at = second.index(b"probe-") + 6
            forged = second[:at] + bytes([second[at] ^ 1]) + second[at + 1 :]
            with pytest.raises(KVFerryError, match="not signed"):
                await move(right, (forged,))
            with pytest.raises(LocalError, match="issued it itself"):
                await move(left, (second,))
            await left.call(w.CloseCall, LIMIT)
            await open_probe(left)
            with pytest.raises(KVFerryError, match=r"connect|another endpoint|earlier life"):
                await move(right, (second,))
            assert right.error is None  # what a node could not do is no end of the node

    asyncio.run(check())


@pytest.mark.usefixtures("nothing_left")
def test_without_a_probe_nothing_is_held_and_after_it_nothing_is_left() -> None:
    """Every call that touches memory is refused before Open and after Close; the agent lives on."""

    async def check() -> None:
        async with await Agent.listen("tcp://127.0.0.1:0", name="n", process=False) as agent:
            site = await AgentSite.connect(agent.address)
            with pytest.raises(PeerError, match="no probe is open"):
                await hold(site)
            await open_probe(site)
            await hold(site)
            await site.call(w.CloseCall, LIMIT)
            with pytest.raises(PeerError, match="no probe is open"):
                await hold(site)
            snapshot = await agent.snapshot()
            assert snapshot.probe is None
            assert (snapshot.probes_served, snapshot.calls_refused) == (1, 2)
            await site.close()

    asyncio.run(check())


@pytest.mark.usefixtures("nothing_left")
def test_one_probe_at_a_time() -> None:
    """A second coordinator is told who is probing; once that one is done, it gets in."""

    async def check() -> None:
        async with await Agent.listen("tcp://127.0.0.1:0", process=False) as agent:
            first, second = [await AgentSite.connect(agent.address) for _ in range(2)]
            await open_probe(first)
            with pytest.raises(CapacityError, match="under probe by"):
                await open_probe(second)
            assert "under probe" in (await second.call(w.AboutCall, LIMIT, version=w.VERSION)).busy
            await first.close()
            await open_probe(second)
            await second.close()

    asyncio.run(check())


@pytest.mark.usefixtures("nothing_left")
def test_a_probe_ends_with_its_time() -> None:
    """A coordinator that goes silent with a probe open: after its seconds everything is given back."""

    async def check() -> None:
        async with await Agent.listen("tcp://127.0.0.1:0", process=False) as agent:
            site = await AgentSite.connect(agent.address)
            await open_probe(site, seconds=1.0)
            while (await agent.snapshot()).probe is not None:
                await asyncio.sleep(0.02)
            with pytest.raises(TransportError):
                await site.call(w.AboutCall, LIMIT, version=w.VERSION)
            await site.close()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.usefixtures("nothing_left")
def test_what_is_asked_of_an_agent_is_bounded() -> None:
    """Memory, time, version: each beyond its bound is refused by name, and nothing is held then."""

    async def check() -> None:
        async with await Agent.listen("tcp://127.0.0.1:0", max_bytes=1 << 20, process=False) as agent:
            site = await AgentSite.connect(agent.address)
            large = Room.of([Payload(4 << 20, 4096)])
            with pytest.raises(CapacityError, match=r"1048576 are allowed.*--max-bytes"):
                await open_probe(site, room=large)
            with pytest.raises(InputError, match="seconds"):
                await open_probe(site, seconds=7 * 3600.0)
            with pytest.raises(IncompatibleError, match="version"):
                await site.call(w.AboutCall, LIMIT, version=w.VERSION + 1)
            assert (await agent.snapshot()).probe is None
            await open_probe(site, room=Room.of([SMALL]))
            with pytest.raises(InputError, match="no room"):
                await site.call(
                    w.HoldCall,
                    LIMIT,
                    mode=Mode.PULL,
                    payload=Payload(512 << 10, 16 << 10),
                    slot=0,
                    count=1,
                    seconds=5.0,
                )
            await site.close()

    asyncio.run(check())


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64])
def test_words_that_no_coordinator_says_end_its_connection_only(frame: bytes) -> None:
    """Garbage in a frame: that connection ends, the agent answers the next coordinator."""

    async def check() -> None:
        async with await Agent.listen("tcp://127.0.0.1:0", process=False) as agent:
            site = await AgentSite.connect(agent.address)
            await open_probe(site)
            await site._connection.send(frame)
            while (await agent.snapshot()).probe is not None:
                await asyncio.sleep(0.02)
            await site.close()
            again = await AgentSite.connect(agent.address)
            await again.close()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.usefixtures("nothing_left")
def test_a_probe_never_touches_a_real_pool(opened: Callable[..., Endpoint]) -> None:
    """An engine's tickets are refused by an agent before it connects, and its pool stays as it was."""
    layout = PoolLayout.paged(range(2), kv_heads=1, head_dim=64, dtype="float32", block_size=1, num_blocks=8)
    engine = opened(layout, "tcp://127.0.0.1:0")
    fill_random(engine.pool, 1)
    before = engine.pool.array.copy()
    table = BlockTable(0, np.arange(4, dtype=np.int32))
    offer = engine.offer(None, table, tokens=4, request_id="chat-1")
    reservation = engine.reserve("chat-2", 4, table)

    async def check() -> None:
        async with two_agents() as (agent, _, left, _):
            for ticket, mode in ((offer, Mode.PULL), (reservation, Mode.PUSH)):
                with pytest.raises(InputError, match=r"chat-\d.*no probe"):
                    await move(left, (ticket,), mode)
            snapshot = await agent.snapshot()
            assert snapshot.probe is not None
            assert len(snapshot.probe.errors) == 2

    asyncio.run(check())
    assert engine.stats().peers == 0
    assert np.array_equal(engine.pool.array, before)


@pytest.mark.usefixtures("nothing_left")
def test_a_snapshot_tells_what_happens_and_by_what() -> None:
    """Leases not yet claimed, bytes and rates by peer with the transport that carried them."""

    async def check() -> None:
        async with two_agents() as (agent, other, left, right):
            tickets = (await hold(left, count=3)).tickets
            snapshot = await agent.snapshot()
            assert snapshot.name == "left"
            assert snapshot.probe is not None
            assert snapshot.probe.stats is not None
            assert snapshot.probe.stats.holds == 3
            assert [held.phase for held in snapshot.probe.transfers] == ["held"] * 3
            assert all(0 < held.lease_seconds <= 30 for held in snapshot.probe.transfers)
            assert (await left.snapshot()).probe is not None  # by wire too, and by whoever may connect
            await move(right, tickets)
            async with asyncio.timeout(LIMIT):  # prefill's answer to the last one may be on its way
                while (snapshot := await other.snapshot()).probe is None or snapshot.probe.transfers:
                    await asyncio.sleep(0.005)
            (way,) = snapshot.tallied.ways
            assert (way.transport, way.path, way.role, way.transfers) == ("tcp", "tcp", "decode", 3)
            assert way.nbytes == 3 * SMALL.moved_nbytes
            assert way.peer == "left at tcp://127.0.0.1"
            assert way.bytes_per_second > 0
            await left.call(w.CollectCall, LIMIT, mode=Mode.PULL, tickets=tickets, seconds=LIMIT)
            with pytest.raises(KVFerryError):
                await move(right, tickets[:1])
            failed = (await other.snapshot()).tallied.recent[0]
            assert failed.record.role == "decode"
            assert "no longer good" in failed.error
            ways = (await agent.snapshot()).tallied.ways
            assert [(way.role, way.transfers) for way in ways] == [("prefill", 3)]

    asyncio.run(check())


def test_one_agent_under_two_addresses_is_told(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A node is not a pair with itself."""
    assert run(["probe", taken, taken.replace("127.0.0.1", "localhost")]) == 2
    assert "the same agent" in capsys.readouterr().err


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    with agents(["--listen", "127.0.0.1:0"]) as found:
        yield found[0].address


@pytest.mark.parametrize(
    ("options", "status", "named"),
    [
        (["--listen", "tcp://0.0.0.0:0"], 2, "every interface"),
        (["--listen", "tcp://[::]:0"], 2, "::"),
        (["--listen", "10.1.2.3:0"], 2, "plain=yes"),
        (["--listen", "pigeon://x"], 2, "pigeon"),
        (["--listen", "127.0.0.1"], 2, "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--max-bytes", "0"], 2, "max_bytes"),
        (["--listen", "{taken}"], 1, "in use"),
        ([], 2, "listen"),
        (["--listen", "127.0.0.1:0", "--name", "n" * 129], 2, "name"),
        (["--listen", "127.0.0.1:0", "--authority", "ca.pem"], 2, "cert"),
        (["--listen", "127.0.0.1:0", "--cert", "/no/such.pem"], 2, "/no/such.pem"),
        (["--listen", "127.0.0.1:0", "--data", "10.0.0.1:7401"], 2, "does not begin with a transport"),
        (["--listen", "127.0.0.1:0", "--data", "tpc://127.0.0.1:0"], 2, "did you mean tcp?"),
        (["--listen", "127.0.0.1:0", "--data", "tcp://127.0.0.1"], 2, "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--data", "tcp://a:1", "--data", "tcp://a:2"], 2, "two addresses"),
    ],
)
def test_an_agent_that_cannot_listen_says_why(
    options: list[str], status: int, named: str, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit 2 for what was given wrongly, 1 for what cannot be had."""
    assert run(["agent", *(option.format(taken=taken) for option in options)]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err
