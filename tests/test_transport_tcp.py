"""What only tcp has: addresses on and off loopback, names, congestion control."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvferry.errors import InputError, TransportError
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.transport.address import Address, parse_address
from kvferry.transport.memory import create_shared
from kvferry.transport.tcp import TcpTransport
from kvferry.transport.tcp_socket import congestion_notes
from transport_raw import (
    new_pair,
)


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[TransportPair]:
    pair = new_pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def tcp_pair() -> Iterator[TransportPair]:
    pair = new_pair("tcp")
    yield pair
    pair.close()


def test_plain_traffic_leaves_the_host_only_when_asked(tcp_pair: TransportPair) -> None:
    """Without ``plain=yes`` another address is refused with the way out; with it, it is listened at."""
    transport = tcp_pair.listening.transport
    for address in ("tcp://0.0.0.0:0", "tcp://192.0.2.7:1", "tcp://0.0.0.0:0?plain=no"):
        with pytest.raises(InputError, match=r"\?plain=yes"):
            tcp_pair.loop.run(transport.listen(address, tcp_pair.accepted.put))
    listener = tcp_pair.loop.run(transport.listen("tcp://0.0.0.0:0?plain=yes", tcp_pair.accepted.put))
    assert listener.address.endswith("?plain=yes")
    port = listener.address.partition("?")[0].rpartition(":")[2]
    connection = tcp_pair.loop.run(
        tcp_pair.connecting.transport.connect(f"tcp://127.0.0.1:{port}", WAIT_SECONDS)
    )
    tcp_pair.loop.run(connection.close())
    tcp_pair.loop.run(tcp_pair.next_accepted().close())
    tcp_pair.loop.run(listener.close())


@pytest.mark.parametrize("contact", ["10.0.0.1:7400", "[fd00::1]:1", "node-3.example:65535"])
def test_peers_are_told_the_contact_and_how_to_speak(tcp_pair: TransportPair, contact: str) -> None:
    """A listener with a contact gives that to peers, with what is spoken there."""
    transport = tcp_pair.listening.transport
    listener = tcp_pair.loop.run(
        transport.listen(f"tcp://127.0.0.1:0?contact={contact}&streams=2", tcp_pair.accepted.put)
    )
    assert parse_address(listener.address, "tcp", ("plain", "streams")) == Address(
        "tcp", contact, {"streams": "2", "plain": "yes"}
    )
    tcp_pair.loop.run(listener.close())


@pytest.mark.parametrize("contact", ["10.0.0.1", ":1", "h:99999", "a/b:1", ""])
def test_a_contact_that_is_no_place_is_refused(tcp_pair: TransportPair, contact: str) -> None:
    """Before anybody is told it; and nothing listens then."""
    with pytest.raises(InputError, match="address"):
        tcp_pair.loop.run(
            tcp_pair.listening.transport.listen(f"tcp://127.0.0.1:0?contact={contact}", tcp_pair.accepted.put)
        )


def test_an_unknown_host_is_a_transport_error(
    tcp_pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that does not resolve is named."""

    def fail(*_arguments: object, **_options: object) -> list:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(TransportError, match="prefill-9") as caught:
        tcp_pair.loop.run(tcp_pair.connecting.transport.connect("tcp://prefill-9:7400", WAIT_SECONDS))
    assert caught.value.next_step


def test_congestion_control_that_could_not_be_set_is_recorded() -> None:
    """What the socket really uses is noted where it is not the wanted one."""
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        assert "reno" in congestion_notes(sock)[0]


def test_a_listener_at_ipv6_says_so() -> None:
    """An IPv6 address is printed in brackets and can be connected to."""
    pair = TransportPair(TcpTransport, "tcp://[::1]:0", create_shared(4096), create_shared(4096))
    assert pair.listener.address.startswith("tcp://[::1]:")
    assert pair.listening.connection.peer_address.startswith("tcp://[::1]:")
    pair.close()
