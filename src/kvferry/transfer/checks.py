"""What decode's transfer side asks of a state before bytes move, and again before it is visible.

The checks themselves are in ``kvferry.state``; here they get what this node knows: the
reservation, the lease, what was seen before, and what arrived.
"""

from __future__ import annotations

import functools
import hashlib
import time
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import CorruptError, IncompatibleError, PeerError
from kvferry.layout import BlockTable, Conversions, GroupLayout, PoolLayout, convert_dtype, rank_plan
from kvferry.protocol.compat import agreed_conversions
from kvferry.protocol.prefix import HeldPrefix, agreed_tokens, prefix_salt
from kvferry.protocol.ticket import Mode
from kvferry.state import (
    Arrival,
    ExecutionState,
    Expectation,
    GroupArrival,
    GroupBlocks,
    GroupRoom,
    LandedBlocks,
    LoraAdapter,
    Requirements,
    TensorEntry,
    check_after_move,
    check_before_move,
    decode_state,
    unpack_ids,
)
from kvferry.transfer.integrity import DigestTable
from kvferry.transfer.portions import plan_portions
from kvferry.transfer.windows import lossy_conversions

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["agree", "as_stored", "before_move", "before_visible"]

_MAX_BLOCKS = (1 << 31) - 1


def before_move(session: Session, requirements: Requirements | None, known: bool, newest_attempt: int) -> int:
    """Checks 1 to 10 of the state that prefill showed; returns the state's attempt number.

    A push may show its state only at commit; then only the room is checked here. Without an
    engine (a probe) there is no state to check. Raises what the failed check says.
    """
    _agree_on_tokens(session)
    if not session.portions:
        assert session.peer is not None
        allowed = agreed_conversions(session.node.party, session.peer.party)
        _covers_all(session.peer.party.layout, session.config.layout, allowed)
    if session.mode is Mode.PUSH and not session.state and session.commit is None:
        return newest_attempt
    if requirements is None:
        if session.state:
            raise IncompatibleError("a state was sent to a side that has no engine to start it")
        return newest_attempt
    state = decode_state(session.state)
    if state.transfer_id != session.transfer:
        raise CorruptError("transfer_id: the state belongs to another transfer", phase="check")
    if state.kv_tokens != session.tokens:
        raise PeerError(f"tokens: {session.tokens} were announced, the state covers {state.kv_tokens}")
    state = as_stored(session, state)
    check_before_move(state, requirements, _expectation(session, requirements, known, newest_attempt))
    return state.attempt


def before_visible(
    session: Session, requirements: Requirements | None, exported: DigestTable, arrived: DigestTable
) -> None:
    """Checks 11, 12 and 17: every byte arrived, into this transfer's blocks, while the lease holds.

    The chunks' digests were compared before; here their places.
    """
    session.payload.check_covered()
    if requirements is None:
        return
    if session.held_tokens > (like := agree(session, session.held)):
        raise PeerError(
            f"held_tokens: {session.held_tokens} were left out, but the state's own ids agree with "
            f"{like} of those that decode holds",
            phase="check",
            next_step="give push the prompt_ids of the state, or none",
        )
    state = as_stored(session, decode_state(session.state))
    integrity = session.config.integrity
    groups = tuple(
        GroupArrival(
            group=group.name,
            expected_nbytes=nbytes,
            nbytes=nbytes,
            peer_digest=_digest(exported) if integrity else None,
            local_digest=_digest(arrived) if integrity else None,
        )
        for group, nbytes in _group_nbytes(session)
    )
    arrival = Arrival(
        transfer_id=session.transfer,
        groups=groups,
        landed=_landed(session, state),
        lease_seconds_left=session.lease_deadline - time.monotonic(),
    )
    check_after_move(_of_this_rank(session, state), requirements, arrival)


def as_stored(session: Session, state: ExecutionState) -> ExecutionState:
    """The state with its tensors in the dtypes that this side stores, where the transfer converts them.

    A tensor that is not of the dtype that prefill's pool has, or that nothing converts, stays as it is,
    and check 7 refuses it.
    """
    requirements, form = session.config.requirements, session.form
    if requirements is None or form is None:
        return state
    allowed = agreed_conversions(session.node.party, session.peer.party) if session.peer else None
    scaled = allowed is not None and allowed.wire is not None
    needed = {(need.layer, need.role, need.part): need for need in requirements.cache}
    held = {(wire.src.layer, wire.src.role, wire.src.part): wire.src.dtype for wire in form}

    def stored(entry: TensorEntry) -> TensorEntry:
        key = (entry.layer, entry.role, entry.part)
        need, bound = needed.get(key), None
        if need is not None and entry.group is not None and held.get(key, entry.dtype) == entry.dtype:
            bound = convert_dtype(entry.dtype, need.dtype)
        if need is None or bound is None or not (bound.is_exact or scaled or (allowed and allowed.lossy)):
            return entry
        return msgspec.structs.replace(entry, dtype=need.dtype)

    return msgspec.structs.replace(state, tensors=tuple(stored(entry) for entry in state.tensors))


