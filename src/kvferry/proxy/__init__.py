"""A proxy before prefill and decode workers: one OpenAI-compatible address for a disaggregated deployment."""

from kvferry.proxy.options import ProxyOptions
from kvferry.proxy.run import run_proxy

__all__ = ["ProxyOptions", "run_proxy"]
