"""Fits find the costs that made their samples, say what they cannot know, and predict monotonically."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError, NoPlanError
from kvferry.link import Knee, LinkFit, Mode, Sample, Span, Spread, fit_link, samples_needed
from kvferry.link.solve import least_log_squares, nonnegative
from link_kit import GOOD, KIB, MIB, SIZES, line, overlap, published, sweep

STARTS = st.floats(1e-6, 1e-2)
DESCRIPTOR_COSTS = st.floats(1e-7, 1e-5)
RATES = st.floats(1e8, 1e11)


def copy(nbytes: int, descriptors: int, seconds: float, **fields: object) -> Sample:
    return Sample(
        **{"mode": Mode.PULL, "nbytes": nbytes, "descriptors": descriptors, "seconds": seconds} | fields
    )


@given(
    st.integers(1, 3).flatmap(
        lambda columns: st.lists(
            st.lists(st.floats(0.01, 100), min_size=columns, max_size=columns), min_size=columns, max_size=12
        )
    ),
    st.integers(0, 2**32 - 1),
)
def test_least_squares_meets_the_optimality_conditions(rows: list[list[float]], seed: int) -> None:
    """No coefficient is negative, and none could change to lower the squares (Karush, Kuhn, Tucker)."""
    matrix = np.array(rows)
    target = np.random.default_rng(seed).normal(1.0, 2.0, len(matrix))
    found = nonnegative(matrix, target)
    norms = np.linalg.norm(matrix, axis=0)
    gradient = matrix.T @ (matrix @ found - target) / norms
    scale = 1e-6 * (1 + np.linalg.norm(target))
    assert (found >= 0).all()
    assert (gradient >= -scale).all()
    assert np.abs(gradient[found * norms > scale]).max(initial=0) <= scale * 10


@given(STARTS, DESCRIPTOR_COSTS, RATES, st.floats(0, 0.5), st.integers(0, 2**32 - 1))
def test_least_log_squares_cannot_be_improved(
    a: float, o: float, rate: float, noise: float, seed: int
) -> None:
    """No small change of any coefficient makes the squares of the logarithms smaller."""
    samples = sweep(line(a, o, rate), noise=noise, seed=seed)
    columns = np.array([(1.0, s.descriptors, s.nbytes) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    found = least_log_squares(columns, seconds)

    def squares(x: np.ndarray) -> float:
        return float((np.log(seconds / (columns @ x)) ** 2).sum())

    rng = np.random.default_rng(seed)
    for step in rng.normal(0, 1, (20, 3)) * [a, o, 1 / rate] * 1e-3:
        assert squares(np.maximum(found + step, 0)) >= squares(found) * (1 - 1e-6) - 1e-12


def test_noise_does_not_bias_the_line() -> None:
    """Over 60 links whose points scatter by 25 %, predictions are neither too fast nor too slow."""
    misses = [
        math.log(fit.predict(nbytes, 16) / GOOD(nbytes, 16))
        for fit in (fit_link(sweep(noise=0.25, seed=seed)) for seed in range(60))
        for nbytes in SIZES
    ]
    assert np.mean(misses) == pytest.approx(0.0, abs=0.02)


@given(STARTS, DESCRIPTOR_COSTS, RATES)
def test_exact_copies_give_back_their_costs(a: float, o: float, rate: float) -> None:
    """Copies without noise are predicted to a thousandth, seen or not, whatever the costs."""
    cost = line(a, o, rate)
    fit = fit_link(sweep(cost))
    assert fit.samples == len(sweep())
    assert fit.knee is None
    assert not fit.descriptors_overlap
    for nbytes, descriptors in ((100 * KIB, 1), (100 * KIB, 20), (10**8, 7), (10**8, 5000)):
        if fit.why_unknown(nbytes, descriptors) is None:
            assert fit.predict(nbytes, descriptors) == pytest.approx(cost(nbytes, descriptors), rel=0.02)
    assert fit.worst_error is not None
    assert fit.worst_error < 0.011


def test_costs_that_all_show_are_recovered() -> None:
    """Where each cost makes a good part of some copy, it comes back to five digits."""
    fit = fit_link(sweep(line(80e-6, 3e-6, 4e9)))
    assert fit.a_seconds == pytest.approx(80e-6, rel=1e-5)
    assert fit.o_seconds == pytest.approx(3e-6, rel=1e-5)
    assert fit.bytes_per_second == pytest.approx(4e9, rel=1e-5)
    assert fit.unidentified == ()


@settings(max_examples=40)
@given(STARTS, DESCRIPTOR_COSTS, RATES, st.floats(0.01, 0.1), st.integers(0, 2**32 - 1))
def test_noisy_copies_are_predicted_within_their_noise(
    a: float, o: float, rate: float, noise: float, seed: int
) -> None:
    """With 15 copies a shape, a typical copy of any measured shape is predicted within its noise."""
    cost = line(a, o, rate)
    samples = sweep(cost, noise=noise, repeats=15, seed=seed)
    fit = fit_link(samples)
    for sample in samples:
        true = cost(sample.nbytes, sample.descriptors)
        assert fit.predict(sample.nbytes, sample.descriptors) == pytest.approx(true, rel=1.5 * noise + 0.011)


@pytest.mark.parametrize(
    ("table", "start", "rate"), [("mooncake-vllm", 0.378e-3, 146.1e9), ("mooncake-sglang", 1.835e-3, 171.0e9)]
)
def test_published_tables_fit_within_seven_percent(table: str, start: float, rate: float) -> None:
    """Nine published sizes from 21 MB to 12.6 GB: one line misses none by more than 7 %.

    ``start`` and ``rate`` are those of a fit of relative errors made elsewhere.
    """
    samples = published(table)
    fit = fit_link(samples)
    assert len(samples) == 9
    assert fit.worst_error is not None
    assert fit.worst_error <= 0.07
    assert fit.knee is None
    assert fit.a_seconds == pytest.approx(start, rel=0.005)
    assert fit.bytes_per_second == pytest.approx(rate, rel=0.005)
    assert fit.o_seconds is None, "the tables do not say how many pieces"
    for sample in samples:
        assert sample.seconds == pytest.approx(fit.predict(sample.nbytes, 1), rel=0.07)


def test_a_stall_does_not_bend_the_line() -> None:
    """Two copies of nine that take ten times as long change no cost, and show in the quantiles."""
    calm = sweep(repeats=7)
    stalled = [copy(s.nbytes, s.descriptors, 10 * s.seconds) for s in sweep(repeats=2)]
    fit, base = fit_link(calm + stalled), fit_link(calm)
    assert (fit.a_seconds, fit.o_seconds, fit.bytes_per_second) == pytest.approx(
        (base.a_seconds, base.o_seconds, base.bytes_per_second)
    )
    assert fit.predict_quantile(0.95, MIB, 16) == pytest.approx(10 * fit.predict(MIB, 16), rel=0.01)
    assert fit.predict_quantile(0.5, MIB, 16) == pytest.approx(fit.predict(MIB, 16), rel=0.01)


def test_first_copies_are_left_out() -> None:
    """Cold copies change neither costs nor spread; alone they are refused."""
    cold = [copy(MIB, 16, 1.0, is_cold=True)]
    assert fit_link(sweep() + cold) == fit_link(sweep())
    with pytest.raises(NoPlanError, match="only first copies"):
        fit_link(cold)
    with pytest.raises(NoPlanError, match="no copies"):
        fit_link([])


def test_one_shape_is_refused_with_what_it_lacks() -> None:
    """Copies of one size in one number of pieces tell nothing, and the message says what to add."""
    with pytest.raises(NoPlanError, match=r"3 samples have 1048576 bytes in 16 descriptors.*second size"):
        fit_link([copy(MIB, 16, 1e-3)] * 3)


def test_one_number_of_descriptors_leaves_their_cost_unknown() -> None:
    """Then the start holds it, that number is predicted, and any other is refused."""
    fit = fit_link([copy(nbytes, 16, GOOD(nbytes, 16)) for nbytes in SIZES])
    assert fit.unidentified == ("o_seconds",)
    assert fit.predict(3 * MIB, 16) == pytest.approx(GOOD(3 * MIB, 16), rel=1e-4)
    with pytest.raises(NoPlanError, match=r"cost of a descriptor is not identified.*16 descriptors"):
        fit.predict(3 * MIB, 17)
    assert fit.at_least(3 * MIB, 17) == fit.predict(3 * MIB, 16)


def test_one_block_size_leaves_the_cost_of_a_descriptor_unknown() -> None:
    """Then the rate holds it: copies in such blocks are predicted, others are refused."""
    fit = fit_link(sweep(blocks=[64 * KIB]))
    assert fit.unidentified == ("o_seconds",)
    assert fit.predict(256 * MIB, 4096) == pytest.approx(GOOD(256 * MIB, 4096), rel=1e-3)
    with pytest.raises(NoPlanError, match="not identified"):
        fit.predict(256 * MIB, 8192)


def test_one_size_leaves_the_rate_unknown() -> None:
    """Then only that size is predicted, in any number of pieces."""
    fit = fit_link([copy(MIB, n, GOOD(MIB, n)) for n in (1, 8, 64, 256)])
    assert fit.unidentified == ("bytes_per_second",)
    assert fit.predict(MIB, 100) == pytest.approx(GOOD(MIB, 100), rel=1e-4)
    with pytest.raises(NoPlanError, match="rate is not identified by copies of 1048576 bytes"):
        fit.predict(2 * MIB, 100)


def test_a_time_that_does_not_grow_leaves_the_rate_unknown() -> None:
    """Small copies that all take the start cost do not show a rate, and no larger copy is predicted."""
    fit = fit_link([copy(nbytes, 1, 1e-3) for nbytes in (100, 1000, 10_000)])
    assert fit.bytes_per_second is None
    assert fit.predict(5000, 1) == pytest.approx(1e-3)
    with pytest.raises(NoPlanError, match="rate is not identified"):
        fit.predict(10_001, 1)


def test_descriptors_that_follow_bytes_are_refused_in_words() -> None:
    """Pieces that are a fixed number and a number per byte cannot be told from both other costs."""
    fit = fit_link(
        [copy(nbytes, 10 + nbytes // 1000, 1e-4 + nbytes / 1e9) for nbytes in (10**4, 10**5, 10**6)]
    )
    assert fit.o_seconds is None
    with pytest.raises(NoPlanError, match="20 to 1010 descriptors"):
        fit.predict(10**5, 110)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e-30])
def test_numbers_that_are_none_are_refused(seconds: float) -> None:
    """A time of zero, below it, not a number, endless or impossible names its sample."""
    with pytest.raises(InputError, match=r"samples\[1\]"):
        fit_link([copy(MIB, 1, 1e-3), copy(2 * MIB, 1, seconds)])


def test_conditions_are_never_mixed() -> None:
    """Push and pull, or TLS and not, are not fitted together."""
    with pytest.raises(InputError, match="several conditions"):
        fit_link([*sweep(), *sweep(mode=Mode.PUSH)])
    with pytest.raises(InputError, match="several conditions"):
        fit_link([*sweep(), *sweep(tls=True)])


def test_a_fit_without_a_point_to_spare_claims_no_error() -> None:
    """Two points and two costs: the line goes through both, which is no evidence."""
    fit = fit_link([copy(MIB, 1, 1e-3), copy(64 * MIB, 1, 1e-2)])
    assert (fit.worst_error, fit.median_error) == (None, None)


def test_a_second_regime_is_reported() -> None:
    """A rate that falls to a third from 4 MiB on gives a knee there, and both sides are predicted."""

    def cost(nbytes: int, descriptors: int) -> float:
        return 50e-6 + 1e-6 * descriptors + nbytes / (6e9 if nbytes < 4 * MIB else 2e9)

    sizes = [2**power for power in range(16, 29)]
    fit = fit_link(sweep(cost, noise=0.03, repeats=9, sizes=sizes))
    assert fit.knee is not None
    assert fit.knee.from_nbytes == 4 * MIB
    assert fit.bytes_per_second == pytest.approx(6e9, rel=0.15)
    assert fit.knee.bytes_per_second == pytest.approx(2e9, rel=0.05)
    for nbytes in sizes:
        descriptors = max(1, nbytes // (64 * KIB))
        assert fit.predict(nbytes, descriptors) == pytest.approx(cost(nbytes, descriptors), rel=0.06)


def test_noise_shows_no_second_regime() -> None:
    """Of 20 links with one regime and 20 % noise, none gets a knee or an overlap."""
    sizes = [2**power for power in range(16, 29)]
    for seed in range(20):
        fit = fit_link(sweep(noise=0.2, repeats=3, seed=seed, sizes=sizes))
        assert fit.knee is None
        assert not fit.descriptors_overlap


def test_overlapping_costs_are_found() -> None:
    """Where posting and moving run at the same time, the larger of the two is predicted."""
    blocks = [2**power * KIB for power in range(3, 11)]
    cost = overlap(50e-6, 0.7e-6, 0.36e12)
    fit = fit_link(sweep(cost, noise=0.02, repeats=5, sizes=[2**24, 2**26, 2**28, 2**30], blocks=blocks))
    assert fit.descriptors_overlap
    assert fit.o_seconds == pytest.approx(0.7e-6, rel=0.05)
    assert fit.bytes_per_second == pytest.approx(0.36e12, rel=0.05)
    for block in blocks:
        assert fit.predict(2**29, 2**29 // block) == pytest.approx(cost(2**29, 2**29 // block), rel=0.06)


def test_quantiles_are_those_of_the_copies() -> None:
    """p50, p95 and p99 of lognormal noise are predicted within a few percent, at every size."""
    sigma = 0.2
    fit = fit_link(sweep(noise=sigma, repeats=400, seed=5))
    for q, z in ((0.5, 0.0), (0.95, 1.64485), (0.99, 2.32635)):
        for nbytes in SIZES:
            true = GOOD(nbytes, 16) * math.exp(sigma * z)
            assert fit.predict_quantile(q, nbytes, 16) == pytest.approx(true, rel=0.12)


def test_small_copies_keep_their_own_spread() -> None:
    """Where small copies scatter far more than large ones, each keeps its own p95."""
    samples = [
        copy(nbytes, n, GOOD(nbytes, n) * float(ratio))
        for seed, (nbytes, sigma) in enumerate(((64 * KIB, 0.5), (64 * MIB, 0.02)))
        for n in (1, 8, 64)
        for ratio in np.random.default_rng(seed).lognormal(0, sigma, 100)
    ]
    fit = fit_link(samples)
    assert [band.up_to_nbytes for band in fit.spreads] == [64 * KIB, 64 * MIB]
    assert fit.spread_at(64 * KIB) is fit.spreads[0]
    assert fit.spread_at(64 * KIB + 1) is fit.spread_at(10**12) is fit.spreads[1]
    small = fit.predict_quantile(0.95, 64 * KIB, 8) / fit.predict(64 * KIB, 8)
    large = fit.predict_quantile(0.95, 64 * MIB, 8) / fit.predict(64 * MIB, 8)
    assert small == pytest.approx(math.exp(0.5 * 1.645), rel=0.25)
    assert large == pytest.approx(math.exp(0.02 * 1.645), rel=0.02)


def test_between_two_bands_the_ratio_rises_in_a_line() -> None:
    """Copies of 64 KiB keep to the line and those of 1 MiB take a fifth more: halfway it is a tenth."""
    true = {64 * KIB: 1.0, MIB: 1.2, 16 * MIB: 1.0, 256 * MIB: 1.0}
    fit = fit_link(
        [copy(nbytes, 1, GOOD(nbytes, 1) * ratio) for nbytes, ratio in true.items() for _ in range(70)]
    )
    small, large = (
        fit.predict_quantile(0.5, nbytes, 1) / fit.predict(nbytes, 1) for nbytes in (64 * KIB, MIB)
    )
    assert large / small > 1.1
    for share in (0.001, 0.25, 0.5, 1.0):
        nbytes = int(64 * KIB + share * (MIB - 64 * KIB))
        found = fit.predict_quantile(0.5, nbytes, 1) / fit.predict(nbytes, 1)
        assert found == pytest.approx(small + share * (large - small), rel=1e-4)


def test_the_tail_beyond_what_was_measured_is_that_of_independent_parts() -> None:
    """Copies of parts that each scatter by 70 %: measured up to 1 MiB, p95 at 64 MiB is within 4 %."""
    rng = np.random.default_rng(3)

    def copies(nbytes: int, count: int) -> np.ndarray:
        return rng.lognormal(-9.0, 0.7, (count, nbytes // (64 * KIB))).sum(axis=1)

    sizes = (256 * KIB, 512 * KIB, MIB)
    fit = fit_link([copy(nbytes, 1, float(seconds)) for nbytes in sizes for seconds in copies(nbytes, 1500)])
    true = float(np.quantile(copies(64 * MIB, 1500), 0.95))
    assert fit.predict_quantile(0.95, 64 * MIB, 1) == pytest.approx(true, rel=0.04)
    assert fit.predict(64 * MIB, 1) * fit.spreads[-1].ratio(0.95) > 1.2 * true


@pytest.mark.parametrize(
    ("counts", "bands"),
    [((70, 70, 10), [70, 80]), ((10, 70, 70), [80, 70]), ((30, 30, 30), [90]), ((30, 30, 6), [66])],
)
def test_bands_hold_the_copies_that_a_p99_needs(counts: tuple[int, ...], bands: list[int]) -> None:
    """Neighbouring sizes are joined until a band has 67 copies; a rest joins the last; few are one band."""
    samples = [
        copy(nbytes, 1, 1e-3 * nbytes / MIB)
        for nbytes, count in zip((MIB, 2 * MIB, 4 * MIB), counts, strict=True)
        for _ in range(count)
    ]
    fit = fit_link(samples)
    assert [band.samples for band in fit.spreads] == bands
    assert fit.spreads[-1].up_to_nbytes == 4 * MIB


def test_a_faster_second_regime_is_never_promised_below_the_first() -> None:
    """Where the start cost falls at the knee, larger copies are predicted no faster than those below it."""
    span = Span(low=1, high=10**9)
    fit = LinkFit(
        a_seconds=1e-2,
        o_seconds=1e-6,
        bytes_per_second=1e9,
        samples=9,
        nbytes=span,
        descriptors=span,
        block_bytes=span,
        knee=Knee(from_nbytes=10**6, a_seconds=1e-4, o_seconds=1e-6, bytes_per_second=1e9),
    )
    at_knee = 1e-2 + 1e-6 * 10 + 1e-3
    assert fit.predict(10**6 - 1, 10) == pytest.approx(at_knee, rel=1e-5)
    assert fit.predict(10**6, 10) == fit.predict(5 * 10**6, 10) == pytest.approx(at_knee)
    assert fit.predict(10**8, 10) == pytest.approx(1e-4 + 1e-5 + 0.1)


@pytest.mark.parametrize(("repeats", "q"), [(12, 0.95), (66, 0.99)])
def test_too_few_copies_do_not_know_a_quantile(repeats: int, q: float) -> None:
    """p95 needs 13 copies and p99 67; with one less the answer is refused and says how many it needs."""
    base = [copy(MIB, 1, 1e-3), copy(64 * MIB, 1, 1e-2)]
    fit = fit_link(base * (repeats // 2))
    with pytest.raises(
        NoPlanError, match=rf"p{q * 100:g} is not known from {repeats} copies.*{samples_needed(q)}"
    ):
        fit.predict_quantile(q, MIB, 1)
    enough = fit_link([*base * (repeats // 2), base[0]])
    assert enough.predict_quantile(q, MIB, 1) == pytest.approx(1e-3)


@pytest.mark.parametrize("q", [0.0, 0.49, 0.995, 1.0, math.nan])
def test_quantiles_outside_the_known_are_refused(q: float) -> None:
    """Only 0.5 to 0.99 can be asked."""
    with pytest.raises(InputError, match="q: "):
        fit_link(sweep(repeats=5)).predict_quantile(q, MIB, 16)


def test_a_copy_outside_the_measured_range_is_predicted_and_said_so() -> None:
    """Extrapolation is allowed and named; inside the range nothing is said."""
    fit = fit_link(sweep())
    assert fit.beyond(MIB, 16) == ()
    said = fit.beyond(512 * MIB, 512 * MIB // KIB)
    assert len(said) == 3
    assert "536870912 bytes is outside the 65536 to 67108864" in said[0]


def test_a_rate_alone_predicts_nothing() -> None:
    """A brochure rate gives a floor and no prediction."""
    fit = LinkFit(a_seconds=None, o_seconds=None, bytes_per_second=1e9)
    assert fit.at_least(10**9, 100) == 1.0
    assert fit.beyond(1, 1)
    with pytest.raises(NoPlanError, match="nothing was measured"):
        fit.predict(10**9, 100)
    with pytest.raises(NoPlanError, match="nothing was measured"):
        fit.predict_quantile(0.5, 10**9, 100)


COSTS = st.floats(0, 1e-2)


@st.composite
def fits(draw: st.DrawFn) -> LinkFit:
    """Any fit that a file may hold: with and without a knee, any bands of spread."""

    def costs() -> dict[str, object]:
        return {
            "a_seconds": draw(COSTS),
            "o_seconds": draw(COSTS),
            "bytes_per_second": draw(RATES),
            "descriptors_overlap": draw(st.booleans()),
        }

    knee = Knee(from_nbytes=draw(st.integers(1, 10**9)), **costs()) if draw(st.booleans()) else None
    ends = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=4)))
    bands = []
    for end in ends:
        p50, p95, p99 = sorted(draw(st.lists(st.floats(0.5, 20), min_size=3, max_size=3)))
        few = draw(st.sampled_from([{}, {}, {"p99": None}, {"p95": None}, {"p95": None, "p99": None}]))
        known = {"p50": p50, "p95": p95, "p99": p99} | few
        bands.append(Spread(up_to_nbytes=end, samples=99, mean=p50, deviation=0.1, **known))
    span = Span(low=1, high=10**9)
    return LinkFit(
        **costs(),
        samples=99,
        nbytes=span,
        descriptors=span,
        block_bytes=span,
        spreads=tuple(bands),
        knee=knee,
    )


@st.composite
def growths(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes and descriptors of a copy, and of one that is no smaller."""
    nbytes, descriptors = draw(st.integers(1, 2 * 10**9)), draw(st.integers(1, 10**6))
    return (nbytes, descriptors), (
        nbytes + draw(st.integers(0, 10**9)),
        descriptors + draw(st.integers(0, 10**6)),
    )


