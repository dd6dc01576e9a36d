"""Sealed records: AES-128-GCM over what a data channel carries, with keys from the control connection.

    record    magic, nbytes | ciphertext of nbytes | tag of 16

The head is authenticated. The nonce is the number of the record in its channel and direction, so a
record that was dropped, repeated, moved or taken from elsewhere does not open. Each direction of
each channel has a key of its own, replaced every REKEY_NBYTES. docs/encryption.md has the whole
construction and its limits. Import this module only where data is sealed: it needs ``cryptography``.
"""

from __future__ import annotations

import hmac
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from kvferry.errors import CorruptError
from kvferry.transport.staging import LINE_NBYTES, STEP_NBYTES, aligned_buffer

__all__ = ["OVERHEAD_NBYTES", "PROOF_NBYTES", "SECRET_NBYTES", "ChannelSeals", "ConnectionKeys", "Seal"]

Bytes = NDArray[np.uint8]

HEAD = struct.Struct("<4sI")
TAG_NBYTES = 16
OVERHEAD_NBYTES = HEAD.size + TAG_NBYTES
# What one record holds at most: any step of a frame.
RECORD_NBYTES = 2 * STEP_NBYTES
SECRET_NBYTES = 32
PROOF_NBYTES = 16
# 2**32 AES blocks under one key leave an attacker a chance of 2**-65 to tell the stream from noise.
REKEY_NBYTES = 1 << 36

_MAGIC = b"KVFS"
_NONCE = struct.Struct(">4xQ")
_LABEL = b"kvferry seal 1 "
# A record and a few small ones beside it go out, or come in, by one system call.
_BATCH_NBYTES = RECORD_NBYTES + OVERHEAD_NBYTES + 4096
_local = threading.local()


def _expand(key: bytes, info: bytes, nbytes: int) -> bytes:
    """HKDF-Expand of RFC 5869 with SHA-256, for at most one block of output."""
    return hmac.digest(key, _LABEL + info + b"\x01", "sha256")[:nbytes]


class ConnectionKeys:
    """What both ends of one connection derive from the two secrets that they exchanged inside TLS.

    ``id`` names the connection to its listener and is no secret.
    """

    def __init__(self, opener_secret: bytes, acceptor_secret: bytes) -> None:
        # HKDF-Extract: either secret alone is enough, should the other side's be a bad one.
        self._root = hmac.digest(b"kvferry", opener_secret + acceptor_secret, "sha256")
        self.id = _expand(self._root, b"connection", 16)

    def proof(self, number: int, role: int) -> bytes:
        """What shows that the peer of this connection opens data channel ``number``."""
        return _expand(self._root, b"join" + struct.pack("<QB", number, role), PROOF_NBYTES)

    def seals(self, number: int, role: int, peer: str, *, is_opener: bool) -> ChannelSeals:
        """The two directions of one channel, as the side that opened it sees them, or the other."""
        chains = [
            _expand(self._root, b"channel" + struct.pack("<QBB", number, role, side), 32) for side in (0, 1)
        ]
        ours, theirs = chains if is_opener else chains[::-1]
        return ChannelSeals(Seal(ours), Seal(theirs), peer)