def agree(session: Session, held: HeldPrefix) -> int:
    """The leading tokens that decode holds, by its hashes and the state's ids (a push: or prefill's)."""
    requirements = session.config.requirements
    if not held.hashes or requirements is None:
        return 0
    ids = session.prompt_ids
    adapters: tuple[LoraAdapter, ...] = ()
    media: tuple[str, ...] = ()
    if session.state:
        state = decode_state(session.state)
        ids = state.tokens.ids
        adapters = state.fingerprint.lora
        media = () if state.multimodal is None else state.multimodal.hashes
    salt = prefix_salt(requirements.fingerprint, adapters=adapters, media=media)
    return min(agreed_tokens(held, unpack_ids(ids), salt), session.tokens)


@functools.lru_cache(maxsize=64)
def _covers_all(prefill: PoolLayout, decode: PoolLayout, allowed: Conversions | None) -> None:
    """Raise IncompatibleError unless prefill's one rank holds every layer and head that decode's holds.

    A plan moves what both hold; the rest would stay whatever lay in decode's blocks before. Ranks
    that hold a part each are a ``RankGroup``, which claims portions and checks their union.
    """
    try:
        rank_plan((prefill,), (decode,), allowed)
    except IncompatibleError as error:
        raise error.with_context(
            phase="check",
            now_true="nothing moved; decode's blocks are free; prefill keeps its copy",
            next_step="hand over from all of prefill's ranks together, by RankGroup",
        ) from None


def _agree_on_tokens(session: Session) -> None:
    """A pull moves what its ticket said; a push at most what was reserved, and then exactly that."""
    announced, here = session.peer_tokens, session.tokens
    if session.mode is Mode.PULL and announced != here:
        raise PeerError(f"tokens: the ticket says {here}, the offer {announced}")
    if announced > here:
        raise PeerError(f"tokens: {announced} are pushed, {here} were reserved")
    session.tokens = announced


def _expectation(
    session: Session, requirements: Requirements, known: bool, newest_attempt: int
) -> Expectation:
    here = {group.name for group in session.config.layout.groups}
    elsewhere = [need.group for need in requirements.groups if need.group not in here]
    return Expectation(
        request_id=session.request_id,
        known_transfer_ids=(session.transfer,) if known else (),
        newest_attempt=newest_attempt,
        room=(
            *(
                GroupRoom(group=group.name, num_blocks=len(table.ids))
                for group, table in zip(session.config.layout.groups, session.tables, strict=True)
            ),
            # Of groups that lie at other ranks of this worker, those ranks say whether there is room.
            *(GroupRoom(group=name, num_blocks=_MAX_BLOCKS) for name in elsewhere if session.portions),
        ),
        batch_slots=1,
        lease_seconds_left=session.lease_deadline - time.monotonic(),
        estimated_seconds=0.0,
        compiled_grammars=None,  # the engine's own affair: it compiles before the request is visible
        bytes_moved=session.payload.nbytes,
        lossy=lossy_conversions(session.form),
    )


def _group_nbytes(session: Session) -> list[tuple[GroupLayout, int]]:
    """Payload bytes of each group that this session moves, by this side's own layout and tables."""
    layout = session.config.layout
    found = []
    for group, table in zip(layout.groups, session.tables, strict=True):
        rank = (PoolLayout((group,), layout.nbytes), (table,))
        plan = plan_portions(session.portions, rank, rank, session.tokens, layers=rank[0].layers)
        found.append((group, plan.total_nbytes))
    return found


def _of_this_rank(session: Session, state: ExecutionState) -> ExecutionState:
    """The state without the block tables of groups that lie at other ranks of this worker only."""
    here = {group.name for group in session.config.layout.groups}
    if not session.portions:
        return state
    return msgspec.structs.replace(
        state, blocks=tuple(blocks for blocks in state.blocks if blocks.group in here)
    )


def _landed(session: Session, state: ExecutionState) -> tuple[LandedBlocks, ...]:
    wanted = {blocks.group: blocks for blocks in state.blocks}
    landed = []
    for group, table in zip(session.config.layout.groups, session.tables, strict=True):
        covered = session.tokens if table.tokens is None else table.tokens  # a cross table states its own
        used = len(table.ids)
        if group.block_size:
            used = -(-covered // group.block_size) - table.first_block
        blocks = GroupBlocks.of(
            group.name,
            BlockTable(table.first_block, table.ids[:used], table.tokens),
            block_tokens=group.block_size,
            layout=wanted[group.name].layout if group.name in wanted else "local",
        )
        landed.append(LandedBlocks(blocks=blocks, owner=session.transfer))
    return tuple(landed)


def _digest(table: DigestTable) -> str:
    chunk_id, digests = table
    return hashlib.sha256(chunk_id.tobytes() + digests.tobytes()).hexdigest()
