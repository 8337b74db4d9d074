"""Every alert fires when it should, keeps still when it should, and has a runbook that can be followed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.promql import HERE, ROOT, check, needs_promtool, promtool

World = dict[str, str]  # series -> its values, one a minute


@dataclass(frozen=True)
class Case:
    """In the world `fires` the alert is firing at minute `at` with `labels`, in none of `quiet`."""

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
ANSWERS = ("**Meaning.**", "**Impact.**", "**Look.**", "**Do.**", "**Over.**")


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
@pytest.mark.parametrize("case", CASES, ids=[f"{case.alert}-{i}" for i, case in enumerate(CASES)])
def test_an_alert_fires_when_it_should_and_only_then(case: Case, tmp_path: Path) -> None:
    rules = [str(path) for path in sorted((HERE / "rules").glob("*.yml"))]
    tests = [group(case, case.fires, fires=True), *(group(case, world, fires=False) for world in case.quiet)]
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_cases() -> None:
    assert {case.alert for case in CASES} == {alert["alert"] for alert in ALERTS}
    assert [case.alert for case in CASES if not case.quiet] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: f"{alert['alert']}-{alert['labels']['severity']}")
def test_an_alert_says_what_it_must(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
    assert alert["alert"] in SECTIONS


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_runbook_answers_every_question_and_is_of_an_alert(name: str) -> None:
    assert name in {alert["alert"] for alert in ALERTS}
    assert [answer for answer in ANSWERS if answer not in SECTIONS[name]] == []
