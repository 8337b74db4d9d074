"""Checks of a cluster on kubectl's objects, and kubectl as a script."""

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.cli.doctor.cluster import COMPONENT, COMPONENTS, CUSTOM_METRICS, GPU, NAME, ClusterFacts, Kubectl, check
from glowplug.cli.doctor.findings import Level

OK, WARN, FAIL, SKIPPED = Level
KINDS = {"router": "deployments", "console": "deployments", "node": "daemonsets", "nats": "statefulsets"}
TOKEN = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "glowplug-tokens", "key": "GLOWPLUG_ADMIN_TOKEN"}}}


def metadata(name: str, component: str = "") -> dict[str, Any]:
    labels = {NAME: "glowplug", COMPONENT: component or name}
    return {"name": name, "namespace": "glowplug", "generation": 2, "labels": labels}


def a_workload(component: str, *, ready: int = 2, gpus: int = 0, **status: Any) -> dict[str, Any]:
    limits = {GPU: str(gpus)} if gpus else {}
    template = {"spec": {"containers": [{"name": component, "resources": {"limits": limits}}]}}
    counted = {"observedGeneration": 2, "readyReplicas": ready, "numberReady": ready, "desiredNumberScheduled": 2}
    spec = {"replicas": 2, "template": template}
    return {"metadata": metadata(component), "spec": spec, "status": counted | status}


def a_pod(name: str = "router-7d9-x2", image: str = "glowplug/router:0.1.0", **status: Any) -> dict[str, Any]:
    container = {"name": "router", "ready": True, "restartCount": 0, "state": {"running": {}}, "lastState": {}}
    container |= status.pop("container", {})
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
    given = {"phase": "Running", "conditions": conditions, "containerStatuses": [container]}
    spec = {"containers": [{"name": "router", "image": image, "env": [TOKEN, {"name": "X", "value": "1"}]}]}
    return {"metadata": metadata(name, "router"), "spec": spec, "status": given | status}


def a_policy(name: str, **spec: Any) -> dict[str, Any]:
    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    return {"metadata": metadata(name), "spec": closed | spec}


def a_scaler(*, active: bool = True) -> dict[str, Any]:
    condition = {"type": "ScalingActive", "status": str(active), "message": "unable to get metric connections"}
    status = {"currentReplicas": 2, "conditions": [condition]}
    return {"metadata": metadata("router"), "spec": {"maxReplicas": 10}, "status": status}


def an_api(group: str = CUSTOM_METRICS, *, available: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Available", "status": str(available)}]
    return {"metadata": {"name": f"v1beta1.{group}"}, "spec": {"group": group}, "status": {"conditions": conditions}}


def a_claim(phase: str = "Bound") -> dict[str, Any]:
    return {"metadata": metadata("data-nats-0"), "spec": {"storageClassName": "fast"}, "status": {"phase": phase}}


def a_budget(healthy: int = 2) -> dict[str, Any]:
    status = {"expectedPods": 2, "currentHealthy": healthy, "desiredHealthy": 1}
    return {"metadata": metadata("router"), "spec": {}, "status": status}


def a_machine(gpus: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "8"} | ({GPU: str(gpus)} if gpus else {})}}


OPEN = a_policy("router", podSelector={"matchLabels": {COMPONENT: "router"}}, ingress=[{"ports": [{"port": 8000}]}])
ITEMS: dict[str, tuple[Mapping[str, Any], ...]] = {
    kind: tuple(a_workload(c) for c in COMPONENTS if KINDS.get(c, "deployments") == kind)
    for kind in ("deployments", "statefulsets", "daemonsets")
} | {
    "pods": (a_pod(), a_pod("console-1", "ghcr.io/glowplug/console:0.1.0")),
    "persistentvolumeclaims": (a_claim(),),
    "networkpolicies": (a_policy("default-deny"), OPEN),
    "horizontalpodautoscalers": (a_scaler(),),
    "poddisruptionbudgets": (a_budget(),),
}
WELL = ClusterFacts(
    namespace="glowplug",
    items=ITEMS,
    nodes=(a_machine(),),
    api_services=(an_api(),),
    secret_keys=("GLOWPLUG_ADMIN_TOKEN", "NATS_TOKEN"),
)


def having(kind: str, *items: Mapping[str, Any], **changes: Any) -> ClusterFacts:
    return replace(WELL, items=ITEMS | {kind: items}, **changes)


def without_servers(**told: str) -> ClusterFacts:
    router = a_workload("router")
    router["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": k, "value": v} for k, v in told.items()]
    others = [w for w in ITEMS["deployments"] if w["metadata"]["name"] != "router"]
    return replace(WELL, items=ITEMS | {"statefulsets": (), "deployments": (router, *others)})


def node(**fields: Any) -> ClusterFacts:
    return having("daemonsets", a_workload("node", **fields))


def test_a_cluster_that_is_well_has_nothing_to_do() -> None:
    found = check(WELL)
    assert [(f.about, f.level) for f in found if f.level is not OK] == [("gpus", SKIPPED)]
    named = {*COMPONENTS, "images", "volumes", "secret", "network policies", "hpa router"}
    assert named <= {f.about for f in found}


PENDING = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}]
PULL = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}, "ready": False}
OOM = {"restartCount": 2, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}


