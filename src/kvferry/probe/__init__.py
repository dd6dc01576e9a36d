"""Probes: what a pair of endpoints really does with payloads of KV blocks, over the path of production."""

from kvferry.probe.loopback import probe_loopback
from kvferry.probe.pair import LoopbackPair, sizes_up_to
from kvferry.probe.payload import Payload

__all__ = ["LoopbackPair", "Payload", "probe_loopback", "sizes_up_to"]
