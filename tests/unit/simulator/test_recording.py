"""A simulation learns a recorded fleet's shape, starts, model costs and request pace."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glowplug_lab.simulator.recording.read import read_recording
from glowplug_lab.simulator.recording.scenario import Busy, Costs, scenario_of, write_arrivals
from glowplug_lab.simulator.scenario.load import Scenario, ScenarioError, load_tree

MODEL = {
    "name": "Chat 7B", "key": "chat-7b", "engine": "vllm", "weights": {"uri": "s3://x"}, "weights_bytes": 10**10,
    "kv_bytes": 10**9, "context_tokens": 1000, "max_concurrency": 10, "max_instances": 2, "slo": {"ttft_s": 2.0},
}  # fmt: skip
GPU = {"gpu_id": "node-1/0", "total_bytes": 24 * 10**9,
       "grants": [{"holder": "i-1", "owner": "weights", "num_bytes": 1}]}  # fmt: skip
NODE = {"node_id": "node-1", "engines": ["vllm"], "agent_url": "http://node-1", "gpus": [GPU],
        "host_cache_bytes": 10**9, "links": [], "abilities": ["vllm:prewarm"]}  # fmt: skip
INSTANCE = {"instance_id": "i-1", "model_key": "chat-7b", "engine": "vllm", "state": "ready", "workers": []}
Fact = tuple[str, float, dict[str, Any]]  # type, when, data


def phases(**spans: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"name": name, "started_at": begin, "ended_at": end} for name, (begin, end) in spans.items()]


BEFORE: list[Fact] = [
    ("model.deployed", 990.0, {"model": MODEL}),
    ("node.beat", 990.0, {"node": NODE}),
    ("node.beat", 995.0, {"node": NODE}),
]
READY: Fact = ("instance.ready", 996.0, {"instance": {**INSTANCE, "phases": phases(launch=(1, 3), load=(3, 8))}})


def request(number: int, **fields: Any) -> dict[str, Any]:
    """One answered stream: 10 ms plus 0.5 ms a prompt token, then 20 ms a token."""
    prompt, response = 100 + 10 * number, 11
    ttft_s = 0.01 + 0.0005 * prompt
    return {
        "model_key": "chat-7b", "request_id": f"r{number}", "router_id": "router-1", "instance_id": "i-1",
        "status": 200, "arrived_at": 1000.0 + number, "finished_at": 1010.0, "queue_s": 0.0, "ttft_s": ttft_s,
        "e2e_s": ttft_s + 0.02 * (response - 1), "prompt_tokens": prompt, "response_tokens": response,
        "tokens_exact": True, "cold": False,
    } | fields  # fmt: skip


def finished(number: int = 1, at_s: float = 1010.0, **fields: Any) -> Fact:
    return "request.finished", at_s, request(number, **fields)


def recording(folder: Path, *rows: Fact, before: Sequence[Fact] = (*BEFORE, READY)) -> Path:
    path = folder / "r.jsonl"
    lines = [{"type": kind, "occurred_at": at_s, "issuer": "x", "data": data} for kind, at_s, data in (*before, *rows)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def replay_of(folder: Path, *rows: Fact) -> Scenario:
    found = read_recording(recording(folder, *rows))
    write_arrivals(found, folder / "arrivals.csv")
    return load_tree(scenario_of(found), folder)


def test_a_recorded_fleet_is_a_scenario(tmp_path: Path) -> None:
    refused = {"model_key": "chat-7b", "request_id": "r99", "router_id": "r", "status": 429, "code": "queue_full"}
    scenario = replay_of(tmp_path, *map(finished, range(10)), ("request.rejected", 1004.5, refused))
    server, model = scenario.setup.servers[0], scenario.setup.models[0]
    assert (server.num_gpus, server.gpu_bytes) == (1, 24 * 10**9)
    assert model.starts[0].load_bytes_per_s == pytest.approx(2e9)
    assert server.host_cache_bytes >= model.model.weights_bytes
    assert (model.model.key, model.start.launch_s, model.model.slo.ttft_s) == ("chat-7b", 2.0, 2.0)
    arrivals = list(scenario.arrivals())
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0, 1, 2, 3, 4, 4.5, 5, 6, 7, 8, 9])
    assert arrivals[5].prompt_tokens == 145
    numbers = read_recording(tmp_path / "r.jsonl").numbers()
    assert (numbers["total"]["num_arrived"], numbers["total"]["num_refused"]) == (11, 1)
    assert numbers["fleet"]["gpu_seconds"] == 5.0


def test_a_packed_recording_reads_as_the_plain_one_and_a_cut_one_is_named(tmp_path: Path) -> None:
    plain = recording(tmp_path, finished())
    packed = tmp_path / "r.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_recording(packed).arrivals() == read_recording(plain).arrivals()
    for damaged in (packed.read_bytes()[:-20], b"no gzip at all"):
        packed.write_bytes(damaged)
        with pytest.raises(ScenarioError, match=r"r\.jsonl\.gz: cannot be read as text"):
            read_recording(packed)


@pytest.mark.parametrize(("placed_by", "predicts"), [("union", "combined"), ("first_fit", "none")])
def test_kinds_that_decided_nothing_are_those_of_the_default_where_the_others_are(
    tmp_path: Path, placed_by: str, predicts: str
) -> None:
    why = {"decision_id": "d", "reason": "it fits", "made_at": 1003.0}
    decision = {"service": "placer-1", "kind": "place", "policy": placed_by, **why}
    policies = replay_of(tmp_path, ("decision.made", 1003.0, {"decision": decision}), finished()).setup.policies
    assert (policies.placement, policies.prediction) == (placed_by, predicts)


def test_a_recording_tells_what_its_gpus_held_when_it_began(tmp_path: Path) -> None:
    empty = {**NODE, "node_id": "node-2", "gpus": [{**GPU, "gpu_id": "node-2/0", "grants": []}]}
    path = recording(tmp_path, ("node.beat", 991.0, {"node": empty}), finished())
    assert read_recording(path).held_at_first == (1, 2)


def test_what_was_not_recorded_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    fleet = read_recording(recording(tmp_path, finished())).numbers()["fleet"]
    assert (fleet["num_starts"], fleet["gpu_seconds"]) == (1, 5.0)
    assert (fleet["bytes_loaded"], fleet["hit_ratio"], fleet["bytes_prewarmed"]) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompt_tokens", -1, "data.prompt_tokens: '-1' is not a number from 0 to 1e+12"),
        ("response_tokens", "x", "data.response_tokens: expected int, got str"),
        ("e2e_s", float("nan"), "data.e2e_s: 'nan' is not a number"),
        ("arrived_at", float("inf"), "data.arrived_at: 'inf' is not a number"),
        ("arrived_at", None, "data.arrived_at: expected float, got null"),
        ("queue_s", 1e300, "data.queue_s: '1e+300' is not a number"),
        ("model_key", 7, "data.model_key: expected str, got int"),
        ("cold", ..., "data: object missing required field cold"),
    ],
)
def test_what_is_wrong_with_a_recorded_request_is_one_line_with_its_field(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    row = request(1, **{field: value})
    if value is ...:
        del row[field]
    path = recording(tmp_path, finished(0), ("request.finished", 1011.0, row))
    with pytest.raises(ScenarioError) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"{path}, line 6: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("model.deployed", {"model": {**MODEL, "weights_bytes": -5}}, "data.model"),
        ("model.deployed", {"model": {**MODEL, "max_concurrency": None}}, "data.model.max_concurrency: expected int"),
        ("model.deployed", None, "data: expected object, got null"),
        ("node.beat", {"node": {"node_id": "n", "gpus": 5}}, "data.node.gpus: expected array, got int"),
        ("decision.made", {}, "data: object missing required field decision"),
    ],
)
def test_what_is_wrong_with_a_recorded_fleet_is_one_line_with_its_field(
    tmp_path: Path, kind: str, data: Any, said: str
) -> None:
    path = recording(tmp_path, (kind, 1010.0, data))
    with pytest.raises(ScenarioError) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"{path}, line 5: {said}")


def grown(number: int, at_s: float, took_s: float) -> Fact:
    load = phases(load=(at_s - took_s, at_s))
    instance = {**INSTANCE, "instance_id": f"i-{number}", "source": f"i-{number - 1}", "phases": load}
    return "instance.ready", at_s, {"instance": instance}


def of(state: str, number: int, at_s: float) -> Fact:
    return f"instance.{state}", at_s, {"instance": {**INSTANCE, "instance_id": f"i-{number}", "created_at": 1.0}}


def test_swaps_take_what_they_took(tmp_path: Path) -> None:
    """Fault: they went unread, and a replay charged 5.3 s for each wake."""
    rows = [
        of("draining", 1, 1000.0),
        of("swapped_out", 1, 1002.575),  # after 0.05 s of quiet and half a tick
        grown(2, 1010.0, 2.0),
        of("draining", 2, 1020.0),
        finished(1, 1021.0, instance_id="i-2", finished_at=1021.0),
        of("swapped_out", 2, 1023.6),
        grown(3, 1030.0, 4.0),
    ]
    (model,) = replay_of(tmp_path, *rows).setup.models
    assert [wake.swap_bytes_per_s for wake in model.wakes] == [5e9, 2.5e9]
    assert [wake.sleep_s for wake in model.wakes] == pytest.approx([0.5, 0.0])
    assert {wake.swap_base_s for wake in model.wakes} == {0.0}


def test_a_model_that_was_never_swapped_is_swapped_as_the_others_were(tmp_path: Path) -> None:
    other = {**MODEL, "name": "other", "key": "other", "weights_bytes": 2 * 10**10}
    rows = [
        ("model.deployed", 990.0, {"model": other}),
        of("draining", 1, 1000.0),
        of("swapped_out", 1, 1002.4),
        grown(2, 1010.0, 2.0),
        finished(),
    ]
    setups = {one.model.key: one for one in replay_of(tmp_path, *rows).setup.models}
    assert [wake.swap_bytes_per_s for wake in setups["other"].wakes] == [5e9]
    assert setups["other"].starts[0].launch_s == 2.0


def test_an_ability_stays_with_its_engine(tmp_path: Path) -> None:
    able = {**NODE, "engines": ["vllm", "llamacpp"], "abilities": ["vllm:prewarm", "emulated:swap"]}
    setup = replay_of(tmp_path, ("node.beat", 996.0, {"node": able}), finished()).setup
    (server,) = setup.servers
    assert setup.models[0].model.engine == "vllm"
    assert server.abilities_of("vllm") == {"prewarm"}
    assert server.abilities_of("llamacpp") == frozenset()


def test_prompts_of_unknown_length_are_as_long_as_the_others(tmp_path: Path) -> None:
    rows = [finished(number, prompt_tokens=0 if number else 80) for number in range(3)]
    found = read_recording(recording(tmp_path, *rows))
    assert [prompt for _, _, prompt, _ in found.arrivals()] == [80, 80, 80]


def test_a_command_takes_as_long_as_it_took(tmp_path: Path) -> None:
    path = recording(tmp_path, finished())
    asked = {"target": "node-1", "instance_id": "i-1", "reason": "idle"}
    drained = {"instance": {**INSTANCE, "state": "draining"}}
    more = [
        {"type": "agent.stop", "event_id": "c1", "occurred_at": 1001.0, "issuer": "placer-1", "data": asked},
        {"type": "instance.draining", "cause_id": "c1", "occurred_at": 1001.02, "issuer": "a", "data": drained},
    ]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in more)
    assert scenario_of(read_recording(path))["params"]["bus_s"] == pytest.approx(0.02)


def test_engines_that_slowed_each_other_are_not_slowed_again(tmp_path: Path) -> None:
    """A request's pace includes whatever ran on the same cores."""
    params = replay_of(tmp_path, *map(finished, range(10))).setup.params
    assert not params.share_compute


