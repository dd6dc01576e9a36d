"""The tables of a cluster file, each key with its bounds; docs/cluster-file.md is written from here.

Every quantity has its unit in the text ("2s", "47 GB/s", "40 GB"); counts and tokens are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.errors import InputError
from kvferry.units import parse_bytes, parse_rate, parse_seconds

__all__ = [
    "ClusterFile",
    "EngineTable",
    "FleetTable",
    "GpuTable",
    "LinkTable",
    "LinksTable",
    "NodeTable",
    "PlanTable",
    "PoolTable",
    "ProfileTable",
    "SloTable",
    "Table",
    "UplinkTable",
    "WorkloadTable",
]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=10**6)]
Tokens = Annotated[int, Meta(ge=1, le=10**9)]
Share = Annotated[float, Meta(gt=0, le=1)]


def _time(text: str, field: str, *, from_zero: bool = False) -> None:
    if not any(character.isalpha() for character in text):
        raise ValueError(f"{field}: {text!r} has no unit, as in '200ms'")
    _above(parse_seconds, text, field, from_zero=from_zero)


def _memory(text: str, field: str) -> None:
    if not any(character.isalpha() for character in text):
        raise ValueError(f"{field}: {text!r} has no unit, as in '40 GB'")
    _above(parse_bytes, text, field)


def _above(parse: Callable[[str, str], float], text: str, field: str, *, from_zero: bool = False) -> None:
    # msgspec tells where a ValueError was raised, and nothing of other errors.
    try:
        value = parse(text, field)
    except InputError as error:
        raise ValueError(error.message) from None
    if value <= 0 and not from_zero:
        raise ValueError(f"{field}: {text!r} is not above 0")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the tables: no key that is not known."""


class SloTable(Table, frozen=True):
    """What is promised.

    Args:
        ttft: the time to the first token, as in "1s".
        tpot: the time of each token after it, as in "60ms".
        attainment: the share of the requests that keeps to both.
    """

    ttft: Name
    tpot: Name
    attainment: Share = 0.9

    def __post_init__(self) -> None:
        _time(self.ttft, "ttft")
        _time(self.tpot, "tpot")


class WorkloadTable(Table, frozen=True):
    """A trace, or lengths with a rate.

    Args:
        trace: a file of requests.
        rate: requests a second; beside a trace with times it stretches them.
        prompt_tokens: of each request.
        output_tokens: of each request.
    """

    trace: Name | None = None
    rate: float | None = None
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate: {self.rate} is not above 0")
        lengths = (self.prompt_tokens, self.output_tokens)
        if (self.trace is None) != all(lengths):
            raise ValueError("trace: give trace, or prompt_tokens and output_tokens with rate")
        if self.trace is None and self.rate is None:
            raise ValueError("rate: missing; lengths need a rate in requests a second")


class EngineTable(Table, frozen=True):
    """How the engines work, all alike.

    Args:
        first_token: who emits it.
        overlap: layer: KV leaves while prefill computes.
        sync: a fixed cost of each handoff.
        chunk_tokens: chunked prefill of colocated instances; each size is tried.
        max_batch: requests that decode together.
        staging: handoffs on the way to one decode instance at once; without it no limit.
        prefill_batch_tokens: short prompts are computed together up to so many tokens; 0: one by one.
        mixed: how long a step with prefill and decode takes; without it both ends are told.
    """

    first_token: Literal["decode", "prefill"] = "decode"  # noqa: S105 - a token of text
    overlap: Literal["none", "layer"] = "none"
    sync: Name = "0s"
    chunk_tokens: Tokens | Annotated[tuple[Tokens, ...], Meta(min_length=1, max_length=8)] = (512, 2048, 8192)
    max_batch: Count = 256
    staging: Count | None = None
    prefill_batch_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 0
    mixed: Literal["longer", "sum", "measured"] | None = None

    def __post_init__(self) -> None:
        _time(self.sync, "sync", from_zero=True)


class ProfileTable(Table, frozen=True):
    """A compute profile.

    Args:
        profile: a file, or the name of a published one.
        model: which of the file's models.
        gpu: which of its GPUs.
        tp: measured with so many tensor-parallel ranks.
        pp: and so many pipeline stages.
    """

    profile: Name
    model: Name | None = None
    gpu: Name | None = None
    tp: Count | None = None
    pp: Count | None = None


class GpuTable(Table, frozen=True):
    """A kind of GPU: the profiles measured on it, one for each tp and pp that may be used.

    Args:
        profiles: published ones by name, or files.
        kv_memory: for KV on one GPU, beside the weights.
        roles: what it may do.
    """

    profiles: Annotated[tuple[Name | ProfileTable, ...], Meta(min_length=1, max_length=64)]
    kv_memory: Name | None = None
    roles: tuple[Literal["prefill", "decode", "colocated"], ...] = ("prefill", "decode", "colocated")

    def __post_init__(self) -> None:
        if self.kv_memory is not None:
            _memory(self.kv_memory, "kv_memory")


class NodeTable(Table, frozen=True):
    """Nodes that are alike.

    Args:
        gpu: which of gpus they have.
        gpus: how many of it each has.
        count: how many nodes.
        domain: the NVLink domain that they share; without it each is its own.
        rack: the rack that they stand in.
        pod: the pod that the rack is of.
    """

    gpu: Name
    gpus: Annotated[int, Meta(ge=1, le=1024)] = 8
    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    domain: Name | None = None
    rack: Name = "rack0"
    pod: Name = "pod0"


