"""The union and the baselines on real models, on an engine that can neither prewarm nor swap.

Lane: system (the union), long (the baseline).
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.engines.samples import sample_weights_path
from glowplug.policies.systems import System
from glowplug_lab.systems import SYSTEMS
from tests.fleet_runner import Fleet
from tests.waiting import wait_until
from tests.weight_servers import WeightServer

pytestmark = [pytest.mark.fleet, pytest.mark.llamacpp, pytest.mark.timeout(500)]
MODEL = """
name: {name}
engine: llamacpp
weights: sample:smollm2
kv_bytes: 140MiB
context_tokens: 1024
max_concurrency: 4
max_wait_s: 180
keep_alive_s: {keep_alive_s}
slo: {{ttft_s: 5, tpot_s: 0.2}}
"""
REASON = {"union": "one worker", "first_fit": "first GPU"}
CHOSEN = {"GLOWPLUG_GPU_BUDGETS": "300MiB"}  # one of these models at a time: 234 MiB each


@pytest.fixture(scope="module", params=["union", pytest.param("serverless_vllm", marks=pytest.mark.long)])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kept = {"lasting": 600, "brief": 2}
    models = {name: MODEL.format(name=name, keep_alive_s=seconds) for name, seconds in kept.items()}
    root, env = tmp_path_factory.mktemp("fleet"), {"GLOWPLUG_POLICIES": request.param, **CHOSEN}
    with Fleet.start(root, models, engine="llamacpp", nodes=1, **env) as made:
        yield made


@pytest.fixture
def system(request: pytest.FixtureRequest, fleet: Fleet) -> System:
    return SYSTEMS[request.node.callspec.params["fleet"]]


def at_rest(system: System) -> set[str]:
    becomes = {system.params["autoscaler"]["stop_becomes"], system.params["placer"]["evict_becomes"]}
    return becomes - {"stopped"}


def decisions(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    url = fleet.url("placer") + "/v1/decisions"
    found: list[dict[str, Any]] = httpx.get(url, params={"model": model}).json()["data"]
    return [row for row in found if row["service"] == "placer"]


def test_a_cold_model_is_fetched_placed_and_answers(fleet: Fleet, system: System) -> None:
    assert fleet.policies() == system.policies
    answer = fleet.chat("lasting")
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
    (placed,) = [row for row in decisions(fleet, "lasting") if row["kind"] == "place"]
    assert placed["policy"] == system.policies["placement"] and REASON[placed["policy"]] in placed["reason"]


def test_it_gives_way_to_another_and_what_idles_serves_no_more(fleet: Fleet, system: System) -> None:
    (first,) = fleet.instances("lasting")
    assert fleet.chat("brief").status_code == 200
    (evicted,) = [row for row in decisions(fleet, "brief") if row["kind"] == "evict"]
    assert evicted["policy"] == system.policies["eviction"] and evicted["chosen"] == first["instance_id"]
    wait_until("idle to zero", lambda: {i["state"] for i in fleet.instances()} <= at_rest(system))


def test_what_sleeps_is_woken(fleet: Fleet, system: System) -> None:
    """The same process continues without fetch or load, with the same greedy answer."""
    sleeping = {i["instance_id"] for i in fleet.instances("lasting")}
    assert bool(sleeping) == ("swapped_out" in at_rest(system))
    answer = fleet.chat("lasting", temperature=0)
    assert answer.status_code == 200, answer.text
    (now,) = [i for i in fleet.instances("lasting") if i["state"] == "ready"]
    assert now.get("source", "") in (sleeping or {""})
    for _ in range(2):
        assert fleet.chat("brief", temperature=0).status_code == 200
        again = fleet.chat("lasting", temperature=0).json()["choices"][0]["message"]
        assert again == answer.json()["choices"][0]["message"]


def streamed(fleet: Fleet, kill_at: int = 0) -> tuple[str, list[Any]]:
    """(text, events) of one greedy stream, whose engine gets kill -9 after that many."""
    body = {"model": "lasting", "stream": True, "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Count from one to a hundred."}]}
    url, events = fleet.url("data") + "/v1/chat/completions", list[Any]()
    (one,) = [i for i in fleet.instances("lasting") if i["state"] == "ready"]
    (memory,) = fleet.state_dir.rglob("agent.json")
    pid = json.loads(memory.read_bytes())["handles"][one["instance_id"]]["pid"]
    with httpx.stream("POST", url, json=body, timeout=90) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
            if kill_at and len(events) == kill_at:
                kill_at = 0
                os.kill(pid, signal.SIGKILL)
    chunks = events[:-1] if events[-1] == "[DONE]" else events
    return "".join(c["delta"].get("content") or "" for one in chunks for c in one["choices"]), events


def test_a_stream_outlives_its_engine(fleet: Fleet) -> None:
    assert fleet.chat("lasting").status_code == 200
    whole, events = streamed(fleet)
    assert len(events) > 300, "long enough for a client that reads late"
    text, after = streamed(fleet, kill_at=6)
    assert after[-1] == "[DONE]" and text == whole
    assert len(after) == len(events) and len({one["id"] for one in after[:-1]}) == 1
    rows = httpx.get(fleet.process("router")["url"] + "/v1/requests", headers=fleet.admin).json()["data"]
    assert [row["num_continued"] for row in rows[:2]] == [1, 0] and rows[0]["instance_id"] != rows[1]["instance_id"]


def test_a_sleeper_that_is_killed_says_so_and_costs_a_start(fleet: Fleet, system: System) -> None:
    """Its bytes were free before kill -9; the next request may find a replica prewarmed meanwhile."""
    asleep = [i for i in fleet.instances("brief") if i["state"] == "swapped_out"]
    assert bool(asleep) == ("swapped_out" in at_rest(system))
    if not asleep:
        return
    (memory,) = fleet.state_dir.rglob("agent.json")
    handles = json.loads(memory.read_bytes())["handles"]
    for one in asleep:
        os.kill(handles[one["instance_id"]]["pid"], signal.SIGKILL)
    url = fleet.process("agent")["url"] + "/v1/instances"

    def ended() -> list[str]:
        rows = httpx.get(url, params={"model": "brief", "gone": True}).json()["data"]
        return [row["reason"] for row in rows if row["state"] == "failed"]

    wait_until("their rows say so", lambda: len(ended()) == len(asleep))
    assert all("ended by itself" in reason for reason in ended())
    assert fleet.chat("brief").status_code == 200
    (now,) = [i for i in fleet.instances("brief") if i["state"] == "ready"]
    assert now["start_kind"] != "wake" and now.get("source", "") not in {i["instance_id"] for i in asleep}


def test_what_is_pinned_asleep_leaves_for_its_sleep_under_any_system(fleet: Fleet) -> None:
    url = fleet.url("autoscaler") + "/v1/models/brief/pin"
    assert httpx.post(url, headers=fleet.admin, json={"at": "asleep"}).status_code == 202
    assert fleet.chat("brief").status_code == fleet.chat("lasting").status_code == 200
    (asleep,) = wait_until("it sleeps", lambda: [i for i in fleet.instances("brief") if i["state"] == "swapped_out"])
    assert fleet.chat("brief").status_code == 200
    (woken,) = [i for i in fleet.instances("brief") if i["state"] == "ready"]
    assert (woken["source"], woken["start_kind"]) == (asleep["instance_id"], "wake")


ARRIVING = MODEL.replace("weights: sample:smollm2", "weights: {{uri: {uri}, sha256: {sha256}}}\nweights_bytes: 94MiB")


@pytest.mark.long
def test_an_engine_loads_its_weights_while_they_arrive_and_serves_none_that_are_wrong(
    fleet: Fleet, system: System, tmp_path: Path
) -> None:
    """HydraServe section 5.1: fetch and load overlap."""
    if system is not SYSTEMS["union"]:
        pytest.skip("the engine does the same under every system")
    data = sample_weights_path().read_bytes()
    with WeightServer(data, step_s=0.001) as server:
        for name, content in (("arriving", data), ("wrong", b"other")):
            sha256 = hashlib.sha256(content).hexdigest()
            text = ARRIVING.format(name=name, keep_alive_s=600, uri=server.url, sha256=sha256)
            (tmp_path / f"{name}.yaml").write_text(text)
        done = fleet.cli("deploy", *map(str, tmp_path.glob("*.yaml")))
        assert done.returncode == 0, done.stderr
        answer = fleet.chat("arriving", temperature=0)
        assert answer.status_code == 200, answer.text
        server.step_s = 0.0
        refused = fleet.chat("wrong")
    (row,) = [row for row in fleet.instances("arriving") if row["phases"]]
    phases = {phase["name"]: phase for phase in row["phases"]}
    assert phases["load"]["started_at"] < phases["fetch"]["ended_at"] - 0.1, phases
    assert phases["warmup"]["ended_at"] > phases["load"]["ended_at"]
    assert refused.status_code == 503 and "sha256" in refused.text, refused.text
    assert all(row["state"] == "failed" and not row.get("ready_at") for row in fleet.instances("wrong"))


def test_no_service_stumbled(fleet: Fleet) -> None:
    """A decision that raises is retried for ever: only the log shows it."""
    for name in ("router-1", "predictor-1", "placer-1", "autoscaler-1", "prefetcher-1", "agent-1"):
        log = fleet.logs(name, lines=10_000)
        assert log != "(no log)" and "Traceback" not in log, log
