"""The sampler against a plain-Python one that shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines import sampler
from kvferry.engines.sampler import Sampler, distribution, logprob, uniform
from kvferry.state import LogitBias, SamplingParameters, pack_ids

VOCAB = 11
MASK = 2**64 - 1
NEAR = 1e-9  # of a cut: sums in another order may fall on either side of it

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
logits_rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)
parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.2, 0.0, 0.4]),
    logit_bias=st.lists(
        st.builds(LogitBias, token=st.integers(0, VOCAB - 1), bias=st.floats(-3, 3)), max_size=3
    ).map(tuple),
    seed=st.integers(0, 2**63 - 1),
)


def plain_adjusted(
    logits: list[float], given: SamplingParameters, prompt: list[int], output: list[int]
) -> list[float]:
    """Bias and penalties, one token at a time."""
    out = []
    for token, value in enumerate(logits):
        x = value + sum(entry.bias for entry in given.logit_bias if entry.token == token)
        if token in prompt or token in output:
            x = x / given.repetition_penalty if x > 0 else x * given.repetition_penalty
        x -= given.frequency_penalty * output.count(token)
        x -= given.presence_penalty * (token in output)
        out.append(x)
    return out


def plain_kept(x: list[float], given: SamplingParameters) -> tuple[set[int], set[int]]:
    """Tokens that must be kept, and those that may be, since they lie within NEAR of a cut."""
    weights = [math.exp((value - max(x)) / given.temperature) for value in x]
    must, may = set(), set()
    above = 0.0
    order = sorted(range(len(x)), key=lambda token: (-weights[token], token))
    first_cut = [token for token in order if weights[token] >= given.min_p]
    pool = first_cut[: given.top_k]
    total = math.fsum(weights[token] for token in pool)
    for rank, token in enumerate(pool):
        if rank == 0 or above < given.top_p - NEAR:
            must.add(token)
        if rank == 0 or above < given.top_p + NEAR:
            may.add(token)
        above += weights[token] / total
    return must, may


def plain_philox(key: int, counter: int) -> int:
    """First 64-bit word of Philox 4x64-10 for a 128-bit key and a 256-bit counter."""
    keys = [key & MASK, key >> 64]
    words = [(counter >> shift) & MASK for shift in (0, 64, 128, 192)]
    for _ in range(10):
        left, right = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [
            (right >> 64) ^ words[1] ^ keys[0],
            right & MASK,
            (left >> 64) ^ words[3] ^ keys[1],
            left & MASK,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & MASK, (keys[1] + 0xBB67AE8584CAA73B) & MASK]
    return words[0]


def make(given: SamplingParameters, prompt: list[int], output: list[int], draws: int = 0) -> Sampler:
    """A sampler over the small vocabulary."""
    return Sampler(given, VOCAB, np.array(prompt, np.int32), np.array(output, np.int32), draws)


@given(logits_rows, parameters, tokens, tokens)
def test_penalties_and_bias_equal_the_plain_ones(
    logits: list[float], given: SamplingParameters, prompt: list[int], output: list[int]
) -> None:
    """Repetition counts prompt and output, presence and frequency the output only."""
    adjusted = make(given, prompt, output).adjusted(np.array(logits, np.float32))
    assert adjusted.tolist() == pytest.approx(plain_adjusted(logits, given, prompt, output), abs=1e-12)


@given(logits_rows, parameters)
def test_the_kept_tokens_and_their_probabilities_equal_the_plain_ones(
    logits: list[float], given: SamplingParameters
) -> None:
    """Min-p, top-k and top-p keep the tokens that the definition keeps, renormalised."""
    p = distribution(np.array(logits), given)
    kept = set(np.flatnonzero(p).tolist())
    must, may = plain_kept(logits, given)
    assert must <= kept <= may
    weights = {token: math.exp((logits[token] - max(logits)) / given.temperature) for token in kept}
    total = math.fsum(weights.values())
    assert [p[token] for token in kept] == pytest.approx([weights[token] / total for token in kept])


@given(logits_rows, parameters, tokens, tokens, st.integers(0, 2**40))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution_at_the_philox_number(
    logits: list[float], given: SamplingParameters, prompt: list[int], output: list[int], draws: int
) -> None:
    """The token is the first whose cumulative probability passes the draw, found by a plain loop."""
    one = make(given, prompt, output, draws)
    row = np.array(logits, np.float32)
    p = distribution(one.adjusted(row), given)
    point, below = uniform(given.seed or 0, draws) * p.sum(), 0.0
    expected = next(token for token, share in enumerate(p) if (below := below + share) > point)
    assert one.sample(row) == expected
    assert one.draws == draws + 1


@given(st.integers(0, 2**127), st.integers(0, 2**80))
def test_the_random_numbers_are_philox(seed: int, draw: int) -> None:
    """NumPy's generator gives the published function of (seed, draw), one counter step ahead."""
    assert uniform(seed, draw) == (plain_philox(seed, draw + 1) >> 11) / 2**53


@given(st.lists(logits_rows, min_size=1, max_size=6), parameters, tokens, tokens)
def test_a_rebuilt_sampler_continues_as_the_first(
    rows: list[list[float]], given: SamplingParameters, prompt: list[int], output: list[int]
) -> None:
    """A sampler made from ids, border and draws before each step chooses what one long-lived sampler does."""
    one = make(given, prompt, output)
    history = list(output)
    for draws, logits in enumerate(rows):
        row = np.array(logits, np.float32)
        token = one.sample(row)
        assert make(given, prompt, history, draws).sample(row) == token
        history.append(token)


@given(logits_rows, tokens, st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB - 1))
def test_forbidden_and_not_allowed_tokens_are_never_chosen(
    logits: list[float], prompt: list[int], out: set[int]
) -> None:
    """A mask holds under greedy choice and under sampling."""
    row = np.array(logits, np.float32)
    allowed = pack_ids(sorted(set(range(VOCAB)) - out))
    for temperature in (0.0, 1.5):
        given = SamplingParameters(temperature=temperature, seed=3)
        assert make(given, prompt, []).sample(row, sorted(out)) not in out
        masked = SamplingParameters(temperature=temperature, seed=3, allowed_tokens=allowed)
        assert make(masked, prompt, []).sample(row) not in out


def test_a_draw_of_zero_never_falls_on_a_token_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the interval that a cut token leaves behind belongs to the next one."""
    monkeypatch.setattr(sampler, "uniform", lambda *_: 0.0)
    only = SamplingParameters(temperature=1.0, seed=1, allowed_tokens=pack_ids([4, 6]))
    assert make(only, [], []).sample(np.zeros(VOCAB, np.float32)) == 4


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """Ties do not depend on the order in which a kernel looks at them."""
    row = np.zeros(VOCAB, np.float32)
    row[[7, 4, 9]] = 2
    greedy = make(SamplingParameters(temperature=0.0), [], [])
    assert greedy.sample(row) == 4
    assert greedy.draws == 0


@given(logits_rows, st.integers(0, VOCAB - 1))
def test_a_logprob_is_the_log_of_the_softmax(logits: list[float], token: int) -> None:
    """Against math.fsum over the whole row."""
    total = math.fsum(math.exp(value) for value in logits)
    assert logprob(np.array(logits, np.float32), token) == pytest.approx(
        logits[token] - math.log(total), abs=1e-9
    )
