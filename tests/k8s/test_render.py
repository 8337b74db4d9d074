"""Every overlay renders with every kustomize; policies allow exactly the arrows of docs/network.md; Prometheus finds
its targets."""

import copy
import json
import re
from functools import cache
from typing import Any

import pytest
import yaml

from tests.k8s.arrows import End, Ports, connections, expand, fleet_ends, outside_ends, parse_ports, table
from tests.k8s.rendering import (
    K8S,
    MONITORED,
    ROOT,
    SCHEMAS,
    WORKLOADS,
    Manifest,
    all_containers,
    environment,
    matches,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    render,
    rendered_text,
    renderers,
    title,
)

VERSIONS = ("1.30.0", "1.36.0")
OBSERVABILITY = ROOT / "deploy/observability"
SERVICES = {"router", "predictor", "placer", "autoscaler", "console", "agent", "prefetcher"}


@cache
def kubernetes() -> Any:
    """Cache its schemas: it rereads megabytes for each manifest."""
    import kubernetes_validate  # here: every process of a lane imports every test file

    kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
    return kubernetes_validate


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(target: str, version: str) -> None:
    import jsonschema

    manifests = render(target)
    assert manifests
    for manifest in manifests:
        if (schema := SCHEMAS.get(manifest["kind"])) is not None:
            jsonschema.validate(manifest, schema)
        else:
            kubernetes().validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_field_is_found(version: str) -> None:
    manifest = render("sim")[-1]
    manifest["spec"]["colour"] = "red"
    with pytest.raises(kubernetes().ValidationError):
        kubernetes().validate(manifest, version, strict=True)


def test_every_kustomize_renders_the_same(target: str) -> None:
    texts = {name: rendered_text(target, name) for name in renderers()}
    if len(texts) < 2:
        pytest.skip("only one kustomize here to render with")
    first = next(iter(texts.values()))
    assert {name for name, text in texts.items() if text != first} == set()


def test_nothing_is_rendered_twice(target: str) -> None:
    titles = [title(manifest) for manifest in render(target)]
    assert sorted(titles) == sorted(set(titles))


def test_every_manifest_file_belongs_to_an_overlay() -> None:
    """A file that no kustomization names is never applied."""
    for kustomization in K8S.rglob("kustomization.yaml"):
        given = kustomization.read_text()
        beside = {f.name for f in kustomization.parent.iterdir() if f.is_file()} - {"kustomization.yaml"}
        assert {name for name in beside if name not in given} == set(), kustomization


def every_connection(manifests: list[Manifest]) -> dict[tuple[str, str], set[Ports]]:
    ours, theirs = fleet_ends(manifests), outside_ends()
    ends: dict[str, End] = ours | theirs
    return {
        (source, target): ports
        for source in ends
        for target in ends
        if (source in ours or target in ours) and (ports := connections(manifests, ends[source], ends[target]))
    }


def test_policies_allow_the_arrows_and_nothing_else(overlay: str, manifests: list[Manifest]) -> None:
    assert every_connection(manifests) == expand(table(overlay))


