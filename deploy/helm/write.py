"""Write deploy/k8s from the chart, so that `helm install` and `kubectl apply -k` make the same fleet.

    python deploy/helm/write.py        # make k8s-write

The chart is rendered once for each of its values files. Objects common to all renderings go to `base`, others to the
overlay of their values file, and those added by `monitoring.enabled` and `operator.enabled` to `components`. Settings
become files, from which kustomize makes ConfigMaps with a hash of the content in the name. Fields that kustomize sets
itself are left out: namespace, `part-of`, `managed-by`, the chart's label, and the chart's checksums, which those
hashes replace.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/glowplug"
K8S = ROOT / "deploy/k8s"
OVERLAYS = ("sim", "gpu")
COMPONENTS = ("monitoring", "operator")  # added by their `enabled`
HEADER = "# Rendered from deploy/helm/glowplug by `make k8s-write`: change it there.\n"
_KUSTOMIZE_SAYS = re.compile(
    r"^ *(app\.kubernetes\.io/(part-of|managed-by)|helm\.sh/chart|checksum/\w+): .*\n", re.MULTILINE
)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EMPTY = re.compile(r"^( *)annotations:\n(?!\1 )", re.MULTILINE)
_FROM_OBSERVABILITY = "observability.yaml"  # deploy/observability is a kustomization of its own


class Rendered(NamedTuple):
    """One object: its template, its text without the fields of kustomize, and the text as data."""

    template: str
    text: str
    manifest: dict[str, Any]


def helm() -> str | None:
    """The helm of this machine: $HELM, that of `make k8s-tools`, or the one on PATH."""
    brought = ROOT / ".venv/helm/helm/helm"
    return os.environ.get("HELM") or (str(brought) if brought.exists() else shutil.which("helm"))


def template(*arguments: str, namespace: str = "glowplug") -> str:
    """Render the chart by `helm template`. Raises RuntimeError with helm's own words."""
    found = helm()
    if found is None:
        raise RuntimeError("no helm here: make k8s-tools")
    command = [found, "template", "glowplug", str(CHART), "--namespace", namespace, "--no-hooks", *arguments]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(re.sub(r"level=INFO msg=.*\n", "", made.stderr).strip())
    return made.stdout


def overlay_arguments(overlay: str) -> list[str]:
    """Arguments to render the objects of an overlay of deploy/k8s: "sim", "gpu", or one with "-monitored"."""
    name, _, monitored = overlay.partition("-")
    more = ["--set", "monitoring.enabled=true"] if monitored else []
    return ["--values", str(CHART / f"values-{name}.yaml"), "--set", "namespace.create=true,tokens.create=false", *more]


def objects(text: str) -> list[Rendered]:
    """The objects of a rendering, in its order."""
    found = []
    for part in re.split(r"^---\n", text, flags=re.MULTILINE):
        source, _, body = part.partition("\n")
        if (manifest := yaml.load(body, Loader=_LOADER)) is not None:
            plain = _EMPTY.sub("", _KUSTOMIZE_SAYS.sub("", body)).strip() + "\n"
            found.append(Rendered(source.rpartition("/")[2], plain, manifest))
    return found


def _of_settings(manifest: Mapping[str, Any], folder: str) -> dict[str, str]:
    """The files that kustomize makes a ConfigMap of: path -> text."""
    name, data = manifest["metadata"]["name"], manifest["data"]
    if name.endswith("settings"):
        return {f"{folder}/{name}.env": "".join(f"{key}={value}\n" for key, value in data.items())}
    if name == "nats":
        return {f"{folder}/nats.conf": data["nats.conf"]}  # glowplug.runtime.privileges writes the users' files
    if name == "models" and "gpu" in folder:
        return {f"{folder}/models/{key}": text for key, text in data.items()}
    return {}  # sim has those of deploy/models


def files() -> dict[str, str]:
    """All written files: path below deploy/k8s -> text."""
    renderings = {overlay: objects(template(*overlay_arguments(overlay))) for overlay in OVERLAYS}
    first, *others = ({r.text for r in rendered} for rendered in renderings.values())
    shared = first.intersection(*others)
    lines: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    for overlay, rendered in renderings.items():
        for one in rendered:
            folder, name = ("base", one.template) if one.text in shared else (f"overlays/{overlay}", "manifests.yaml")
            if one.manifest["kind"] == "ConfigMap":
                found |= _of_settings(one.manifest, folder)
            elif one.text not in lines.setdefault(f"{folder}/{name}", []):
                lines[f"{folder}/{name}"].append(one.text)
    plain = {r.text for r in renderings["sim"]}
    for component in COMPONENTS:
        for one in objects(template(*overlay_arguments("sim"), "--set", f"{component}.enabled=true")):
            if one.text not in plain and one.template != _FROM_OBSERVABILITY:
                lines.setdefault(f"components/{component}/{one.template}", []).append(one.text)
    return found | {path: HEADER + "---\n".join(texts) for path, texts in lines.items()}


def main() -> int:
    for path, text in files().items():
        (K8S / path).parent.mkdir(parents=True, exist_ok=True)
        (K8S / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
