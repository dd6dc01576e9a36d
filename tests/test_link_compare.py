"""Drift is told from noise, merges say what they kept, and slow pairs are named with their reason."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvferry.errors import InputError
from kvferry.link import (
    How,
    LinkFile,
    LinkProfile,
    Mode,
    Node,
    Reason,
    Registration,
    Shape,
    Verdict,
    common_copies,
    diff_links,
    find_outliers,
    fit_link,
    merge_links,
    preset_links,
    samples_needed,
    summarise,
)
from kvferry.link.diff import uncertainty
from link_kit import BLOCKS, GOOD, KIB, MARCH, MAY, MIB, SIZES, Cost, line, links, profile, sweep


def measured(
    cost: Cost = GOOD, a: str = "a", b: str = "b", *, seed: int = 0, **fields: object
) -> LinkProfile:
    return profile(sweep(cost, noise=0.03, repeats=12, seed=seed), a, b, **fields)


# Drift


def test_two_runs_of_one_link_are_the_same() -> None:
    """Of 20 pairs measured twice without a change, all are called the same."""
    verdicts = [
        drift.verdict
        for seed in range(20)
        for drift in diff_links(links(measured(seed=seed)), links(measured(seed=seed + 100))).drifts
    ]
    assert verdicts == [Verdict.SAME] * 20


@pytest.mark.parametrize(
    ("cost", "verdict", "shape"),
    [
        (line(50e-6, 2e-6, 4e9), Verdict.SLOWER, Shape.LARGE),
        (line(50e-6, 2e-6, 7e9), Verdict.FASTER, Shape.LARGE),
        (line(50e-6, 4e-6, 5e9), Verdict.SLOWER, Shape.SCATTERED),
        (line(150e-6, 2e-6, 5e9), Verdict.SLOWER, Shape.SMALL),
        (line(150e-6, 2e-6, 7e9), Verdict.MIXED, Shape.LARGE),
    ],
)
def test_a_drift_is_found_where_it_is(cost: Cost, verdict: Verdict, shape: Shape) -> None:
    """A changed rate shows in large copies, a descriptor's cost in scattered ones, a start in small ones."""
    diff = diff_links(links(measured()), links(measured(cost, seed=1)))
    (drift,) = diff.drifts
    assert drift.verdict is verdict
    change = next(change for change in drift.changes if change.shape is shape)
    true = cost(change.nbytes, change.descriptors) / GOOD(change.nbytes, change.descriptors) - 1
    assert change.change == pytest.approx(true, abs=0.04)
    assert change.noise < abs(true)
    assert change.new_seconds / change.old_seconds == pytest.approx(1 + change.change)
    assert change.new_p95_seconds is not None
    assert change.new_p95_seconds > change.new_seconds


def test_a_change_within_the_noise_is_no_drift() -> None:
    """The same 15 % count with quiet copies, and not with few copies that scatter by half."""
    slower = line(50e-6 * 1.15, 2e-6 * 1.15, 5e9 / 1.15)
    quiet = [profile(sweep(cost, noise=0.01, repeats=9)) for cost in (GOOD, slower)]
    loud = [profile(sweep(cost, noise=0.5, repeats=2, seed=3)) for cost in (GOOD, slower)]
    for pairs, verdict in ((quiet, Verdict.SLOWER), (loud, Verdict.SAME)):
        (drift,) = diff_links(links(pairs[0]), links(pairs[1])).drifts
        assert drift.verdict is verdict
        assert drift.changes[0].change == pytest.approx(0.15, abs=0.01)


def test_uncertainty_is_that_of_a_median() -> None:
    """Copies that scatter around a line: 1.25 deviations over the root of their number, 1 % at least."""
    exact = sweep(repeats=1, sizes=SIZES[:4])
    scattered = [
        msgspec.structs.replace(sample, seconds=sample.seconds * ratio)
        for sample in exact
        for ratio in (0.5, 1, 2)
    ]
    fit = fit_link(scattered)
    (spread,) = fit.spreads
    assert fit.median_error == pytest.approx(0.0, abs=1e-5)
    assert spread.p95 == pytest.approx(2.0)
    count = len(scattered)
    assert count < samples_needed(0.99)
    assert uncertainty(fit, MIB) == pytest.approx(1.2533 * (2 - 1) / 1.645 / count**0.5, rel=1e-3)
    assert uncertainty(fit_link(exact), MIB) == 0.01


def test_pairs_of_one_file_only_are_named() -> None:
    """What was not measured twice is listed with its conditions and not compared."""
    old = links(measured(), measured(a="x"))
    new = links(measured(), profile([*sweep(repeats=2), *sweep(repeats=2, tls=True)], "y"))
    diff = diff_links(old, new)
    assert len(diff.drifts) == 1
    assert diff.only_old == ("x -> b over tcp: pull",)
    assert diff.only_new == ("y -> b over tcp: pull", "y -> b over tcp: pull, TLS")