def test_every_pod_is_denied_by_default(manifests: list[Manifest]) -> None:
    deny = named(manifests, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_no_policy_can_be_left_out(manifests: list[Manifest]) -> None:
    """Each carries an arrow, or denies."""
    before = every_connection(manifests)
    for policy in of_kind(manifests, "NetworkPolicy"):
        if policy["metadata"]["name"] == "default-deny":
            continue
        without = [m for m in manifests if m is not policy]
        assert every_connection(without) != before, policy["metadata"]["name"]


def test_a_rule_too_many_is_found() -> None:
    manifests = render("sim")
    wide = copy.deepcopy(named(manifests, "NetworkPolicy", "engines"))
    del wide["spec"]["ingress"][0]["from"]
    wide["metadata"]["name"] = "too-wide"
    nodes = named(manifests, "NetworkPolicy", "control-plane")
    nodes["spec"]["egress"].append({"ports": [{"protocol": "TCP", "port": 20000}]})
    found, drawn = every_connection([*manifests, wide]), expand(table("sim"))
    assert found[("predictor", "node")] == {Ports("TCP", 20000, 20000)}
    assert ("predictor", "node") not in drawn


def test_the_engines_are_where_routers_may_reach_them(overlay: str, manifests: list[Manifest]) -> None:
    drawn = expand(table(overlay))[("router", "node")]
    given = {environment(manifests, c).get("GLOWPLUG_ENGINE_PORTS", "") for _, c in all_containers(manifests)} - {""}
    assert given == {str(ports) for ports in drawn}


def test_stages_meet_where_nodes_may_reach_each_other_and_nobody_else(overlay: str, manifests: list[Manifest]) -> None:
    """vLLM's own ports come from the kernel's range; both ranges are one arrow."""
    (agent,) = (c for _, c in all_containers(manifests) if c["name"] == "agent")
    met = parse_ports(environment(manifests, agent)["GLOWPLUG_STAGE_PORTS"])[0]
    workload = next(m for m in of_kind(manifests, *WORKLOADS) if m["metadata"]["name"] == "node")
    sysctls = {s["name"]: s["value"] for s in pod_spec(workload)["securityContext"]["sysctls"]}
    first, last = map(int, sysctls["net.ipv4.ip_local_port_range"].split())
    assert met.last + 1 == first
    stages = Ports("TCP", met.first, last)
    reach = {pair for pair, spans in every_connection(manifests).items() if any(_meet(stages, s) for s in spans)}
    assert reach == {("node", "node")}
    assert stages in every_connection(manifests)[("node", "node")]
    assert "/dev/shm" in {mount["mountPath"] for mount in agent["volumeMounts"]}, "vLLM's queues take more than 64 MiB"


def node_pod(target: str) -> dict[str, Any]:
    return pod_spec(next(m for m in of_kind(render(target), *WORKLOADS) if m["metadata"]["name"] == "node"))


def what_stages_need(target: str) -> dict[str, Any]:
    manifests, pod = render(target), node_pod(target)
    (agent,) = (c for c in pod["containers"] if c["name"] == "agent")
    given = {entry["name"]: entry for entry in agent["env"]}
    return {
        "met": given["GLOWPLUG_STAGE_PORTS"],
        "address": given["GLOWPLUG_ADVERTISE_HOST"],
        "kernel": pod["securityContext"]["sysctls"],
        "policy": named(manifests, "NetworkPolicy", "stages")["spec"],
    }


@pytest.mark.parametrize("target", ["gpu", *MONITORED])
def test_nodes_with_gpus_have_what_stages_need_as_those_without_have(target: str) -> None:
    """NCCL's sockets take ports from the kernel, as gloo's do."""
    assert what_stages_need(target) == what_stages_need("sim")
    pod = node_pod(target)
    assert not pod.get("hostNetwork"), "no policy holds for it, and the kernel's ports would be the server's"
    (memory,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    least = 8 if target.startswith("gpu") else 1
    assert memory["medium"] == "Memory" and int(memory["sizeLimit"].removesuffix("Gi")) >= least


def _meet(one: Ports, other: Ports) -> bool:
    return one.protocol == other.protocol and one.first <= other.last and other.first <= one.last


def test_emulated_stages_alone_reach_the_engines_of_other_nodes(overlay: str, manifests: list[Manifest]) -> None:
    """An emulated pipeline's first stage calls the later ones' engine ports; vLLM's does not."""
    (agent,) = (c for _, c in all_containers(manifests) if c["name"] == "agent")
    engines = parse_ports(environment(manifests, agent)["GLOWPLUG_ENGINE_PORTS"])[0]
    emulated = environment(manifests, agent).get("GLOWPLUG_ENGINES") == "emulated"
    assert (engines in every_connection(manifests)[("node", "node")]) is emulated


def test_every_address_a_service_is_given_is_an_arrow(overlay: str, manifests: list[Manifest]) -> None:
    drawn = expand(table(overlay))
    tried = 0
    for where, container in all_containers(manifests):
        pod = where.split("/")[1]
        for value in environment(manifests, container).values():
            for host, port in re.findall(r"://(?:[^@/\s]*@)?([a-z][a-z-]*):(\d+)", str(value)):
                tried += 1
                assert any(("TCP", int(port)) in ports for ports in drawn[(pod, host)]), (where, value)
    assert tried > 15


def targets(manifests: list[Manifest]) -> dict[str, set[tuple[str, int]]]:
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


def test_every_service_is_read_once_under_its_own_name(monitored: list[Manifest]) -> None:
    expected = {service: {(service, 8080)} for service in SERVICES - {"agent", "prefetcher"}}
    expected |= {"agent": {("node", 8080)}, "prefetcher": {("node", 8081)}}
    assert targets(monitored) == expected
    compose = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    assert {job["job_name"] for job in compose["scrape_configs"]} - {"prometheus"} >= SERVICES


def test_labels_of_ours_win(monitored: list[Manifest]) -> None:
    """Without honorLabels the operator's own `service` replaces ours."""
    endpoints = [e for m in of_kind(monitored, "ServiceMonitor") for e in m["spec"]["endpoints"]]
    assert all(endpoint["honorLabels"] for endpoint in endpoints)


def test_rules_and_dashboards_are_those_of_compose(monitored: list[Manifest]) -> None:
    (rule,) = of_kind(monitored, "PrometheusRule")
    groups = [
        g for f in sorted((OBSERVABILITY / "rules").glob("*.yml")) for g in yaml.safe_load(f.read_text())["groups"]
    ]
    assert sorted(rule["spec"]["groups"], key=lambda g: g["name"]) == sorted(groups, key=lambda g: g["name"])
    boards = named(monitored, "ConfigMap", "glowplug-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {f.name: f.read_text() for f in (OBSERVABILITY / "grafana/dashboards").glob("*.json")}
    assert boards["data"] == files
    assert sum(map(len, files.values())) < 1 << 20, "a ConfigMap holds one MiB at most"
    assert all(json.loads(text)["panels"] for text in files.values())


def test_the_adapter_offers_what_the_scaler_asks_for(monitored: list[Manifest]) -> None:
    (rule,) = yaml.safe_load(named(monitored, "ConfigMap", "prometheus-adapter-rules")["data"]["rules.yaml"])["rules"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    scaler = named(monitored, "HorizontalPodAutoscaler", "router")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert {name for name in asked if not re.fullmatch(pattern, name)} == set()
    assert asked == set(pattern.split("|"))
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


def test_without_the_operator_nothing_of_it_is_applied(overlay: str) -> None:
    plain, more = render(overlay), render(f"{overlay}-monitored")
    assert [m for m in plain if "monitoring.coreos.com" in m["apiVersion"]] == []
    assert [m for m in plain if m not in more] == []
    assert {m["metadata"].get("namespace") for m in more if m["kind"] != "Namespace"} == {"glowplug"}
