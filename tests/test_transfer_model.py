"""Random stories of two endpoints against a plain model: who owns which block, what is visible, what ended.

The model is two engines that do what the contract lets them do: a block that is theirs again is
overwritten at once. So a byte that is written too late, or read too late and believed, is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from conftest import unique_address, wait_until
from kvferry.errors import KVFerryError, LocalError, TransportError
from kvferry.layout import BlockTable, PoolLayout, source_pieces
from kvferry.protocol.table import Phase
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.transfer import Endpoint, Move, Pool, Push, Timeouts, TransferRecord, process
from kvferry.transfer.node import Node

NUM_BLOCKS, BLOCK_SIZE, LAYERS = 16, 4, 2
LAYOUT = PoolLayout.paged(
    range(LAYERS), kv_heads=1, head_dim=4, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
)
# Nothing here ends by the clock, save what the story makes expire.
TIMEOUTS = Timeouts(handshake=20.0, heartbeat=0.2, lost=20.0, abort=0.2, start=20.0)
SECONDS = 60.0
# In these phases a copy may touch the blocks of a session.
TOUCHING = frozenset(Phase) - {
    Phase.COMMITTED,
    Phase.ALONE,
    Phase.STARTING,
    Phase.ABORTING,
    Phase.DONE,
    Phase.FAILED,
}
Nodes = dict[str, tuple[Node, asyncio.AbstractEventLoop]]
T = TypeVar("T")


def live_bytes(blocks: list[int], tokens: int) -> NDArray[np.int64]:
    """Where each byte lies that these blocks hold of a request, in the request's order."""
    pieces = source_pieces(LAYOUT, (BlockTable(0, blocks),), tokens)
    spans = [np.arange(at, at + size) for at, size in zip(pieces.offset, pieces.nbytes, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *spans])


@dataclass(eq=False)
class Story:
    """What the model knows of one transfer.

    ``is_wrong``: its engines made a mistake that must not pass. ``is_struck``: something happened
    to it from outside, after which it may end either way.
    """

    mode: Mode
    tokens: int
    ticket: bytes = b""
    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    sent: bytes = b""
    given: list[int] = field(default_factory=list)
    push: Push | None = None
    move: Move | None = None
    outcome: Future[TransferRecord] | None = None
    given_up: Future[TransferRecord] | None = None
    is_claimed: bool = False
    is_committed: bool = False
    is_wrong: bool = False
    is_struck: bool = False
    is_visible: bool = False
    is_started: bool = False
    is_over: bool = False

    @property
    def transfer(self) -> bytes:
        return read_ticket(self.ticket).transfer

    @property
    def may_fail(self) -> bool:
        return self.is_wrong or self.is_struck


class Side:
    """One engine: its blocks, what it believes is in them, and its endpoint in this process."""

    def __init__(self, name: str, address: str, nodes: Nodes) -> None:
        self.name = name
        self._nodes = nodes
        self._noise = np.random.default_rng(len(name))
        self.pool = Pool.allocate(LAYOUT)
        self.free = list(range(NUM_BLOCKS))
        self.believed = self.pool.array.copy()
        self.write(self.free)
        self._address = address
        self.endpoint = self._open()
        self._address = self.endpoint.addresses[0]  # a later life listens there too

    def _open(self) -> Endpoint:
        return Endpoint.listen(
            self._address, pool=self.pool, name=self.name, process=False, timeouts=TIMEOUTS
        )

    def restart(self) -> None:
        self.endpoint.close()
        self.endpoint = self._open()

    def close(self) -> None:
        self.endpoint.close()
        self.pool.close()

    def allocate(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK_SIZE))]

    def give_back(self, blocks: list[int]) -> None:
        """The blocks are the engine's again: it uses them for something else at once."""
        self.write(blocks)
        self.free += blocks
        blocks.clear()

    def write(self, blocks: list[int]) -> None:
        at = live_bytes(blocks, len(blocks) * BLOCK_SIZE)
        self.believed[at] = self._noise.integers(0, 256, len(at), np.uint8)
        self.pool.array[at] = self.believed[at]

    def holds_nothing(self) -> bool:
        stats = self.endpoint.stats()
        return (stats.transfers, stats.holds, stats.grants, stats.copies, stats.digesting) == (0, 0, 0, 0, 0)

    def on_loop(self, call: Callable[[Node], T]) -> T:
        """Run something where the node lives."""
        node, loop = self._nodes[self.name]

        async def run() -> T:
            return call(node)

        return asyncio.run_coroutine_threadsafe(run(), loop).result(SECONDS)


