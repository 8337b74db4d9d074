"""The verbs of a model against scripted services."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from glowplug.cli import client, verbs
from glowplug.cli.client import Answer
from glowplug.cli.main import app_of
from glowplug.domain.model import WeightsRef

COST = {
    "model": "tiny", "verb": "load", "rung": "ready", "seconds": 2.5, "kind": "cold", "phases": {}, "scope": "prior",
    "source": "default of emulated: none has been measured", "num_measured": 0, "is_emulated": True,
    "node_id": "node-1", "gpu_ids": ["node-1/0"], "gpu_bytes": 1 << 30, "kept_gpu_bytes": 1 << 30,
    "freed_gpu_bytes": 0, "fetch_bytes": 1 << 20, "freed_host_bytes": 0, "num_in_flight": 0, "leaving": [],
    "is_possible_now": True, "reason": "",
}  # fmt: skip
LEAVING = {"instance_id": "i-1", "model_key": "big", "state": "ready", "num_bytes": 1 << 30, "becomes": "swapped_out"}


def row(state: str, *instances: str, **fields: Any) -> dict[str, Any]:
    shown = [{"instance_id": f"i-{n}", "state": s, "node_id": "node-1"} for n, s in enumerate(instances)]
    return {"name": "tiny", "key": "tiny", "state": state, "instances": shown, "last_failure": ""} | fields


class Fleet:
    """`rows`: successive views of the model; the last one repeats. `asked`: changes requested."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any], cost: dict[str, Any] | None = None
    ) -> None:
        self.rows, self.cost, self.asked = list(rows), COST if cost is None else cost, list[tuple[str, Any]]()
        self.refused: tuple[str, ...] = ()  # path suffixes
        for service in ("placer", "autoscaler"):
            monkeypatch.setenv(f"GLOWPLUG_{service.upper()}_URL", f"http://{service}")
        monkeypatch.setattr(client, "request", self.answer)

    def answer(self, method: str, url: str, **kwargs: Any) -> Answer:
        if url.endswith(self.refused):
            error = {"message": "tiny is pinned in host memory", "code": "conflict"}
            return said(409, {"error": error})
        if url.endswith("/cost"):
            return said(200 if "seconds" in self.cost else 503, self.cost)
        if method == "POST":
            self.asked.append((url.removeprefix("http://"), kwargs.get("json")))
            return said(202, {})
        return said(200, self.rows.pop(0) if len(self.rows) > 1 else self.rows[0])


def said(status: int, value: Any) -> Answer:
    return Answer(status, json.dumps(value).encode())


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    def command(*argv: str, code: int = 0) -> str:
        done = CliRunner().invoke(app_of(), [argv[0], "--state-dir", str(tmp_path), *argv[1:]])
        assert done.exit_code == code, done.output
        return f"{done.output}{done.exception or ''}"

    return command


def test_a_dry_run_says_the_cost_and_asks_nothing(monkeypatch, run):
    fleet = Fleet(monkeypatch, row("cold"), cost=COST | {"leaving": [LEAVING]})
    said = run("load", "tiny", "--dry-run")
    assert said.startswith(
        "about 2.50 s (a cold start on node-1); 1.0 MiB fetched into host memory; 1.0 GiB of GPU memory"
    )
    assert "big (1.0 GiB, then asleep) leaves" in said and "default of emulated" in said
    assert json.loads(run("load", "tiny", "--dry-run", "-o", "json"))["seconds"] == 2.5
    assert fleet.asked == []


def test_a_verb_that_is_waited_for_says_what_it_took_beside_what_was_predicted(monkeypatch, run):
    fleet = Fleet(monkeypatch, row("cold"), row("starting", "loading"), row("hot", "ready"))
    said = run("load", "tiny", "--wait").splitlines()
    assert said[0] == "tiny: load requested (now cold)" and said[-1].endswith("s (2.50 s predicted)")
    assert fleet.asked == [("autoscaler/v1/models/tiny/load", None)]
    done = json.loads(run("wake", "tiny", "--wait", "-o", "json"))
    assert done["cost"]["seconds"] == 2.5 and done["actual_s"] >= 0


def test_what_is_put_away_is_waited_for_until_it_is(monkeypatch, run):
    passing = row("hot", "ready", is_being_put_away=True)
    fleet = Fleet(monkeypatch, row("cold"), passing, row("warm", "swapped_out", is_being_put_away=False))
    run("load", "tiny", "--to", "asleep", "--node", "node-1", "--wait")
    assert fleet.asked == [("autoscaler/v1/models/tiny/load", {"to": "asleep", "node": "node-1"})]
    assert len(fleet.rows) == 1


def test_rungs_go_to_their_owner(monkeypatch, run):
    fleet = Fleet(monkeypatch, row("cold"))
    run("load", "tiny", "--to", "host", "--node", "node-1")
    run("unload", "tiny", "--from", "asleep")
    run("unload", "tiny", "--from", "host")
    run("pin", "tiny", "--at", "asleep")
    run("unpin", "tiny")
    assert fleet.asked == [
        ("placer/v1/models/tiny/fetch", {"node": "node-1"}),
        ("autoscaler/v1/models/tiny/unload", {"from": "asleep"}),
        ("placer/v1/models/tiny/drop", None),
        ("autoscaler/v1/models/tiny/unload", None),
        ("autoscaler/v1/models/tiny/pin", {"at": "asleep"}),
        ("autoscaler/v1/models/tiny/unpin", None),
    ]


def test_nothing_is_drained_where_weights_may_not_leave_host_memory(monkeypatch, run):
    fleet = Fleet(monkeypatch, row("hot", "ready"))
    fleet.refused = ("/drop",)
    assert "pinned in host memory" in run("unload", "tiny", "--from", "host", code=1)
    assert fleet.asked == []


def test_a_cost_that_is_not_known_keeps_no_verb_from_its_owner(monkeypatch, run):
    fleet = Fleet(monkeypatch, row("cold"), cost={"error": {"message": "another leads", "code": "not_leader"}})
    assert "the cost is not known: another leads" in run("sleep", "tiny")
    assert fleet.asked == [("autoscaler/v1/models/tiny/sleep", None)]
    run("sleep", "tiny", "--dry-run", code=1)


def test_waiting_ends_with_the_reason_where_nothing_comes(monkeypatch, run):
    Fleet(monkeypatch, row("cold", last_failure="no GPU could hold it"))
    ended = run("load", "tiny", "--wait", "--timeout", "0", code=1)
    assert "tiny is cold after 0 s, so load is not done yet: no GPU could hold it" in ended


def test_what_cannot_be_now_says_why_and_what_is_there_that_nothing_has_to_be_done():
    assert verbs.described(COST | {"is_possible_now": False, "reason": "big stays"}) == "it has to wait: big stays"
    there = COST | {"seconds": 0.0, "reason": "i-1 is ready on node-1"}
    assert verbs.described(there) == "nothing to do: i-1 is ready on node-1"


def test_weights_count_as_in_host_memory_by_their_digest_and_not_by_the_model_that_brought_them():
    ref = WeightsRef(uri="file:/now")
    shown = row("cold", weights={"uri": ref.uri, "sha256": ""})
    for cached, is_there in (({"digest": "of before", "model_keys": ["tiny"]}, False), ({"digest": ref.digest}, True)):
        fleet = SimpleNamespace(nodes=lambda cached=cached: [{"node_id": "node-1", "cached": [cached]}])
        assert verbs._in_host_memory("")(fleet, shown) is is_there