def test_a_transport_that_changed_is_still_compared() -> None:
    """A pair that fell from shm to tcp is one pair, and the change is said."""
    diff = diff_links(
        links(measured(transport="shm")), links(measured(transport="tcp", path="2 streams", seed=1))
    )
    (drift,) = diff.drifts
    assert drift.reasons == ("transport was shm, is tcp", "path was not given, is 2 streams")
    assert (diff.only_old, diff.only_new) == ((), ())


def test_what_cannot_be_compared_says_why() -> None:
    """No common size, or a parameter that one of them does not know: unknown, with the reason."""
    small, large = (profile(sweep(sizes=sizes, repeats=3)) for sizes in (SIZES[:2], SIZES[4:]))
    (drift,) = diff_links(links(small), links(large)).drifts
    assert drift.verdict is Verdict.UNKNOWN
    assert drift.reasons == ("the two have no size of copy in common",)
    one_block = profile(sweep(blocks=[64 * KIB], repeats=3))
    no_spread = msgspec.structs.replace(
        one_block,
        fits=(
            msgspec.structs.replace(
                one_block.fits[0], fit=msgspec.structs.replace(one_block.fits[0].fit, spreads=())
            ),
        ),
    )
    (drift,) = diff_links(links(one_block), links(no_spread)).drifts
    assert drift.verdict is Verdict.UNKNOWN
    assert "the spread of this fit was not kept" in drift.reasons[0]


def test_common_copies_lie_in_every_fit() -> None:
    """Copies to compare by are inside what each fit has measured, and none are given where nothing is."""
    wide = fit_link(sweep())
    narrow = fit_link(sweep(sizes=[MIB, 4 * MIB], blocks=[64 * KIB, 256 * KIB]))
    copies = common_copies([wide, narrow])
    assert [copy.shape for copy in copies] == [Shape.LARGE, Shape.SCATTERED, Shape.SMALL]
    for copy, fit in itertools.product(copies, (wide, narrow)):
        assert fit.beyond(copy.nbytes, copy.descriptors) == ()
    assert common_copies([wide, fit_link(sweep(sizes=[10**9, 2 * 10**9]))]) == ()
    assert common_copies([wide, preset_links("eth25").pairs[0].fits[0].fit]) == ()
    assert common_copies([]) == ()


# Merge


def test_the_newest_measurement_stays() -> None:
    """Whatever the order of the files, the newer run of a pair is kept whole and the choice is said."""
    old, new = measured(date=MARCH), measured(line(1e-4, 1e-6, 9e9), date=MAY)
    for files in ([links(old), links(new)], [links(new), links(old)]):
        merged = merge_links(files)
        assert merged.links.pairs == (new,)
        assert merged.notes == (
            "a -> b over tcp: pull: kept measured 2026-05-01, dropped measured 2026-03-01",
        )


def test_of_equal_dates_the_later_file_stays() -> None:
    """The order of the files breaks a tie."""
    one, two = measured(), measured(line(1e-4, 1e-6, 9e9))
    assert merge_links([links(one), links(two)]).links.pairs == (two,)
    assert merge_links([links(two), links(one)]).links.pairs == (one,)


def test_conditions_of_several_runs_are_put_together() -> None:
    """Pull of March and push of May make one profile, each fit with its own date and samples."""
    pull = measured(date=MARCH, registration=Registration(nbytes=1, seconds=1.0), first_contact_seconds=0.5)
    push = profile(sweep(mode=Mode.PUSH, repeats=2), date=MAY)
    merged = merge_links([links(push), links(pull)])
    (pair,) = merged.links.pairs
    assert pair.date == MAY
    assert {str(entry.conditions): pair.label_of(entry) for entry in pair.fits} == {
        "pull": "measured 2026-03-01",
        "push": "measured 2026-05-01",
    }
    assert pair.fit("pull") == pull.fit("pull")
    assert len(pair.samples) == len(pull.samples) + len(push.samples)
    assert (pair.registration, pair.first_contact_seconds) == (pull.registration, 0.5)
    assert merged.notes == ()


def test_pooled_samples_are_fitted_together() -> None:
    """The pool of two runs is the fit of all their samples."""
    one, two = measured(seed=1), measured(seed=2, date=MAY)
    merged = merge_links([links(one), links(two)], How.POOL)
    (pair,) = merged.links.pairs
    assert pair.date == MAY
    assert pair.fit("pull") == fit_link([*one.samples, *two.samples])
    assert merged.notes == (
        "a -> b over tcp: pooled the samples of measured 2026-03-01, measured 2026-05-01",
    )


