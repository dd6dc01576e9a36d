"""Cluster files: what they become, link classes by their measurements, and every way to get one wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvferry.errors import InputError, NoPlanError
from kvferry.link import LinkFile
from kvferry.link.load import load_links
from kvferry.model import load_shape
from kvferry.plan.cluster import Cluster, build_cluster, pool_tokens
from kvferry.plan.cluster_file import parse_cluster
from kvferry.plan.cluster_tables import FleetTable, PoolTable
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.compute_file import ProfileChoice
from kvferry.plan.deploy import deploy
from kvferry.plan.fleet import Role, Wires
from kvferry.plan.interference import MixedStep
from kvferry.plan.where import toml_place
from plan_kit import LLAMA_70B, link, link_file, profile

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster.toml"
BASE = """\
model = "shape:80x8x128"
[slo]
ttft = "2s"
tpot = "100ms"
[workload]
rate = 5.0
prompt_tokens = 2000
output_tokens = 200
[gpus.h100]
kv_memory = "40 GB"
profiles = ["one", { profile = "engine.csv", tp = 2 }]
[[nodes]]
gpu = "h100"
count = 2
[[nodes]]
gpu = "h100"
rack = "r1"
[links]
domain = { rate = "300 GB/s", start = "50us", measured = "by hand" }
rack = { rate = "47 GB/s", start = "1ms", descriptor = "2us", measured = "by hand" }
pod = "eth100"
[uplinks]
node = "100 GB/s"
rack = "800 Gb/s"
"""


def open_profile(name: str, choice: ProfileChoice) -> ComputeProfile:
    return profile(model=name, tp=choice.tp or 4)


def build(text: str = BASE, links: LinkFile | None = None) -> Cluster:
    return build_cluster(
        parse_cluster(text, "c.toml"),
        LLAMA_70B,
        open_links=lambda name: links if links is not None and name == "links.json" else load_links(name),
        open_profile=open_profile,
        payload_tokens=2000,
    )


def test_a_file_becomes_a_cluster() -> None:
    """Nodes with their spots, profiles by name and choice, tiers in seconds and bytes, both mixed bounds."""
    cluster = build()
    assert cluster.num_gpus == 24
    assert [node.spot.domain for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert [node.spot.rack for node in cluster.nodes] == ["rack0", "rack0", "r1"]
    assert [(p.model, p.tp) for p in cluster.gpus["h100"].profiles] == [("one", 4), ("engine.csv", 2)]
    assert [tier.is_measured for tier in cluster.tiers] == [True, True, False]
    assert cluster.tiers[1].seconds(47 * 10**9, 1000) == pytest.approx(1.0 + 0.001 + 0.002)
    assert (cluster.node_rate, cluster.rack_uplink_rate) == (100e9, 100e9)
    assert cluster.mixed == (MixedStep.LONGER, MixedStep.SUM)
    assert any("links.pod" in warning for warning in cluster.warnings)


def test_the_example_is_read() -> None:
    """examples/cluster.toml parses, and every key of the schema's tables is in it or in a comment."""
    text = EXAMPLE.read_text("utf-8")
    found = parse_cluster(text, "cluster.toml")
    assert found.fleet is not None
    for table in (found.slo, found.workload, found.engine, found.plan, found.nodes[0], found.gpus["h100"]):
        for key in table.__struct_fields__:
            assert key in text, key


def test_a_class_is_read_from_its_measurements() -> None:
    """Of all pairs of a class the median stands for it, and the label names the slowest."""
    pairs = [
        replace(link(rate=rate, names=(f"a{n}", f"b{n}")), link_class="same rack")
        for n, rate in enumerate([40e9, 50e9, 10e9])
    ]
    text = BASE.replace(
        'rack = { rate = "47 GB/s", start = "1ms", descriptor = "2us", measured = "by hand" }', ""
    )
    text = text.replace("[links]\n", '[links]\nrack = { file = "links.json", class = "same rack" }\n')
    cluster = build(text, link_file(*pairs))
    assert cluster.tiers[1].rate == 40e9
    assert "a2 -> b2" in cluster.tiers[1].label
    assert "4 times as long" in cluster.tiers[1].label
    with pytest.raises(InputError, match=r"no pair of class 'same pod'; known: same rack"):
        build(text.replace('"same rack"', '"same pod"'), link_file(*pairs))


