"""What the engine holds of a transfer that is under way: decode a Move, prefill a Push."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.layout import BlockTable
from kvferry.state import ExecutionState, decode_state, encode_state, unpack_ids
from kvferry.transfer import calls as c
from kvferry.transfer.client import NodeClient
from kvferry.transfer.trace import TransferRecord

__all__ = ["CALL_SECONDS", "LOOK_SECONDS", "Move", "Push", "cancel", "encode_for"]

# A node answers at once; its first answer waits for its process to start, slow on a busy machine.
CALL_SECONDS = 30.0
# For who only looks: within a scrape, which usually has 10 s, that the node is frozen has to be said.
LOOK_SECONDS = 4.0
_AGAIN = "this side ended it; offer, reserve or pull again to retry"


class Move:
    """Decode's side of one transfer: a future of the execution state.

    Until ``result`` returns, nothing is visible. After it, the state and all its blocks are.
    """

    def __init__(
        self,
        client: NodeClient,
        transfer: bytes,
        arrival: Future[Any],
        limit_seconds: float,
        request_id: str,
    ) -> None:
        self._client = client
        self._request_id = request_id
        self.arrival = arrival
        self.limit_seconds = limit_seconds
        self.transfer = transfer

    def result(self) -> ExecutionState | None:
        """Wait for the commit; None when the payload came without a state (a probe).

        Raises the KVFerryError that ended the transfer; then nothing is visible and the
        blocks are the caller's again. Ends by the timeout of the pull, or the lease of the
        reservation, plus the time an abort may take.
        """
        with _about(self._request_id):
            state = self._client.wait(self.arrival, self.limit_seconds).state
        return decode_state(state) if state else None

    @property
    def record(self) -> TransferRecord:
        """What moved and how; after ``result`` returned."""
        record: TransferRecord = self.arrival.result(0).record
        return record

    def started(self) -> None:
        """The engine runs on from the state: prefill may forget its copy."""
        with _about(self._request_id):
            self._client.call(c.StartCall, CALL_SECONDS, transfer=self.transfer)

    def abort(self, error: KVFerryError | str) -> None:
        """Give the transfer up, before or after it arrived (an import that refused, a cancelled request)."""
        self._client.wait(cancel(self._client, self.transfer, error), CALL_SECONDS)


class Push:
    """Prefill's side of a push that is under way: parts, then one commit.

    With integrity each part is summed when it is given and once more at commit: a part that was written
    after it had moved passes every other check, and is refused by the second sum.
    """

    def __init__(
        self,
        client: NodeClient,
        transfer: bytes,
        tokens: int,
        limit_seconds: float,
        request_id: str,
        *,
        lent: Mapping[str, BlockTable],
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._lent = lent
        self._limit_seconds = limit_seconds
        self._tokens = tokens
        self.transfer = transfer

    def layers(
        self, first_layer: int, stop_layer: int, *, first_token: int = 0, stop_token: int | None = None
    ) -> None:
        """These layers are final for these tokens: they may move now, while prefill computes on.

        Raises what ended the transfer, once it has ended.
        """
        with _about(self._request_id):
            self._client.call(
                c.LayersCall,
                self._limit_seconds,
                transfer=self.transfer,
                first_layer=first_layer,
                stop_layer=stop_layer,
                first_token=first_token,
                stop_token=self._tokens if stop_token is None else stop_token,
            )

    def layer(self, layer: int) -> None:
        """One layer is final for all tokens."""
        self.layers(layer, layer + 1)

    def commit(self, state: ExecutionState | None) -> None:
        """All parts were given and this is the state; decode's answer comes by ``Endpoint.outcome``."""
        encoded = encode_for(state, self.transfer, self._limit_seconds, self._lent)
        with _about(self._request_id):
            self._client.call(c.CommitCall, self._limit_seconds, transfer=self.transfer, state=encoded)

    def abort(self, error: KVFerryError | str) -> None:
        """Give the push up; decode's reservation ends too."""
        self._client.wait(cancel(self._client, self.transfer, error), CALL_SECONDS)


@contextlib.contextmanager
def _about(request_id: str) -> Iterator[None]:
    """What ends a call of a handle is told with its request, also by a node that is gone."""
    try:
        yield
    except KVFerryError as error:
        error.with_context(request_id=request_id)
        raise


def encode_for(
    state: ExecutionState | None, transfer: bytes, lease_seconds: float, lent: Mapping[str, BlockTable]
) -> bytes:
    """The state as this attempt carries it: the id that both sides echo, and the lease from now on.

    ``lent``: the block tables given beside it, by group. Raises InputError where the state names
    other blocks: one of the two is another request's.
    """
    if state is None:
        return b""
    if not isinstance(state, ExecutionState):
        raise InputError(f"state: a {type(state).__name__} is not an ExecutionState")
    for blocks in state.blocks:
        table = lent.get(blocks.group)
        if table is None:
            continue  # of another rank
        ids = unpack_ids(blocks.ids)
        given = np.asarray(table.ids)[: len(ids)]
        if blocks.first_logical_block != table.first_block or not np.array_equal(ids, given):
            raise InputError(
                f"tables: group {blocks.group!r} lies in other blocks than its state says",
                next_step="give the block tables of the request whose state this is",
            )
    replaced = msgspec.structs.replace(state, transfer_id=transfer, lease_ms=int(lease_seconds * 1e3))
    return encode_state(replaced)


def cancel(
    client: NodeClient, transfer: bytes, error: KVFerryError | str, *, unclaimed_only: bool = False
) -> Future[Any]:
    """Tell the node to give a transfer up; the future only says that it was told."""
    known = LocalError(error, next_step=_AGAIN) if isinstance(error, str) else error
    return client.submit(
        c.CancelCall, transfer=transfer, error=known.to_record(), unclaimed_only=unclaimed_only
    )
