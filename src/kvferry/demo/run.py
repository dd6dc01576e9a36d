"""Runs the demo: two worker processes hand a request over, a third does it alone, and they are compared."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, get_args

import msgspec

from kvferry.demo.records import (
    Begin,
    DemoOptions,
    DemoResult,
    DemoTimings,
    Failed,
    Finished,
    Held,
    Job,
    ModelName,
    Progress,
    Ready,
    WorkerEvent,
)
from kvferry.demo.stage import OnProgress, load_model, possible_tp
from kvferry.demo.storage import check_storage, storage
from kvferry.engines.grammar import OutputGrammar
from kvferry.engines.reference import Model, chat_prompt, check_sampling
from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transport.security import Identity, Plain, Security

__all__ = ["run_demo"]

TRANSPORTS = ("shm", "tcp", "nixl", "mooncake")
MODES = ("pull", "push")
MAX_DRAFTS = 16
QUESTION = "Read this text, then say in a few sentences what it is about.\n\n"
# A worker that says nothing for so long hangs: the slowest step, one prefill chunk or loading
# the weights, takes seconds.
SILENCE_SECONDS = 120.0
# BLAS threads that spin for cores which others use make a small model ten times slower, and
# another number of them changes bits: one a process, in all three.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_event_decoder: msgspec.json.Decoder[WorkerEvent] = msgspec.json.Decoder(WorkerEvent)
Event = TypeVar("Event", Ready, Held, Finished)


def run_demo(options: DemoOptions, on_progress: OnProgress) -> DemoResult:
    """Prefill in one process, decode in another, do the same in a third; compare.

    ``on_progress(stage, done, total, text)`` is told of stages ``load``, ``prefill``, ``decode``
    and ``alone``. Raises InputError naming the option, or the KVFerryError that ended the
    handoff; no process is left behind.
    """
    _check(options)
    name, model = _choose_model(options, on_progress)
    jobs = _jobs(options, name, model)
    total = len(jobs["prefill"].prompt_ids) + options.max_tokens
    with (
        _secured(jobs, options) as jobs,
        _Worker(jobs["prefill"], on_progress) as prefill,
        _Worker(jobs["decode"], on_progress) as decode,
    ):
        for worker in (prefill, decode):
            worker.expect(Ready)
        first, second = (prefill, decode) if options.mode == "pull" else (decode, prefill)
        first.begin(Begin())
        second.begin(Begin(first.expect(Held).bundle))
        made, gave = decode.expect(Finished), prefill.expect(Finished)
    with _Worker(jobs["alone"], on_progress) as worker:
        worker.expect(Ready)
        worker.begin(Begin())
        on_progress("alone", 0, total, "")
        alone = worker.expect(Finished)
    return _result(model, jobs["prefill"], gave, made, alone)


def _check(options: DemoOptions) -> None:
    for field, value, known in (
        ("transport", options.transport, TRANSPORTS),
        ("mode", options.mode, MODES),
        ("model", options.model, ("auto", *get_args(ModelName))),
    ):
        if value not in known:
            raise InputError(f"{field}: {value!r} is not one of {', '.join(known)}")
    if options.max_tokens < 1:
        raise InputError(f"tokens: {options.max_tokens} is less than 1")
    for field, block_size in (
        ("block_size", options.block_size),
        ("decode_block_size", options.decode_block_size),
    ):
        if block_size is not None and not 1 <= block_size <= 4096:
            raise InputError(f"{field}: {block_size} is not from 1 to 4096 tokens")
    if not 0 <= options.num_drafts <= MAX_DRAFTS:
        raise InputError(f"speculative: {options.num_drafts} is not from 0 to {MAX_DRAFTS} drafts a round")
    if options.num_drafts and options.max_tokens < 2:
        raise InputError("tokens: with drafts prefill gives the first token, so at least 2 are needed")
    check_storage(options)
    if options.tls and options.transport != "tcp":
        raise InputError("tls: shared memory stays on the host and is not encrypted; take --transport tcp")
    if options.prompt is not None and not options.prompt.strip():
        raise InputError("prompt: it is empty")


def _choose_model(options: DemoOptions, on_progress: OnProgress) -> tuple[ModelName, Model]:
    """The model that was asked for; ``auto`` takes random weights, and says so, if it must.

    Raises InputError for a number of ranks that cannot share its heads.
    """
    real, random = get_args(ModelName)
    name: ModelName = random if options.model == random else real
    splits = _splits(options)
    on_progress("load", 0, 1, "")
    try:
        model = load_model(name, splits)
    except LocalError as error:
        if options.model != "auto":
            raise
        print(f"kvferry: random weights instead of SmolLM2: {error}", file=sys.stderr)
        name, model = random, load_model(random, splits)
    on_progress("load", 1, 1, "")
    possible = possible_tp(model)
    for field, tp in zip(("tp", "decode_tp"), splits, strict=True):
        if tp not in possible:
            config, known = model.config, ", ".join(map(str, possible))
            raise InputError(
                f"{field}: {tp} ranks cannot share the {config.heads} heads and {config.kv_heads} KV heads"
                f" of {model.name}; {known} can"
            )
    return name, model


def _splits(options: DemoOptions) -> tuple[int, int]:
    return options.tp, options.tp if options.decode_tp is None else options.decode_tp


def _jobs(options: DemoOptions, name: ModelName, model: Model) -> dict[str, Job]:
    text = QUESTION + files("kvferry.demo").joinpath("prompt.txt").read_text("utf-8")
    ids = model.tokenizer.encode(chat_prompt(text if options.prompt is None else options.prompt))
    room = model.config.max_context - options.max_tokens
    if len(ids) > room:
        raise InputError(
            f"prompt: {len(ids)} tokens and {options.max_tokens} to come do not fit the context of "
            f"{model.config.max_context} tokens"
        )
    sampling = SamplingParameters(
        temperature=options.temperature, seed=0 if options.seed is None else options.seed
    )
    check_sampling(sampling, model.config.vocab_size)
    if options.grammar is not None:
        OutputGrammar(options.grammar, model.tokenizer, model.config.vocab_size)  # it says what is wrong
    exactness, conversions = storage(options)
    decode_dtype = options.decode_dtype or options.dtype
    jobs = {}
    for role, block_size, axis_order, dtype in (
        ("alone", options.block_size, options.axis_order, options.dtype),
        ("prefill", options.block_size, options.axis_order, options.dtype),
        (
            "decode",
            options.decode_block_size or options.block_size,
            options.decode_axis_order or options.axis_order,
            decode_dtype,
        ),
    ):
        # The name holds this process's id, so that demos side by side do not meet.
        address = f"{options.transport}://127.0.0.1:0"
        if options.transport == "mooncake":
            address += "?wildcard=yes"  # who asks for it has its engine's listeners; it warns of them
        if options.transport == "shm":
            address = f"shm://demo-{os.getpid()}-{role}-{{rank}}"
        jobs[role] = Job(
            role=role,  # type: ignore[arg-type]  # one of the three literals above
            mode=options.mode,  # type: ignore[arg-type]  # checked above
            model=name,
            address=address,
            prompt_ids=ids,
            sampling=sampling,
            limits=Limits(max_tokens_left=options.max_tokens),
            block_size=block_size,
            axis_order=axis_order,
            dtype=dtype,
            decode_dtype=decode_dtype,
            exactness=exactness,
            conversions=conversions,
            splits=_splits(options),
            num_drafts=options.num_drafts,
            grammar=options.grammar,
        )
    return jobs


@contextlib.contextmanager
def _secured(jobs: dict[str, Job], options: DemoOptions) -> Iterator[dict[str, Job]]:
    """The jobs with identities that each other's workers take, while the block runs."""
    if not options.tls:
        yield jobs
        return
    from kvferry.transport.certificates import init_authority, issue  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as name:
        folder = Path(name)
        init_authority(folder, days=1)
        secured = dict(jobs)
        for role, peer in (("prefill", "decode"), ("decode", "prefill")):
            identity = Identity.load(issue(folder, role, days=1), folder / "ca.pem", peers=(peer,))
            secured[role] = msgspec.structs.replace(jobs[role], security=Security(identity, Plain.NEVER))
        yield secured


