"""A cluster as the planner knows it: nodes and spots, GPUs and profiles, tiers and costs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_low

import msgspec

from kvferry.errors import InputError, NoPlanError
from kvferry.link import LinkFile, LinkProfile, Mode
from kvferry.model import ModelShape
from kvferry.plan.cluster_tables import ClusterFile, GpuTable, LinkTable, ProfileTable
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.compute_file import ProfileChoice
from kvferry.plan.fleet import TIERS, EngineRules, Role, Spot
from kvferry.plan.handoff import Way
from kvferry.plan.interference import MixedStep
from kvferry.plan.payload import Payload, PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.tier import TierCost
from kvferry.units import parse_bytes, parse_rate, parse_seconds

__all__ = ["Cluster", "Gpu", "Node", "build_cluster", "pool_tokens", "tier_cost"]

OpenLinks = Callable[[str], LinkFile]
OpenProfile = Callable[[str, ProfileChoice], ComputeProfile]


class Gpu(msgspec.Struct, frozen=True):
    """A kind of GPU: its profiles, the bytes of KV that one holds (None: not given), what it may do."""

    name: str
    profiles: tuple[ComputeProfile, ...]
    kv_nbytes: int | None
    roles: tuple[Role, ...]


class Node(msgspec.Struct, frozen=True):
    """One machine."""

    gpu: str
    num_gpus: int
    spot: Spot


class Cluster(msgspec.Struct, frozen=True):
    """What a plan is made for.

    ``tiers`` goes as far as the nodes are apart; ``mixed`` lists the bounds of a step with both phases
    that colocation is judged by: one if it was chosen or measured, else both ends. ``chunks`` are the
    chunked prefill sizes that colocated units are tried with.
    """

    shape: ModelShape
    pool: PoolFormat
    targets: Targets
    gpus: dict[str, Gpu]
    nodes: tuple[Node, ...]
    tiers: tuple[TierCost, ...]
    node_rate: float | None
    rack_uplink_rate: float | None
    pod_uplink_rate: float | None
    rules: EngineRules
    mixed: tuple[MixedStep, ...]
    chunks: tuple[int, ...]
    max_batch: int
    warnings: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.num_gpus for node in self.nodes)

    def payloads(self) -> PayloadTable:
        """What handoffs weigh."""
        return PayloadTable(self.shape, self.pool)


def build_cluster(
    file: ClusterFile,
    shape: ModelShape,
    *,
    open_links: OpenLinks,
    open_profile: OpenProfile,
    payload_tokens: int,
) -> Cluster:
    """The cluster of a file.

    Args:
        file: as parsed.
        shape: of its model.
        open_links, open_profile: give what a name in the file stands for.
        payload_tokens: the prompt (p95) at which links with two regimes or several pairs are read.

    Raises InputError naming the key for a tier that is needed and missing, and for what the two
    openers raise.
    """
    pool = PoolFormat(file.kv_dtype, file.block_size, encoder_tokens=file.encoder_tokens)
    size = pool.size(shape, payload_tokens)
    nodes = _nodes(file)
    warnings: list[str] = []
    gpus = {name: _gpu(name, table, open_profile) for name, table in file.gpus.items()}
    for gpu in gpus.values():
        warnings += [p.doubt for p in gpu.profiles if p.doubt is not None]
        if gpu.kv_nbytes is None and not all(p.kv_tokens for p in gpu.profiles):
            warnings.append(f"gpus.{gpu.name}: no kv_memory given: KV memory is taken as unlimited")
    payload = Payload(size.wire_bytes, size.descriptors)
    tiers = _tiers(file, nodes, gpus, payload, open_links=open_links, warnings=warnings)
    engine = file.engine
    return Cluster(
        shape=shape,
        pool=pool,
        targets=Targets(
            parse_seconds(file.slo.ttft), parse_seconds(file.slo.tpot), attainment=file.slo.attainment
        ),
        gpus=gpus,
        nodes=nodes,
        tiers=tiers,
        node_rate=_rate(file.uplinks.node),
        rack_uplink_rate=_rate(file.uplinks.rack),
        pod_uplink_rate=_rate(file.uplinks.pod),
        rules=EngineRules(
            first_token=FirstToken(engine.first_token),
            groups=shape.num_layers if engine.overlap == "layer" else 1,
            sync_seconds=parse_seconds(engine.sync),
            staging=engine.staging,
            prefill_batch_tokens=engine.prefill_batch_tokens,
            chunk_tokens=_chunks(file)[0],
        ),
        mixed=_mixed(file, gpus),
        chunks=_chunks(file),
        max_batch=engine.max_batch,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _chunks(file: ClusterFile) -> tuple[int, ...]:
    chunks = file.engine.chunk_tokens
    return (chunks,) if isinstance(chunks, int) else chunks


def _rate(text: str | None) -> float | None:
    return None if text is None else parse_rate(text)


def _mixed(file: ClusterFile, gpus: dict[str, Gpu]) -> tuple[MixedStep, ...]:
    if file.engine.mixed is not None:
        return (MixedStep(file.engine.mixed),)
    profiles = [profile for gpu in gpus.values() for profile in gpu.profiles]
    if all(profile.mixed_share is not None for profile in profiles):
        return (MixedStep.MEASURED,)
    return (MixedStep.LONGER, MixedStep.SUM)


def _nodes(file: ClusterFile) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for table in file.nodes:
        for _ in range(table.count):
            name = f"node{len(nodes)}"
            spot = Spot(name, table.domain or name, table.rack, table.pod)
            nodes.append(Node(table.gpu, table.gpus, spot))
    return tuple(nodes)


def _gpu(name: str, table: GpuTable, open_profile: OpenProfile) -> Gpu:
    profiles = []
    for entry in table.profiles:
        asked = ProfileTable(profile=entry) if isinstance(entry, str) else entry
        choice = ProfileChoice(asked.model, asked.gpu, asked.tp, asked.pp)
        try:
            profiles.append(open_profile(asked.profile, choice))
        except InputError as error:
            raise InputError(f"gpus.{name}.profiles: {error.message}") from error
    kv = None if table.kv_memory is None else parse_bytes(table.kv_memory)
    return Gpu(name, tuple(profiles), kv, tuple(Role(role) for role in table.roles))


def _tiers(
    file: ClusterFile,
    nodes: tuple[Node, ...],
    gpus: dict[str, Gpu],
    payload: Payload,
    *,
    open_links: OpenLinks,
    warnings: list[str],
) -> tuple[TierCost, ...]:
    needed = _needed_tiers(nodes, min(p.num_gpus for gpu in gpus.values() for p in gpu.profiles))
    tiers: list[TierCost] = []
    for number in range(max(needed, default=0) + 1):
        name = TIERS[number]
        table = getattr(file.links, name)
        if table is None:
            if number in needed:
                raise InputError(f"links.{name}: missing; some instances share no more than a {name}")
            tiers.append(_NEVER_USED)
            continue
        asked = LinkTable(file=table) if isinstance(table, str) else table
        try:
            cost = tier_cost(asked, payload, open_links)
        except InputError as error:
            raise InputError(f"links.{name}: {error.message}") from error
        if not cost.is_measured:
            warnings.append(f"links.{name}: {cost.label}")
        if number > 1 and cost.seconds(*_pair(payload)) < tiers[-1].seconds(*_pair(payload)):
            warnings.append(f"links.{name}: faster than links.{TIERS[number - 1]}; check the labels")
        tiers.append(cost)
    return tuple(tiers)


_NEVER_USED = TierCost.typed(label="no two instances are so near")


def _needed_tiers(nodes: tuple[Node, ...], smallest: int) -> set[int]:
    """The tiers that some pair of instances of ``smallest`` GPUs can have between them."""
    domains: dict[str, int] = {}
    racks: dict[tuple[str, str], set[str]] = {}
    pods: dict[str, set[str]] = {}
    for node in nodes:
        spot = node.spot
        domains[spot.domain] = domains.get(spot.domain, 0) + node.num_gpus
        racks.setdefault((spot.pod, spot.rack), set()).add(spot.domain)
        pods.setdefault(spot.pod, set()).add(spot.rack)
    needed = {0} if max(domains.values()) >= 2 * smallest else set()
    if any(len(members) > 1 for members in racks.values()):
        needed.add(1)
    if any(len(members) > 1 for members in pods.values()):
        needed.add(2)
    if len(pods) > 1:
        needed.add(3)
    return needed


def _pair(payload: Payload) -> tuple[int, int]:
    return payload.nbytes, payload.descriptors


def tier_cost(table: LinkTable, payload: Payload, open_links: OpenLinks) -> TierCost:
    """The cost of a tier as its file, preset or hand-typed numbers give it, for payloads like this one.

    Of all pairs of a class the one with the median time stands for it, and the label says how far
    the slowest is from it.
    """
    if table.rate is not None:
        label = (
            f"given: {table.measured}" if table.measured else "given by hand, not said how it was measured"
        )
        return TierCost.typed(
            parse_seconds(table.start),
            parse_seconds(table.descriptor),
            parse_rate(table.rate),
            links=table.links,
            is_measured=table.measured is not None,
            label=label,
        )
    assert table.file is not None
    file = open_links(table.file)
    if table.link_class is None:
        pairs = [file.select(table.from_node, table.to_node, table.transport)]
    else:
        pairs = [
            pair
            for pair in file.pairs
            if pair.link_class == table.link_class and table.transport in (None, pair.transport)
        ]
        if not pairs:
            known = ", ".join(sorted({pair.link_class for pair in file.pairs} - {""})) or "none"
            raise InputError(f"{table.file}: no pair of class {table.link_class!r}; known: {known}")
    return _cost_of(table, pairs, payload)


def _cost_of(table: LinkTable, pairs: list[LinkProfile], payload: Payload) -> TierCost:
    costs = [_pair_cost(table, pair, payload) for pair in pairs]
    times = [cost.seconds(*_pair(payload)) for cost in costs]
    middle = median_low(times)
    chosen = costs[times.index(middle)]
    if len(costs) == 1:
        return chosen
    slowest = times.index(max(times))
    label = (
        f"median of {len(costs)} pairs; {pairs[slowest].pair} takes {max(times) / middle:.2g} times as long"
    )
    return msgspec.structs.replace(chosen, label=label, is_measured=all(cost.is_measured for cost in costs))


def _pair_cost(table: LinkTable, pair: LinkProfile, payload: Payload) -> TierCost:
    measured = {entry.mode for entry in pair.fits}
    mode = Mode(table.mode) if table.mode else Mode.PULL if Mode.PULL in measured else Mode.PUSH
    way = Way(pair, mode, tls=table.tls, incast=table.incast, under_load=table.under_load, links=table.links)
    unknown: str | None = None if pair.measured else f"{pair.pair}: unmeasured"
    try:
        fit = way.fit()
    except NoPlanError as error:
        fit, unknown = pair.fits[0].fit, error.message
    nbytes, pieces = -(-payload.nbytes // table.links), max(1, -(-payload.descriptors // table.links))
    unknown = unknown or fit.why_unknown(nbytes, pieces)
    if unknown is not None:
        # As in check: what cannot be predicted has no tail either.
        fit = msgspec.structs.replace(fit, spreads=())
    elif (far := fit.too_far(nbytes, pieces)) is not None:
        unknown = f"{pair.pair}: the p95 prompt's {far}"
    return TierCost(fit, table.links, unknown is None, unknown or f"{pair.pair}, {pair.label}")


def pool_tokens(cluster: Cluster, gpu: Gpu, profile: ComputeProfile, tokens: int) -> int | None:
    """Tokens of KV that an instance holds, requests being about ``tokens`` long; None: not known.

    What is constant per request (windows, recurrent state) is spread over its tokens.
    """
    if gpu.kv_nbytes is None:
        return profile.kv_tokens
    pool = msgspec.structs.replace(cluster.pool, tp=profile.tp, pp=profile.pp)
    fullest = max(pool.size(cluster.shape, tokens).rank_bytes)
    return int(gpu.kv_nbytes / (fullest / tokens))