class Transfers(RuleBasedStateMachine):
    """Two endpoints and many requests between them."""

    @initialize(scheme=st.sampled_from(["inproc", "shm", "tcp"]))
    def begin(self, scheme: str) -> None:
        self.stories: list[Story] = []
        self.unforeseen: list[dict[str, Any]] = []
        nodes: Nodes = {}
        unforeseen = self.unforeseen

        class SeenNode(Node):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                loop = asyncio.get_running_loop()
                loop.set_exception_handler(lambda _, context: unforeseen.append(context))
                nodes[self.config.name] = (self, loop)

        self.node_class, process.Node = process.Node, SeenNode  # type: ignore[misc]
        self.prefill, self.decode = (
            Side(name, unique_address(scheme), nodes) for name in ("prefill", "decode")
        )

    def some(self, which: int, wanted: Callable[[Story], bool] = lambda _: True) -> list[Story]:
        """One of the stories that are not over, or none."""
        found = [story for story in self.stories if not story.is_over and wanted(story)]
        return found[which % len(found) :][:1] if found else []

    # What engines do.

    @rule(mode=st.sampled_from(Mode), tokens=st.integers(1, 4 * BLOCK_SIZE))
    def hold(self, mode: Mode, tokens: int) -> None:
        """Offer or reserve."""
        story = Story(mode, tokens)
        if mode is Mode.PULL and len(self.prefill.free) >= 4:
            story.src = self.prefill.allocate(tokens)
            self.note_sent(story)
            story.ticket = self.prefill.endpoint.offer(
                None, BlockTable(0, story.src), tokens=tokens, request_id="r", lease_seconds=SECONDS
            )
            story.outcome = self.prefill.endpoint.outcome(story.ticket)
            self.stories.append(story)
        elif mode is Mode.PUSH and len(self.decode.free) >= 4:
            story.dst = self.decode.allocate(tokens)
            story.ticket = self.decode.endpoint.reserve(
                "r", tokens, BlockTable(0, story.dst), lease_seconds=SECONDS
            )
            story.move = self.decode.endpoint.arrival(story.ticket)
            self.stories.append(story)

    @rule(which=st.integers(0, 99), at_once=st.booleans())
    def go_on(self, which: int, at_once: bool) -> None:
        """One story takes its next step; a pull runs beside whatever comes next, or is waited for."""
        for story in self.some(which):
            if not story.is_claimed:
                self.claim(story)
            elif story.push is not None and not story.is_committed:
                if len(story.given) < LAYERS:
                    self.give(story, len(story.given))
                else:
                    self.commit(story)
            elif story.is_visible and story.dst:
                self.start(story)
            if at_once and (story.is_committed or (story.mode is Mode.PULL and story.dst)):
                self.wait_for(story)

    @rule(which=st.integers(0, 99), layer=st.integers(0, LAYERS - 1), commits=st.booleans())
    def blunder(self, which: int, layer: int, commits: bool) -> None:
        """A layer twice, a commit too early: it must not pass. After the commit: refused, no harm done."""
        for story in self.some(which, lambda story: story.push is not None):
            if commits:
                self.commit(story)
            else:
                self.give(story, layer)

    def claim(self, story: Story) -> None:
        if min(len(self.prefill.free), len(self.decode.free)) < 4:
            return
        story.is_claimed = True
        if story.mode is Mode.PUSH:
            self.begin_push(story)
        else:
            story.dst = self.decode.allocate(story.tokens)
            story.move = self.decode.endpoint.pull(
                story.ticket, BlockTable(0, story.dst), timeout_seconds=SECONDS
            )

    def begin_push(self, story: Story) -> None:
        story.src = self.prefill.allocate(story.tokens)
        self.note_sent(story)
        try:
            story.push = self.prefill.endpoint.push(
                story.ticket, BlockTable(0, story.src), tokens=story.tokens, timeout_seconds=SECONDS
            )
        except KVFerryError:
            assert story.is_struck
            self.prefill.give_back(story.src)
            return
        try:
            story.outcome = self.prefill.endpoint.outcome(story.ticket)
        except KVFerryError:
            assert story.is_struck

    def commit(self, story: Story) -> None:
        if not story.is_committed:
            story.is_wrong |= sorted(story.given) != list(range(LAYERS))
        self.is_accepted(story, Push.commit, None)
        story.is_committed = True

    def start(self, story: Story) -> None:
        """Decode runs on from the state; then the request ends and its blocks are free."""
        assert story.move is not None
        if story.given_up is None:
            story.is_started = True
            story.move.started()
            self.decode.give_back(story.dst)

    def give(self, story: Story, layer: int) -> None:
        if self.is_accepted(story, Push.layer, layer):
            story.given.append(layer)

    def is_accepted(self, story: Story, call: Callable[..., None], *given: object) -> bool:
        """Do it; it may be refused where the push has ended or was committed already."""
        try:
            call(story.push, *given)
        except KVFerryError as error:
            if not story.may_fail and not (story.is_committed and isinstance(error, LocalError)):
                raise
            return False
        assert not story.is_committed or story.is_struck
        return True

    # What happens to them.

    @rule(
        which=st.integers(0, 99),
        at_prefill=st.booleans(),
        what=st.sampled_from(["claim again", "renew", "renew", "cancel", "expire", "drop", "restart"]),
    )
    def trouble(self, which: int, at_prefill: bool, what: str) -> None:
        side = self.prefill if at_prefill else self.decode
        if what == "drop":
            self.drop(side)
        elif what == "restart":
            self.restart(side)
        for story in self.some(which):
            if what == "claim again":
                self.claim_again(story)
            elif what == "renew":
                with contextlib.suppress(KVFerryError):  # not known there, yet or any more
                    side.endpoint.renew(story.ticket, SECONDS)
            elif what == "cancel":
                self.cancel(story, side)
            elif what == "expire":
                story.is_struck = True
                side.on_loop(lambda node, story=story: _expire(node, story.transfer))  # type: ignore[misc]

    def claim_again(self, story: Story) -> None:
        """A ticket that was used is refused, nothing is held for it, and its transfer does not notice.

        Not where something struck the story: its first claim may have been lost on the way, and then
        the ticket is good still.
        """
        if story.mode is Mode.PULL and story.is_claimed and self.decode.free and not story.is_struck:
            again = self.decode.endpoint.pull(story.ticket, BlockTable(0, self.decode.free))
            wait_until(again.arrival.done, SECONDS)
            assert isinstance(again.arrival.exception(), KVFerryError)

    def cancel(self, story: Story, side: Side) -> None:
        story.is_struck = True
        if side is self.decode and story.move is not None and not story.is_started:
            story.given_up = side.endpoint.outcome(story.ticket)
        side.endpoint.withdraw(story.ticket, "the client went away")

    def drop(self, side: Side) -> None:
        """The connections break; holds that nobody has claimed do not care."""
        self.strike(lambda story: story.is_claimed)
        with self.until_they_are_gone(side):
            side.on_loop(_lose_all)

    def restart(self, side: Side) -> None:
        """One side begins a new life: its tickets are void, and what the other held for it comes free."""
        issued = Mode.PULL if side is self.prefill else Mode.PUSH
        self.strike(lambda story: story.is_claimed or story.mode is issued)
        with self.until_they_are_gone(side):
            side.restart()
        for story in self.stories:
            self.note_arrival(story)
            if side is self.decode and story.is_visible:  # the engine's requests died with it
                self.decode.give_back(story.dst)

    # What must be true.

    @invariant()
    def keep_books(self) -> None:
        """Blocks come back when their futures say so; what is visible is what was sent."""
        for story in self.stories:
            self.note_arrival(story)
            self.note_end(story)
        assert not self.unforeseen

    @invariant()
    def nobody_writes_into_what_is_not_lent(self) -> None:
        """Prefill's pool is never written; decode's only where blocks wait for their request."""
        assert np.array_equal(self.prefill.pool.array, self.prefill.believed)
        differs = self.decode.pool.array != self.decode.believed
        for story in self.stories:
            if story.dst and not story.is_visible:
                differs[live_bytes(story.dst, story.tokens)] = False
        assert not differs.any()

    @invariant()
    def a_block_has_one_owner(self) -> None:
        """Sessions that may touch memory own the blocks that their story has lent, and none twice."""
        for side in (self.prefill, self.decode):
            lent = [story.src if side is self.prefill else story.dst for story in self.stories]
            owned = side.on_loop(_owned_blocks)
            assert max(owned.values(), default=1) == 1
            assert set(owned) <= set(itertools.chain(*lent))
            assert side.on_loop(_grants_without_session) == set()

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        try:
            for story in self.stories:
                story.is_struck = True
                for side in (self.prefill, self.decode):
                    side.on_loop(lambda node, story=story: _expire(node, story.transfer))  # type: ignore[misc]
            for side in (self.prefill, self.decode):
                wait_until(side.holds_nothing, SECONDS, side.endpoint.stats)
            wait_until(self.is_over, SECONDS, lambda: [story for story in self.stories if not story.is_over])
            self.nobody_writes_into_what_is_not_lent()
        finally:
            process.Node = self.node_class  # type: ignore[misc]
            self.prefill.close()
            self.decode.close()

    # Helpers.

    def is_over(self) -> bool:
        """Every block has come back, save those of requests that decode still has."""
        self.keep_books()
        return all(not story.src and (story.is_visible or not story.dst) for story in self.stories)

    def note_sent(self, story: Story) -> None:
        story.sent = self.prefill.pool.array[live_bytes(story.src, story.tokens)].tobytes()

    def strike(self, hits: Callable[[Story], bool]) -> None:
        for story in self.stories:
            story.is_struck |= hits(story)

    def wait_for(self, story: Story) -> None:
        assert story.move is not None
        wait_until(story.move.arrival.done, SECONDS)

    @contextlib.contextmanager
    def until_they_are_gone(self, side: Side) -> Iterator[None]:
        """What follows ends all connections of a side; wait until the other side has noticed."""
        other = self.decode if side is self.prefill else self.prefill
        before = other.on_loop(lambda node: set(node.directory._peers))
        yield
        wait_until(lambda: not other.on_loop(lambda node: node.directory._peers & before), SECONDS)

    def note_arrival(self, story: Story) -> None:
        if story.is_over or story.move is None or not story.move.arrival.done():
            return
        if story.move.arrival.exception() is not None:
            assert story.may_fail, story.move.arrival.exception()
            assert not story.is_visible
            self.decode.give_back(story.dst)
        elif not story.is_visible:
            assert not story.is_wrong
            at = live_bytes(story.dst, story.tokens)
            assert self.decode.pool.array[at].tobytes() == story.sent
            self.decode.believed[at] = self.decode.pool.array[at]
            story.is_visible = True
        if story.is_visible and story.given_up is not None and story.given_up.done():
            self.decode.give_back(story.dst)

    def note_end(self, story: Story) -> None:
        if story.outcome is None or not story.outcome.done():
            return
        if story.src:
            if story.outcome.exception() is None:
                assert story.is_visible
                assert story.is_started
            else:
                assert story.may_fail
            self.prefill.give_back(story.src)
        story.is_over = not story.src and not story.dst


def _expire(node: Node, transfer: bytes) -> None:
    session = node.ledger.find(transfer)
    if session is not None:
        session.lease_deadline = session.timeout_deadline = time.monotonic()
        session.set_timer()


def _lose_all(node: Node) -> None:
    for peer in list(node.directory._peers):
        peer.lose(TransportError("cut"))


def _owned_blocks(node: Node) -> Counter[int]:
    touching = [session for session in node.ledger if session.machine.phase in TOUCHING]
    return Counter(int(block) for session in touching for table in session.tables for block in table.ids)


def _grants_without_session(node: Node) -> set[bytes]:
    return set(node.grants._grants) - {session.grant for session in node.ledger}


Transfers.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestTransfers = Transfers.TestCase
