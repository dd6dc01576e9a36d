"""A demo worker's process: prefill, decode, or both alone; one request, then the end.

Reads a Job and then a Begin as JSON lines on stdin; writes events as JSON lines on stdout. It
ends when its stdin ends, so it does not outlive the demo.

    python -m kvferry.demo.worker
"""

from __future__ import annotations

import base64
import os
import sys
import threading
import time
from contextlib import ExitStack
from statistics import median

import msgspec
import numpy as np

from kvferry.demo.records import Begin, Failed, Finished, Held, Job, Progress, Ready, WorkerEvent
from kvferry.demo.stage import (
    CHUNK_TOKENS,
    REQUEST_ID,
    Continuation,
    continue_to_end,
    load_model,
    make_engine,
    run_alone,
)
from kvferry.engines.reference import ReferenceEngine
from kvferry.errors import KVFerryError, LocalError
from kvferry.layout import BlockTable
from kvferry.transfer import Endpoint, GroupMove, RankGroup, read_bundle

__all__ = ["main"]

TIMEOUT_SECONDS = 30.0
LEASE_SECONDS = 120.0


def main() -> None:
    """Entry of the child process."""
    lines = sys.stdin.buffer
    try:
        job = msgspec.json.decode(lines.readline(), type=Job)
        _run(job)
    except KVFerryError as error:
        emit(Failed(error.to_record()))
    except BrokenPipeError:
        os._exit(1)  # the demo is gone: there is nobody to tell
    except Exception as error:  # noqa: BLE001 - the parent shows it; a silent child would look like a hang
        emit(Failed(LocalError(f"the {sys.argv[0]} process failed: {error!r}").to_record()))


