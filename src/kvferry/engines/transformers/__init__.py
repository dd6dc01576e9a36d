"""The transformers engine. Needs the extra ``transformers`` (torch and transformers)."""

from kvferry.errors import LocalError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise LocalError(
        f"the transformers engine needs the package {error.name!r}",
        next_step="pip install 'kvferry[transformers]'",
    ) from error

from kvferry.engines.transformers.assisted import Drafter
from kvferry.engines.transformers.engine import TransformersEngine
from kvferry.engines.transformers.generation import from_generation_config
from kvferry.engines.transformers.model import Identity, TransformersModel
from kvferry.engines.transformers.sampler import TorchSampler

__all__ = [
    "Drafter",
    "Identity",
    "TorchSampler",
    "TransformersEngine",
    "TransformersModel",
    "from_generation_config",
]