def test_starts_that_slowed_each_other_are_told_apart_from_those_that_did_not(tmp_path: Path) -> None:
    """CPU-bound starts: two at once on a node take twice as long."""

    def started(number: int, at_s: float, took_s: float) -> Fact:
        launched_at, loaded_at = at_s + 0.25 * took_s, at_s + took_s
        worker = {"worker_id": "w", "node_id": "node-1", "gpu_id": "node-1/0", "num_bytes": 1}
        stages = phases(launch=(at_s, launched_at), load=(launched_at, loaded_at))
        instance = {**INSTANCE, "instance_id": f"c-{number}", "workers": [worker], "phases": stages}
        return "instance.ready", loaded_at, {"instance": instance}

    pairs = [started(10 * at + n, 1000.0 + 20 * at, 4.0) for at in range(3) for n in range(2)]
    alone = [started(90 + at, 1100.0 + 20 * at, 2.0) for at in range(3)]
    tree = scenario_of(read_recording(recording(tmp_path, *pairs, *alone, finished(), before=BEFORE)))
    assert tree["servers"][0]["start_cores"] == 1.0
    (model,) = tree["models"]
    assert {one["launch_s"] for one in model["starts"]} == {0.5}
    assert {one["load_bytes_per_s"] for one in model["starts"]} == {6666670000.0}


