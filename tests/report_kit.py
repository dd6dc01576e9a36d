"""Files of every kind that a report is made from, as the verbs write them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvferry.cli import run
from kvferry.link.load import encode_links
from link_kit import links, profile, sweep

CLUSTER = str(Path(__file__).parents[1] / "examples" / "cluster.toml")


def write_all(folder: Path) -> list[str]:
    """A link file of three nodes, a check, a plan, a simulation with its records, and a demo."""
    nodes = ("alpha", "beta", "<b>gamma</b>")
    pairs = [profile(sweep(repeats=3), one, other) for one in nodes for other in nodes if one != other]
    (folder / "links.json").write_bytes(encode_links(links(*pairs)))
    one = ("--from-node", "alpha", "--to-node", "beta")
    verbs = {
        "check.json": ("check", "shape:32x8x128", "--link", str(folder / "links.json"), *one,
                       "--prompt-tokens", "1024", "--ttft", "500ms", "--prefill-seconds", "0.2"),
        "plan.json": ("plan", CLUSTER, "--requests", "50"),
        "sim.json": ("simulate", CLUSTER, "--requests", "50", "--records", str(folder / "sim.parquet")),
        "sweep.json": ("simulate", CLUSTER, "--requests", "50", "--policy", "load", "--policy", "cache"),
        "demo.json": ("demo", "--model", "tiny", "--prompt", "Hello", "--tokens", "4"),
    }  # fmt: skip
    for name, arguments in verbs.items():
        with (folder / name).open("w") as file, contextlib.redirect_stdout(file):
            assert run([*arguments, "--json"]) in (0, 3)
    return [str(folder / name) for name in ("links.json", "sim.parquet", *verbs)]
