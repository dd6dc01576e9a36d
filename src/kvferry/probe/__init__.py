"""Probes: what pairs of nodes really do with payloads of KV blocks, over the path of production."""

from kvferry.probe.agent import DEFAULT_MAX_BYTES, Agent
from kvferry.probe.loopback import probe_loopback
from kvferry.probe.pair import LoopbackPair
from kvferry.probe.payload import Payload, Room, sizes_up_to
from kvferry.probe.plan import ProbePlan
from kvferry.probe.run import Failure, ProbeResult, Progress, probe_sites
from kvferry.probe.site import AgentSite, LocalSite, Site, close_all
from kvferry.probe.snapshot import AgentSnapshot, ProbeSnapshot

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Agent",
    "AgentSite",
    "AgentSnapshot",
    "Failure",
    "LocalSite",
    "LoopbackPair",
    "Payload",
    "ProbePlan",
    "ProbeResult",
    "ProbeSnapshot",
    "Progress",
    "Room",
    "Site",
    "close_all",
    "probe_loopback",
    "probe_sites",
    "sizes_up_to",
]
