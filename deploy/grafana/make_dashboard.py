"""Write ``deploy/grafana/kvferry.json``: a dashboard over what /metrics gives.

python deploy/grafana/make_dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Grafana fills in a window that holds a few scrapes.
ENDED = "kvferry_transfers_total[$__rate_interval]"
NBYTES = "kvferry_transfer_bytes_total[$__rate_interval]"
BUCKETS = "kvferry_transfer_seconds_bucket[$__rate_interval]"
TARGET = Path(__file__).with_name("kvferry.json")
PANELS = (
    (
        "Handoffs a second, by outcome",
        "reqps",
        f"sum by (outcome) (rate({ENDED}))",
    ),
    (
        "Payload rate",
        "Bps",
        f"sum by (transport, mode) (rate({NBYTES}))",
    ),
    (
        "Handoff p95, by part",
        "s",
        f"histogram_quantile(0.95, sum by (le, part) (rate({BUCKETS})))",
    ),
    ("Carried by", "reqps", f"sum by (transport, path) (rate({ENDED}))"),
    ("In flight", "short", "sum by (instance) (kvferry_transfers_in_flight)"),
    ("Leases held and not claimed", "short", "sum by (instance) (kvferry_leases_held)"),
    ("Endpoints that do not answer", "short", "count(kvferry_endpoint_up == 0) or vector(0)"),
    ("Peers connected", "short", "sum by (instance) (kvferry_peers_connected)"),
    ("Requests in servers, by state", "short", "sum by (state) (kvferry_server_requests)"),
    (
        "Free blocks of servers' pools",
        "percentunit",
        "kvferry_server_free_blocks / kvferry_server_blocks",
    ),
    (
        "What the proxy did",
        "reqps",
        "sum by (event) (rate(kvferry_proxy_events_total[$__rate_interval]))",
    ),
    (
        "Failures of workers behind the proxy",
        "reqps",
        "sum by (role, worker) (rate(kvferry_proxy_worker_failures_total[$__rate_interval]))",
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "datasource": source, "expr": expression}],
        }
        for number, (title, unit, expression) in enumerate(PANELS)
    ]
    return {
        "uid": "kvferry",
        "title": "kvferry: handoffs",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n", "utf-8")
