"""What bytes from outside may do to kvferry: be taken, or be refused by an error of its own, within a bound.

Each target takes any bytes. It returns what it made of them, or raises a KVFerryError; anything else
is a defect. ``tests/fuzz.py`` drives them by coverage (``make fuzz``), ``test_fuzz.py`` by mutation.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kvferry.errors import PeerError
from kvferry.link.load import decode_links, encode_links
from kvferry.model.source import _parse, shape_from_config
from kvferry.plan.cluster_file import parse_cluster
from kvferry.plan.compute_file import ProfileChoice, parse_profile
from kvferry.protocol import messages as m
from kvferry.protocol.compat import hello_reasons, pair_reasons
from kvferry.protocol.ticket import open_ticket, read_ticket, seal_ticket
from kvferry.state import codec as state_codec
from kvferry.state import decode_state, encode_state
from kvferry.transfer.bundle import pack_layouts, read_bundle, seal_bundle
from kvferry.transfer.lease import Grants
from kvferry.transport.base import MAX_FRAME_NBYTES, Direction
from kvferry.transport.control import Control
from kvferry.transport.greeting import (
    TOKEN_NBYTES,
    Role,
    cannot_connect,
    read_greeting,
    read_refusal,
    tell_refused,
    write_greeting,
)
from kvferry.transport.shm_offer import _parse_offer
from kvferry.transport.wire import MAX_REASON_NBYTES, REQUEST, Request, decode, decode_head, decode_reason
from link_kit import links as links_of
from link_kit import profile
from size_cases import golden_cases
from state_cases import good_state
from test_protocol_words import KEY, LAYOUT, MESSAGES, party, ticket

__all__ = ["FRAMES", "RECORDS", "SEEDS", "TARGETS", "run"]

POOL_NBYTES = 1 << 20
ROOT = Path(__file__).parent.parent
COMPUTE = b"""{"model": "m", "gpu": "g", "tp": 1, "decode": {"a": 0.01, "b": 1e-7, "c": 1e-6},
"prefill": {"a": 0.01, "b": 1e-5, "c": 1e-10}}"""


def message(data: bytes) -> object:
    """A control frame, and what a handshake or a claim makes of it."""
    said = m.decode(data)
    assert m.decode(m.encode(said)) == said
    if isinstance(said, m.Hello):
        return hello_reasons(said, party())
    if isinstance(said, m.Accept):
        return pair_reasons(party(), said.party)
    if isinstance(said, m.Claim | m.Offered | m.Granted):
        return m.from_wire(said.tables)
    return said.digest_table() if isinstance(said, m.Commit) else said


def control_stream(data: bytes) -> object:
    """A control connection that gets these bytes, cut anywhere; what it keeps is bounded."""
    lost: list[Exception] = []
    control = Control("peer", lambda _kind, _payload: None, lost.append)
    cut = data[0] + 1 if data else 1
    for start in range(0, len(data), cut):
        control.data_received(data[start : start + cut])
        assert len(control._buffer) <= MAX_FRAME_NBYTES + 5
    if lost:
        raise lost[0]
    return list(control._frames)


def request(data: bytes) -> object:
    """A request of a data channel: its head bounds what is read, its tables are checked against the pool."""
    head, rest = data[: REQUEST.size], data[REQUEST.size :]
    if len(head) < REQUEST.size:
        raise PeerError("cut")
    known = decode_head(head, "peer")
    nbytes = known.tables_nbytes
    assert 0 < nbytes <= 64 << 20
    if len(rest) < nbytes:
        raise PeerError("cut")
    made = decode(known, np.frombuffer(rest[:nbytes], np.uint8), POOL_NBYTES, "peer")
    assert (made.offset >= 0).all()
    assert (made.offset + made.nbytes <= POOL_NBYTES).all()
    grants = Grants()
    grants.open(b"g" * 16, Direction.READ, np.array([64]), np.array([4096]), lambda _: None)
    grants.enter(b"g" * 16, Direction.READ, made.offset, made.nbytes)
    assert (made.offset >= 64).all()
    assert (made.offset + made.nbytes <= 64 + 4096).all()
    return made


def reason(data: bytes) -> object:
    """Why a peer ended a copy."""
    return decode_reason(data, "peer")


def greeting(data: bytes) -> object:
    """What a listener answers to whoever connects: a role, and behind REFUSED the reason."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.sendall(data[: MAX_REASON_NBYTES + 64])
        there.close()
        return asyncio.run(_greeted(here))


async def _greeted(sock: socket.socket) -> Role:
    try:
        role, _ = await read_greeting(sock, "peer")
        if role is Role.REFUSED:
            raise await read_refusal(sock, "peer")
    except OSError as error:
        raise cannot_connect("peer", error) from error
    return role