class Seal:
    """One direction of one channel: seals, or opens, its records in their order. One thread at a time."""

    def __init__(self, chain: bytes) -> None:
        self._chain = chain
        self._count = 0
        self._next_key()

    def seal(self, plain: Bytes, out: Bytes) -> None:
        """Fill ``out``, which is OVERHEAD_NBYTES longer than ``plain``, with the next record."""
        head = HEAD.pack(_MAGIC, plain.nbytes)
        out[: HEAD.size] = np.frombuffer(head, np.uint8)
        nonce = self._nonce(plain.nbytes)  # first: it may put another key in place
        self._cipher.encrypt_into(nonce, plain.data, head, out[HEAD.size :].data)

    def open(self, record: Bytes, out: Bytes) -> None:
        """Fill ``out`` with what the next record holds; ``record`` is OVERHEAD_NBYTES longer.

        Raises InvalidTag when it is not exactly the record that the peer sealed as its next; then
        ``out`` is undefined, and no later record opens either.
        """
        head = HEAD.pack(_MAGIC, out.nbytes)
        nonce = self._nonce(out.nbytes)
        if record[: HEAD.size].tobytes() != head:  # what is authenticated must be what came
            raise InvalidTag
        self._cipher.decrypt_into(nonce, record[HEAD.size :].data, head, out.data)

    def _nonce(self, nbytes: int) -> bytes:
        """Of the next record, which holds ``nbytes``; both ends change keys at the same record."""
        if self._left < nbytes + OVERHEAD_NBYTES:
            self._next_key()
        self._left -= nbytes + OVERHEAD_NBYTES
        self._count += 1
        return _NONCE.pack(self._count)

    def _next_key(self) -> None:
        """Forget the key in use; its chain cannot be turned back."""
        self._cipher = AESGCM(_expand(self._chain, b"key", 16))
        self._chain = _expand(self._chain, b"next", 32)
        self._left = REKEY_NBYTES


class ChannelSeals:
    """Both directions of one channel: whole arrays in, records on the wire, whole arrays out.

    Each array is a message of its own: it is read as it was written, never in other portions.
    """

    def __init__(self, ours: Seal, theirs: Seal, peer: str) -> None:
        self._ours = ours
        self._theirs = theirs
        self._peer = peer

    def sealed(self, arrays: list[Bytes]) -> Iterator[list[Bytes]]:
        """The records of the arrays, by batches to send; each batch is good until the next one."""
        for batch in _batches(arrays):
            records = _places(batch)
            for plain, record in zip(batch, records, strict=True):
                self._ours.seal(plain, record)
            yield records

    def open_into(self, arrays: list[Bytes], receive: Callable[[list[Bytes]], None]) -> None:
        """Fill the arrays; ``receive`` fills records with bytes of the wire. Raises CorruptError."""
        for batch in _batches(arrays):
            records = _places(batch)
            receive(records)
            for plain, record in zip(batch, records, strict=True):
                try:
                    self._theirs.open(record, plain)
                except InvalidTag as error:
                    raise self._not_opened() from error

    def _not_opened(self) -> CorruptError:
        return CorruptError(
            "a sealed record does not open: it was damaged, repeated, left out or forged on the way",
            phase="move",
            peer=self._peer,
            now_true="what it held was thrown away and its channel is closed; nothing was committed",
            next_step="ask again; if it comes back, look for what changes bytes between the two hosts",
        )


def _batches(arrays: list[Bytes]) -> Iterator[list[Bytes]]:
    """The arrays cut into what fits one record, and these into what fits one batch."""
    batch: list[Bytes] = []
    left = _BATCH_NBYTES
    for array in arrays:
        for start in range(0, array.nbytes, RECORD_NBYTES):
            part = array[start : start + RECORD_NBYTES]
            if _room(part) > left:
                yield batch
                batch, left = [], _BATCH_NBYTES
            batch.append(part)
            left -= _room(part)
    if batch:
        yield batch


def _room(plain: Bytes) -> int:
    """What a record takes of the buffer: its ciphertext begins a cache line, which is faster."""
    return LINE_NBYTES + -(-(plain.nbytes + TAG_NBYTES) // LINE_NBYTES) * LINE_NBYTES


def _places(batch: list[Bytes]) -> list[Bytes]:
    """Room for the record of each plain text, in this thread's buffer."""
    buffer: Bytes | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = aligned_buffer(_BATCH_NBYTES)  # kept, so that its pages are touched once
    records, end = [], 0
    for plain in batch:
        start, end = end + LINE_NBYTES - HEAD.size, end + _room(plain)
        records.append(buffer[start : start + plain.nbytes + OVERHEAD_NBYTES])
    return records