@pytest.mark.parametrize(
    ("facts", "about", "level", "words"),
    [
        (ClusterFacts(namespace="x", error="connection refused"), "kubectl", FAIL, "connection refused"),
        (replace(WELL, refused={"pods": "forbidden"}), "pods", SKIPPED, "forbidden"),
        (having("statefulsets"), "nats", FAIL, "is not deployed"),
        (without_servers(GLOWPLUG_NATS_URL="nats://router:p@nats:4222"), "nats", FAIL, "is not deployed"),
        (without_servers(GLOWPLUG_NATS_URL="tls://router:p@bus.example:4222"), "nats", OK, "not part of this release"),
        (node(ready=1), "node", FAIL, "1 of 2 ready"),
        (node(desiredNumberScheduled=0), "node", FAIL, "no node matches"),
        (node(observedGeneration=1), "node", WARN, "not rolled out yet"),
        (having("pods", a_pod(phase="Pending", conditions=PENDING)), "router-7d9-x2", FAIL, "insufficient"),
        (having("pods", a_pod(container=PULL)), "router-7d9-x2", FAIL, "ImagePullBackOff"),
        (having("pods", a_pod(container=OOM)), "router-7d9-x2", FAIL, "killed for its memory"),
        (having("pods", a_pod(container={"restartCount": 7})), "router-7d9-x2", WARN, "restarted 7 times"),
        (having("pods", a_pod(), a_pod("p", "glowplug/placer:0.2.0")), "images", WARN, "0.2.0: placer"),
        (having("persistentvolumeclaims", a_claim("Pending")), "data-nats-0", FAIL, "Pending"),
        (having("persistentvolumeclaims"), "volumes", WARN, "no claim"),
        (replace(WELL, secret_keys=("NATS_TOKEN",)), "secret", FAIL, "lacks GLOWPLUG_ADMIN_TOKEN"),
        (replace(WELL, secret_keys=None, secret_problem="not found"), "secret", FAIL, "not found"),
        (replace(WELL, secret_keys=None, secret_problem="Forbidden"), "secret", SKIPPED, "may not read it"),
        (having("networkpolicies"), "network policies", WARN, "there is none"),
        (having("networkpolicies", OPEN), "network policies", WARN, "no policy denies"),
        (having("networkpolicies", a_policy("default-deny")), "network policies", FAIL, "none allowed"),
        (node(gpus=4), "gpus", FAIL, "no node offers 4"),
        (replace(node(gpus=4), nodes=(a_machine(8),)), "gpus", OK, "1 node(s) offer"),
        (replace(node(gpus=4), nodes=None), "gpus", SKIPPED, "may not list"),
        (having("horizontalpodautoscalers", a_scaler(active=False)), "hpa router", WARN, "unable to get metric"),
        (replace(WELL, api_services=()), "metrics API", WARN, "not served"),
        (replace(WELL, api_services=(an_api(available=False),)), "metrics API", WARN, "not available"),
        (having("poddisruptionbudgets", a_budget(0)), "pdb router", WARN, "0 healthy of 1"),
    ],
)
def test_what_is_wrong_is_named(facts: ClusterFacts, about: str, level: Level, words: str) -> None:
    found = [f for f in check(facts) if f.about == about]
    assert any(f.level is level and words in f.says for f in found), found


def test_a_pod_that_is_leaving_is_no_news() -> None:
    pod = a_pod(container=PULL)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not [f for f in check(having("pods", pod, a_pod("other"))) if f.level is FAIL]


SCRIPT = """#!/bin/sh
# Plays kubectl: prints the file named like the kind that is asked for.
printf "%s\\n" "$*" >>"{folder}/calls"
for word in "$@"; do [ -f "{folder}/$word.json" ] && exec cat "{folder}/$word.json"; done
echo "Error from server (Forbidden): $2 is forbidden" >&2
exit 1
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> Kubectl:
    program = tmp_path / "kubectl"
    program.write_text(SCRIPT.format(folder=tmp_path))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for kind in ITEMS:
        (tmp_path / f"{kind}.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": ITEMS[kind]}))
    return Kubectl("glowplug", "prod", str(program))


def test_kubectl_is_read_and_what_may_not_be_seen_is_left_out(kubectl: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("GLOWPLUG_ADMIN_TOKEN\nNATS_TOKEN\n")
    facts = kubectl.gather()
    assert facts == replace(WELL, nodes=None, api_services=None)
    assert not [f for f in check(facts) if f.level in (WARN, FAIL)]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[2] for call in calls} == {"get"}
    assert all(call.startswith("--context prod ") and "--request-timeout" in call for call in calls)
    assert [call for call in calls if " secret " in call and "$value" in call and ".data" not in call] == []


def test_a_cluster_that_refuses_everything_is_one_finding(tmp_path: Path, kubectl: Kubectl) -> None:
    for file in tmp_path.glob("*.json"):
        file.unlink()
    (found,) = check(kubectl.gather())
    assert found.level is FAIL and "is forbidden" in found.says


def test_without_kubectl_that_is_said(tmp_path: Path) -> None:
    (found,) = check(Kubectl("glowplug", program=str(tmp_path / "kubectl")).gather())
    assert "there is no" in found.says and found.do
