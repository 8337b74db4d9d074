"""The dashboards are current and uniform; every expression parses and names existing series."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from glowplug.telemetry import document
from tests.observability import promql
from tests.observability.promql import HERE, ROOT, needs_promtool
from tests.observability.test_names import known

BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((HERE / "grafana/dashboards").glob("*.json"))
}
UNITS = {"short", "s", "bytes", "Bps", "reqps", "ops", "percentunit"}
KINDS = {"timeseries", "stat", "bargauge", "heatmap", "state-timeline", "table", "text"}
FILLED_IN = {"$__rate_interval": "1m", "$__range": "30m", "$model": ".*", "$node": ".*"}


def filled(expr: str) -> str:
    for name, value in FILLED_IN.items():
        expr = expr.replace(name, value)
    return expr


def asked() -> list[tuple[str, str]]:
    return [
        (f"{name}: {panel['title']}", filled(target["expr"]))
        for name, board in BOARDS.items()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def test_what_is_written_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the generator adds its own folder
    written = runpy.run_path(str(HERE / "grafana/build.py"))["written"]()
    stale = [name for name, text in written.items() if (HERE / name).read_text() != text]
    assert stale == [], "run: make dashboards"
    assert BOARDS.keys() == {Path(name).stem for name in written if name.endswith(".json")}


def test_uids_are_unique_and_files_are_named_after_them() -> None:
    assert [board["uid"] for board in BOARDS.values()] == list(BOARDS)
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS) == 5


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_has_the_shape_of_one(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert board["schemaVersion"] >= 39 and board["tags"] == ["glowplug"] and board["description"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert board["templating"]["list"][0]["name"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval", "__range", "__field"}
    assert used <= {variable["name"] for variable in board["templating"]["list"]} | {"datasource"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_panel_says_what_it_shows_and_in_which_unit(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        if panel["type"] in ("row", "text"):
            assert panel.get("title") or panel["options"]["content"]
            continue
        assert panel["type"] in KINDS
        assert panel["title"] and len(panel["description"]) >= 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"] and all(t["datasource"] == panel["datasource"] for t in panel["targets"])
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_no_panel_lies_over_another(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_a_panel_asks_for_what_exists() -> None:
    names = known()
    for where, expr in asked():
        assert promql.faults(expr, names) == [], where
        assert "$" not in expr, where


@needs_promtool
def test_every_expression_parses(tmp_path: Path) -> None:
    promql.check_expressions((expr for _, expr in asked()), tmp_path)


def test_what_is_read_in_a_legend_or_link_is_a_label_there_is() -> None:
    panels = [panel for board in BOARDS.values() for panel in board["panels"]]
    for title, target in [(panel["title"], target) for panel in panels for target in panel.get("targets", ())]:
        kept = promql.kept(filled(target["expr"]), known())
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= kept, (title, legend - kept)


def test_links_lead_to_views_the_console_has() -> None:
    views = re.findall(r"^  (\w+): \{ open", (ROOT / "services/console/page/main.js").read_text(), re.MULTILINE)
    linked = set(re.findall(r"\$\{console\}/#/(\w+)", json.dumps(BOARDS)))
    assert linked and linked <= set(views)


def test_every_metric_a_person_may_ask_for_is_on_a_dashboard_or_in_an_alert() -> None:
    shown = " ".join(expr for _, expr in asked()) + (HERE / "rules/alerts.yml").read_text()
    shown += (HERE / "rules/recording.yml").read_text() + (ROOT / "docs/runbooks.md").read_text()
    ours = ("requests", "fleet", "nodes", "weights")
    names = [n.value for n in document.names() if n.section.startswith(tuple(f"Metrics: {word}" for word in ours))]
    assert names and [name for name in names if name not in shown] == ["glowplug_response_chunks_total"]


def test_grafana_is_given_what_the_dashboards_ask_for() -> None:
    provisioning = HERE / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/glowplug.yaml").read_text())["datasources"]
    kinds = {source["uid"]: source["type"] for source in sources}
    assert kinds == {"prometheus": "prometheus", "jaeger": "jaeger"}
    assert [source["uid"] for source in sources if source.get("isDefault")] == ["prometheus"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/glowplug.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"


def test_the_cluster_is_given_the_same_files() -> None:
    made = yaml.safe_load((HERE / "kustomization.yaml").read_text())
    listed = {name for generator in made["configMapGenerator"] for name in generator["files"]}
    assert listed == {
        str(path.relative_to(HERE)) for folder in ("rules", "grafana/dashboards") for path in (HERE / folder).iterdir()
    }
    assert made["resources"] == ["prometheusrule.yaml"]


def test_compose_names_what_prometheus_looks_for() -> None:
    compose = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text())["services"]
    jobs = yaml.safe_load((HERE / "prometheus.yml").read_text())["scrape_configs"]
    looked_for = {
        (job["job_name"], name) for job in jobs for found in job.get("dns_sd_configs", ()) for name in found["names"]
    }
    kinds = {"agent-llamacpp": "agent", "agent-vllm": "agent"}
    ours = {}
    for name, service in compose.items():
        image = re.match(r"\$\{IMAGE_PREFIX:-glowplug\}/([\w-]+)", service.get("image", ""))
        if image and service.get("restart") != "no":  # others run once and end
            ours[name] = kinds.get(image[1], image[1])
    assert looked_for == {(kind, name) for name, kind in ours.items()}
