"""`glowplug top`, and states in `models` and `ps`."""

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.cli import views
from glowplug.cli.client import FleetClient


class Fleet(FleetClient):
    """One node with one empty GPU; the third request for nodes ends the caller."""

    num_asked = 0

    def rows(self, service: str, path: str, **params: Any) -> list[dict[str, Any]]:
        if path != "/v1/nodes":
            return []
        type(self).num_asked += 1
        if self.num_asked > 2:
            raise KeyboardInterrupt
        return [{"gpus": [{"gpu_id": "node-1/0", "total_bytes": 1 << 30, "grants": []}]}]


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "num_asked", 0)
    monkeypatch.setattr(views, "connect", lambda _: Fleet({}))


def top(**given: Any) -> None:
    views.top(**{"interval_s": 0.0, "once": False, "state_dir": Path(), "as_json": False} | given)


def test_a_pipe_gets_the_table_once(capsys: pytest.CaptureFixture[str]) -> None:
    top()
    said = capsys.readouterr().out
    assert said.count("node-1/0") == said.count("MODEL") == 1
    assert "Ctrl-C" not in said and "\x1b" not in said


def test_a_terminal_gets_it_again_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    top()
    said = capsys.readouterr().out
    assert said.count("node-1/0") == said.count("Ctrl-C ends") == 2
    monkeypatch.setattr(Fleet, "num_asked", 0)
    top(once=True)
    said = capsys.readouterr().out
    assert said.count("node-1/0") == 1 and "Ctrl-C" not in said


@pytest.mark.parametrize(
    ("given", "state", "note"),
    [
        ({"model_state": "prewarmed", "state": "warm"}, "prewarmed", "-"),
        ({"model_state": "waiting", "state": "cold"}, "waiting for room", "-"),
        ({"model_state": "cold", "state": "suspended", "suspended": True}, "cold", "drained"),
        ({"state": "hot", "pinned": True, "pinned_at": "asleep"}, "hot", "pinned kept asleep"),
    ],
)
def test_a_model_stands_as_the_console_says(given: dict[str, Any], state: str, note: str) -> None:
    row = dict.fromkeys(("config_error", "last_failure", "name", "engine", "num_waiting", "num_in_flight"), "")
    row |= {"pinned": False, "suspended": False, "memory_bytes": 0, "instances": []} | given
    shown = views.model_row(row)
    assert (shown[2], shown[-1]) == (state, note)


def test_an_engine_that_was_swapped_out_is_asleep() -> None:
    row = {"ready_at": 0, "created_at": 1.0, "engine": "e", "emulated": False, "instance_id": "i", "model_key": "m"}
    row |= {"state": "swapped_out", "workers": [], "max_concurrency": 1, "url": ""}
    assert views.instance_row(row)[3] == "asleep"
    assert views.instance_row(row | {"outdated": True})[3] == "asleep, outdated"
    assert views.instance_row(row | {"host_bytes": 60 << 20})[5] == "60 MiB of the host"


def test_json_goes_on_into_a_pipe_unless_it_is_asked_for_once(capsys: pytest.CaptureFixture[str]) -> None:
    top(as_json=True)
    assert [json.loads(line)["models"] for line in capsys.readouterr().out.splitlines()] == [[], []]
    Fleet.num_asked = 0
    top(as_json=True, once=True)
    assert len(capsys.readouterr().out.splitlines()) == 1
