"""Rules, dashboards and runbooks name existing series, labels and commands."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperGroup

from glowplug.cli.main import app_of
from glowplug.telemetry import document
from tests.observability import promql
from tests.observability.promql import HERE, ROOT, needs_promtool

CLI = typer.main.get_command(app_of())
RULES: list[dict[str, Any]] = [
    rule
    for path in sorted((HERE / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [
        line
        for block in re.findall(rf"```{language}\b[^\n]*\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line
    ]


def known() -> dict[str, set[str]]:
    found = promql.known()
    for rule in RULES:
        if "record" in rule:
            found[rule["record"]] = promql.grouped_by(rule["expr"]) or {
                label for one in promql.series(rule["expr"]) for label in found[one.name]
            }
    return found


PAGES = ("docs/runbooks.md", "docs/observability.md")
PROMQL = [line for page in PAGES for line in blocks(page, "promql")]
COMMANDS = sorted({line for page in PAGES for line in blocks(page, "sh") if line.startswith("glowplug ")})


def test_rules_and_expressions_of_the_docs_name_series_and_labels_that_exist() -> None:
    names = known()
    assert {
        expr: faults for expr in [*(r["expr"] for r in RULES), *PROMQL] if (faults := promql.faults(expr, names))
    } == {}


def test_what_a_rule_tells_it_has_the_label_for() -> None:
    for rule in (rule for rule in RULES if "alert" in rule):
        asked = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.get("annotations", {}).values())))
        kept = promql.kept(rule["expr"], known())
        assert asked <= kept, (rule["alert"], asked, kept)


@needs_promtool
def test_every_expression_of_the_docs_parses(tmp_path: Path) -> None:
    promql.check_expressions(PROMQL, tmp_path)


def test_a_command_of_the_docs_exists_with_its_options() -> None:
    """The command line parses it, but does not run it."""
    assert isinstance(CLI, TyperGroup)
    for line in COMMANDS:
        name, *args = shlex.split(line, comments=True)[1:]
        command = CLI.commands[name]
        command.make_context(name, args)
        assert command.help, line


def test_the_reader_of_expressions_sees_faults() -> None:
    """Without this, the tests above might never fail."""
    assert promql.faults("rate(glowplug_nothing_total[5m])", known()) == ["no series glowplug_nothing_total"]
    assert promql.faults('glowplug_requests_held{pod="x"}', known()) == ["glowplug_requests_held has no label pod"]
    assert promql.faults("sum by (owner) (glowplug_requests_held)", known()) == ["nothing here has the label owner"]
    assert promql.faults("sum by (model, le) (rate(glowplug_request_ttft_seconds_bucket[5m]))", known()) == []


def test_every_metric_on_the_page_has_its_labels_as_words() -> None:
    odd = [
        n.value
        for n in document.names()
        if n.section.startswith("Metrics:")
        for label in document.labels(n)
        if not re.fullmatch("[a-z_]+", label)
    ]
    assert odd == []


def test_what_the_cluster_scales_by_is_measured() -> None:
    text = "".join(path.read_text() for path in sorted((ROOT / "deploy/k8s").rglob("*.yaml")))
    named = set(re.findall(r"\bglowplug_[a-z_]+\b", text))
    assert {"glowplug_requests_in_flight", "glowplug_connections"} <= named <= set(known())


def test_the_cluster_names_jobs_as_rules_and_dashboards_do() -> None:
    monitors = (ROOT / "deploy/k8s/components/monitoring/servicemonitors.yaml").read_text()
    jobs = {job["job_name"] for job in yaml.safe_load((HERE / "prometheus.yml").read_text())["scrape_configs"]}
    components = set(re.findall(r"values: \[([^\]]*)\]", monitors)[0].split(", "))
    assert components | set(re.findall(r"replacement: (\w+)", monitors)) == jobs - {"prometheus"}
