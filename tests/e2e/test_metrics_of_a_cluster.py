"""/metrics of a whole cluster that runs tasks; the dashboard and the alerts ask for what is told there."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.embedded import Embedded, wait_for
from tests.unit.test_metrics import ALL

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs/prometheus/laxity.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "docs/prometheus/alerts.yml").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
RULES = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
NAME = re.compile(r"\b(?:laxity|DCGM|process)_\w+")
Found = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    monkeypatch.setenv("LAXITY_METRICS_PORT", "0")
    with Embedded(tmp_path, "--nodes", "0", "--fake-nodes", "1", "--placers", "1", "--storage", "memory") as embedded:
        yield embedded


def told(cluster: Embedded) -> Found:
    """All samples of all services by name, and the labels' values."""
    found: Found = {}
    for service in cluster.laxity("status")["services"]:
        with urllib.request.urlopen(service["metrics"], timeout=10) as answer:  # noqa: S310  # our own
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, {})[*sample.labels.values()] = sample.value
    return found


def test_a_cluster_tells_its_tasks_devices_and_requests(cluster: Embedded, tmp_path: Path) -> None:
    request = {
        "request_id": "infer",
        "command": ["sleep", "60"],
        "gpu": {"share": 0.2},
        "realtime": {"deadline_us": 100_000, "runtime_us": 5_000, "period_us": 50_000},
    }
    file = tmp_path / "infer.json"
    file.write_text(json.dumps(request))
    assert "placed" == cluster.laxity("place", "-f", str(file))["outcome"]

    def judged() -> Found | None:
        found = told(cluster)
        met = [v for of, v in found.get("laxity_tasks_total", {}).items() if {"infer", "met"} <= set(of)]
        return found if sum(met) > 10 else None

    found = wait_for(judged, "tasks that are told")
    assert {("placed",): 1.0} == found["laxity_replies_total"]
    assert 1 == found["laxity_requests"]["started",]
    assert 1 == found["laxity_nodes"]["ready",]
    assert 3 == len(found["DCGM_FI_DEV_GPU_UTIL"])
    (lower,), (ratio,) = (found[f"laxity_guarantee_ratio{end}"].values() for end in ("_lower", ""))
    assert 0 < lower < ratio <= 1
    unknown = set(found) - {metric.name for metric in ALL}
    assert {name for name in unknown if not name.startswith(("process_", "laxity_service_info"))} == set()
    shown = {name for query in QUERIES for name in NAME.findall(query)}
    assert shown - set(found) - SELDOM == set()


SELDOM = {"laxity_device_ill", "laxity_device_xid_last_timestamp_seconds", "laxity_container_device_memory_bytes"}
"""Told only while something is wrong, or of real GPUs."""


@pytest.mark.parametrize("query", [*QUERIES, *RULES])
def test_what_the_dashboard_and_the_alerts_ask_for_is_documented(query: str) -> None:
    names = NAME.findall(query)
    assert names
    known = {metric.name for metric in ALL} | {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    assert set(names) <= known
    assert query.count("(") == query.count(")")


def test_each_panel_has_a_place_and_an_id_of_its_own() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(places) == len(set(places)) == len({p["id"] for p in DASHBOARD["panels"]})