@pytest.mark.parametrize("means", [(1.0, 0.9), (0.9, 1.0)])
@pytest.mark.parametrize("deviations", [(0.5, 0.7), (0.7, 0.5)])
def test_moments_never_fall(means: tuple[float, float], deviations: tuple[float, float]) -> None:
    """The mean, and that of the squares, whichever of mean and scatter is less in the next band."""
    bands = tuple(
        Spread(up_to_nbytes=end, samples=99, p50=0.9, mean=mean, deviation=deviation)
        for end, mean, deviation in zip((1000, 4000), means, deviations, strict=True)
    )
    span = Span(low=1, high=10**4)
    spans = {"nbytes": span, "descriptors": span, "block_bytes": span}
    for rate in (1e8, 1e10):
        fit = LinkFit(
            a_seconds=1e-4, o_seconds=0.0, bytes_per_second=rate, samples=99, spreads=bands, **spans
        )
        found = [fit.mean_and_square(nbytes, 1) for nbytes in range(500, 6000, 100)]
        for (mean, square), (more, squarer) in itertools.pairwise(found):
            assert more >= mean * (1 - 1e-12)
            assert squarer >= square * (1 - 1e-12)


@given(fits(), growths(), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_predictions_never_fall(
    fit: LinkFit, growth: tuple[tuple[int, int], tuple[int, int]], q: float, other: float
) -> None:
    """More bytes, more descriptors or a higher quantile never give a shorter time."""
    small, large = growth
    assert fit.predict(*large) >= fit.predict(*small) * (1 - 1e-12)
    low, high = sorted((q, other))
    known = []
    for at, size in ((low, small), (low, large), (high, small), (high, large)):
        with contextlib.suppress(NoPlanError):  # too few copies of that size for that quantile
            known.append((at, *size, fit.predict_quantile(at, *size)))
    for *less, short in known:
        for *more, long in known:
            if all(one <= other for one, other in zip(less, more, strict=True)):
                assert long >= short * (1 - 1e-12)