def test_a_load_that_took_what_came_in_is_no_measure_of_the_load(tmp_path: Path) -> None:
    """Streamed weights: 6 s of load beside 6 s of fetch are not 12 s of start."""
    stages = phases(launch=(1, 2), fetch=(1, 8), load=(2, 8.1))
    ready = ("instance.ready", 997.0, {"instance": {**INSTANCE, "instance_id": "i-9", "phases": stages}})
    found = read_recording(recording(tmp_path, ready, finished()))
    whole, streamed = scenario_of(found)["models"][0]["starts"]
    assert (whole["load_bytes_per_s"], streamed["launch_s"]) == (2e9, 1.0)
    assert (streamed["chunk_bytes"], streamed["tail_s"]) == (1, 0.1), "what was loaded after the last byte"


def test_costs_are_read_off_streamed_requests() -> None:
    costs = Costs([request(number) for number in range(20)], 256)
    assert costs.tree["prefill_ms"] == pytest.approx([10, 0.5], rel=0.01)
    assert costs.tree["decode_ms"] == pytest.approx([20, 0], rel=0.01)
    assert costs.pace == []


def test_costs_are_read_off_whole_answers_where_nobody_streams() -> None:
    rows = []
    for number in range(20):
        e2e_s = 0.1 + 0.02 * (10 + number)
        rows.append(request(number, response_tokens=10 + number, ttft_s=e2e_s, e2e_s=e2e_s))
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"][0] == pytest.approx(20, rel=0.01)
    assert costs.tree["prefill_ms"][0] == pytest.approx(120, rel=0.05)
    assert costs.pace == []