def test_a_pool_without_samples_is_refused() -> None:
    """A file that kept only its fits cannot be pooled, and is named by pair, date and condition."""
    with pytest.raises(
        InputError, match=r"pool: a -> b over tcp, measured 2026-03-01: pull: kept no samples"
    ):
        merge_links([links(measured(keep=False)), links(measured(date=MAY))], How.POOL)
    assert merge_links([links(measured(keep=False))], How.POOL).links.pairs[0].samples == ()


def test_a_measurement_replaces_a_brochure_rate() -> None:
    """Whatever the order, what was measured stays and the brochure goes, said aloud."""
    brochure = msgspec.structs.replace(
        preset_links("eth100").pairs[0], from_node="a", to_node="b", transport="tcp", date=MAY
    )
    for files in ([links(brochure), links(measured())], [links(measured()), links(brochure)]):
        merged = merge_links(files)
        assert merged.links.pairs == (measured(),)
        assert "brochure rate is dropped" in merged.notes[0]
    assert merge_links([links(brochure), links(brochure)]).links.pairs[0].label == "unmeasured"


def test_other_pairs_and_nodes_are_all_kept() -> None:
    """Pairs over another transport or proxy stay apart; a node's facts are those of the newest file."""
    pairs = [measured(), measured(transport="shm"), measured(via="stunnel"), measured(a="c")]
    old = LinkFile(nodes=(Node(name="a", host="old"), Node(name="z")), pairs=(pairs[0],))
    new = LinkFile(
        nodes=(Node(name="a", host="new"),),
        pairs=tuple(msgspec.structs.replace(p, date=MAY) for p in pairs[1:]),
    )
    merged = merge_links([new, old])
    assert len(merged.links.pairs) == 4
    assert {node.name: node.host for node in merged.links.nodes} == {"a": "new", "z": ""}
    assert merged.notes == ("node a: its facts changed; kept those of the newest file",)
    with pytest.raises(InputError, match="one link file at least"):
        merge_links([])


def test_a_merge_over_several_paths_is_said() -> None:
    """Runs that took different paths are merged with a note."""
    merged = merge_links([links(measured(path="one")), links(measured(path="two", date=MAY))])
    assert "a -> b over tcp: over several paths (one, two)" in merged.notes


# Outliers

NODES = ("n0", "n1", "n2", "n3")
SLOW = line(50e-6, 2e-6, 2e9)


def mesh(costs: dict[tuple[str, str], Cost], **fields: dict[tuple[str, str], str]) -> LinkFile:
    """All ordered pairs of four nodes; some with costs, transports or paths of their own."""
    pairs = []
    for seed, ends in enumerate(itertools.permutations(NODES, 2)):
        cost = costs.get(ends, GOOD)
        own = {name: values[ends] for name, values in fields.items() if ends in values}
        pairs.append(measured(cost, *ends, seed=seed, link_class="rack", **own))
    return links(*pairs)


def test_a_class_of_equals_has_no_outlier() -> None:
    """Noise alone names nobody."""
    assert find_outliers(mesh({})) == ()


@pytest.mark.parametrize(("times", "count"), [(1.15, 0), (1.4, 1)])
def test_slow_is_a_quarter_above_the_median(times: float, count: int) -> None:
    """A pair 15 % above its class is not called slow, one 40 % above is."""
    cost = line(50e-6 * times, 2e-6 * times, 5e9 / times)
    assert len(find_outliers(mesh({("n0", "n1"): cost}))) == count


def test_one_slow_direction_is_named() -> None:
    """The slow pair is found among twelve, with its ratio, and that its other direction is well."""
    (outlier,) = find_outliers(mesh({("n1", "n2"): SLOW}))
    assert outlier.pair == "n1 -> n2 over tcp"
    assert outlier.reasons == (Reason.ONE_DIRECTION, Reason.RATE)
    assert outlier.detail == "n2 -> n1 is not slow; the rate is lower than on the others"
    true = SLOW(outlier.nbytes, outlier.descriptors) / GOOD(outlier.nbytes, outlier.descriptors)
    assert outlier.ratio == pytest.approx(true, rel=0.05)
    assert outlier.seconds / outlier.median_seconds == pytest.approx(outlier.ratio)


def test_a_node_that_is_slow_to_all_is_named() -> None:
    """Every pair from n3 is slow: the node is the reason, and sends; the same for receiving."""
    sends = find_outliers(mesh({("n3", other): SLOW for other in NODES[:3]}))
    assert {outlier.pair for outlier in sends} == {f"n3 -> {other} over tcp" for other in NODES[:3]}
    assert all(outlier.reasons[0] is Reason.NODE_SENDS for outlier in sends)
    assert sends[0].detail.startswith("n3 sends slowly to all; ")
    receives = find_outliers(mesh({(other, "n3"): SLOW for other in NODES[:3]}))
    assert all(outlier.reasons[0] is Reason.NODE_RECEIVES for outlier in receives)
    assert receives[0].detail.startswith("n3 receives slowly from all; ")


