"""Endpoints: the one way to move a request's KV and state between workers."""

from kvferry.transfer.calls import Stats, Timeouts
from kvferry.transfer.endpoint import Endpoint
from kvferry.transfer.handles import Move, Push
from kvferry.transfer.pool import Pool
from kvferry.transfer.trace import Timings, TransferRecord

__all__ = ["Endpoint", "Move", "Pool", "Push", "Stats", "Timeouts", "Timings", "TransferRecord"]
