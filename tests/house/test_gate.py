"""The gate's verdict (.ci/gate_ask.py) on a lane's outcomes and reruns; `make steady`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests import lanes, steady
from tests.house.tree import ROOT, text

Rows = list[dict[str, object]]


def row(test: str, outcome: str, text: str = "") -> dict[str, object]:
    return {"test": test, "when": "call", "outcome": outcome, "text": text}


def verdict(out: Path, lane: Rows, *again: Rows, most_unsteady: int = 1) -> tuple[int, str]:
    out = out / "gate"
    out.mkdir()
    for name, rows in zip(("lane-fast", "again-1-fast", "again-2-fast"), (lane, *again), strict=False):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    asked = [sys.executable, str(ROOT / ".ci/gate_ask.py"), "verdict", str(time.time()), str(most_unsteady)]
    done = subprocess.run(asked, env={**os.environ, "GATE_OUT": str(out)}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_a_test_that_passes_alone_is_unsteady_and_named(tmp_path: Path) -> None:
    lane = [{"collected": ["a", "b", "c"]}, row("a", "passed"), row("b", "failed", "E  too slow"), row("c", "skipped")]
    code, said = verdict(tmp_path, lane, [row("b", "failed")], [row("b", "passed")])
    assert code == 0
    assert "UNSTEADY, again: failed, passed: b\n[call] E  too slow" in said
    assert said.splitlines()[-1].startswith("2 passed, 1 skipped, 1 rerun in ")
    assert [json.loads(line)["test"] for line in (tmp_path / "gate/unsteady.jsonl").read_text().splitlines()] == ["b"]


def test_a_test_that_fails_three_times_fails(tmp_path: Path) -> None:
    lane = [{"collected": ["a", "b"]}, row("a", "passed"), row("b", "failed")]
    code, said = verdict(tmp_path, lane, [row("b", "failed")], [row("b", "failed")])
    assert code == 1 and "\nFAILED b\n" in said
    assert said.splitlines()[-1].startswith("1 failed, 1 passed, 1 rerun in ")


def test_a_skip_the_second_time_proves_nothing(tmp_path: Path) -> None:
    lane = [{"collected": ["a", "b"]}, row("a", "passed"), row("b", "failed")]
    assert verdict(tmp_path, lane, [row("b", "skipped")], [row("b", "skipped")])[0] == 1


def test_a_skip_proves_that_a_skipped_test_ends_well(tmp_path: Path) -> None:
    ending = {**row("b", "failed", "OSError"), "when": "teardown"}
    lane = [{"collected": ["a", "b"]}, row("a", "passed"), row("b", "skipped"), ending]
    code, said = verdict(tmp_path, lane, [row("b", "skipped")])
    assert code == 0 and "UNSTEADY, again: skipped, -: b\n[teardown] OSError" in said


def test_more_unsteady_tests_than_may_be_are_a_failure(tmp_path: Path) -> None:
    lane = [{"collected": ["a", "b"]}, row("a", "failed"), row("b", "failed")]
    code, said = verdict(tmp_path, lane, [row("a", "passed"), row("b", "passed")])
    assert code == 1 and "ERROR 2 tests are unsteady, 1 may be" in said


def test_a_test_that_had_no_turn_is_named(tmp_path: Path) -> None:
    code, said = verdict(tmp_path, [{"collected": ["a", "b"]}, row("a", "passed")])
    assert code == 1 and "NO OUTCOME b\n" in said and "ERROR fast: 1 tests have no outcome\n" in said
    assert said.splitlines()[-1].startswith("1 passed, 1 error in ")


def test_an_example_that_was_found_is_not_run_again(tmp_path: Path) -> None:
    lane = [{"collected": ["a", "b"]}, row("a", "passed"), row("b", "failed", "Falsifying example: f(x=0)")]
    code, said = verdict(tmp_path, lane)
    assert code == 1 and "FAILED, again: not run, an example fails: b" in said


def test_nothing_run_is_no_success(tmp_path: Path) -> None:
    assert verdict(tmp_path, [{"collected": ["a"]}, row("a", "skipped")])[0] == 1


def test_what_is_run_many_times_exists_and_is_in_its_lane() -> None:
    rows = [line.split() for line in steady.LIST.read_text().splitlines() if not line.startswith("#")]
    paths = [(lane, name.partition("::")[0]) for lane, name in rows]
    assert [path for _, path in paths if not (ROOT / path).is_file()] == []
    tests = [(path, name.partition("::")[2]) for (_, path), (_, name) in zip(paths, rows, strict=True)]
    assert [test for path, test in tests if test and f"def {test}(" not in text(path)] == []
    assert [path for lane, path in paths if lanes.lane(path) != lane and path not in lanes.BOTH] == []


def test_work_for_a_worker_that_has_just_died_ends_no_run(tmp_path: Path) -> None:
    code = """
import gate_plugin
from xdist.workermanage import WorkerController

class Closed:
    def send(self, item):
        raise OSError("cannot send (already closed?)")

gate_plugin.pytest_xdist_newgateway()
worker = WorkerController.__new__(WorkerController)
worker.log, worker.channel = print, Closed()
worker.sendcommand("runtests", indices=[1])
"""
    environment = {**os.environ, "GATE_OUT": str(tmp_path), "PYTHONPATH": str(ROOT / ".ci")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