def test_prompts_of_unknown_length_cost_the_same_each() -> None:
    costs = Costs([request(number, prompt_tokens=0) for number in range(20)], 256)
    assert costs.tree["prefill_ms"][1] == 0
    assert costs.tree["prefill_ms"][0] > 50


def test_without_a_request_there_are_costs_all_the_same() -> None:
    assert min(Costs([], 256).tree["decode_ms"][0], Costs([], 256).tree["prefill_ms"][0]) > 0


def test_a_step_is_dearer_beside_others() -> None:
    """30 ms alone, 40 ms beside one other: 20 ms and 10 ms for each."""
    rows = []
    for number in range(12):
        for twin in range(1 + number % 2):
            seconds = 0.3 if number % 2 == 0 else 0.4
            rows.append(request(10 * number, request_id=f"{number}-{twin}", ttft_s=0.05, e2e_s=0.05 + seconds))
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"] == pytest.approx([20, 10], rel=0.01)
    assert costs.pace == []


def test_each_request_keeps_its_pace_and_so_does_the_mean() -> None:
    """Fault: the lower quartile of 10, 10, 10 and 50 ms was 10 ms, and a replay twice as fast as its recording."""
    rows = [request(10 * n, ttft_s=0.05, e2e_s=0.05 + (0.5 if n % 4 == 3 else 0.1)) for n in range(8)]
    costs = Costs(rows, 256)
    decode_ms = costs.tree["decode_ms"][0]
    assert [decode_ms * later for _, later in costs.pace] == pytest.approx([10, 10, 10, 50] * 2)


