"""kvferry: size, measure, plan and make the move of KV cache and execution state.

The names below are imported when they are first used, so that the command line and the pure
parts start without NumPy.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.layout import BlockTable, Conversions, PoolLayout
    from kvferry.model import ModelShape
    from kvferry.size import KVSize, kv_size
    from kvferry.state import ExecutionState, Requirements
    from kvferry.transfer import Endpoint, Pool, RankGroup
    from kvferry.transport import Identity

__all__ = [
    "BlockTable",
    "Conversions",
    "Endpoint",
    "ExecutionState",
    "Identity",
    "KVSize",
    "ModelShape",
    "Pool",
    "PoolLayout",
    "RankGroup",
    "Requirements",
    "__version__",
    "kv_size",
]

_HOME = {
    "BlockTable": "layout",
    "Conversions": "layout",
    "Endpoint": "transfer",
    "ExecutionState": "state",
    "Identity": "transport.security",
    "KVSize": "size",
    "ModelShape": "model",
    "Pool": "transfer",
    "PoolLayout": "layout",
    "RankGroup": "transfer",
    "Requirements": "state",
    "kv_size": "size",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("kvferry")
    if name in _HOME:
        return getattr(import_module(f"kvferry.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