def a_ticket(data: bytes) -> object:
    """A ticket, as who was given it reads it, and as its issuer opens it."""
    made = read_ticket(data)
    open_ticket(data, KEY, made.incarnation)
    return made


def bundle(data: bytes) -> object:
    """The tickets of a group of ranks."""
    return read_bundle(data)


def shm_offer(data: bytes) -> object:
    """What a process of this host says of its memory."""
    return _parse_offer(data, [], 1, "peer")


def state(data: bytes) -> object:
    """A state record, as it came."""
    made = decode_state(data)
    assert encode_state(made) == data
    return made


def state_body(data: bytes) -> object:
    """The same behind a header that fits, so that the schema is reached."""
    digest = hashlib.sha256(data).digest()
    return state(
        state_codec._HEADER.pack(state_codec._MAGIC, state_codec.MAJOR_VERSION, len(data), digest) + data
    )


def links(data: bytes) -> object:
    """A link file."""
    return decode_links(data)


def config(data: bytes) -> object:
    """A model's config.json."""
    return shape_from_config(_parse(Path("config.json"), data, "model"))


def cluster(data: bytes) -> object:
    """A cluster file."""
    return parse_cluster(data.decode("utf-8", "replace"), "fuzz")


def compute(data: bytes) -> object:
    """A compute profile."""
    return parse_profile(data.decode("utf-8", "replace"), "fuzz", ProfileChoice())


FRAMES: tuple[Callable[[bytes], object], ...] = (
    message,
    control_stream,
    request,
    reason,
    greeting,
    a_ticket,
    bundle,
    shm_offer,
)
"""What comes over a connection, or with a ticket: from anybody."""
RECORDS: tuple[Callable[[bytes], object], ...] = (state, state_body, links, config, cluster, compute)
"""State records, and files that a person gives."""
TARGETS = (*FRAMES, *RECORDS)


def run(data: bytes) -> object:
    """The first byte chooses the target, the rest is its input."""
    return TARGETS[data[0] % len(TARGETS)](data[1:]) if data else None


def _requests() -> list[bytes]:
    numbers = np.array([64, 128], np.int64)
    chunks = np.array([256], np.int64)
    made = [
        Request(operation, b"g" * 16, 1.0, True, numbers, numbers, *parts)  # type: ignore[arg-type]
        for operation, parts in ((1, (chunks[:0], chunks[:0])), (2, (chunks * 3 // 4, chunks)))
    ]
    return [b"".join(bytes(part) for part in one.encode()) for one in made]


def _greetings() -> list[bytes]:
    here, there = socket.socketpair()

    async def say() -> None:
        here.setblocking(False)
        await write_greeting(here, Role.ACCEPTED, b"t" * TOKEN_NBYTES)
        await tell_refused(here, PeerError("no"))

    with here, there:
        asyncio.run(say())
        said = there.recv(4096)
    nbytes = len(said) - said.rindex(b"KVFERRY")
    return [said[:-nbytes], said[-nbytes:]]


def _seeds() -> dict[str, list[bytes]]:
    """Valid inputs, from which mutation and coverage go on."""
    frames = [m.encode(one) for one in MESSAGES]
    encoded = encode_state(good_state())
    return {
        "message": frames,
        "control_stream": [
            bytes([7]) + b"".join(struct.pack("<IB", len(frame), 0) + frame for frame in frames[3:6])
        ],
        "request": _requests(),
        "reason": [msgspec.msgpack.encode(PeerError("no").to_record())],
        "greeting": _greetings(),
        "a_ticket": [seal_ticket(ticket(), KEY)],
        "bundle": [seal_bundle(pack_layouts((LAYOUT,)), ((seal_ticket(ticket(), KEY),),))],
        "shm_offer": [struct.pack("<4sBBHQQQ16s", b"KVFO", 0, 1, 0, 4096, 0, 0, bytes(16))],
        "state": [encoded],
        "state_body": [encoded[state_codec.HEADER_NBYTES :]],
        "links": [encode_links(links_of(profile()))],
        "config": [json.dumps(config).encode() for config in _configs()],
        "cluster": [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.toml"))],
        "compute": [COMPUTE],
    }


def _configs() -> list[dict[str, object]]:
    """One of each class of cache in the golden sizes."""
    return list({str(case.config.get("model_type")): case.config for case in golden_cases()}.values())


_BY_TARGET = _seeds()
SEEDS: list[bytes] = [
    bytes([index]) + seed for index, target in enumerate(TARGETS) for seed in _BY_TARGET[target.__name__]
]
