"""What the demo is asked, what its processes tell each other, and what it answers. Plain records."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.engines.reference import GrammarText
from kvferry.errors import ErrorRecord
from kvferry.layout import Conversions
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transfer import TransferRecord
from kvferry.transport.security import HOST_ONLY, Security

__all__ = [
    "AxisOrder",
    "Begin",
    "DemoOptions",
    "DemoResult",
    "DemoTimings",
    "Dtype",
    "Failed",
    "Finished",
    "Held",
    "Job",
    "Progress",
    "Ready",
    "WorkerEvent",
]

ModelName = Literal["smollm2", "tiny"]
Dtype = Literal["float32", "float16", "bfloat16"]
AxisOrder = Literal["NHD", "HND", "HND-transposed"]


class DemoOptions(msgspec.Struct, frozen=True):
    """One demo. ``prompt`` None: the project's own text. ``model`` auto: real weights if installed.

    ``num_drafts``: of a round of speculative decoding; with them prefill also gives the first token, and
    hands over with drafts pending. ``tls``: encrypt tcp, by an authority made for this demo.
    ``HND-transposed``: keys are stored transposed inside a block. ``allow_lossy``: values may be rounded
    on the way; ``wire_format``: the form that they cross in.
    """

    transport: str = "shm"
    mode: str = "pull"
    prompt: str | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    model: str = "auto"
    block_size: int = 16
    decode_block_size: int | None = None
    axis_order: str = "NHD"
    decode_axis_order: str | None = None
    dtype: str = "float32"
    decode_dtype: str | None = None
    allow_lossy: bool = False
    wire_format: str | None = None
    tp: int = 1
    decode_tp: int | None = None
    num_drafts: int = 0
    grammar: GrammarText | None = None
    tls: bool = False


class Job(msgspec.Struct, frozen=True):
    """The first line that a worker reads.

    ``splits``: ranks of the prefill and of the decode worker. ``address``: of a rank, with its number
    for ``{rank}``. ``dtype`` is this worker's, ``conversions`` what both allow.
    """

    role: Literal["prefill", "decode", "alone"]
    mode: Literal["pull", "push"]
    model: ModelName
    address: str
    prompt_ids: list[int]
    sampling: SamplingParameters
    limits: Limits
    block_size: int
    axis_order: str
    dtype: str
    decode_dtype: str
    exactness: Exactness
    conversions: Conversions | None
    splits: tuple[int, int]
    num_drafts: int = 0
    grammar: GrammarText | None = None
    security: Security = HOST_ONLY

    @property
    def tp(self) -> int:
        """Ranks of this worker."""
        return {"prefill": self.splits[0], "decode": self.splits[1], "alone": 1}[self.role]

    @property
    def peer_tp(self) -> int:
        """Ranks of the other worker."""
        return self.splits[0] if self.role == "decode" else self.splits[1]


class Begin(msgspec.Struct, frozen=True):
    """Go. ``bundle`` (base64) where the other worker issued one."""

    bundle: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Model loaded, pool allocated, listening."""

    load_seconds: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Tokens of a stage that are done; of decode also the text that a client would see."""

    stage: str
    done: int
    total: int
    text: str = ""


class Held(msgspec.Struct, frozen=True, tag=True):
    """An offer or a reservation is held; base64."""

    bundle: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """What a worker did: prefill its times, decode the move; the output of each, in ``rounds`` steps.

    ``free_blocks`` of ``num_blocks`` at the end: equal when nothing stayed held.
    ``logits_digest``: one xxh3-64 for each step's logits. Times in seconds; ``ready_at`` is when
    prefill had computed and exported, ``arrived_at`` when decode had everything, both by this
    host's monotonic clock, which its processes share.
    """

    free_blocks: int
    num_blocks: int
    prefill_seconds: float = 0.0
    export_seconds: float = 0.0
    ready_at: float = 0.0
    arrived_at: float = 0.0
    import_seconds: float = 0.0
    first_step_seconds: float = 0.0
    memcpy_seconds: float = 0.0
    tokens: list[int] = []
    logits_digest: list[int] = []
    text: str = ""
    rounds: int = 0
    blocks_moved: int = 0
    record: TransferRecord | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker gives up."""

    error: ErrorRecord


WorkerEvent = Ready | Progress | Held | Finished | Failed


class DemoTimings(msgspec.Struct, frozen=True):
    """Seconds of the handoff, in order. ``total``: from the prompt to decode's first own step.

    ``move`` is what a request waits for: in a push, the part after prefill had finished.
    """

    prefill: float
    export: float
    handshake: float
    move: float
    verify: float
    commit: float
    import_: float = msgspec.field(name="import")
    first_decode_step: float = 0.0
    total: float = 0.0


class DemoResult(msgspec.Struct, frozen=True):
    """What happened; the JSON object of ``kvferry demo --json``.

    ``accepted_drafts``: output tokens that were drafts which held, with ``num_drafts`` a round.
    ``conversions``: what was done to values on the way; ``is_lossy``: some may have been rounded, so the
    two continuations may differ.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    text: str
    identical: bool
    tokens_identical: bool
    logits_identical: bool
    transport_used: str
    path: str
    mode: str
    wire_bytes: int
    payload_bytes: int
    state_bytes: int
    blocks: int
    descriptors: int
    bytes_per_second: float
    memcpy_ratio: float
    timings: DemoTimings
    num_drafts: int = 0
    accepted_drafts: int = 0
    conversions: list[str] = []
    is_lossy: bool = False
