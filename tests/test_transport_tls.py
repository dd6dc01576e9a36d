"""Who gets in over encrypted tcp, and what each side is told when somebody does not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from conftest import wait_until
from kvferry.errors import InputError, KVFerryError, LocalError, PeerError, TransportError
from kvferry.testing.transport_fixture import check_error
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.transport import library, listening, tcp_sealed
from kvferry.transport.base import Transport
from kvferry.transport.certificates import init_authority, issue
from kvferry.transport.channel import Channel
from kvferry.transport.greeting import Role
from kvferry.transport.memory import create_shared
from kvferry.transport.patience import Patience
from kvferry.transport.security import Identity, Plain
from kvferry.transport.wire import REQUEST, Kind
from tls_kit import FOLDER, NODE, SealedTcpTransport, odd_identity, transport_of
from transport_raw import connection_token, greet, raw_socket, read_to_end, request, still_serves

LOOPBACK = "tcp://127.0.0.1:0"
# An address where nobody is: RFC 5737 gives it to documentation.
FAR = "tcp://192.0.2.1:7400"


@pytest.fixture
def pair() -> Iterator[TransportPair]:
    """An encrypted pair with small pools; what is refused must not disturb it."""
    pair = TransportPair(SealedTcpTransport, LOOPBACK, create_shared(1 << 16), create_shared(1 << 16))
    yield pair
    pair.close()


@contextlib.contextmanager
def side(pair: TransportPair, identity: Identity | None, plain: Plain) -> Iterator[Transport]:
    """A transport of its own, beside the pair's."""
    memory = create_shared(4096)
    yield transport_of(identity, plain)(memory, pair.connecting.guard)
    memory.close()


def refused(
    pair: TransportPair, address: str, identity: Identity | None, plain: Plain = Plain.LOOPBACK
) -> KVFerryError:
    """Connect as somebody; it must fail without effect at either side. The error of who connects."""
    with side(pair, identity, plain) as transport:
        with pytest.raises(KVFerryError) as caught:
            pair.loop.run(transport.connect(address, WAIT_SECONDS))
        assert pair.accepted.empty()
        assert pair.listening.guard.entered == []
        return caught.value


@contextlib.contextmanager
def listening_as(pair: TransportPair, identity: Identity | None, plain: Plain = Plain.NEVER) -> Iterator[str]:
    """The address where somebody else listens."""
    with side(pair, identity, plain) as transport:
        listener = pair.loop.run(transport.listen(LOOPBACK, pair.accepted.put))
        yield listener.address
        pair.loop.run(listener.close())


class Dropped:
    """What the listener's log says of the peers that it dropped."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "kvferry")
        self._caplog = caplog

    def __call__(self) -> str:
        wait_until(lambda: bool(self._found()))
        return self._found()[-1]

    def _found(self) -> list[str]:
        said = [record.getMessage() for record in self._caplog.records]
        return [line for line in said if "dropped a peer" in line]


@pytest.fixture
def dropped(caplog: pytest.LogCaptureFixture) -> Dropped:
    return Dropped(caplog)


@dataclass(frozen=True)
class Bad:
    """A certificate that must be refused; why, as who checks it says, and as its owner is told."""

    make: Callable[[Path], Identity]
    why: str
    told: str


def other_authority(folder: Path) -> Identity:
    """Signed by an authority of the same name that is not ours."""
    init_authority(folder / "other")
    issue(folder / "other", "node", hosts=["127.0.0.1"])
    return Identity(str(folder / "other" / "node.pem"), NODE.authority)


BAD = {
    "wrong authority": Bad(other_authority, "local issuer certificate", "does not know the authority"),
    "expired": Bad(
        lambda folder: odd_identity(folder, "node", start=-3, end=-1), "has expired", "not valid at this time"
    ),
    "not yet valid": Bad(
        lambda folder: odd_identity(folder, "node", start=1, end=3), "not yet valid", "does not accept it"
    ),
    "for another use": Bad(
        lambda folder: odd_identity(folder, "node", usage=[ExtendedKeyUsageOID.EMAIL_PROTECTION]),
        "purpose",
        "not for this use",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_certificate_of_the_side_that_connects_is_refused(
    pair: TransportPair, tmp_path: Path, dropped: Dropped, name: str
) -> None:
    """Both sides say that it is the connecting side's certificate, and why."""
    bad = BAD[name]
    error = refused(pair, pair.listener.address, bad.make(tmp_path))
    assert isinstance(error, LocalError)
    check_error(error)
    assert error.message.startswith("this side's certificate is refused by the peer")
    assert bad.told in error.message
    assert "the peer's certificate is refused by this side" in dropped()
    assert bad.why in dropped()
    still_serves(pair)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_certificate_of_the_side_that_listens_is_refused(
    pair: TransportPair, tmp_path: Path, dropped: Dropped, name: str
) -> None:
    """The connecting side refuses it before it has shown its own, and the listener hears of it."""
    bad = BAD[name]
    with listening_as(pair, bad.make(tmp_path)) as address:
        error = refused(pair, address, NODE)
        assert isinstance(error, PeerError)
        check_error(error)
        assert error.message.startswith("the peer's certificate is refused by this side")
        assert bad.why in error.message
        assert "this side's certificate is refused by the peer" in dropped()


