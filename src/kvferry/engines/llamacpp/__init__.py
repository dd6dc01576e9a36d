"""The llama.cpp engine. Needs the extra ``llamacpp`` (llama-cpp-python, built from source, and gguf)."""

from kvferry.errors import LocalError

try:
    import gguf  # noqa: F401
    import llama_cpp  # noqa: F401
except ImportError as error:
    raise LocalError(
        f"the llama.cpp engine needs the package {error.name!r}",
        next_step="pip install 'kvferry[llamacpp]' (it is built from source: some ten minutes, once)",
    ) from error

from kvferry.engines.llamacpp.context import ContextOptions
from kvferry.engines.llamacpp.engine import LlamaCppEngine
from kvferry.engines.llamacpp.model import LlamaCppModel

__all__ = ["ContextOptions", "LlamaCppEngine", "LlamaCppModel"]
