"""Names in PromQL expressions; runs of Debian's Prometheus and promtool."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from glowplug.telemetry import document

TARGET = {"job", "instance"}  # on every series, from Prometheus
FOREIGN = {  # from Prometheus itself and the client library
    "up": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
}
_SERIES = re.compile(r"\b(glowplug[_:][a-z0-9_:]+|up|process_[a-z_]+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"((?:[^\"\\]|\\.)*)\"")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy/observability"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (apt install prometheus)"
)


@dataclass(frozen=True)
class Series:
    name: str
    matchers: tuple[tuple[str, str], ...]


def known() -> dict[str, set[str]]:
    found: dict[str, set[str]] = dict(FOREIGN)
    for name in document.names():
        if name.section.startswith("Metrics:"):
            own = set(document.labels(name))
            if document.kind(name.value) == "histogram":
                found |= {f"{name.value}_bucket": own | {"le"}, f"{name.value}_sum": own, f"{name.value}_count": own}
            else:
                found[name.value] = own
    return found


def series(expr: str) -> list[Series]:
    return [Series(name, tuple(_MATCHER.findall(inside))) for name, inside in _SERIES.findall(expr)]


def grouped_by(expr: str) -> set[str]:
    return {label.strip() for inside in _GROUPING.findall(expr) for label in inside.split(",") if label.strip()}


def kept(expr: str, series_known: dict[str, set[str]]) -> set[str]:
    """Labels of the result: fewer after a sum."""
    own = {label for one in series(expr) for label in series_known[one.name]} | TARGET
    summed = {label.strip() for inside in re.findall(r"\bby\s*\(([^)]*)\)", expr) for label in inside.split(",")}
    made = set(re.findall(r'label_replace\(.*?, "([a-z_]+)"', expr))
    return (summed & own or own) | made


def faults(expr: str, series_known: dict[str, set[str]]) -> list[str]:
    found, labels = [], set(TARGET)
    for one in series(expr):
        if one.name not in series_known:
            found.append(f"no series {one.name}")
            continue
        own = series_known[one.name] | TARGET
        labels |= own
        found += [f"{one.name} has no label {label}" for label, _ in one.matchers if label not in own]
    made = set(re.findall(r'label_replace\(.*?, "([a-z_]+)"', expr))
    return found + [f"nothing here has the label {label}" for label in grouped_by(expr) - labels - made]


def check(kind: str, *files: str) -> None:
    done = promtool("check", kind, *files)
    assert done.returncode == 0, done.stdout + done.stderr


def check_expressions(exprs: Iterable[str], tmp_path: Path) -> None:
    rules = [{"record": f"checked:{i}", "expr": expr} for i, expr in enumerate(exprs)]
    file = tmp_path / "expressions.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "checked", "rules": rules}]}))
    check("rules", str(file))


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *args], capture_output=True, text=True, check=False, cwd=HERE)