def test_every_request_has_a_pace_whatever_became_of_it() -> None:
    rows = [request(10 * n, ttft_s=0.05, e2e_s=0.05 + 0.1 * (n + 1), stream=True) for n in range(8)]
    rows[2] |= {"error_code": "engine_failed", "ttft_s": 0.0}
    rows[3] |= {"ttft_s": 1.4, "e2e_s": 1.401}
    costs = Costs(rows, 256)
    decode_ms = costs.tree["decode_ms"][0]
    assert [decode_ms * later for _, later in costs.pace[4:]] == pytest.approx([50, 60, 70, 80], rel=0.01)


def test_requests_that_waited_for_others_tell_nothing_of_prefill() -> None:
    """The second of each pair arrives during the first's prefill, and its first token comes after 3 s."""
    alone = [request(10 * n, arrived_at=1000.0 + 100 * n) for n in range(8)]
    late = {"ttft_s": 3.0, "e2e_s": 3.5}
    pairs = [request(50, arrived_at=1050.0 + 100 * n + late_s, **(late if late_s else {}))
             for n in range(8) for late_s in (0.0, 0.02)]  # fmt: skip
    assert Costs([*alone, *pairs], 256).tree["prefill_ms"] == pytest.approx([10, 0.5], rel=0.01)


def test_a_cold_engine_that_was_sent_several_prompts_took_what_each_of_them_took() -> None:
    """It reads one, then the others at once, usually in 0.25 s each time; here in 1 s and 5.9 s. They held up the
    first one's decoding, so its pace is unknown.
    """
    warm = [request(10 * n, ttft_s=0.25, prompt_tokens=100) for n in range(8)]
    cold = [request(99, arrived_at=900.0, instance_id="i-2", cold=True, prompt_tokens=100, ttft_s=ttft_s, e2e_s=e2e_s)
            for ttft_s, e2e_s in ((6.9, 7.1), (1.0, 7.0), (6.9, 7.1))]  # fmt: skip
    costs = Costs([*warm, *cold], 256)
    assert costs.tree["prefill_ms"] == pytest.approx([250, 0], abs=0.01)
    assert costs.first_s("i-2") == pytest.approx(0.75)
    assert [prompt for prompt, _ in costs.pace[:3]] == pytest.approx([23.6, 1.0, 23.6], abs=0.01)
    assert costs.pace[1][1] == 1.0


def test_a_prompt_that_waited_in_the_engine_is_not_charged_to_who_decoded_meanwhile() -> None:
    """The second of each pair was sent before the first one's first token and read after it, for 0.25 s. The replay
    charges that itself: the first one's pace is 25 ms a token.
    """
    rows = [request(10 * n, arrived_at=1000.0 + 20 * n, ttft_s=0.25, e2e_s=0.5) for n in range(8)]
    for n in range(8):
        at_s = 1010.0 + 20 * n
        rows.append(request(10, arrived_at=at_s, ttft_s=0.25, e2e_s=0.75, response_tokens=11))
        rows.append(request(10, arrived_at=at_s + 0.1, ttft_s=0.4, e2e_s=0.65, response_tokens=11))
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"] == pytest.approx([25, 0], rel=0.02)
    assert costs.pace == []


def test_how_many_ran_at_once_is_a_mean_over_time() -> None:
    busy = Busy([(0.0, 10.0), (5.0, 10.0), (20.0, 30.0)])
    assert busy.mean(0.0, 10.0) == 1.5
    assert busy.mean(5.0, 10.0) == 2.0
    assert busy.mean(10.0, 20.0) == 0.0
    assert busy.mean(0.0, 30.0) == pytest.approx(25 / 30)