def test_a_transport_that_fell_back_is_named() -> None:
    """A pair over tcp among pairs over shm, or over another path, is slow for that reason first."""
    ends = ("n0", "n2")
    shm = {pair: "shm" for pair in itertools.permutations(NODES, 2) if pair != ends}
    (outlier,) = find_outliers(mesh({ends: SLOW}, transport=shm))
    assert outlier.reasons[0] is Reason.FELL_BACK
    assert outlier.detail.startswith("it used tcp; most of its class use shm; ")
    (outlier,) = find_outliers(mesh({ends: SLOW}, path={ends: "through the host"}))
    assert outlier.detail.startswith("it used tcp, through the host; most of its class use tcp; ")


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (line(50e-6, 9e-6, 5e9), Reason.DESCRIPTORS),
        (line(1e-3, 2e-6, 5e9), Reason.START),
        (SLOW, Reason.RATE),
    ],
)
def test_the_cost_that_is_high_is_named(cost: Cost, reason: Reason) -> None:
    """Slow only with many pieces, only at the start, or in rate: the last reason says which."""
    outliers = find_outliers(mesh({("n1", "n2"): cost, ("n2", "n1"): cost}))
    assert len(outliers) == 2
    assert all(outlier.reasons == (reason,) for outlier in outliers)
    assert outliers[0].detail == str(reason)


def test_classes_and_conditions_are_judged_apart() -> None:
    """A slow class is no outlier of a fast one; classes of two pairs are not judged; presets never."""
    fast = mesh({})
    slow = tuple(
        measured(SLOW, a, b, link_class="between racks") for a, b in (("x", "y"), ("y", "x"), ("x", "z"))
    )
    assert find_outliers(links(*fast.pairs, *slow)) == ()
    odd = measured(SLOW, "y", "z", link_class="")
    alike = tuple(measured(GOOD, a, b, link_class="") for a, b in (("x", "y"), ("y", "x")))
    assert find_outliers(links(odd, alike[0])) == ()
    assert len(find_outliers(links(odd, *alike))) == 1
    assert find_outliers(links(odd, alike[0], preset_links("eth100").pairs[0])) == ()


def test_a_pair_with_several_transports_counts_with_its_fastest() -> None:
    """A slow tcp probe beside a fast shm one of the same pair makes no outlier."""
    slow = measured(SLOW, "n0", "n1", transport="tcp: other", link_class="rack")
    assert find_outliers(links(slow, *mesh({}).pairs)) == ()


# Summary


def test_a_summary_is_of_one_payload() -> None:
    """Time, p95, rate and share of the line are those of the payload asked for, in its pieces."""
    pair = measured(line_rate=10e9)
    (summary,) = summarise(links(pair), 8 * MIB, 64 * KIB)
    fit = pair.fit("pull")
    assert (summary.nbytes, summary.descriptors) == (8 * MIB, 128)
    assert summary.seconds == fit.predict_quantile(0.5, 8 * MIB, 128)
    assert summary.p95_seconds == fit.predict_quantile(0.95, 8 * MIB, 128)
    assert summary.bytes_per_second == pytest.approx(8 * MIB / summary.seconds)
    assert summary.share_of_line_rate == pytest.approx(summary.bytes_per_second / 10e9)
    assert (summary.unknown, summary.beyond, summary.label) == ("", (), "measured 2026-03-01")


def test_a_summary_without_a_payload_takes_what_all_have_measured() -> None:
    """The largest common size, in the fewest pieces."""
    small = profile(sweep(sizes=SIZES[:4], repeats=3), "x")
    summaries = summarise(links(measured(), small))
    assert {(summary.nbytes, summary.descriptors) for summary in summaries} == {
        (SIZES[3], SIZES[3] // BLOCKS[-1])
    }


def test_a_summary_says_what_it_does_not_know() -> None:
    """An unmeasured link has a floor and the reason; a payload outside is marked."""
    (brochure,) = summarise(preset_links("eth25"))
    assert (brochure.seconds, brochure.p95_seconds, brochure.bytes_per_second) == (None, None, None)
    assert brochure.at_least_seconds == pytest.approx(1e9 / 3.125e9)
    assert brochure.unknown == "nothing was measured on this link"
    assert brochure.label == "unmeasured"
    (beyond,) = summarise(links(measured()), 10**10)
    assert "10000000000 bytes is outside" in beyond.beyond[0]
    (few,) = summarise(links(profile(sweep(repeats=1, sizes=SIZES[:2]))))
    assert few.seconds is not None
    assert few.p95_seconds is None
    assert "p95 is not known from" in few.unknown
