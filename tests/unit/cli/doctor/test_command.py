"""The doctor's output and derived values."""

import hashlib
import json
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glowplug.cli.doctor.findings import Finding, Findings, Level, document, lines, redacted
from glowplug.cli.doctor.fleet import _skew, local_weights, missing_files
from glowplug.cli.main import app_of
from glowplug.domain.model import WeightsRef
from tests.fleet_builder import a_model

F = Findings("fleet")
FOUND = [
    F.ok("bus", "answers"),
    F.warn("store", "late", "look"),
    F.fail("agent", "gone", "start it"),
    F.skipped("x", "no"),
]


def test_every_finding_is_a_line_with_its_remedy_below() -> None:
    shown = lines(FOUND)
    assert shown[0] == "fleet"
    assert "  fail     agent  gone" in shown
    assert shown[shown.index("  fail     agent  gone") + 1].strip() == "do: start it"
    assert shown[-1] == "1 ok, 1 to look at, 1 failed, 1 skipped"
    assert [row for row in lines(FOUND, only_bad=True) if "answers" in row] == []


def test_json_says_whether_all_is_well() -> None:
    assert document(FOUND)["healthy"] is False
    assert document(FOUND[:2])["healthy"] is True
    assert json.loads(json.dumps(document(FOUND)))["counts"] == {"ok": 1, "warn": 1, "fail": 1, "skipped": 1}


def test_no_secret_is_printed() -> None:
    said = Finding(Level.FAIL, "fleet", "bus", "nats://tok3n@host and gpa-secret", "redis://:pw@h:1/0")
    (found,) = redacted([said], ["gpa-secret", "", "a"])
    assert found.says == "nats://***@host and ***"
    assert found.do == "redis://***@h:1/0"


@pytest.mark.parametrize(
    ("date_s", "sent", "took_s", "skew_s"),
    [(100, 100.4, 0.1, 0.0), (100, 100.9, 3.0, 0.0), (100, 105.0, 0.5, -4.0), (110, 105.0, 0.5, 4.5)],
)
def test_a_clock_is_known_to_a_second(date_s: int, sent: float, took_s: float, skew_s: float) -> None:
    assert _skew(formatdate(date_s, usegmt=True), sent, took_s) == pytest.approx(skew_s)


def test_a_service_without_a_clock_has_no_skew() -> None:
    assert _skew("", 1.0, 1.0) is None


def test_weights_are_held_against_their_size_and_checksum(tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    good.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    (tmp_path / "empty").mkdir()

    def model(name: str, path: Path, **fields: Any) -> Any:
        return a_model(name, weights=WeightsRef(uri=path.as_uri(), **fields))

    models = [
        model("fine", good, sha256=digest, num_bytes=7),
        model("other", good, sha256="0" * 64),
        model("short", good, num_bytes=8),
        model("missing", tmp_path / "no.gguf"),
        model("folder", tmp_path / "empty"),
        a_model("elsewhere", weights=WeightsRef(uri="s3://b/k")),
    ]
    problems, num = local_weights(models)
    assert num == 5
    assert set(problems) == {"other", "short", "missing", "folder"}
    assert "sha256" in problems["other"] and "7 bytes and should have 8" in problems["short"]


def test_model_files_that_are_gone_are_named(tmp_path: Path) -> None:
    there, gone = tmp_path / "a.yaml", tmp_path / "b.yaml"
    there.write_text("")
    models = [a_model("a", source=str(there)), a_model("b", source=str(gone)), a_model("c", source="api")]
    assert set(missing_files(models)) == {str(gone)}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--url", "no-address"], 2, "is not an http address"),
        (["--kubernetes", "--url", "http://127.0.0.1:1"], 2, "takes no --url"),
        (["--url", "http://127.0.0.1:1"], 1, "does not answer"),
    ],
)
def test_wrong_usage_is_date_s_apart(argv: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app_of(), ["doctor", *argv])
    assert getattr(done.exception, "exit_code", done.exit_code) == code
    assert words in str(done.exception)


def test_without_a_fleet_the_machine_is_looked_at(tmp_path: Path) -> None:
    done = CliRunner().invoke(app_of(), ["doctor", "--output", "json", "--state-dir", str(tmp_path / "s")])
    shown = json.loads(done.stdout)
    (fleet,) = (f for f in shown["findings"] if f["area"] == "fleet")
    assert fleet["level"] == "skipped" and "glowplug up" in fleet["do"]
    assert done.exit_code == (0 if shown["healthy"] else 1)
