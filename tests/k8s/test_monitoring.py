"""What Prometheus is told: targets that exist, the rules and dashboards of compose, the metrics the HPA asks for."""

import json
import re

import pytest
import yaml

from tests.k8s.rendering import (
    MONITORED,
    OVERLAYS,
    ROOT,
    WORKLOADS,
    Manifest,
    matches,
    named,
    of_kind,
    pod_labels,
    render,
)

monitored = pytest.mark.parametrize("target", MONITORED)
OBSERVABILITY = ROOT / "deploy/observability"
SERVICES = {"router", "predictor", "placer", "autoscaler", "console", "agent", "prefetcher"}


def targets(manifests: list[Manifest]) -> dict[str, set[tuple[str, int]]]:
    """job -> (kind of pod, port) it is read from."""
    found: dict[str, set[tuple[str, int]]] = {}
    for monitor in of_kind(manifests, "ServiceMonitor"):
        spec = monitor["spec"]
        services = [s for s in of_kind(manifests, "Service") if matches(spec["selector"], s["metadata"]["labels"])]
        assert services, monitor["metadata"]["name"]
        for service in services:
            ports = {p["name"]: p["port"] for p in service["spec"]["ports"]}
            for endpoint in (e for e in spec["endpoints"] if e["port"] in ports):
                job = {r["targetLabel"]: r["replacement"] for r in endpoint.get("relabelings", ())}.get("job")
                job = job or service["metadata"]["labels"][spec["jobLabel"]]
                selector = {"matchLabels": service["spec"]["selector"]}
                pods = [w for w in of_kind(manifests, *WORKLOADS) if matches(selector, pod_labels(w))]
                found.setdefault(job, set()).update((w["metadata"]["name"], ports[endpoint["port"]]) for w in pods)
    return found


@monitored
def test_every_service_is_read_once_under_its_own_name(target: str) -> None:
    expected = {service: {(service, 8080)} for service in SERVICES - {"agent", "prefetcher"}}
    expected |= {"agent": {("node", 8080)}, "prefetcher": {("node", 8081)}}
    assert targets(render(target)) == expected
    compose = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    assert {job["job_name"] for job in compose["scrape_configs"]} - {"prometheus"} >= SERVICES


@monitored
def test_labels_of_ours_win(target: str) -> None:
    """Metrics carry `service`; without honorLabels the operator's label of that name takes its place."""
    endpoints = [e for m in of_kind(render(target), "ServiceMonitor") for e in m["spec"]["endpoints"]]
    assert all(endpoint["honorLabels"] for endpoint in endpoints)


@monitored
def test_rules_and_dashboards_are_those_of_compose(target: str) -> None:
    manifests = render(target)
    (rule,) = of_kind(manifests, "PrometheusRule")
    groups = [
        g for f in sorted((OBSERVABILITY / "rules").glob("*.yml")) for g in yaml.safe_load(f.read_text())["groups"]
    ]
    assert sorted(rule["spec"]["groups"], key=lambda g: g["name"]) == sorted(groups, key=lambda g: g["name"])
    boards = named(manifests, "ConfigMap", "glowplug-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {f.name: f.read_text() for f in (OBSERVABILITY / "grafana/dashboards").glob("*.json")}
    assert boards["data"] == files
    assert sum(map(len, files.values())) < 1 << 20, "a ConfigMap holds one MiB at most"
    assert all(json.loads(text)["panels"] for text in files.values())


@monitored
def test_the_adapter_offers_what_the_scaler_asks_for(target: str) -> None:
    manifests = render(target)
    (rule,) = yaml.safe_load(named(manifests, "ConfigMap", "prometheus-adapter-rules")["data"]["rules.yaml"])["rules"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    scaler = named(manifests, "HorizontalPodAutoscaler", "router")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert {name for name in asked if not re.fullmatch(pattern, name)} == set()
    assert asked == set(pattern.split("|"))
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_without_the_operator_nothing_of_it_is_applied(overlay: str) -> None:
    plain, more = render(overlay), render(f"{overlay}-monitored")
    assert [m for m in plain if "monitoring.coreos.com" in m["apiVersion"]] == []
    assert [m for m in plain if m not in more] == []
    assert {m["metadata"].get("namespace") for m in more if m["kind"] != "Namespace"} == {"glowplug"}
