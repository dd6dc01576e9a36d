"""Endpoints: the one way to move a request's KV and state between workers."""

from kvferry.transfer.bundle import Bundle, read_bundle
from kvferry.transfer.calls import Ended, Stats, Timeouts
from kvferry.transfer.client import Observer
from kvferry.transfer.endpoint import Endpoint
from kvferry.transfer.group import RankGroup
from kvferry.transfer.group_moves import GroupMove, GroupPush
from kvferry.transfer.handles import Move, Push
from kvferry.transfer.pool import Pool
from kvferry.transfer.staging import DEFAULT_STAGING_NBYTES
from kvferry.transfer.trace import Timings, TransferRecord

__all__ = [
    "DEFAULT_STAGING_NBYTES",
    "Bundle",
    "Ended",
    "Endpoint",
    "GroupMove",
    "GroupPush",
    "Move",
    "Observer",
    "Pool",
    "Push",
    "RankGroup",
    "Stats",
    "Timeouts",
    "Timings",
    "TransferRecord",
    "read_bundle",
]