class LinkTable(Table, frozen=True):
    """A tier's link: from a link file (a pair, or all pairs of a class), a preset, or typed by hand.

    Typed by hand it counts as measured only where ``measured`` says how and when.

    Args:
        file: a link file that `kvferry probe` wrote, or a preset's name.
        from_node: the prefill node of the pair that is taken from the file.
        to_node: its decode node.
        link_class: all pairs of this class instead, such as "same pod".
        transport: the one that is meant, where the file has several.
        mode: push or pull; without it the one that the file has.
        tls: the measurement with encryption.
        incast: the measurement with so many senders at once.
        under_load: the measurement with other traffic beside.
        links: so many of it side by side.
        rate: by hand, with its unit, as in "47 GB/s".
        start: by hand, what a handoff takes before its first byte.
        descriptor: by hand, what each piece takes.
        measured: how and when the numbers by hand were measured.
    """

    file: Name | None = None
    from_node: Name | None = msgspec.field(default=None, name="from")
    to_node: Name | None = msgspec.field(default=None, name="to")
    link_class: Name | None = msgspec.field(default=None, name="class")
    transport: Name | None = None
    mode: Literal["push", "pull"] | None = None
    tls: bool = False
    incast: Count = 1
    under_load: bool = False
    links: Count = 1
    rate: Name | None = None
    start: Name = "0s"
    descriptor: Name = "0s"
    measured: Name | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.rate is None):
            raise ValueError("rate: give file (a link file or a preset), or rate")
        if self.rate is not None:
            _above(parse_rate, self.rate, "rate")
        for field in ("start", "descriptor"):
            _time(getattr(self, field), field, from_zero=True)


class LinksTable(Table, frozen=True):
    """What lies between two instances, by the nearest thing that both share.

    Args:
        domain: between two of one NVLink domain.
        rack: between two of one rack.
        pod: between two of one pod.
        cluster: between all others.
    """

    domain: Name | LinkTable | None = None
    rack: Name | LinkTable | None = None
    pod: Name | LinkTable | None = None
    cluster: Name | LinkTable | None = None


class UplinkTable(Table, frozen=True):
    """Rates that many handoffs share, each way, as in "376 GB/s".

    Args:
        node: all those of a node.
        rack: all those that leave or enter a rack.
        pod: all those that leave or enter a pod.
    """

    node: Name | None = None
    rack: Name | None = None
    pod: Name | None = None

    def __post_init__(self) -> None:
        for field in ("node", "rack", "pod"):
            value = getattr(self, field)
            if value is not None:
                _above(parse_rate, value, field)


class PlanTable(Table, frozen=True):
    """How ``plan`` decides.

    Args:
        margin: by how much disaggregation must be better to be chosen.
        exposed_share: a candidate whose p95 exposed transfer takes more of the TTFT target is rejected.
        max_gpus: of one unit that is simulated and then repeated.
        requests: the fewest that are simulated at each rate that is tried.
        policy: how prefill and decode are paired.
    """

    margin: Annotated[float, Meta(ge=0, le=10)] = 0.05
    exposed_share: Share = 0.1
    max_gpus: Annotated[int, Meta(ge=1, le=1024)] = 64
    requests: Annotated[int, Meta(ge=50, le=10**6)] = 1000
    policy: Literal["round_robin", "load", "cache", "network_cost"] = "network_cost"


class PoolTable(Table, frozen=True):
    """Instances of one role.

    Args:
        gpu: which of gpus they run on.
        count: how many there are.
        tp: tensor-parallel ranks of each; a profile has to have them.
        pp: pipeline stages of each.
    """

    gpu: Name
    count: Count
    tp: Count
    pp: Count = 1


class FleetTable(Table, frozen=True):
    """What runs, for ``simulate``: prefill and decode, or colocated.

    Args:
        prefill: the prefill workers.
        decode: the decode workers.
        colocated: workers that do both.
    """

    prefill: PoolTable | None = None
    decode: PoolTable | None = None
    colocated: PoolTable | None = None

    def __post_init__(self) -> None:
        apart = self.prefill is not None and self.decode is not None
        if apart == (self.colocated is not None) or (self.prefill is None) != (self.decode is None):
            raise ValueError("prefill: give prefill and decode, or colocated")


class ClusterFile(Table, frozen=True):
    """What stands above every table.

    Args:
        model: a config.json, its folder, or shape:LAYERSxKV_HEADSxHEAD_DIM.
        slo: what is promised.
        workload: what is asked.
        gpus: kinds of GPU.
        nodes: what there is of them, and where.
        links: what lies between instances.
        uplinks: what they share on the way.
        engine: how the engines work.
        plan: how `plan` decides.
        fleet: what runs, for `simulate`.
        kv_dtype: of K and V; without it the config's own.
        block_size: tokens a block.
        encoder_tokens: of each request, for models with an encoder.
    """

    model: Name
    slo: SloTable
    workload: WorkloadTable
    gpus: Annotated[dict[Name, GpuTable], Meta(min_length=1, max_length=64)]
    nodes: Annotated[tuple[NodeTable, ...], Meta(min_length=1, max_length=1024)]
    links: LinksTable = LinksTable()
    uplinks: UplinkTable = UplinkTable()
    engine: EngineTable = EngineTable()
    plan: PlanTable = PlanTable()
    fleet: FleetTable | None = None
    kv_dtype: Name | None = None
    block_size: Annotated[int, Meta(ge=1, le=10**6)] = 16
    encoder_tokens: Tokens | None = None
