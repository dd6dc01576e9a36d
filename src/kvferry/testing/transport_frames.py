"""The part of the transport suite about control frames."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import KVFerryError, LocalError, TransportError
from kvferry.testing.transport_fixture import TransportFixture, check_error
from kvferry.testing.transport_pair import TransportPair
from kvferry.transport.base import MAX_FRAME_NBYTES, Connection

__all__ = ["FrameTests"]


async def exchange(sender: Connection, receiver: Connection, frames: list[bytes]) -> list[bytes]:
    """Send all, while receiving as many."""

    async def send_all() -> None:
        for frame in frames:
            await sender.send(frame)

    async def receive_all() -> list[bytes]:
        return [await receiver.receive() for _ in frames]

    received, _ = await asyncio.gather(receive_all(), send_all())
    return received


class FrameTests(TransportFixture):
    """Control frames: whole, in order, bounded, and an end that both sides see."""

    @pytest.mark.parametrize("nbytes", [0, 1, 5, 65_535, 65_536, 1_000_003, MAX_FRAME_NBYTES])
    def test_a_frame_of_any_size_arrives_whole(self, steady_pair: TransportPair, nbytes: int) -> None:
        """Frames from empty to the largest arrive byte for byte, both ways."""
        frame = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        ends = [side.connection for side in steady_pair.sides]
        for sender, receiver in (ends, ends[::-1]):
            assert steady_pair.loop.run(exchange(sender, receiver, [frame])) == [frame]

    def test_frames_keep_their_order_and_borders(self, steady_pair: TransportPair) -> None:
        """Many small frames, sent without waiting for the reader, stay apart and in order."""
        frames = [b"%d" % i * (i % 97) for i in range(2000)]
        ends = [side.connection for side in steady_pair.sides]
        for sender, receiver in (ends, ends[::-1]):
            assert steady_pair.loop.run(exchange(sender, receiver, frames)) == frames

    def test_concurrent_senders_do_not_mix(self, steady_pair: TransportPair) -> None:
        """Frames of several tasks arrive whole, in some order."""
        frames = [bytes([i]) * (200_000 + i) for i in range(20)]
        sender, receiver = (side.connection for side in steady_pair.sides)

        async def run() -> list[bytes]:
            sending = asyncio.gather(*(sender.send(frame) for frame in frames))
            received = [await receiver.receive() for _ in frames]
            await sending
            return received

        assert sorted(steady_pair.loop.run(run())) == frames

    def test_an_oversize_frame_is_refused_before_it_is_sent(self, steady_pair: TransportPair) -> None:
        """One byte above the limit is a LocalError, and the connection works on."""
        sender, receiver = (side.connection for side in steady_pair.sides)
        with pytest.raises(LocalError) as caught:
            steady_pair.loop.run(sender.send(bytes(MAX_FRAME_NBYTES + 1)))
        check_error(caught.value)
        assert steady_pair.loop.run(exchange(sender, receiver, [b"after"])) == [b"after"]

    def test_a_receive_that_timed_out_loses_nothing(self, steady_pair: TransportPair) -> None:
        """Waiting for a frame can be given up at any moment, also inside a frame, and taken up again."""
        sender, receiver = (side.connection for side in steady_pair.sides)
        frame = bytes(range(256)) * 20_000

        async def run() -> tuple[int, bytes]:
            sending = asyncio.ensure_future(sender.send(frame))
            given_up = 0
            while True:
                try:
                    async with asyncio.timeout(0.0002):
                        received = await receiver.receive()
                except TimeoutError:
                    given_up += 1
                else:
                    await sending
                    return given_up, received

        given_up, received = steady_pair.loop.run(run())
        assert given_up > 0
        assert received == frame

    def test_unread_frames_hold_their_sender_back(self, steady_pair: TransportPair) -> None:
        """A peer that does not receive is not sent without end: memory is bounded, and nothing is lost."""
        sender, receiver = (side.connection for side in steady_pair.sides)
        frames = [bytes([i]) * 1_000_000 for i in range(60)]

        async def run() -> tuple[int, list[bytes]]:
            sending = [asyncio.ensure_future(sender.send(frame)) for frame in frames]
            _, held_back = await asyncio.wait(sending, timeout=0.5)
            received = [await receiver.receive() for _ in frames]
            await asyncio.gather(*sending)
            return len(held_back), received

        num_held_back, received = steady_pair.loop.run(run())
        assert received == frames
        assert num_held_back > 20

    def test_what_was_sent_before_a_close_arrives(self, pair: TransportPair) -> None:
        """A close flushes: the peer receives every frame, then learns that it is over."""
        sender, receiver = (side.connection for side in pair.sides)
        frames = [bytes([i]) * 10_000 for i in range(20)]

        async def run() -> list[bytes]:
            for frame in frames:
                await sender.send(frame)
            closing = asyncio.ensure_future(sender.close())
            received = [await receiver.receive() for _ in frames]
            with pytest.raises(TransportError) as caught:
                await receiver.receive()
            check_error(caught.value)
            await closing
            return received

        assert pair.loop.run(run()) == frames

    def test_a_close_flushes_past_unread_frames(self, pair: TransportPair) -> None:
        """Megabytes unread in both directions: the closing side's frames still all arrive."""
        closing, peer = (side.connection for side in pair.sides)
        frames = [bytes([i]) * 1_000_000 for i in range(6)]

        async def run() -> list[bytes]:
            unread = [asyncio.ensure_future(peer.send(bytes(500_000))) for _ in range(6)]
            sending = [asyncio.ensure_future(closing.send(frame)) for frame in frames]
            await asyncio.sleep(0.05)  # the sockets of both fill up
            ending = asyncio.ensure_future(closing.close())
            received = [await peer.receive() for _ in frames]
            await asyncio.gather(ending, *sending, *unread, return_exceptions=True)
            return received

        assert pair.loop.run(run()) == frames

    def test_after_a_close_nothing_goes(self, pair: TransportPair) -> None:
        """On a closed connection, and at its peer, send and receive raise TransportError."""

        async def run(closed: Connection, peer: Connection) -> None:
            await closed.close()
            with pytest.raises(TransportError):
                await peer.receive()
            for connection in (closed, peer):
                for call in (connection.receive(), connection.send(b"late")):
                    with pytest.raises(TransportError) as caught:
                        await call
                    check_error(caught.value)

        pair.loop.run(run(*(side.connection for side in pair.sides)))

    def test_an_abort_gives_its_error_to_whoever_waits(self, pair: TransportPair) -> None:
        """A waiting receive raises the very error, later calls too, and the peer learns of the end."""
        aborted, peer = (side.connection for side in pair.sides)
        error = KVFerryError("the test says so")

        async def run() -> None:
            waiting = asyncio.ensure_future(aborted.receive())
            await asyncio.sleep(0)
            pair.threads.submit(aborted.abort, error).result()
            for call in (waiting, aborted.receive(), aborted.send(b"late")):
                with pytest.raises(KVFerryError) as caught:
                    await call
                assert caught.value is error
            with pytest.raises(TransportError) as lost:
                await peer.receive()
            check_error(lost.value)

        pair.loop.run(run())

    def test_ending_twice_is_harmless(self, pair: TransportPair) -> None:
        """Close after close, abort after close and close after abort do nothing more."""
        for side in pair.sides:
            pair.loop.run(side.connection.close())
            side.connection.abort(KVFerryError("again"))
            pair.loop.run(side.connection.close())
