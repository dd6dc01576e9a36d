"""Endpoints: the one way to move a request's KV and state between workers."""

from kvferry.transfer.bundle import Bundle, read_bundle
from kvferry.transfer.calls import Ended, InFlight, Stats, Timeouts
from kvferry.transfer.client import Observer
from kvferry.transfer.endpoint import Endpoint
from kvferry.transfer.group import RankGroup
from kvferry.transfer.group_moves import GroupMove, GroupPush
from kvferry.transfer.handles import Move, Push
from kvferry.transfer.pool import Pool
from kvferry.transfer.staging import DEFAULT_STAGING_NBYTES
from kvferry.transfer.tally import Tallied, Tally, Told, Way
from kvferry.transfer.trace import Timings, TransferRecord

__all__ = [
    "DEFAULT_STAGING_NBYTES",
    "Bundle",
    "Ended",
    "Endpoint",
    "GroupMove",
    "GroupPush",
    "InFlight",
    "Move",
    "Observer",
    "Pool",
    "Push",
    "RankGroup",
    "Stats",
    "Tallied",
    "Tally",
    "Timeouts",
    "Timings",
    "Told",
    "TransferRecord",
    "Way",
    "read_bundle",
]
