"""Write the dashboards: `make dashboards`, which is `python deploy/observability/grafana/build.py`.

Also writes prometheusrule.yaml, the rules as the object for the Prometheus operator of Kubernetes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from boards import cold_starts, control_plane, forecasts, gpus, service_levels  # noqa: E402
from panels import COLUMNS, SCHEMA, SOURCE, Board, Panel, drawn  # noqa: E402

BOARDS = (service_levels.BOARD, cold_starts.BOARD, forecasts.BOARD, gpus.BOARD, control_plane.BOARD)
Json = dict[str, Any]


def variable(name: str) -> Json:
    """A drop-down at the top of the page, filled from the metrics' labels."""
    queries = {
        "model": "label_values(glowplug_requests_total, model)",
        "node": "label_values(glowplug_gpu_total_bytes, node)",
    }
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": queries[name], "refId": name},
        "definition": queries[name],
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def variables(board: Board) -> list[Json]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    console = {
        "name": "console",
        "label": "Console",
        "description": "Address of the Glowplug console, for links",
        "type": "textbox",
        "query": "http://localhost:8001",
        "current": {"text": "http://localhost:8001", "value": "http://localhost:8001"},
    }
    return [
        source | {"current": {"text": "Prometheus", "value": "prometheus"}},
        *map(variable, board.variables),
        console,
    ]


def panels(board: Board) -> list[Json]:
    """Lay out every row's panels from left to right, on a new line if one does not fit."""
    made: list[Json] = []
    y = 0
    for title, row in board.rows:
        header = {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        made.append(header | {"gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y = _fill(row, made, y + 1)
    return made


def _fill(row: Any, made: list[Json], y: int) -> int:
    x = line = 0
    panel: Panel
    for panel in row:
        if x + panel.width > COLUMNS:
            x, y, line = 0, y + line, 0
        made.append(drawn(panel, len(made) + 1, x, y))
        x, line = x + panel.width, max(line, panel.height)
    return y + line


def links(board: Board) -> list[Json]:
    others = {"type": "dashboards", "title": "Glowplug", "tags": ["glowplug"], "asDropdown": True, "keepTime": True}
    console = {"type": "link", "title": "Console", "url": "${console}", "icon": "external link", "targetBlank": True}
    return [others | {"includeVars": True}, console]


def dashboard(board: Board) -> Json:
    """One board in Grafana's format."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": ["glowplug"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables(board)},
        "annotations": {"list": []},
        "links": links(board),
        "panels": panels(board),
    }


def prometheus_rule() -> str:
    """Put recording rules and alerts into one PrometheusRule."""
    rules = HERE.parent / "rules"
    groups = [
        group
        for name in ("recording.yml", "alerts.yml")
        for group in yaml.safe_load((rules / name).read_text(encoding="utf-8"))["groups"]
    ]
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "glowplug", "labels": {"app.kubernetes.io/part-of": "glowplug"}},
        "spec": {"groups": groups},
    }
    return "# Written by `make dashboards` from rules/.\n" + yaml.safe_dump(body, sort_keys=False, width=120)


def written() -> dict[str, str]:
    """All written files: path below deploy/observability -> text."""
    files = {f"grafana/dashboards/{b.uid}.json": json.dumps(dashboard(b), indent=1) + "\n" for b in BOARDS}
    return files | {"prometheusrule.yaml": prometheus_rule()}


if __name__ == "__main__":
    for name, text in written().items():
        path = HERE.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
