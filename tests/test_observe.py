"""Observers: each ended transfer is told once, to metrics, spans and logs; a bad observer harms nothing."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from conftest import unique_address, wait_until
from kvferry.cli import run
from kvferry.errors import KVFerryError
from kvferry.observe.logs import JsonLines, Logs
from kvferry.observe.opentelemetry import Spans
from kvferry.observe.perfetto import trace_of
from kvferry.observe.prometheus import Metrics
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Ended, Endpoint
from test_docs import load
from test_transfer import TOKENS, layout, move, table

Opened = Callable[..., Endpoint]
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("nothing_left")


def two(opened: Opened, scheme: str, *observers: Callable[[Ended], None], process: bool) -> list[Endpoint]:
    return [
        opened(layout(8), unique_address(scheme), name=name, observers=observers, process=process)
        for name in ("prefill", "decode")
    ]


def spoil(prefill: Endpoint, decode: Endpoint) -> None:
    """One transfer that fails at both sides."""
    ticket = decode.reserve("bad", TOKENS, table(8, 3))
    push = prefill.push(ticket, table(8, 2), tokens=TOKENS)
    push.commit(None)  # no layer was given
    with pytest.raises(KVFerryError):
        decode.arrival(ticket).result()


@pytest.mark.parametrize("process", [False, True])
def test_everyone_is_told_of_every_end(
    opened: Opened, process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A pull, a push and a failure, at both sides: counted, as spans, as log records with their fields."""
    ended: list[Ended] = []
    metrics, exporter = Metrics(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def bad(_: Ended) -> None:
        raise RuntimeError("an observer's own fault")

    with caplog.at_level(logging.INFO):
        prefill, decode = two(
            opened, "tcp", bad, metrics, Spans(provider), Logs(), ended.append, process=process
        )
        metrics.watch(decode.stats)
        for mode in Mode:
            move(prefill, decode, table(8, 2), table(8, 3), mode)
        spoil(prefill, decode)
        wait_until(lambda: len(ended) == 6)
    assert sorted((one.record.role, one.record.mode, one.error is None) for one in ended) == [
        (role, mode, well)
        for role in ("decode", "prefill")
        for mode, well in (("pull", True), ("push", False), ("push", True))
    ]
    totals = samples(metrics)
    well = {
        key: value for key, value in totals.items() if key[0] == "kvferry_transfers_total" and "ok" in key
    }
    assert sum(well.values()) == 4
    nbytes = sum(one.record.nbytes for one in ended)
    assert sum(value for key, value in totals.items() if key[0] == "kvferry_transfer_bytes_total") == nbytes
    assert totals["kvferry_endpoint_up",] == 1
    assert totals["kvferry_transfers_in_flight",] == 0
    spans = exporter.get_finished_spans()
    whole = [span for span in spans if span.parent is None]
    assert len(whole) == 6
    assert sum(span.status.status_code is StatusCode.ERROR for span in whole) == 2
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    fields = [record.kvferry for record in caplog.records if record.name == "kvferry.transfers"]
    assert sorted({field["request_id"] for field in fields}) == ["bad", "r"]
    assert sum("error" in field for field in fields) == 2
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert {"time", "level", "message", "peer"} <= lines[-1].keys()
    assert any("an observer's own fault" in line.get("traceback", "") for line in lines)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """What a scrape reads, by name and label values."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_an_endpoint_that_is_gone_is_down(opened: Opened) -> None:
    """A scrape after the end is answered, and says so."""
    metrics = Metrics()
    endpoint = opened(layout(8), unique_address("inproc"))
    metrics.watch(endpoint.stats)
    endpoint.close()
    assert samples(metrics)["kvferry_endpoint_up",] == 0


def test_labels_are_of_closed_sets(opened: Opened) -> None:
    """No label grows with peers or requests."""
    metrics = Metrics()
    prefill, decode = two(opened, "inproc", metrics, process=False)
    move(prefill, decode, table(8, 2), table(8, 3), Mode.PULL)
    wait_until(lambda: b"kvferry_transfers_total{" in metrics.text())
    labels = set(re.findall(r'(\w+)="', metrics.text().decode()))
    assert labels == {"role", "mode", "transport", "path", "outcome", "part", "le"}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """The file is what its script writes, and every series in it is one of ours."""
    module = load(ROOT / "deploy" / "grafana" / "make_dashboard.py")
    text = (ROOT / "deploy" / "grafana" / "kvferry.json").read_text("utf-8")
    assert json.loads(text) == module.dashboard(), "run python deploy/grafana/make_dashboard.py"
    asked = set(re.findall(r"kvferry_\w+", text))
    files = ("observe/prometheus.py", "serve/look.py", "proxy/metrics.py")
    source = "".join((ROOT / "src" / "kvferry" / name).read_text("utf-8") for name in files)
    known = set(re.findall(r'"(kvferry_\w+)"', source))
    suffixed = known | {f"{name}{suffix}" for name in known for suffix in ("_total", "_bucket")}
    assert asked <= suffixed


@pytest.mark.slow
def test_a_trace_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complete events in microseconds, one after the other; what cannot be written is one line."""
    path = tmp_path / "trace.json"
    base = ["demo", "--model", "tiny", "--prompt", "Hi", "--tokens", "2", "--json", "--trace"]
    assert run([*base, str(path)]) == 0
    timings = json.loads(capsys.readouterr().out)["timings"]
    events = [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert events[0]["dur"] == pytest.approx(timings["total"] * 1e6)
    parts = events[1:]
    assert [event["name"].replace(" ", "_") for event in parts] == [
        name for name in timings if name != "total"
    ]
    for before, after in itertools.pairwise(parts):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert trace_of([("a", {"b": 1.0})], {})["traceEvents"][1]["dur"] == 1e6