def test_a_certificate_of_another_host_is_refused(pair: TransportPair, tmp_path: Path) -> None:
    """Without names to go by, the certificate must be for the address that was connected to."""
    with listening_as(pair, odd_identity(tmp_path, "elsewhere", host="192.0.2.1")) as address:
        error = refused(pair, address, NODE)
    assert isinstance(error, PeerError)
    assert "IP address mismatch" in error.message
    assert "--host HOST" in error.next_step


@pytest.mark.parametrize("wanted", ["decode-0", "prefill-*"])
def test_a_peer_with_a_wrong_name_is_refused_by_either_side(
    pair: TransportPair, tmp_path: Path, dropped: Dropped, wanted: str
) -> None:
    """Who checks names says which it found and which it takes, and so hears the one that was refused."""
    odd = odd_identity(tmp_path, "decode-1")
    picky = msgspec.structs.replace(NODE, peers=(wanted,))
    with listening_as(pair, odd) as address:
        error = refused(pair, address, picky)
        assert isinstance(error, PeerError)
        assert f"is for decode-1, 127.0.0.1, and this side takes {wanted}" in error.message
        assert "the peer refuses this side: the peer's certificate is for decode-1" in dropped()
    with listening_as(pair, picky) as address:
        error = refused(pair, address, msgspec.structs.replace(odd, peers=("node",)))
        assert isinstance(error, PeerError)
        assert "the peer refuses this side: the peer's certificate is for decode-1" in error.message
        check_error(error)