def test_labels_against_measurements() -> None:
    """A tier that was measured faster than a nearer one is called out."""
    text = BASE.replace('pod = "eth100"', 'pod = { rate = "200 GB/s", measured = "by hand" }')
    assert any("faster than links.rack" in warning for warning in build(text).warnings)


def test_a_hand_typed_rate_is_measured_only_if_it_says_how() -> None:
    """Without ``measured`` it is marked, as a preset is."""
    cluster = build(BASE.replace(', descriptor = "2us", measured = "by hand" }', " }"))
    assert cluster.tiers[1].is_measured is False
    assert "not said how it was measured" in cluster.tiers[1].label


def test_tiers_are_needed_as_far_as_nodes_are_apart() -> None:
    """A missing tier that some pair needs is named; one that no pair can use is not asked for."""
    with pytest.raises(InputError, match=r"links\.pod: missing"):
        build(BASE.replace('pod = "eth100"\n', ""))
    one_rack = BASE.replace('rack = "r1"\n', "").replace('pod = "eth100"\n', "")
    assert len(build(one_rack).tiers) == 2
    shared = BASE.replace('gpu = "h100"\n', 'gpu = "h100"\ndomain = "nvl"\n')
    assert len(build(shared.replace('rack = "r1"\n', "")).tiers) == 1


def test_pool_tokens() -> None:
    """40 GB a GPU at tp 4 hold 4 x 40 GB of Llama-3.1-70B's KV; without it the profile's count holds."""
    cluster = build()
    gpu = cluster.gpus["h100"]
    assert pool_tokens(cluster, gpu, gpu.profiles[0], 2000) == pytest.approx(4 * 40e9 / 327_680, rel=1e-3)
    bare = replace(gpu, kv_nbytes=None)
    assert pool_tokens(cluster, bare, profile(kv_tokens=78_496), 2000) == 78_496
    assert pool_tokens(cluster, bare, profile(), 2000) is None


