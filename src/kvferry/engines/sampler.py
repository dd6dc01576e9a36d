"""Next token from logits. The state is (parameters, token ids, prompt border, draws): small and exact.

The order of steps is vLLM's: masks, bias, penalties, then temperature, min-p, top-k, top-p. All in
float64, so that nothing depends on how a float32 sum was ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LocalError
from kvferry.state import Rng, RngKind, SamplingParameters, unpack_ids

__all__ = ["Sampler", "TokenSampler", "distribution", "logprob", "uniform"]

Float64 = NDArray[np.float64]


class TokenSampler(Protocol):
    """What a request asks of the sampler that its engine gave it."""

    @property
    def parameters(self) -> SamplingParameters:
        """Resolved."""

    def sample(self, logits: NDArray[np.float32], forbidden: Sequence[int] = ()) -> int:
        """Choose and count the next token. ``forbidden``: ids not to choose now."""

    def rng(self) -> Rng | None:
        """The random state as it stands; None where nothing is drawn."""


class Sampler:
    """The sampler of one request, always equal to one rebuilt from its parameters, ids and draws.

    Args:
        parameters: resolved; ``seed`` is set where ``temperature > 0``.
        vocab_size: length of the logits.
        prompt_ids: count for the repetition penalty only.
        output_ids: count for all penalties.
        draws: random numbers used so far.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        vocab_size: int,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        draws: int = 0,
    ) -> None:
        self.parameters = parameters
        self.draws = draws
        self._in_prompt = np.bincount(prompt_ids, minlength=vocab_size) > 0
        self._output_counts = np.bincount(output_ids, minlength=vocab_size)
        self._bias = np.zeros(vocab_size)
        for entry in parameters.logit_bias:
            self._bias[entry.token] += entry.bias
        if parameters.allowed_tokens is not None:
            outside = np.ones(vocab_size, dtype=bool)
            outside[unpack_ids(parameters.allowed_tokens)] = False
            self._bias[outside] = -np.inf

    @classmethod
    def continued(
        cls,
        parameters: SamplingParameters,
        vocab_size: int,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        rng: Rng | None,
    ) -> Sampler:
        """One that stands where ``rng`` says; None: at the beginning."""
        if rng is None:
            return cls(parameters, vocab_size, prompt_ids, output_ids)
        seeded = msgspec.structs.replace(parameters, seed=rng.seed)
        return cls(seeded, vocab_size, prompt_ids, output_ids, rng.draws)

    def rng(self) -> Rng | None:
        """Seed and draws: the whole random state."""
        if self.parameters.temperature == 0:
            return None
        return Rng(kind=RngKind.PHILOX, seed=self.parameters.seed, draws=self.draws)

    def sample(self, logits: NDArray[np.float32], forbidden: Sequence[int] = ()) -> int:
        """Choose and count a token; one draw is used unless greedy. ``forbidden``: ids not to choose now."""
        adjusted = self.adjusted(logits, forbidden)
        if self.parameters.temperature == 0:
            token = int(adjusted.argmax())  # the lowest id among equals
        else:
            token = self.draw(distribution(adjusted, self.parameters))
        self.count(token)
        return token

    def count(self, token: int) -> None:
        """Take a token as output."""
        self._output_counts[token] += 1

    def draw(self, weights: Float64) -> int:
        """A token by weights that need not sum to 1; uses one draw."""
        cumulative = np.cumsum(weights)
        # side="right": the first entry above the point, so never one of weight 0.
        return int(np.searchsorted(cumulative, self.uniform() * cumulative[-1], side="right"))

    def uniform(self) -> float:
        """The next number in [0, 1); uses one draw."""
        assert self.parameters.seed is not None
        self.draws += 1
        return uniform(self.parameters.seed, self.draws - 1)

    def adjusted(self, logits: NDArray[np.float32], forbidden: Sequence[int] = ()) -> Float64:
        """Logits after masks, bias and penalties, float64 (vocab_size,).

        Raises LocalError where they leave no token.
        """
        given = self.parameters
        x: Float64 = logits.astype(np.float64) + self._bias
        x[list(forbidden)] = -np.inf
        seen = self._in_prompt | (self._output_counts > 0)
        x[seen] = np.where(
            x[seen] > 0, x[seen] / given.repetition_penalty, x[seen] * given.repetition_penalty
        )
        x -= given.frequency_penalty * self._output_counts
        x -= given.presence_penalty * (self._output_counts > 0)
        if not (x > -np.inf).any():
            raise LocalError(
                "no token may come next: allowed tokens, bias, grammar and limits leave none",
                next_step="release the request: its parameters contradict each other",
            )
        return x


def distribution(adjusted: Float64, parameters: SamplingParameters) -> Float64:
    """Probabilities (vocab_size,) after temperature, min-p, top-k and top-p; 0 for what is cut.

    Top-k and top-p rank by probability, the lower id first among equals; both keep at least one.
    """
    with np.errstate(over="ignore"):  # a temperature near 0 divides to -inf, whose exp is the 0 it should be
        p: Float64 = np.exp((adjusted - adjusted.max()) / parameters.temperature)
    p[p < parameters.min_p * p.max()] = 0
    if parameters.top_k is None and parameters.top_p >= 1:
        return np.asarray(p / p.sum())
    order = np.argsort(-p, kind="stable")[: parameters.top_k]
    ranked = p[order] / p[order].sum()
    above = np.cumsum(ranked) - ranked
    kept = order[(above < parameters.top_p) | (np.arange(len(order)) == 0)]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def uniform(seed: int, draw: int) -> float:
    """The ``draw``-th number in [0, 1) of ``seed``: 53 bits of Philox 4x64 (Salmon et al., SC 2011).

    Counter-based, so no generator state has to travel; NumPy promises the raw stream (NEP 19).
    """
    word = int(np.random.Philox(key=seed, counter=draw).random_raw())
    return float((word >> 11) * 2.0**-53)


def logprob(logits: NDArray[np.float32], token: int) -> float:
    """Natural log of the softmax of the raw logits at ``token``."""
    x = logits.astype(np.float64)
    top = x.max()
    return float(x[token] - top - np.log(np.exp(x - top).sum()))
