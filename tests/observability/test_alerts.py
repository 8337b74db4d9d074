"""Every alert fires exactly when it should, and has a usable runbook."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.observability.promql import HERE, ROOT, check, needs_promtool, promtool

World = dict[str, str]  # series -> its values, one a minute


@dataclass(frozen=True)
class Case:
    """`fires` fires at minute `at` with `labels`; `quiet` never."""

    alert: str
    fires: World
    quiet: list[World]
    at: int = 70
    labels: dict[str, str] = field(default_factory=dict)


CASES = [Case(**case) for case in yaml.safe_load(Path(__file__).with_name("alert_cases.yml").read_text())]
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((HERE / "rules/alerts.yml").read_text())["groups"] for rule in group["rules"]
]
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS, re.MULTILINE | re.DOTALL))
ANSWERS = ("**Impact.**", "**Look.**", "**Do.**")  # the alert itself says what it means


@needs_promtool
def test_rules_and_configuration_are_valid() -> None:
    check("rules", "rules/alerts.yml", "rules/recording.yml")
    check("config", "prometheus.yml")


def firing(case: Case) -> str:
    labels = {"alertname": case.alert, "alertstate": "firing"} | case.labels
    pairs = ",".join(f'{k}="{v}"' for k, v in labels.items())
    return f"count(ALERTS{{{pairs}}}) > 0"


def group(case: Case, world: World, *, fires: bool) -> dict[str, Any]:
    series = [{"series": name, "values": values} for name, values in world.items()]
    check = {"expr": f"({firing(case)}) * 0 + 1", "eval_time": f"{case.at}m"}
    return {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [check | {"exp_samples": [{"labels": "{}", "value": 1}] if fires else []}],
    }


@needs_promtool
def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """Each alert is evaluated alone, with the recording rules."""
    for name in {case.alert for case in CASES}:
        rules = [rule for rule in ALERTS if rule["alert"] == name]
        cases = [case for case in CASES if case.alert == name]
        tests = [group(case, case.fires, fires=True) for case in cases]
        tests += [group(case, world, fires=False) for case in cases for world in case.quiet]
        (tmp_path / f"{name}.rules").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}))
        files = [f"{name}.rules"]
        if any("glowplug:" in rule["expr"] for rule in rules):
            files.append(str(HERE / "rules/recording.yml"))
        told = {"rule_files": files, "evaluation_interval": "1m", "tests": tests}
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(told))
    done = promtool("test", "rules", *map(str, sorted(tmp_path.glob("*.yml"))))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_cases() -> None:
    assert {case.alert for case in CASES} == {alert["alert"] for alert in ALERTS}
    assert [case.alert for case in CASES if not case.quiet] == []


def test_an_alert_says_what_it_must() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), alert
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}, alert
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"


def test_a_runbook_answers_every_question_and_is_of_an_alert() -> None:
    assert SECTIONS.keys() == {alert["alert"] for alert in ALERTS}
    assert [(name, answer) for name in SECTIONS for answer in ANSWERS if answer not in SECTIONS[name]] == []
