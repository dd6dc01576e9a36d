"""kvferry: size, measure, plan and make the move of KV cache and execution state."""

from importlib import metadata

__all__ = ["__version__"]

__version__ = metadata.version("kvferry")