def test_a_side_that_may_not_move_payload_there_says_so_to_the_other(
    pair: TransportPair, dropped: Dropped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's payload is plain whatever kvferry's own connection is: who refuses that tells the peer."""
    monkeypatch.setattr(library, "stays_here", lambda _: False)

    class Careful(SealedTcpTransport):
        _check_way = library.LibraryTransport._check_way

    why = "tcp moves payload in plain, and this endpoint does so on this host only"
    memory = create_shared(4096)
    careful = Careful(memory, pair.connecting.guard)
    with pytest.raises(InputError, match=why):
        pair.loop.run(careful.connect(pair.listener.address, WAIT_SECONDS))
    assert "the peer refuses this side: " in dropped()
    assert why in dropped()
    listener = pair.loop.run(careful.listen(LOOPBACK, pair.accepted.put))
    error = refused(pair, listener.address, NODE)
    assert isinstance(error, TransportError)  # another way to that peer may do
    assert error.message.startswith("the peer refuses this side: ")
    assert why in error.message
    check_error(error)
    pair.loop.run(listener.close())
    memory.close()


@pytest.mark.parametrize("wanted", ["decode-1", "DECODE-*", "*"])
def test_a_peer_with_a_wanted_name_gets_in_wherever_it_is(
    pair: TransportPair, tmp_path: Path, wanted: str
) -> None:
    """With names to go by, the host does not matter: workers move."""
    odd = msgspec.structs.replace(odd_identity(tmp_path, "decode-1"), peers=("node",))
    picky = msgspec.structs.replace(NODE, peers=(wanted,))
    with listening_as(pair, odd) as address, side(pair, picky, Plain.NEVER) as transport:
        connection = pair.loop.run(transport.connect(address, WAIT_SECONDS))
        accepted = pair.next_accepted()
        assert connection.peer_names == ("decode-1", "127.0.0.1")
        assert "node" in accepted.peer_names
        pair.loop.run(connection.close())
        pair.loop.run(accepted.close())


def test_a_client_without_a_certificate_is_refused(pair: TransportPair, dropped: Dropped) -> None:
    """TLS without a client certificate ends in an alert, before anything is read as a message."""
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(greet(Role.SEALED_CONTROL))
        assert sock.recv(25, socket.MSG_WAITALL) == greet(Role.SEALED_CONTROL)
        context = ssl.create_default_context(cafile=NODE.authority)
        with (
            context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        ):
            wrapped.recv(1)
    assert "the peer shows no certificate" in dropped()
    assert pair.accepted.empty()
    still_serves(pair)


def test_an_older_tls_is_refused(pair: TransportPair) -> None:
    """TLS 1.2 is not spoken."""
    context = NODE.context(server_side=False)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(greet(Role.SEALED_CONTROL))
        sock.recv(25, socket.MSG_WAITALL)
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            context.wrap_socket(sock, server_hostname="127.0.0.1")
    still_serves(pair)


def test_plain_and_encrypted_sides_tell_each_other(pair: TransportPair, dropped: Dropped) -> None:
    """A plain client at an encrypted address, and the reverse: each with its own error."""
    error = refused(pair, pair.listener.address.partition("?")[0], NODE)
    assert isinstance(error, PeerError)
    assert "encrypted connections only" in error.message
    check_error(error)
    assert "the peer speaks plain" in dropped()
    with listening_as(pair, None, Plain.LOOPBACK) as address:
        error = refused(pair, f"{address}?plain=no", NODE)
        assert isinstance(error, PeerError)
        assert "plain connections only" in error.message
        check_error(error)
        wait_until(lambda: "the peer speaks TLS" in dropped())
    still_serves(pair)


def test_what_is_no_tls_after_the_greeting_is_dropped(pair: TransportPair, dropped: Dropped) -> None:
    """Bytes that are no handshake, and a handshake that breaks off, end the attempt alone."""
    for first in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x16\x03\x01\xff\xff" + bytes(1000)):
        with raw_socket(pair.listener.address) as sock:
            sock.sendall(greet(Role.SEALED_CONTROL) + first)
            sock.shutdown(socket.SHUT_WR)
            read_to_end(sock)
    assert "dropped" in dropped()
    assert pair.accepted.empty()
    still_serves(pair)


@pytest.mark.parametrize("stage", ["greeting", "hello", "handshake"])
def test_a_peer_that_stops_within_the_handshake_is_dropped_by_deadline(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """After the greeting, in the middle of its hello, or with no secret to say: others get in meanwhile."""
    monkeypatch.setattr(listening, "GREETING_SECONDS", 0.3)
    with raw_socket(pair.listener.address) as sock, contextlib.ExitStack() as stack:
        silent = sock
        sock.sendall(greet(Role.SEALED_CONTROL))
        sock.recv(25, socket.MSG_WAITALL)
        if stage == "hello":
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        elif stage == "handshake":
            context = NODE.context(server_side=False)
            silent = stack.enter_context(context.wrap_socket(sock, server_hostname="127.0.0.1"))
        still_serves(pair)
        with contextlib.suppress(ssl.SSLError):
            assert read_to_end(silent) == b""
    assert pair.accepted.empty()


@pytest.mark.parametrize("address", [FAR, "tcp://[2001:db8::1]:1", "tcp://127.0.0.1:1?plain=no"])
def test_without_an_identity_nothing_is_sent_where_encryption_is_due(
    pair: TransportPair, address: str
) -> None:
    """Off loopback that is everywhere; the error names both ways out."""
    for plain in (Plain.LOOPBACK, Plain.ANYWHERE):
        error = refused(pair, address, None, plain)
        assert isinstance(error, InputError)
        assert "kvferry certs" in error.message
        assert "?plain=yes" in error.message


def test_an_address_from_elsewhere_cannot_make_this_side_talk_plain(pair: TransportPair) -> None:
    """``?plain=yes`` in a ticket's address counts only where this side allows plain anywhere."""
    for identity in (NODE, None):
        error = refused(pair, f"{FAR}?plain=yes", identity, Plain.LOOPBACK)
        assert isinstance(error, InputError)
        assert "plain on loopback only" in error.message
    error = refused(pair, pair.listener.address.partition("?")[0], NODE, Plain.NEVER)
    assert isinstance(error, InputError)
    assert "never talks plain" in error.message


def test_a_channel_cannot_join_an_encrypted_connection_without_its_keys(pair: TransportPair) -> None:
    """Its id is no secret; a plain channel, another's proof, and a proof used before are all dropped."""
    keys = pair.connecting.connection.sealing.keys  # type: ignore[attr-defined] # of TcpConnection
    number, role = 100, Role.OPENER_ASKS
    proof = keys.proof(number, role)
    good = greet(Role.SEALED_ASKS, keys.id) + number.to_bytes(8, "little") + proof
    for bad in (
        greet(Role.SEALED_ASKS, keys.id) + (number + 1).to_bytes(8, "little") + proof,
        greet(Role.SEALED_SERVES, keys.id) + number.to_bytes(8, "little") + proof,
        greet(Role.SEALED_ASKS, keys.id) + number.to_bytes(8, "little") + bytes(16),
        greet(Role.OPENER_ASKS, keys.id),
    ):
        with raw_socket(pair.listener.address) as sock:
            sock.sendall(bad)
            assert read_to_end(sock) == b""
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(good)
        channel = Channel(sock, keys.seals(number, role, "peer", is_opener=True))
        patience = Patience(time.monotonic() + WAIT_SECONDS, (), "peer")
        head, tables = request()[: REQUEST.size], request()[REQUEST.size :]
        channel.write(patience, head, tables)
        channel.read_mark(Kind.DATA, patience, 4096)
        with raw_socket(pair.listener.address) as again:  # it would use the same nonces again
            again.sendall(good)
            assert read_to_end(again) == b""
    still_serves(pair)


def test_nobody_joins_an_encrypted_connection_through_a_plain_listener(pair: TransportPair) -> None:
    """One transport may listen at both kinds of addresses; its connections do not mix."""
    transport = pair.listening.transport
    keys = pair.connecting.connection.sealing.keys  # type: ignore[attr-defined] # of TcpConnection
    transport.security = msgspec.structs.replace(transport.security, plain=Plain.LOOPBACK)
    listener = pair.loop.run(transport.listen(LOOPBACK, pair.accepted.put))
    assert "plain" not in listener.address
    with raw_socket(listener.address) as sock:
        sock.sendall(greet(Role.OPENER_ASKS, keys.id))
        assert read_to_end(sock) == b""
    with raw_socket(listener.address) as sock:  # and a plain one is reached by its token as ever
        token = connection_token(sock)
        accepted = pair.next_accepted()
        with raw_socket(pair.listener.address) as channel:
            channel.sendall(greet(Role.SEALED_ASKS, token) + bytes(24))
            assert read_to_end(channel) == b""
    pair.loop.run(accepted.close())
    pair.loop.run(listener.close())
    still_serves(pair)


def test_certificates_are_renewed_without_a_restart(pair: TransportPair, tmp_path: Path) -> None:
    """A listener that shows an expired certificate shows the new one as soon as the file is replaced."""
    init_authority(tmp_path)
    (tmp_path / "ca.pem").write_bytes((FOLDER / "ca.pem").read_bytes())
    stale = odd_identity(tmp_path, "node", start=-3, end=-1)
    with listening_as(pair, stale) as address:
        assert "has expired" in refused(pair, address, NODE).message
        Path(stale.certificate).write_bytes(Path(NODE.certificate).read_bytes())
        with side(pair, NODE, Plain.NEVER) as transport:
            connection = pair.loop.run(transport.connect(address, WAIT_SECONDS))
            pair.loop.run(connection.close())
            pair.loop.run(pair.next_accepted().close())


def test_an_authority_is_replaced_by_trusting_both_for_a_while(pair: TransportPair, tmp_path: Path) -> None:
    """A file with the old and the new authority's certificate takes peers of either."""
    new = other_authority(tmp_path)
    assert isinstance(refused(pair, pair.listener.address, new), LocalError)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(NODE.authority).read_bytes() + (tmp_path / "other" / "ca.pem").read_bytes())
    with listening_as(pair, msgspec.structs.replace(NODE, authority=str(both))) as address:
        for identity in (NODE, new):
            with side(pair, identity, Plain.NEVER) as transport:
                connection = pair.loop.run(transport.connect(address, WAIT_SECONDS))
                pair.loop.run(connection.close())
                pair.loop.run(pair.next_accepted().close())


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Missing, not PEM, without a key, the key of another: InputError with the file, when it is loaded."""
    init_authority(tmp_path)
    one, two = issue(tmp_path, "one"), issue(tmp_path, "two")
    (tmp_path / "text.pem").write_text("hello")
    certificate = one.read_bytes()[one.read_bytes().index(b"-----BEGIN CERT") :]
    (tmp_path / "bare.pem").write_bytes(certificate)
    (tmp_path / "folder.pem").mkdir()
    for arguments, named in (
        ({"certificate": tmp_path / "none.pem"}, "none.pem: No such file"),
        ({"certificate": tmp_path / "folder.pem"}, "folder.pem: Is a directory"),
        ({"certificate": tmp_path / "text.pem"}, "text.pem"),
        ({"certificate": tmp_path / "bare.pem"}, "bare.pem"),
        ({"certificate": tmp_path / "ca.pem"}, "ca.pem"),
        ({"certificate": one, "key": two}, "the key is not this certificate's"),
        ({"certificate": one, "authority": tmp_path / "text.pem"}, "authority"),
        ({"certificate": "/dev/zero"}, "longer than"),
    ):
        with pytest.raises(InputError, match="identity") as caught:
            Identity.load(**arguments)
        assert named in caught.value.message
        assert "\n" not in caught.value.message
    assert Identity.load(tmp_path / "bare.pem", key=one).key == str(one)


def test_a_peer_that_breaks_tls_later_ends_the_connection(pair: TransportPair) -> None:
    """Bytes that TLS did not seal, on a control connection that stands: it ends, nothing is delivered."""
    connection, accepted = pair.connecting.connection, pair.listening.connection
    control = connection.control  # type: ignore[attr-defined] # of SocketConnection
    pair.loop.run(connection.send(b"one"))
    assert pair.loop.run(accepted.receive()) == b"one"

    async def inject() -> None:
        control._transport.write(b"\x17\x03\x03\x00\x20" + bytes(32))

    pair.loop.run(inject())
    with pytest.raises(TransportError, match="encrypted control connection broke"):
        pair.loop.run(accepted.receive())


def test_channel_numbers_are_good_once_however_many_there_were(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of channels later a new number is taken, every old one is refused, little is remembered."""
    monkeypatch.setattr(tcp_sealed, "NUMBER_WINDOW", 8)
    sealing = pair.listening.connection.sealing  # type: ignore[attr-defined] # of TcpConnection
    keys = pair.connecting.connection.sealing.keys  # type: ignore[attr-defined]

    async def is_taken(number: int) -> bool:
        near, far = socket.socketpair()
        near.setblocking(False)
        with near, far:
            far.sendall(number.to_bytes(8, "little") + keys.proof(number, Role.OPENER_ASKS))
            try:
                await sealing.accept_channel(near, Role.OPENER_ASKS)
            except PeerError:
                return False
            return True

    for number in (10, 11, 13, 12, 5000, 4999):
        assert pair.loop.run(is_taken(number))
    for number in (0, 10, 12, 4992, 4999, 5000):
        assert not pair.loop.run(is_taken(number))
    assert pair.loop.run(is_taken(4993))
    assert len(sealing._used) <= 8
