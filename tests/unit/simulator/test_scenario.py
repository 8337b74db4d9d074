"""Scenarios: one-line errors, inheritance, and named systems."""

import math
from pathlib import Path
from typing import Any

import pytest

from glowplug.policies.registry import KINDS, choose
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.systems import DEFAULT
from glowplug_lab.simulator.scenario.load import ScenarioError, load
from glowplug_lab.simulator.scenario.sources import SERVEGEN_LENGTHS, TRACES
from glowplug_lab.simulator.setup import Params
from glowplug_lab.simulator.world import World
from glowplug_lab.systems import SYSTEMS
from tests.unit.simulator.scenarios import TINY, workload, write

SCENARIOS = Path(__file__).parents[3] / "scenarios"
SERVER = TINY["servers"][0]


def wrong(path: Path, *settings: str) -> str:
    with pytest.raises(ScenarioError) as error:
        load(path, settings)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("seconds=0",), "seconds: '0'"),
        (("seconds=-5",), "seconds: -5 is below 0"),
        (("seed=-1",), "seed: '-1'"),
        (("name=../elsewhere",), "name: '../elsewhere': is not a name for a folder"),
        (("workload.rps=1e300",), "workload.rps: "),
        (("workload.lengths={prompt_mean: -1}",), "workload.lengths.prompt_mean: '-1': input should be greater"),
        (("models.0.kv_bytes_per_token=0",), "models.chat.kv_bytes_per_token: "),
        (("servers.node.num_gpus=100000000",), "servers.node.num_gpus: 1 x 100000000 GPUs are more than 100000"),
        (("servers.node.abilities=[fly]",), "servers.node.abilities: no 'fly' (there are: adapters, prewarm, share, "),
        (("servers.node.abilities=['vllm:fly']",), "servers.node.abilities: no 'vllm:fly' (there are: adapters"),
        (("seconds=soon",), "seconds: not a duration"),
        (("seconds=.inf",), "seconds: inf is not a finite number"),
        (("secnds=5",), "secnds: is not a field of a scenario"),
        (("servers=[]",), "servers: "),
        (("servers.0.num_gpus=0",), "servers.node.num_gpus: 0 is below 1"),
        (("servers.node.gpu_bytes=-1",), "servers.node.gpu_bytes: -1 is below 0"),
        (("servers.node.gpu_bytes=lots",), "servers.node.gpu_bytes: not a size"),
        (("servers.node.gpus=4",), "servers.node.gpus: there is no such field (did you mean num_gpus?"),
        (("servers.node.num_gpus=two",), "servers.node.num_gpus: 'two'"),
        (("servers.node.num_gpus=true",), "servers.node.num_gpus: True is not a number or word"),
        (("servers.node.host_cache_bytes=1GiB",),
         "servers.node.host_cache_bytes: 1.0 GiB, and the weights of chat take 12 GiB: it could never start"),
        (("servers.node.gpu_kind=a99",), "models.chat.costs: 'llama-2-7b' was not measured on 'a99'"),
        (("models=[]",), "models: is empty"),
        (("models.chat.weights_bytes=-3GB",), "models.chat.weights_bytes: not a size"),
        (("models.chat.weights_bytes=-3",), "models.chat.weights_bytes: -3 is below 0"),
        (("models.chat.weights_bytes=0",), "models.chat.weights_bytes: '0'"),
        (("models.chat.weights_bytes=30GB",), "models.chat: weights and KV take 33 GiB, and no GPU has"),
        (("models.chat.num_gpus=3",), "models.chat.num_gpus: 3 GPUs of one server, and no server has more than 2"),
        (("models.chat.num_gpus=0",), "models.chat.num_gpus: 0 is below 1"),
        (("models.chat.copies=0",), "models.chat.copies: '0'"),
        (("models.chat.colour=red",), "models.chat.colour: there is no such field"),
        (("models.chat.key=x",), "models.chat.key: is made from the name"),
        (("models.code.name=chat",), "models: two of them are called 'chat'"),
        (("models.code.name='?'",), "models.?.name: model name '?' has no letter"),
        (("models.chat.costs=llama-9",), "models.chat.costs: 'llama-9' was not measured on 'a10'"),
        (("models.chat.costs={a100: llama-2-7b}",), "models.chat.costs: nothing for GPUs of kind 'a10'"),
        (("models.chat.costs={profile: llama-2-7b, scale: -1}",), "models.chat.costs.scale: -1 is not a number"),
        (("models.chat.costs={prefill_ms: [1], decode_ms: [-1]}",), "models.chat.costs.decode_ms: [-1] is not one to"),
        (("models.chat.costs={prefill_ms: [1]}",), "models.chat.costs.decode_ms: None is not one to three"),
        (("policies.routing=fastest",), "policies.routing: there is no routing policy 'fastest' (there are: "),
        (("policies.routing=round_robbin",), "did you mean round_robin?"),
        (("policies.luck=yes",), "policies.luck: there is no such field"),
        (("params.router.speed=9",), "params.router.speed: there is no such field"),
        (("params.placer.repeat_s=often",), "params.placer.repeat_s: not a duration"),
        (("workload.rps=0",), "workload: rps: 0, and 'gamma' has no rate of its own"),
        (("workload.rps=-1",), "workload.rps: '-1'"),
        (("slo.ttft_s=-1",), "slo.ttft_s: -1 is below 0"),
        (("models.chat.keep_alive_s=-2",), "models.chat.keep_alive_s: -2 is below -1"),
        (("models.chat.max_concurrency=0",), "models.chat.max_concurrency: 0 is below 1"),
        (("models.chat.min_instances=9",), "models.chat.min_instances: 9 is above max_instances, 2"),
        (("params.placer.repeat_s=-1",), "params.placer.repeat_s: -1 is below 0"),
        (("params.agent.health_misses=0",), "params.agent.health_misses: 0 is below 1"),
        (("params.router.max_dispatches=0",), "params.router.max_dispatches: 0 is below 1"),
        (("params.router.balancer.num_steps=-3",), "params.router.balancer.num_steps: -3 is below 1"),
        (("params.predictor.num_ahead=-1",), "params.predictor.num_ahead: -1 is below 1"),
        (("params.tick_s=0",), "params.tick_s: 0.0 is not above 0"),
        (("params.autoscaler.stop_becomes=gone",), "params.autoscaler.stop_becomes: 'gone'"),
        (("workload.rps=.nan",), "workload.rps: nan is not a finite number"),
        (("workload.keep=2",), "workload.keep: '2'"),
        (("workload.source=azure_2077",), "workload.source: there is no trace 'azure_2077'"),
        (("workload.source=lost.csv",), "workload.source: 'lost.csv' is not a file beside the scenario"),
        (("workload.source=servegen_clients_10min",), "workload: clients: none"),
        (("faults=[{at_s: 5}]",), "faults.0.node_id: is missing"),
        (("faults=[{at_s: 5, node_id: node-9}]",), "faults.0.node_id: no node 'node-9'"),
        (("faults=[{at_s: 5, node_id: node-1, kind: fire}]",), "kind: 'fire' is not one of death, consolidation, hang"),
        (("faults=[{at_s: -5, node_id: node-1}]",), "faults.0.at_s: -5 is below 0"),
        (("models.pony.copies=2",), "models.pony.copies: no entry 'pony'"),
        (("seed",), "--set: 'seed' is not key=value"),
        (("seed=[",), "seed: '[' is not a YAML value"),
        (("title.x=1",), "title.x: 'x' cannot be set inside 'Two models"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, settings: tuple[str, ...], said: str) -> None:
    assert said in wrong(write(tmp_path), *settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tiny.yaml: is not a mapping"),
        ("- a\n- b\n", "tiny.yaml: is not a mapping"),
        ("seconds: [1\n", "tiny.yaml, line 2: "),
        ("base: [x]\n", "base: ['x'] is not a name of a file"),
        ("base: tiny.yaml\n", "inherits itself"),
        ("base: none.yaml\n", "none.yaml: No such file"),
    ],
)
def test_a_file_that_is_no_scenario_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    assert said in wrong(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert wrong(tmp_path / "no.yaml").endswith("no.yaml: No such file or directory")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "t_s,prompt_tokens,response_tokens\n0,5,x\n", "t.csv, line 2: response_tokens: 'x' is not"),
        ("t.csv.gz", "no gzip", "t.csv.gz, line 1: cannot be read"),
        ("t.csv", "t_s,prompt_tokens,response_tokens\n", "t.csv: holds no request"),
        ("t.csv", "t_s,requests\n0,0\n60,0\n", "t.csv: holds no request"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    line = wrong(write(tmp_path, workload={"source": name, "lengths": {"prompt_mean": 9}}))
    assert line.startswith("workload.source: ")
    assert said in line


def test_a_trace_that_ends_before_the_run_begins_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,prompt_tokens,response_tokens\n0,5,5\n9,5,5\n", encoding="utf-8")
    path = write(tmp_path, workload={"source": "t.csv"})
    assert wrong(path, "workload.start_s=10").endswith("t.csv: holds no request from 10 s on, for 60 s")
    assert len(list(load(path, ["workload.start_s=9"]).arrivals())) == 1


def test_a_trace_whose_requests_have_no_answer_gives_no_lengths(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,9,0,9,Conversation log\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    assert "t.csv: holds no request" in wrong(write(tmp_path, workload={"source": "t.csv", "rps": 1, "cv": 2}))


def test_sizes_rates_and_times_are_read_as_people_write_them(tmp_path: Path) -> None:
    server = {**SERVER, "network_bytes_per_s": "16Gbps", "pcie_bytes_per_s": "32GB/s", "host_cache_bytes": "64GiB"}
    setup = load(write(tmp_path, servers=[server], seconds="2m")).setup
    assert setup.servers[0].network_bytes_per_s == 2e9
    assert setup.servers[0].pcie_bytes_per_s == 32e9
    assert setup.servers[0].host_cache_bytes == 64 * 2**30
    assert setup.models[0].model.weights_bytes == 12_500_000_000
    assert setup.models[0].model.max_wait_s == 60.0


def test_defaults_lie_under_models_and_slo_under_each_of_theirs(tmp_path: Path) -> None:
    chat, code = load(write(tmp_path)).setup.models
    assert (chat.model.slo.ttft_s, chat.model.slo.tpot_s) == (5.0, 0.0)
    assert (code.model.slo.ttft_s, code.model.slo.tpot_s) == (5.0, 0.2)


def test_rest_gives_the_cache_what_the_smallest_fitting_gpu_has_left(tmp_path: Path) -> None:
    servers = [SERVER, {**SERVER, "name": "big", "gpu_bytes": "80GB"}, {**SERVER, "name": "mini", "gpu_bytes": "8GB"}]
    path = write(tmp_path, servers=servers)
    setup = load(path, ["models.chat.kv_bytes=rest", "models.code.kv_bytes=rest", "models.code.num_gpus=2"]).setup
    assert setup.models[0].model.memory_bytes == 24_000_000_000
    assert setup.models[1].model.memory_bytes == 2 * 8_000_000_000


def test_copies_are_models_of_their_own(tmp_path: Path) -> None:
    scenario = load(write(tmp_path), ["models.chat.copies=3"])
    assert [one.model.key for one in scenario.setup.models] == ["chat-1", "chat-2", "chat-3", "code"]
    assert len({one.model.weights.uri for one in scenario.setup.models}) == 4


def test_costs_are_a_profile_one_of_another_gpu_scaled_or_written_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    plain = load(path).setup.models[0].costs["a10"]
    scaled = load(path, ["models.chat.costs={profile: llama-2-7b/a10, scale: 2}"]).setup.models[0].costs["a10"]
    own = load(path, ["models.chat.costs={prefill_ms: [10, 0.5], decode_ms: [20]}"]).setup.models[0].costs["a10"]
    assert scaled.decode_base_s == pytest.approx(2 * plain.decode_base_s)
    assert (own.prefill_base_s, own.prefill_s_per_token, own.decode_base_s) == (0.01, 0.0005, 0.02)


def test_params_change_what_is_set_and_keep_the_simulators_defaults(tmp_path: Path) -> None:
    params = load(write(tmp_path, params={"placer.repeat_s": "7s", "router": {"waiting_every_s": 0.1}})).setup.params
    assert params.placer.repeat_s == 7.0
    assert params.placer.settle_s == Params().placer.settle_s == 0.0
    assert params.router.waiting_every_s == 0.1
    assert params.agent == Params().agent


def test_a_scenario_is_laid_over_its_base_field_by_field_and_lists_whole(tmp_path: Path) -> None:
    write(tmp_path, name="under.yaml")
    over: dict[str, Any] = {"base": "under.yaml", "seconds": 30, "workload": {"rps": 4}, "models": [{"name": "solo"}]}
    scenario = load(write(tmp_path, over, name="over.yaml"))
    assert scenario.name == "over"
    assert scenario.seconds == 30
    assert scenario.words.workload.rps == 4
    assert scenario.words.workload.alpha == 1
    assert [one.model.key for one in scenario.setup.models] == ["solo"]


def test_settings_enter_lists_by_name_by_number_and_all_at_once(tmp_path: Path) -> None:
    settings = ["models.code.max_concurrency=3", "models.0.max_concurrency=5", "models.*.priority=7"]
    chat, code = load(write(tmp_path), settings).setup.models
    assert (chat.model.max_concurrency, code.model.max_concurrency) == (5, 3)
    assert chat.model.priority == code.model.priority == 7


def test_faults_reach_the_setup(tmp_path: Path) -> None:
    faults = load(write(tmp_path, faults=[{"at_s": "10s", "node_id": "node-1", "model": "chat"}])).setup.faults
    assert [(fault.at_s, fault.node_id, fault.model) for fault in faults] == [(10.0, "node-1", "chat")]


def test_where_a_node_breaks_nodes_have_a_lease(tmp_path: Path) -> None:
    engine, node = {"at_s": 10, "node_id": "node-1", "model": "chat"}, {"at_s": 10, "node_id": "node-1"}
    calm, watched = (load(write(tmp_path, faults=faults)).setup.params for faults in ([engine], [engine, node]))
    assert calm.placer.node_lease_s == math.inf and 0 < watched.placer.node_lease_s < math.inf
    assert watched.agent.beat_s < watched.placer.node_lease_s and watched.idle_tick_s < watched.placer.node_lease_s
    own = load(write(tmp_path, faults=[node], params={"placer": {"node_lease_s": 3}})).setup.params
    assert own.placer.node_lease_s == 3 and own.agent == watched.agent


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_ours_is_sound_without_the_traces(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_DATA", str(tmp_path))
    scenario = load(path, ["seconds=60"])
    keys = {one.model.key for one in scenario.setup.models}
    arrivals = list(scenario.arrivals())
    assert scenario.words.title
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    assert {arrival.model for arrival in arrivals} <= keys
    assert arrivals == list(scenario.arrivals())
    for name in traces_of(dict(scenario.tree)):
        assert any(note.startswith(f"no {name} in {tmp_path}: ") for note in scenario.notes), (
            f"{name}: {scenario.notes}"
        )
    silent = scenario.words.history.seconds and not scenario.setup.history
    assert not silent or any(note.startswith("history: ") for note in scenario.notes), scenario.notes


def traces_of(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value} & {*TRACES, SERVEGEN_LENGTHS}
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for one in below for name in traces_of(one)}


def test_a_trace_that_is_not_there_is_stood_in_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_DATA", str(tmp_path))
    scenario = load(write(tmp_path, workload=workload(source="azure_2024_conv_10s", rps=2.0)))
    assert any("azure_2024_conv_10s" in note and "generated" in note for note in scenario.notes)
    assert 40 < len(list(scenario.arrivals())) < 400


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_names_a_policy_of_every_kind(name: str) -> None:
    system = SYSTEMS[name]

    assert system.policies.keys() == KINDS.keys()
    assert all(choose(kind, policy) for kind, policy in system.policies.items())


def test_preserve_alone_lets_requests_wait_while_all_are_overloaded() -> None:
    """PreServe section 4.3.3."""
    setup = load(SCENARIOS / "small.yaml", ["policies=preserve"]).setup
    router = World(setup, []).control.router
    assert router.balances._factory(BalancerParams()).params.hold_overloaded  # type: ignore[attr-defined]


def test_a_system_over_a_scenario_takes_the_place_of_its_policies_and_their_settings() -> None:
    own = load(SCENARIOS / "swapserve.yaml").setup
    found = load(SCENARIOS / "swapserve.yaml", ["policies=warmserve"]).setup

    assert own.params.placer.evict_becomes == "swapped_out"
    assert found.params.placer.evict_becomes == "stopped"
    assert found.policies.scaling == "warmserve_one_way" and found.policies.eviction == "lru"


def test_one_kind_of_a_system_can_be_set_after_it() -> None:
    found = load(SCENARIOS / "small.yaml", ["policies=union", "policies.scaling=reactive"]).setup.policies

    assert found.scaling == "reactive" and found.placement == "union"


def test_a_file_that_names_a_system_keeps_its_own_settings(tmp_path: Path) -> None:
    base = SCENARIOS / "small.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\npolicies: union\nparams: {{autoscaler: {{stop_becomes: stopped, rest_s: 7}}}}\n")

    params = load(path).setup.params

    assert (params.autoscaler.stop_becomes, params.autoscaler.rest_s) == ("stopped", 7.0)
    assert params.placer.evict_becomes == "swapped_out"


def test_a_scenario_that_names_no_policies_runs_the_default_system_and_of_some_the_rest_are_baselines() -> None:
    told_nothing, of_some = load(SCENARIOS / "small.yaml").setup, load(SCENARIOS / "mcache.yaml").setup

    assert told_nothing == load(SCENARIOS / "small.yaml", [f"policies={DEFAULT}"]).setup
    assert told_nothing.policies.scaling == SYSTEMS[DEFAULT].policies["scaling"]
    assert (of_some.policies.caching, of_some.policies.scaling) == ("mcache", "reactive")


def test_a_system_that_does_not_exist_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"policies: there is no system 'unoin' \(did you mean union"):
        load(SCENARIOS / "small.yaml", ["policies=unoin"])