class _Worker:
    """One child process; killed, if it has not ended, when the demo leaves it."""

    def __init__(self, job: Job, on_progress: OnProgress) -> None:
        self._job = job
        self._on_progress = on_progress
        self._events: queue.SimpleQueue[WorkerEvent | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
            process_group=0,  # Ctrl-C is the demo's: it ends its workers itself
        )
        self._reader = threading.Thread(target=self._read, name=f"demo-{self._job.role}")
        try:  # Ctrl-C may come here too
            self._reader.start()
            self._tell(self._job)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def begin(self, begin: Begin) -> None:
        """Let the worker go."""
        self._tell(begin)

    def expect(self, kind: type[Event]) -> Event:
        """Its next event of this kind; progress is passed on. Raises its error, or its silence."""
        while True:
            try:
                event = self._events.get(timeout=SILENCE_SECONDS)
            except queue.Empty:
                raise DeadlineError(
                    f"the {self._job.role} worker said nothing for {SILENCE_SECONDS:.0f} s",
                    next_step="the machine may be out of memory, or very slow; try --tokens 8",
                ) from None
            if isinstance(event, kind):
                return event
            if isinstance(event, Progress):
                self._on_progress(event.stage, event.done, event.total, event.text)
            elif isinstance(event, Failed):
                raise KVFerryError.from_record(event.error)
            else:
                status = self._process.wait(SILENCE_SECONDS)
                raise LocalError(f"the {self._job.role} worker ended with status {status}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        if error is not None:
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _tell(self, message: Job | Begin) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LocalError(f"the {self._job.role} worker ended before it began") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(_event_decoder.decode(line))
        self._events.put(None)


def _result(model: Model, job: Job, gave: Finished, made: Finished, alone: Finished) -> DemoResult:
    record = made.record
    assert record is not None
    for role, worker in (("prefill", gave), ("decode", made)):
        if worker.free_blocks != worker.num_blocks:
            raise LocalError(f"the {role} worker still holds {worker.num_blocks - worker.free_blocks} blocks")
    timings = record.timings
    move = timings.claim + timings.move
    if job.mode == "push":  # most of it went on beside prefill: what is left is what was waited for
        move = max(0.0, made.arrived_at - gave.ready_at - timings.verify - timings.commit)
    parts = (
        gave.prefill_seconds,
        gave.export_seconds,
        timings.handshake,
        move,
        timings.verify,
        timings.commit,
        made.import_seconds,
        made.first_step_seconds,
    )
    tokens, text = gave.tokens + made.tokens, gave.text + made.text
    tokens_identical = tokens == alone.tokens
    logits_identical = gave.logits_digest + made.logits_digest == alone.logits_digest
    return DemoResult(
        model=model.name,
        prompt_tokens=len(job.prompt_ids),
        output_tokens=len(tokens),
        text=text,
        identical=tokens_identical and logits_identical and text == alone.text,
        tokens_identical=tokens_identical,
        logits_identical=logits_identical,
        transport_used=record.transport,
        path=record.path,
        mode=job.mode,
        wire_bytes=record.nbytes + record.state_nbytes,
        payload_bytes=record.nbytes,
        state_bytes=record.state_nbytes,
        blocks=made.blocks_moved,
        descriptors=record.descriptors,
        bytes_per_second=record.bytes_per_second,
        memcpy_ratio=record.bytes_per_second * made.memcpy_seconds / record.nbytes if record.nbytes else 0.0,
        timings=DemoTimings(*parts, sum(parts)),
        num_drafts=job.num_drafts,
        accepted_drafts=len(tokens) - gave.rounds - made.rounds,
        conversions=list(record.conversions),
        is_lossy=job.exactness is Exactness.BEST_EFFORT,
    )
