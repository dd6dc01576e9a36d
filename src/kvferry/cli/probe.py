"""``kvferry probe``: what pairs of nodes do with payloads of KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.cli.identity import identity_of
from kvferry.cli.options import Flag, Whole
from kvferry.cli.output import check_out
from kvferry.errors import InputError, KVFerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.cli.probe_show import ProbeBar
    from kvferry.link import Mode
    from kvferry.probe import ProbePlan, ProbeResult, Progress
    from kvferry.transport.security import Identity

__all__ = ["PayloadFlags", "ProbeFlags", "probe"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadFlags:
    """The largest payload; smaller ones, and smaller blocks, are measured too."""

    payload: Annotated[str | None, Parameter(name="--bytes")] = None
    "Its bytes (64MiB, 1.34GB), where no model is given. Default: 64MiB."
    block_bytes: str | None = None
    "Bytes of one block in one layer. Default: 32KiB, or the model's."
    model: str | None = None
    "A config.json, a folder with one, or shape:LAYERSxKV_HEADSxHEAD_DIM: the payload is this model's."
    tokens: Whole | None = None
    "Tokens of the p95 prompt, with --model."
    prompt_lengths: Path | None = None
    "A trace with prompt lengths instead: the payloads of their p50, p95 and p99, with --model."
    kv_dtype: str | None = None
    "Dtype of K and V, with --model. Default: the config's own."
    block_size: Whole = 16
    "Tokens per block, with --model."
    tp: Whole = 1
    "Tensor-parallel ranks, with --model: the payload is one rank's."


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFlags:
    """How it is measured."""

    loopback: Annotated[bool, Flag] = False
    "Measure this host against itself: two endpoints, each with its transfer process; no agents needed."
    ray: Annotated[bool, Flag] = False
    "Start an agent on every node of a Ray cluster, for this probe. PEER may then be the cluster's HOST:PORT."
    transport: tuple[str, ...] = ()
    "Give it once for each transport to measure. Default: tcp; with --loopback shm and tcp."
    mode: Literal["push", "pull", "both"] = "both"
    "Who starts the move."
    repeat: Whole = 40
    (
        "Warm copies of each shape at most; fewer where the median is known within 2.5 % before. Of up to "
        "256 KiB, whose tail is long, five times as many, as far as they take a second."
    )
    seconds: float | None = None
    "Time for all of it. Default: 6 s for each pair, direction, transport and mode that are measured in turn."
    incast: Whole = 0
    "Also measure so many nodes sending to one at the same time, each node in turn."
    under_load: Annotated[bool, Flag] = False
    "Also measure each pair while the other pairs of its round, and its own other direction, copy."
    tls: Literal["on", "off", "both"] | None = None
    "Encryption of tcp, or its price: both. Default: encrypted where the addresses of the agents are."
    cert: Path | None = None
    "This side's certificate and key, to reach agents by encrypted addresses (see `kvferry certs`)."
    authority: Path | None = None
    "The certificate that the agents' must lead to. Default: ca.pem beside --cert."
    peer_name: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A name, * for any letters, that the agents' certificates must carry; repeatable. Default: their hosts."
    via: str = ""
    "HOST:PORT of a proxy beside each of two nodes that leads to the other: data goes through it."
    line_rate: str | None = None
    "Brochure rate of the links (400 Gb/s): the matrix then says what share of it was reached."
    integrity: Literal["on", "off"] = "on"
    "Digests at export and arrival, compared before commit."

    def tls_passes(self) -> tuple[bool, ...] | None:
        """Off first: what is compared with."""
        return {None: None, "on": (True,), "off": (False,), "both": (False, True)}[self.tls]

    def modes(self) -> tuple[Mode, ...]:
        from kvferry.link import Mode

        return tuple(Mode) if self.mode == "both" else (Mode(self.mode),)


def probe(
    *peers: Annotated[str, Parameter(name="PEER")],
    payload: PayloadFlags | None = None,
    flags: ProbeFlags | None = None,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Measure what moving KV blocks costs between all pairs of nodes, fit it, and write a link file.

    Each node runs `kvferry agent`. All ordered pairs are measured, in rounds of disjoint pairs; a node
    that is lost is told, and the rest is measured. Exit status: 1 where a pair could not be measured.

    Parameters
    ----------
    peers
        Agents, two or more: tcp://HOST:PORT or HOST:PORT; dns:NAME:PORT for all addresses of a name;
        @FILE for the entries of a file, one a line.
    out
        Write the link file here, for `kvferry link`, `check` and `plan`.
    as_json
        Print one JSON object.
    """
    flags, payload = flags or ProbeFlags(), payload or PayloadFlags()
    check_out(out, "out")
    addresses = [] if flags.ray else _addresses(peers, flags)

    from kvferry.cli.probe_payload import wanted_payloads
    from kvferry.cli.probe_show import ProbeBar, print_json, show, write

    payloads = wanted_payloads(payload)
    plan = _plan(flags, payloads.largest)
    identity = identity_of(flags.cert, flags.authority, flags.peer_name)
    with ProbeBar() as bar:
        if flags.ray:
            result, unreachable = _measure_on_ray(peers, plan, flags, bar)
        else:
            result, unreachable = asyncio.run(_measure(addresses, plan, identity, bar.on_progress))
    if out is not None and result.links.pairs:
        write(result.links, out)
    if as_json:
        print_json(result, unreachable, payloads)
    else:
        show(result, unreachable, payloads, out)
    return 1 if result.failures or unreachable else 0


