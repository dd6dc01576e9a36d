"""Exposed time of a push that begins while prefill computes, against one that begins when it is done.

    python bench/overlap.py [--tokens 512] [--repeat 5] [--ratio 1.0] [--steady 0] [--json FILE]

The reference engine on SmolLM2 prefills in this process and pushes over tcp to a decode worker in
another; the loopback of a network namespace of their own is shaped (tc tbf) to move the payload in
``--ratio`` times the seconds of a prefill alone, measured anew at each turn, as the load of a shared
machine changes. ``--steady 2``: as an accelerator's would, prefill takes its time evenly, twice the
seconds measured; each layer waits for its turn before it is final. It takes root, or user
namespaces, with ``unshare`` and ``tc``.

Exposed: from the end of prefill until decode's engine has state and blocks. Cases: all of it after
prefill; by layer in one chunk; by chunk and layer. Each turn runs every case once, the first turn is
dropped, and ratios are of one turn; beside them the least that could be had, since a prefill that is
shorter than the one measured before it hides less. After each case the bytes of both pools are
compared, and the logits of decode's next step with prefill's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transfer import facts

from kvferry.engines.reference import ReferenceEngine, chat_prompt, load_smollm2
from kvferry.errors import KVFerryError
from kvferry.layout import PoolLayout
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transfer import Endpoint, Pool, Timeouts
from kvferry.units import format_bytes, format_rate, format_seconds

REQUEST = "overlap"
LIMIT_SECONDS = 120.0
INSIDE = "KVFERRY_OVERLAP_INSIDE"
SAMPLING = SamplingParameters(temperature=0.0)
# Acknowledgements of the same bytes share the shaped loopback, and headers come on top.
OVERHEAD = 1.04
CHUNK_TOKENS = 128
CASES = ("after prefill", "by layer", "by chunk and layer")


class Arrived(msgspec.Struct, frozen=True):
    """What decode says of one push; times by the host's monotonic clock."""

    arrived_at: float
    pool_digest: int
    logits_digest: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=1.0, help="transfer seconds over prefill seconds")
    parser.add_argument("--steady", type=float, default=0.0, help="prefill seconds over those measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.decode:
            decode(options.tokens)
        elif os.environ.get(INSIDE):
            report(prefill(options.tokens, options.repeat, options.ratio, options.steady), options.json)
        else:
            run_in_namespace()
    except KVFerryError as error:
        raise SystemExit(f"overlap: {error}") from error


def run_in_namespace() -> None:
    """Become this command again, where the loopback is its own."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"overlap: {tool} is needed (packages util-linux, iproute2)")
    own = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    env = os.environ | {INSIDE: "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execvpe(own[0], [*own, sys.executable, *sys.argv], env)  # noqa: S606


def shape(bytes_per_second: float) -> None:
    """The loopback of this namespace, in both directions together."""
    bits = f"{round(8 * bytes_per_second)}bit"
    for command in (
        "ip link set lo up mtu 1500",
        f"tc qdisc replace dev lo root tbf rate {bits} burst 32kb latency 100ms",
    ):
        subprocess.run(command.split(), check=True)


class Worker:
    """An engine over a pool that a transfer process shares."""

    def __init__(self, name: str, tokens: int, chunk_tokens: int) -> None:
        model = load_smollm2()
        layout = PoolLayout.paged(
            range(model.config.layers),
            kv_heads=model.config.kv_heads,
            head_dim=model.config.head_dim,
            dtype="float32",
            block_size=16,
            num_blocks=2 * -(-tokens // 16) + 2,
        )
        self.pool = Pool.allocate(layout)
        self.engine = ReferenceEngine(model, layout, self.pool.array, chunk_tokens=chunk_tokens)
        self.endpoint = Endpoint.listen(
            "tcp://127.0.0.1:0",
            pool=self.pool,
            name=name,
            requirements=self.engine.requirements(),
            timeouts=Timeouts(handshake=10.0, heartbeat=1.0, lost=20.0),
        )

    def close(self) -> None:
        self.endpoint.close()
        self.pool.close()

    def pool_digest(self, tokens: int) -> int:
        """Of the request's K and V, in an order of their own."""
        digest = xxhash.xxh3_64()
        table = self.engine.request(REQUEST).table
        for layer in self.pool.layout.layers:
            for rows in self.engine.pool.read(layer, table, tokens):
                digest.update(rows.tobytes())
        return digest.intdigest()

    def next_logits_digest(self) -> int:
        """Logits that decide the second token, so those of a step over all that moved."""
        self.engine.step([REQUEST])
        (output,) = self.engine.step([REQUEST])
        return xxhash.xxh3_64_intdigest(output.logits.tobytes())


def decode(tokens: int) -> None:
    """A line with a ticket for each line that comes, then one with what arrived."""
    worker = Worker("decode", tokens, CHUNK_TOKENS)
    print("ready", flush=True)
    while sys.stdin.readline():
        tables = worker.engine.allocate(tokens + 1)
        ticket = worker.endpoint.reserve(REQUEST, tokens, tables, lease_seconds=LIMIT_SECONDS)
        move = worker.endpoint.arrival(ticket)
        print(ticket.hex(), flush=True)
        state = move.result()
        arrived_at = time.monotonic()
        assert state is not None
        worker.engine.import_state(state, tables)
        pool_digest = worker.pool_digest(tokens)
        found = Arrived(arrived_at, pool_digest, worker.next_logits_digest())
        move.started()
        worker.engine.release(REQUEST)
        print(msgspec.json.encode(found).decode(), flush=True)
    worker.close()


def prefill(tokens: int, repeat: int, ratio: float, steady: float) -> dict[str, Any]:
    """Every case, in turns, beside a decode process."""
    shape(1e9)
    console = Console(stderr=True)
    command = [sys.executable, __file__, "--decode", "--tokens", str(tokens)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        console.print("loading SmolLM2 twice, some seconds", highlight=False)
        workers = {
            "by layer": Worker("prefill in one chunk", tokens, tokens),
            "by chunk and layer": Worker("prefill", tokens, CHUNK_TOKENS),
        }
        workers["after prefill"] = workers["by chunk and layer"]
        ids = prompt(workers["by layer"], tokens)
        assert child.stdout.readline() == "ready\n"
        nbytes = tokens * sum(
            heads.heads * heads.row_nbytes for heads in workers["by layer"].pool.layout.groups[0].tensors
        )
        turns = range(repeat + 1)
        rows: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        alone, rates = [], []
        for _ in track(turns, "turns", console=console, transient=True, disable=not console.is_terminal):
            alone.append((steady or 1.0) * prefill_alone(workers["after prefill"], ids))
            rates.append(OVERHEAD * nbytes / (ratio * alone[-1]))
            shape(rates[-1])
            for case, found in rows.items():
                child.stdin.write("next\n")
                child.stdin.flush()
                ticket = bytes.fromhex(child.stdout.readline())

                def arrived() -> Arrived:
                    assert child.stdout is not None
                    return msgspec.json.decode(child.stdout.readline(), type=Arrived)

                at_least = alone[-1] if steady else 0.0
                found.append(one(workers[case], ids, ticket, case, arrived, at_least=at_least))
        for worker in set(workers.values()):
            worker.close()
        child.stdin.close()
        child.wait(30)
    finally:
        child.kill()
        child.wait()
    return {
        "tokens": tokens,
        "payload_nbytes": nbytes,
        "shaped_bytes_per_second": rates[1:],
        "prefill_seconds_wanted": alone[1:],
        "steady": steady,
        "rows": [summary(case, found[1:], rows["after prefill"][1:]) for case, found in rows.items()],
    }


def prompt(worker: Worker, tokens: int) -> list[int]:
    """So many tokens of the project's own licence, which is at hand and no noise."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text("utf-8")
    ids = worker.engine.model.tokenizer.encode(chat_prompt(text))
    if len(ids) < tokens:
        raise SystemExit(f"overlap: --tokens {tokens} is more than {len(ids)}")
    return ids[:tokens]


def prefill_alone(worker: Worker, ids: list[int]) -> float:
    """Seconds of a prefill that nobody waits for."""
    worker.engine.submit(REQUEST, ids, SAMPLING, Limits(max_tokens_left=4, ignore_eos=True))
    started = time.monotonic()
    while not worker.engine.prefill(REQUEST):
        pass
    seconds = time.monotonic() - started
    worker.engine.release(REQUEST)
    return seconds


def one(
    worker: Worker,
    ids: list[int],
    ticket: bytes,
    case: str,
    arrived: Callable[[], Arrived],
    *,
    at_least: float,
) -> dict[str, float]:
    """One request, pushed as ``case`` says; its prefill takes ``at_least`` so many seconds, evenly.

    Raises AssertionError where anything differs at decode.
    """
    engine, tokens = worker.engine, len(ids)
    engine.submit(REQUEST, ids, SAMPLING, Limits(max_tokens_left=4, ignore_eos=True))
    request, tables = engine.request(REQUEST), engine.tables(REQUEST)
    started = time.monotonic()
    push = worker.endpoint.push(ticket, tables, tokens=tokens, timeout_seconds=LIMIT_SECONDS)
    outcome = worker.endpoint.outcome(ticket)
    chunk_tokens = tokens if case == "by layer" else CHUNK_TOKENS
    parts = itertools.count(1)
    seconds_a_part = at_least / (engine.model.config.layers * -(-tokens // chunk_tokens))
    is_done = False
    while not is_done:
        first = request.kv_tokens
        stop = min(first + chunk_tokens, tokens)

        def is_final(layer: int, first: int = first, stop: int = stop) -> None:
            time.sleep(max(0.0, started + next(parts) * seconds_a_part - time.monotonic()))
            if case != "after prefill":
                push.layers(layer, layer + 1, first_token=first, stop_token=stop)

        is_done = engine.prefill(REQUEST, is_final)
    prefilled = time.monotonic()
    if case == "after prefill":
        push.layers(0, engine.model.config.layers)
    push.commit(engine.export_state(REQUEST, Exactness.BITS))
    found = arrived()
    outcome.result(LIMIT_SECONDS)
    assert found.pool_digest == worker.pool_digest(tokens)
    assert found.logits_digest == worker.next_logits_digest()
    engine.release(REQUEST)
    return {
        "prefill_seconds": prefilled - started,
        "exposed_seconds": found.arrived_at - prefilled,
        "total_seconds": found.arrived_at - started,
    }


def summary(case: str, turns: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, Any]:
    """Each value of each turn, and its ratio to the same turn's move after prefill."""
    row: dict[str, Any] = {"case": case}
    for name in turns[0]:
        row[name] = [turn[name] for turn in turns]
        ratios = [turn[name] / other[name] for turn, other in zip(turns, after, strict=True)]
        row[f"{name.removesuffix('_seconds')}_over_after"] = ratios
    # What no push could hide, as this prefill was shorter than the move: 0 on a machine of one's own.
    row["least_over_after"] = [
        max(0.0, 1 - turn["prefill_seconds"] / other["exposed_seconds"])
        for turn, other in zip(turns, after, strict=True)
    ]
    return row


def report(result: dict[str, Any], out: Path | None) -> None:
    """For a person on stdout: medians, and the extremes of the turns; all of it as JSON."""
    console = Console(highlight=False, soft_wrap=True, width=160)
    console.print(
        f"{result['tokens']} tokens, {format_bytes(result['payload_nbytes'])}, loopback shaped to "
        f"{format_rate(median(result['shaped_bytes_per_second']))}; prefill wanted in "
        f"{spread(result['prefill_seconds_wanted'], format_seconds)}; bytes and logits compared each time"
    )
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "pushed", "prefill", "exposed", "over after prefill", "at least", "with prefill, over after"
    )
    for row in result["rows"]:
        seconds = (spread(row[name], format_seconds) for name in ("prefill_seconds", "exposed_seconds"))
        ratios = (spread(row[f"{name}_over_after"]) for name in ("exposed", "least", "total"))
        table.add_row(row["case"], *seconds, *ratios)
    console.print(table, crop=False)
    if out:
        out.write_text(json.dumps({"run": facts(), **result}, indent=1))


def spread(values: list[float], show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Median, least and most."""
    return f"{show(median(values))} ({show(min(values))} to {show(max(values))})"


if __name__ == "__main__":
    main()
