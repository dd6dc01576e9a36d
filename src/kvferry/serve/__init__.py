"""A small OpenAI-compatible server of the reference engine: alone, or as prefill or decode worker."""

from kvferry.serve.options import ServeOptions
from kvferry.serve.run import run_server

__all__ = ["ServeOptions", "run_server"]
