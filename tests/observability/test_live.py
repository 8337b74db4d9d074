"""A real Prometheus over a real local fleet of emulated engines."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet_runner import EMULATED, Fleet
from tests.observability.promql import HERE, known
from tests.observability.test_dashboards import asked
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(500),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here (apt install prometheus)"),
]
MODEL = EMULATED + "slo: {{ttft_s: 30, tpot_s: 1}}\n"
NOTHING_YET = (  # events that a healthy fleet does not have
    "glowplug-service-levels: Errors by model and code",
    "glowplug-service-levels: Held by model",
    "glowplug-service-levels: Streams whose engine was lost or drains",
    "glowplug-cold-starts: Failed starts by model and reason",
    "glowplug-cold-starts: Engines that died after they were ready",
    "glowplug-cold-starts: Consolidation, p95",  # one node starts no stages
    "glowplug-cold-starts: Consolidations by model",
    "glowplug-cold-starts: Fetched",  # the emulated engine reads no weights
    "glowplug-cold-starts: Whole fetches, p95",
    "glowplug-gpus: Evictions",
    "glowplug-gpus: Failed and repeated fetches",
    "glowplug-service-levels: Lines of batches",
)


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30)
        body = answer.json()
        assert body["status"] == "success", (params, body)
        return body["data"]

    def query(self, expr: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expr)["result"]
        return found

    def alerts(self) -> dict[str, str]:
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.get("alerts")["alerts"]}


def configuration(fleet: Fleet) -> dict[str, Any]:
    script = [sys.executable, str(HERE / "local.py"), str(fleet.state_dir)]
    made: dict[str, Any] = yaml.safe_load(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    made["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return made


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    models = {name: MODEL.format(name=name, keep_alive_s=-1) for name in ("one", "two")}
    forecasts = {"GLOWPLUG_POLICY_PREDICTION": "last_window", "GLOWPLUG_WINDOW_S": "5"}
    charts = {"GLOWPLUG_PROMETHEUS_URL": f"http://{address}"}
    with Fleet.start(root, models, nodes=2, **forecasts, **charts) as made:
        yield made


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(fleet)))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://{address}")
    try:
        wait_until("prometheus is ready", lambda: httpx.get(f"{server.url}/-/ready").status_code == 200)
        wait_until("a first scrape", lambda: server.query('up{job="router"} == 1'))
        live(fleet, server)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def live(fleet: Fleet, server: Prometheus) -> None:
    for name in ("one", "two", "one", "two"):
        assert fleet.chat(name, max_tokens=4).status_code == 200
    for num in (1, 2):  # a rate needs a scrape between two of a kind
        for name in ("one", "two"):
            assert fleet.chat(name, max_tokens=16, stream=True).status_code == 200
        assert fleet.chat("nobody").status_code == 404
        streams = f"sum(glowplug_request_tpot_seconds_count) == {2 * num}"
        wait_until("streams are scraped", lambda query=streams: server.query(query))
    for num in (9, 10):  # a start is compared with the previous one, and a rate needs a scrape between two
        fleet.cli("unload", "one")
        wait_until("one is asleep", lambda: not [i for i in fleet.instances("one") if i["state"] == "ready"])
        assert fleet.chat("one").status_code == 200
        scraped = f'sum(glowplug_requests_total{{code="200"}}) == {num}'
        wait_until("all of it is scraped", lambda query=scraped: server.query(query))
        start = f"sum(glowplug_starts_total) == {num - 6}"
        wait_until("the start is scraped", lambda query=start: server.query(query))
    wait_until("models are scraped", lambda: server.query('max(glowplug_models{temperature="hot"}) == 2'))
    wait_until(
        "rules have been evaluated", lambda: server.query('glowplug:slo_missed:ratio_rate5m{model="one",level="tpot"}')
    )


def test_every_process_is_scraped_under_the_name_of_its_service(fleet: Fleet, prometheus: Prometheus) -> None:
    targets = prometheus.get("targets", state="active")["activeTargets"]
    assert [t["scrapeUrl"] for t in targets if t["health"] != "up"] == []
    jobs = [t["labels"]["job"] for t in targets]
    assert sorted(jobs) == sorted(
        ["router", "predictor", "placer", "autoscaler", "console", *["agent", "prefetcher"] * 2]
    )


def test_what_is_scraped_is_what_the_page_of_metrics_says(fleet: Fleet) -> None:
    """Every process exposes only series on the page, with exactly its labels."""
    page, odd = known(), set()
    for process in fleet.document["processes"]:
        if not process["url"] or process["service"] in ("nats", "valkey"):
            continue
        for family in text_string_to_metric_families(httpx.get(f"{process['url']}/metrics").text):
            for sample in family.samples:
                is_ours = sample.name.startswith("glowplug_") and not sample.name.endswith("_created")
                if is_ours and set(sample.labels) != page.get(sample.name):
                    odd.add((sample.name, *sample.labels))
    assert odd == set()


def test_every_panel_is_answered_and_shows_data(prometheus: Prometheus) -> None:
    """NOTHING_YET names every panel without data."""
    full = {where for where, expr in asked() if prometheus.query(expr)}
    assert {where for where, _ in asked()} - full == set(NOTHING_YET)


def test_every_rule_is_well_and_no_alert_is_raised(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) > 30
    assert prometheus.alerts() == {}


def test_numbers_are_those_of_what_happened(prometheus: Prometheus) -> None:
    def value(expr: str) -> float:
        (row,) = prometheus.query(expr)
        return float(row["value"][1])

    assert value('sum(glowplug_slo_requests_total{level="ttft"})') == 10
    assert value('sum(glowplug_slo_missed_total{level="ttft"})') == 0
    assert value("sum(glowplug_starts_total)") == 4
    assert value('sum(glowplug_cold_start_seconds_count{phase="total"})') == 4
    assert value('sum(glowplug_cold_start_predicted_seconds_count{phase="load"})') >= 1
    assert value('sum(glowplug_requests_refused_total{code="404"})') == 2
    assert value('sum(glowplug_request_ttft_seconds_count{temperature="cold"})') == 4
    assert value("sum(glowplug_node_up)") == 2 and value('max(glowplug_nodes{state="alive"})') == 2
    assert value('max(glowplug_models{temperature="hot"})') == 2
    assert value("sum(glowplug_response_tokens_total)") > 0
    assert value("count(glowplug_build_info)") == 9


def test_the_consoles_charts_show_what_prometheus_knows(fleet: Fleet, prometheus: Prometheus) -> None:
    """Waits up to ten seconds for the step with the last start."""

    def newest(**asked: str) -> dict[str, dict[str, float]]:
        page = httpx.get(f"{fleet.url('console')}/v1/history", params=asked).json()
        assert (page["source"], page["problem"], page["step_s"]) == ("prometheus", "", 10)
        lines = {metric: {one["name"]: one["values"] for one in found} for metric, found in page["metrics"].items()}
        return {m: {name: values[-1] for name, values in found.items()} for m, found in lines.items()}

    def has_starts() -> bool:
        return any((value or 0) > 0 for value in newest()["starts"].values())

    wait_until("the charts have a start", has_starts)
    of_fleet, of_one = newest(), newest(model="one")
    assert of_fleet["gpu"]["capacity"] == 4 * 40e9 and "gpu" not in of_one
    assert all(found["tokens"]["response"] > found["tokens"]["prompt"] > 0 for found in (of_fleet, of_one))
    assert 0 < of_one["ttft"]["p50"] <= of_one["ttft"]["p95"] <= of_one["ttft"]["p99"]
    assert 0 < of_one["hits"]["warm"] < 1 and set(of_fleet["queue"]) == {"waiting", "running"}
    for metric, found in of_fleet.items():
        assert all(value is not None for value in found.values()), metric


def test_a_node_that_stops_speaking_raises_its_alert_and_ends_it(fleet: Fleet, prometheus: Prometheus) -> None:
    agent = fleet.process("agent-2")
    os.kill(agent["pid"], signal.SIGSTOP)
    try:
        wait_until("NodeSilent", lambda: "NodeSilent" in prometheus.alerts())
    finally:
        os.kill(agent["pid"], signal.SIGCONT)
    assert wait_until("it is over", lambda: "NodeSilent" not in prometheus.alerts())