def _addresses(peers: Sequence[str], flags: ProbeFlags) -> list[str]:
    if flags.loopback:
        if peers:
            raise InputError("loopback: it measures this host alone; give no peers with it")
        for name, given in (("incast", flags.incast), ("under_load", flags.under_load), ("via", flags.via)):
            if given:
                raise InputError(f"{name}: needs agents, not --loopback")
        return []
    from kvferry.probe.plan import check_count
    from kvferry.transport.peers import find_peers

    addresses = [peer if "://" in peer else f"tcp://{peer}" for peer in find_peers(peers, "peers")]
    check_count(len(addresses))
    if len(addresses) < 2:
        raise InputError(
            f"peers: {len(addresses)} found; give the addresses of two agents or more (`kvferry agent` on "
            "each node), or --loopback"
        )
    twice = [address for address in addresses if addresses.count(address) > 1]
    if twice:
        raise InputError(f"peers: {twice[0]} is given twice")
    return addresses


def _plan(flags: ProbeFlags, largest: object) -> ProbePlan:
    from kvferry.probe import Payload, ProbePlan
    from kvferry.transport.registry import transport_for
    from kvferry.units import parse_rate

    assert isinstance(largest, Payload)
    if not 1 <= flags.repeat <= 1000:
        raise InputError(f"repeat: {flags.repeat} is not from 1 to 1000")
    if flags.seconds is not None and not 0 < flags.seconds <= 4 * 3600:
        raise InputError(f"seconds: {flags.seconds} is not from 0 to {4 * 3600}")
    transports = flags.transport or (("shm", "tcp") if flags.loopback else ("tcp",))
    for scheme in transports:
        transport_for(scheme)
        if scheme == "inproc":
            raise InputError("transport: inproc never leaves its process; there is no link to measure")
    return ProbePlan(
        largest=largest,
        transports=tuple(dict.fromkeys(transports)),
        modes=flags.modes(),
        repeats=flags.repeat,
        seconds=flags.seconds,
        integrity=flags.integrity == "on",
        under_load=flags.under_load,
        incast=flags.incast,
        via=flags.via,
        tls=flags.tls_passes(),
        line_rate=None if flags.line_rate is None else parse_rate(flags.line_rate, "line_rate"),
    )


def _measure_on_ray(
    peers: Sequence[str], plan: ProbePlan, flags: ProbeFlags, bar: ProbeBar
) -> tuple[ProbeResult, dict[str, str]]:
    from kvferry.probe.on_ray import ray_agents
    from kvferry.probe.run import Progress

    if len(peers) > 1:
        raise InputError(f"ray: one cluster is probed, and {len(peers)} addresses are given")
    for name, given in (("loopback", flags.loopback), ("cert", flags.cert), ("via", flags.via)):
        if given:
            raise InputError(f"{name}: not with --ray, which starts agents of its own")
    bar.on_progress(Progress(0, 1, 0.0, "agents start on the nodes of Ray"))
    # Ray tells of its nodes on stdout, which is ours.
    with (
        contextlib.redirect_stdout(sys.stderr),
        ray_agents(peers[0] if peers else "auto", tls=plan.tls) as found,
    ):
        result, unreachable = asyncio.run(_measure(found.addresses, plan, found.identity, bar.on_progress))
    return result, found.failed | unreachable


async def _measure(
    addresses: Sequence[str],
    plan: ProbePlan,
    identity: Identity | None,
    on_progress: Callable[[Progress], None],
) -> tuple[ProbeResult, dict[str, str]]:
    """The result, and the agents that could not be reached, with the reason."""
    from kvferry.probe import AgentSite, close_all, probe_loopback, probe_sites

    if not addresses:
        return await probe_loopback(plan, on_progress), {}
    found = await asyncio.gather(
        *(AgentSite.connect(address, tls=identity) for address in addresses), return_exceptions=True
    )
    sites = [site for site in found if isinstance(site, AgentSite)]
    unreachable: dict[str, str] = {}
    for address, site in zip(addresses, found, strict=True):
        if isinstance(site, InputError) or (
            isinstance(site, BaseException) and not isinstance(site, KVFerryError)
        ):
            await close_all(sites)
            raise site
        if isinstance(site, KVFerryError):
            unreachable[address] = str(site)
            error = site
    if len(sites) < 2:
        await close_all(sites)
        *others, _ = unreachable
        if others:
            error = error.retold(message=f"{error.message}; nor were reached: {', '.join(others)}")
        raise error
    return await probe_sites(sites, plan, on_progress), unreachable
