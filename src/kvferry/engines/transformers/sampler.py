"""Sampling as ``generate`` does it: transformers' own processors, and a torch generator for each request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from kvferry.errors import CorruptError, InputError
from kvferry.state import Rng, RngKind, SamplingParameters, unpack_ids

__all__ = ["TorchSampler"]


class TorchSampler:
    """The sampler of one request: its processors see all ids, and its random numbers are its own.

    For equal parameters, seed and logits it draws the tokens that ``generate`` draws after
    ``torch.manual_seed(seed)``. Raises InputError for a parameter that transformers does not have,
    CorruptError for a random state that torch does not take.
    """

    def __init__(self, parameters: SamplingParameters, ids: NDArray[np.int32], rng: Rng | None) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(parameters, name):
                raise InputError(f"{name}: transformers has no such penalty; repetition_penalty is its own")
        self.parameters = parameters
        self.ids: list[int] = ids.tolist()
        self.generator: torch.Generator | None = None
        if parameters.temperature > 0:
            self.generator = torch.Generator()
            self._seed(self.generator, rng)
        self._before = _processors(parameters)
        self._warpers = _warpers(parameters)

    def sample(self, logits: NDArray[np.float32], forbidden: Sequence[int] = ()) -> int:
        """Choose and count a token; one draw is used unless greedy. ``forbidden``: ids not to choose now."""
        token = self.draw(self.distribution(torch.from_numpy(logits.copy()), self.ids, forbidden))
        self.ids.append(token)
        return token

    def distribution(
        self, logits: torch.Tensor, ids: Sequence[int], forbidden: Sequence[int] = ()
    ) -> torch.Tensor:
        """What follows ``ids``: probabilities float32 (vocab_size,), one 1 and zeros where greedy."""
        history = torch.tensor([list(ids)], dtype=torch.long)
        scores = self._before(history, logits[None])
        scores[0, list(forbidden)] = -torch.inf
        if self.generator is None:
            return torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[-1]).float()
        return torch.softmax(self._warpers(history, scores), dim=-1)[0]

    def draw(self, probabilities: torch.Tensor) -> int:
        """A token by its probability."""
        if self.generator is None:
            return int(probabilities.argmax())
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def rng(self) -> Rng | None:
        """The generator's state; None where nothing is drawn."""
        if self.generator is None:
            return None
        return Rng(
            kind=RngKind.TORCH_MT19937_CPU,
            state=self.generator.get_state().numpy().tobytes(),
            seed=self.parameters.seed,
        )

    def _seed(self, generator: torch.Generator, rng: Rng | None) -> None:
        if rng is None:
            assert self.parameters.seed is not None
            generator.manual_seed(self.parameters.seed)
            return
        try:
            generator.set_state(torch.frombuffer(bytearray(rng.state), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise CorruptError("rng.state: torch does not take it", phase="import") from error
        self.parameters = msgspec.structs.replace(self.parameters, seed=rng.seed)


def _processors(given: SamplingParameters) -> LogitsProcessorList:
    """What greedy decoding uses too, in the order of ``generate``."""
    found = LogitsProcessorList()
    bias = {(entry.token,): float(entry.bias) for entry in given.logit_bias}
    if bias:
        found.append(lp.SequenceBiasLogitsProcessor(sequence_bias=bias))
    if given.repetition_penalty != 1.0:
        found.append(lp.RepetitionPenaltyLogitsProcessor(given.repetition_penalty))
    if given.allowed_tokens is not None:
        allowed = unpack_ids(given.allowed_tokens).tolist()
        found.append(lp.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1))
    return found


def _warpers(given: SamplingParameters) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if given.temperature not in (0.0, 1.0):
        found.append(lp.TemperatureLogitsWarper(given.temperature))
    if given.top_k is not None:
        found.append(lp.TopKLogitsWarper(given.top_k))
    if given.top_p < 1.0:
        found.append(lp.TopPLogitsWarper(given.top_p))
    if given.min_p > 0.0:
        found.append(lp.MinPLogitsWarper(given.min_p))
    return found