def test_a_fleet_is_put_on_the_nodes() -> None:
    """Instances get names and spots; paths cross the uplinks that they need; too many are refused."""
    cluster = build()
    pool = PoolTable(gpu="h100", count=3, tp=4)
    fleet = deploy(cluster, FleetTable(prefill=pool, decode=pool), typical_tokens=2000, long_tokens=4000)
    assert sorted(i.name for i in fleet.instances) == sorted(
        f"{r}-{n}" for r in ("prefill", "decode") for n in range(3)
    )
    assert fleet.num_gpus == 24
    wires = Wires(fleet)
    prefill, decode = fleet.of_role(Role.PREFILL), fleet.of_role(Role.DECODE)
    kinds = {tuple(one.kind for one in wires.between(p, d)[1]) for p in prefill for d in decode}
    assert kinds == {("domain", "domain"), ("node", "node"), ("node", "rack uplink", "rack uplink", "node")}
    alone = deploy(cluster, FleetTable(colocated=pool), typical_tokens=2000, long_tokens=4000)
    assert len(alone.of_role(Role.COLOCATED)) == 3
    many = PoolTable(gpu="h100", count=4, tp=4)
    with pytest.raises(NoPlanError, match="no room for 4 x 4 h100 GPUs and 4 x 4 h100 GPUs on 24 GPUs"):
        deploy(cluster, FleetTable(prefill=many, decode=many), typical_tokens=2000, long_tokens=4000)
    with pytest.raises(InputError, match=r"fleet\.colocated\.tp: no profile of h100 with tp 3"):
        deploy(cluster, FleetTable(colocated=replace(pool, tp=3)), typical_tokens=2000, long_tokens=4000)
    with pytest.raises(InputError, match=r"fleet\.colocated\.gpu: 'a100'"):
        deploy(
            cluster, FleetTable(colocated=replace(pool, gpu="a100")), typical_tokens=2000, long_tokens=4000
        )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('ttft = "2s"', 'ttft = "2"', "c.toml, line 3: slo.ttft: '2' has no unit"),
        ('ttft = "2s"', "ttft = 2", "c.toml, line 3: slo.ttft"),
        ('ttft = "2s"', 'ttft = "0s"', "c.toml, line 3: slo.ttft: '0s' is not above 0"),
        ("tpot", "tpott", "c.toml, line 4: slo.tpott: unknown key"),
        ("rate = 5.0", "rate = -5.0", "c.toml, line 6: workload.rate: -5.0"),
        ("rate = 5.0", "rate = nan", "c.toml, line 6: workload.rate: nan"),
        ("rate = 5.0", "rate = inf", "c.toml, line 6: workload.rate: inf"),
        ("rate = 5.0\n", "", "c.toml, line 5: workload.rate: missing"),
        ("prompt_tokens = 2000", "prompt_tokens = 0", "c.toml, line 7: workload.prompt_tokens"),
        ("prompt_tokens = 2000\n", "", "c.toml, line 5: workload.trace: give trace"),
        ('"40 GB"', '"40"', "c.toml, line 10: gpus.h100.kv_memory: '40' has no unit"),
        ('"40 GB"', '"40 GB/s"', "c.toml, line 10: gpus.h100.kv_memory"),
        ("profiles = [", "profile = [", "c.toml, line 11: gpus.h100.profile: unknown key"),
        ("count = 2", 'count = "2"', "c.toml, line 14: nodes[0].count"),
        ('rack = "r1"', "gpus = 0", "c.toml, line 17: nodes[1].gpus"),
        (
            'gpu = "h100"\nrack',
            'gpu = "h200"\nrack',
            "c.toml, line 16: nodes[1].gpu: 'h200' is not one of gpus: h100",
        ),
        ('"47 GB/s"', '"47 GB"', "c.toml, line 20: links.rack.rate: '47 GB'"),
        ('start = "1ms"', 'latency = "1ms"', "c.toml, line 20: links.rack.latency: unknown key"),
        ('rate = "47 GB/s", ', "", "c.toml, line 20: links.rack.rate: give file"),
        ('node = "100 GB/s"', 'node = "100"', "c.toml, line 23: uplinks.node"),
        ('model = "shape:80x8x128"\n', "", "c.toml, line 1: model: missing key"),
        ("[slo]", "[slo", "c.toml, line 2: is not TOML"),
        ("[slo]", "[service]", "c.toml, line 2: service: unknown key"),
    ],
)
def test_a_bad_cluster_names_file_line_and_key(old: str, new: str, says: str) -> None:
    """What is wrong is one line with the file, the line and the key."""
    assert old in BASE
    with pytest.raises(InputError) as caught:
        parse_cluster(BASE.replace(old, new), "c.toml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fleet_tables_are_checked() -> None:
    """Prefill needs decode, and colocated stands alone."""
    pool = '{ gpu = "h100", count = 1, tp = 4 }'
    for fleet in (f"prefill = {pool}", f"prefill = {pool}\ndecode = {pool}\ncolocated = {pool}", ""):
        with pytest.raises(InputError, match="fleet"):
            parse_cluster(f"{BASE}[fleet]\n{fleet}\n", "c.toml")


def test_places_in_toml() -> None:
    """Lines of keys in tables, lists of tables, inline tables, quoted keys, and beside comments."""
    text = '# slo.ttft\n[slo]\n"ttft" = 1 # tpot\ntpot = 2\n\n[[n]]\na = 1\n[[n]]\nb = {a = 1}\n'
    text += '[g."x y"]\nk = 1\n'
    for key, line in (
        ("slo.ttft", 3),
        ("slo.tpot", 4),
        ("n[0].a", 7),
        ("n[1].b.a", 9),
        ("n[1]", 8),
        ("g.x y.k", 11),
    ):
        assert toml_place("f", text, key) == f"f, line {line}: {key}"


def test_shape_of_the_example() -> None:
    """The example's model is Llama-3.1-70B's shape: 327,680 bytes a token."""
    found = parse_cluster(EXAMPLE.read_text("utf-8"), "cluster.toml")
    assert (
        build_cluster(
            found,
            load_shape(found.model),
            open_links=load_links,
            open_profile=open_profile,
            payload_tokens=1000,
        )
        .pool.size(load_shape(found.model), 1000)
        .bytes_per_token
        == 327_680
    )