def emit(event: WorkerEvent) -> None:
    """One line for the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def _progress(stage: str, done: int, total: int, text: str) -> None:
    emit(Progress(stage, done, total, text))


def _run(job: Job) -> None:
    started = time.monotonic()
    model = load_model(job.model, job.splits)
    if job.role == "alone":
        emit(Ready(time.monotonic() - started))
        _wait_for_begin()
        emit(_with_output(Finished(0, 0), run_alone(model, job, _progress)))
        return
    engine, pools = make_engine(model, job, shared=True)
    with ExitStack() as stack:
        endpoints = []
        for rank, pool in enumerate(pools):
            stack.callback(pool.close)
            name = job.role if job.tp == 1 else f"{job.role} rank {rank}"
            endpoint = Endpoint.open(
                pool=pool,
                name=name,
                requirements=engine.requirements(),
                tls=job.security.identity,
                plain=job.security.plain,
                conversions=job.conversions,
            )
            endpoints.append(stack.enter_context(endpoint))
        for rank, endpoint in enumerate(endpoints):  # all transfer processes have been started by now
            endpoint.add_addresses((job.address.format(rank=rank),))
        emit(Ready(time.monotonic() - started))
        (_prefill if job.role == "prefill" else _decode)(job, engine, RankGroup(endpoints))


def _wait_for_begin() -> Begin:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)  # the demo is gone; nothing here is worth keeping
    # From here on the parent says nothing more: when its end closes, this process has no purpose.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return msgspec.json.decode(line, type=Begin)


def _end_with_parent() -> None:
    # Not by sys.stdin: a thread that waits inside its lock would crash the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _prefill(job: Job, engine: ReferenceEngine, group: RankGroup) -> None:
    begin = _wait_for_begin()
    total = len(job.prompt_ids)
    engine.submit(REQUEST_ID, job.prompt_ids, job.sampling, job.limits, job.grammar)
    made = Continuation()
    tables = [engine.tables(REQUEST_ID)] * job.tp  # a block has one number at every rank
    started = time.monotonic()
    if job.mode == "pull":
        while not engine.prefill(REQUEST_ID):
            _progress("prefill", engine.request(REQUEST_ID).kv_tokens, total, "")
        _draft(job, engine, made)
        prefilled = time.monotonic()
        state = engine.export_state(REQUEST_ID, job.exactness)
        bundle = group.offer(state, tables, claims=job.peer_tp, lease_seconds=LEASE_SECONDS)
        emit(Held(base64.b64encode(bundle).decode()))
    else:
        bundle = base64.b64decode(begin.bundle)
        push = group.push(bundle, tables, tokens=total, timeout_seconds=LEASE_SECONDS)
        done = False
        while not done:
            # A layer is final for all tokens once the last chunk has passed it: it leaves at once.
            last = engine.request(REQUEST_ID).kv_tokens + CHUNK_TOKENS >= total
            done = engine.prefill(REQUEST_ID, push.layer if last else None)
            _progress("prefill", engine.request(REQUEST_ID).kv_tokens, total, "")
        _draft(job, engine, made)
        prefilled = time.monotonic()
        push.commit(engine.export_state(REQUEST_ID, job.exactness))
    exported = time.monotonic()
    group.outcome(bundle).result(LEASE_SECONDS)
    engine.release(REQUEST_ID)
    finished = Finished(0, 0, prefilled - started, exported - prefilled, ready_at=exported)
    _finish(engine, _with_output(finished, made))


def _draft(job: Job, engine: ReferenceEngine, into: Continuation) -> None:
    """With speculative decoding, prefill gives the first token, and drafts are pending at the handoff."""
    if job.num_drafts:
        into.step(engine)
        if engine.request(REQUEST_ID).finish is not None:
            raise LocalError("the first token ended the output: there is nothing to hand over")
        engine.draft([REQUEST_ID])


def _decode(job: Job, engine: ReferenceEngine, group: RankGroup) -> None:
    if job.mode == "push":
        total = len(job.prompt_ids)
        tables = engine.allocate(total + 2)  # a token that is pending, and the next
        bundle = group.reserve(
            REQUEST_ID, total, [tables] * job.tp, claims=job.peer_tp, lease_seconds=LEASE_SECONDS
        )
        emit(Held(base64.b64encode(bundle).decode()))
        _wait_for_begin()
        move = group.arrival(bundle)
    else:
        bundle = base64.b64decode(_wait_for_begin().bundle)
        tables = engine.allocate(read_bundle(bundle).tokens + 2)
        move = group.pull(bundle, [tables] * job.tp, timeout_seconds=TIMEOUT_SECONDS)
    state = move.result()
    assert state is not None
    arrived = time.monotonic()
    engine.import_state(state, tables)
    imported = time.monotonic()
    made = Continuation()
    first = made.step(engine)
    stepped = time.monotonic()
    move.started()
    _progress("decode", len(made.tokens), job.limits.max_tokens_left, first)
    continue_to_end(engine, made, job.limits.max_tokens_left, _progress)
    engine.release(REQUEST_ID)
    done = Finished(
        0,
        0,
        arrived_at=arrived,
        import_seconds=imported - arrived,
        first_step_seconds=stepped - imported,
        memcpy_seconds=_memcpy_seconds(move),
        blocks_moved=job.tp * _blocks(tables, engine.pool.block_size, state.kv_tokens),
        record=move.record,
    )
    _finish(engine, _with_output(done, made))


def _with_output(done: Finished, made: Continuation) -> Finished:
    return msgspec.structs.replace(
        done, tokens=made.tokens, logits_digest=made.logits_digest, text=made.text, rounds=made.rounds
    )


def _finish(engine: ReferenceEngine, finished: Finished) -> None:
    free, num_blocks = engine.pool.num_free_blocks, engine.pool.group.num_blocks
    emit(msgspec.structs.replace(finished, free_blocks=free, num_blocks=num_blocks))


def _blocks(tables: tuple[BlockTable, ...], block_size: int, tokens: int) -> int:
    return sum(min(len(table.ids), -(-tokens // block_size)) for table in tables)


def _memcpy_seconds(move: GroupMove) -> float:
    """One-thread copy of as many bytes, touched before: the yardstick of this run on this machine."""
    src = np.ones(max(1, move.record.nbytes), np.uint8)
    dst = np.zeros_like(src)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(dst, src)
        times.append(time.perf_counter() - started)
    return median(times)


if __name__ == "__main__":
    main()
