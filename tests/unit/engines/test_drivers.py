"""The registry and drivers: early refusals and process arguments."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jinja2
import pytest

from glowplug.controllers.router.failures import HOPELESS_CODES
from glowplug.domain.errors import BadRequest, EngineFailed, EngineMisconfigured
from glowplug.domain.gguf import InvalidGguf
from glowplug.domain.hardware import Devices
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import rendezvous, vllm_args
from glowplug.engines.drivers import driver, installed
from glowplug.engines.gguf import GgufFacts, read_facts
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.landing import Landing
from glowplug.engines.llamacpp import LlamacppDriver
from glowplug.engines.llamacpp_args import ARGUMENTS, as_asked, plan_context
from glowplug.engines.port import Ability, EngineHandle, EngineSettings, Place
from glowplug.engines.samples import sample_weights_path
from glowplug.events.commands import StartInstance
from tests.arriving_region import ArrivingRegion
from tests.fleet_builder import a_start

host = pytest.importorskip("glowplug.engines.llamacpp_host", exc_type=ImportError)

FACTS = GgufFacts(architecture="llama", context_tokens=8192, kv_bytes_per_token=1000, chat_template="")


def request(
    engine: str = "vllm", *, gpu_kind: str = "host", gpus: Sequence[int] = (2,), num_bytes: int = 257, **changes: Any
) -> tuple[StartInstance, Place]:
    """`changes`: of the model, and where they bear such a name, of the start or its place."""
    start = {name: changes.pop(name) for name in ("num_stages", "stage", "rendezvous", "replica") if name in changes}
    run_dir, address = changes.pop("run_dir", Path("/r")), changes.pop("address", "")
    values: dict[str, Any] = {
        "name": "Org/Model",
        "key": "org-model",
        "engine": engine,
        "weights": WeightsRef(uri="file:/w"),
        "weights_bytes": 1,
        "kv_bytes": 256,
        "context_tokens": 512,
        "max_concurrency": 3,
        "aliases": ("short",),
        **changes,
    }
    devices = Devices(kind=gpu_kind, ordinals=tuple(gpus), num_bytes=num_bytes)
    place = Place(run_dir=run_dir, log_path=run_dir / "log", devices=devices, address=address)
    return a_start(Model(**values), **start), place


@pytest.mark.parametrize("name", installed())
def test_every_name_gives_a_driver_that_says_what_it_is(name: str) -> None:
    made = driver(name)
    assert made.name == name
    assert made.capabilities.emulated == (name == "emulated")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="llamacpp, vllm, command, emulated"):
        driver("torch")


@pytest.mark.parametrize(
    ("engine", "args", "named"),
    [
        ("llamacpp", {"n_thread": 2}, "engine_args.n_thread is not known to llamacpp (did you mean n_threads?)"),
        ("llamacpp", {"n_threads": "four"}, 'engine_args.n_threads cannot be "four"; allowed is a whole number'),
        ("llamacpp", {"n_threads": True}, "engine_args.n_threads cannot be true"),
        ("llamacpp", {"n_batch": 1 << 31}, "from 1 to 2147483647"),
        ("llamacpp", {"n_gpu_layers": -2}, "from -1 to"),
        ("llamacpp", {"embeddings": "no"}, 'engine_args.embeddings cannot be "no"; allowed is true or false'),
        ("llamacpp", {"pooling": "foo"}, "allowed is one of none, mean, cls, last, rank"),
        ("emulated", {"launch_s": float("inf")}, "engine_args.launch_s"),
        ("emulated", {"time_scale": float("nan")}, "engine_args.time_scale"),
        ("emulated", {"faults": {"ttft_s": float("inf")}}, "ttft_s: a finite number is expected"),
        ("emulated", {"faults": {"hangs": True}}, "unknown field `hangs`"),
        ("emulated", {"profil": "x"}, "engine_args.profil"),
        ("emulated", {"profile": "gpt/abacus"}, "engine_args.profile"),
        ("emulated", {"profile": ["x"]}, "engine_args.profile"),
        ("emulated", {"time_scale": 0}, "engine_args.time_scale"),
        ("emulated", {"launch_s": -1.0}, "engine_args.launch_s"),
        ("emulated", {"seed": 1.5}, "engine_args.seed"),
        (
            "emulated",
            {"faults": {"hang": 3}},
            'engine_args.faults cannot be {"hang": 3} (hang: Expected `bool`, got `int`)',
        ),
    ],
)
async def test_a_wrong_engine_argument_is_named(engine: str, args: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(EngineMisconfigured, match=re.escape(named)) as found:
        await driver(engine).launch(*request(engine, run_dir=tmp_path, engine_args=args))
    assert found.value.code in HOPELESS_CODES, "the next start would be given the same arguments"
    assert found.value.param == f"engine_args.{next(iter(args))}"
    assert list(tmp_path.iterdir()) == []


async def test_a_startup_failure_made_by_hand_is_the_reason(tmp_path: Path) -> None:
    made = driver("emulated", EngineSettings(emulated_time_scale=1000.0))
    args = {"faults": {"startup_failure": "no such GPU"}}
    handle = await made.launch(*request("emulated", run_dir=tmp_path, engine_args=args))
    weights = tmp_path / "weights"
    weights.write_bytes(b"x")
    with pytest.raises(EngineFailed, match="no such GPU"):
        await made.load(handle, weights)
    assert not made.adopt(handle)


async def test_a_modelled_network_overlaps_the_launch_and_ends_before_the_load(tmp_path: Path) -> None:
    made = driver("emulated", EngineSettings(emulated_time_scale=100.0))
    args = {"launch_s": 1.0, "fetch_bytes_per_s": 0.02}  # one byte: 50 s
    handle = await made.launch(*request("emulated", run_dir=tmp_path, engine_args=args))
    try:
        phases = {phase.name.value: phase for phase in (await made.load(handle, tmp_path)).phases}
    finally:
        await made.stop(handle, grace_s=5.0)
    assert phases["fetch"].actual_s >= 0.5
    assert phases["fetch"].started_at == phases["launch"].started_at
    assert phases["fetch"].ended_at <= phases["load"].started_at


async def test_an_emulated_engine_that_streams_ends_its_load_behind_the_last_byte(tmp_path: Path) -> None:
    """At 100 times the speed, 100 MB take 1 ms at 1 GB/s; the last 16 MB take less."""
    source = tmp_path / "w"
    source.write_bytes(b"x" * (64 << 10))
    region = ArrivingRegion(source, tmp_path / "shm")
    made = driver("emulated", EngineSettings(emulated_time_scale=100.0, emulated_streams=True))
    assert Ability.STREAM in made.abilities("emulated")
    assert Ability.STREAM not in driver("emulated", EngineSettings()).abilities("emulated")
    args = {"launch_s": 1.0, "warmup_s": 0, "load_bytes_per_s": 1e9}
    handle = await made.launch(*request("emulated", run_dir=tmp_path, engine_args=args))
    try:
        loading = asyncio.create_task(made.load(handle, region.root))
        await region.land()
        await asyncio.sleep(0.3)
        assert not loading.done(), "its weights are not checked"
        completed_at = time.time()
        region.complete()
        phases = {phase.name.value: phase for phase in (await loading).phases}
    finally:
        await made.stop(handle, grace_s=5.0)
    assert completed_at < phases["load"].ended_at


def test_what_a_header_says_is_known_before_a_tensor_has_landed(tmp_path: Path) -> None:
    region = ArrivingRegion(sample_weights_path(), tmp_path)
    threading.Timer(0.02, lambda: asyncio.run(region.land(0.05))).start()
    landing = Landing.of(region.root)
    assert landing is not None
    found = host.facts_of(region.root, landing, 10.0)
    assert found == read_facts(sample_weights_path())
    assert found.header_bytes == 1_785_664 and found.tensor_types == {0, 3, 8}, "F32, Q4_1, Q8_0"
    assert region.writer.landed.total < 0.1 * region.num_bytes


def test_a_header_that_is_none_is_refused_once_all_of_it_is_there(tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"GGUF" + bytes(5 << 20))
    region = ArrivingRegion(source, tmp_path / "shm")
    threading.Timer(0.02, lambda: asyncio.run(region.land())).start()
    with pytest.raises(InvalidGguf):
        host.facts_of(region.root, Landing.of(region.root), 10.0)


@pytest.mark.parametrize(
    ("types", "machine", "system", "stays"),
    [
        ({0, 3, 8}, "x86_64", "AVX2 = 1 | REPACK = 1", True),
        ({0, 3, 8}, "x86_64", "AMX_INT8 = 1 | REPACK = 1", False),
        ({0, 2}, "x86_64", "REPACK = 1", False),  # Q4_0
        ({0, 12}, "x86_64", "REPACK = 1", False),  # Q4_K
        ({0, 1, 30}, "aarch64", "NEON = 1", True),
        ({0, 8}, "aarch64", "NEON = 1", False),
    ],
)
def test_weights_that_could_be_repacked_are_not_mapped_early(
    types: set[int], machine: str, system: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host.xllamacpp, "get_system_info", lambda: system)
    assert host.stay_mapped(frozenset(types)) is stays


def test_threads_wait_as_the_driver_says_unless_the_operator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    given = LlamacppDriver().environment(*request("llamacpp"))
    assert (given["OMP_WAIT_POLICY"], given["GOMP_SPINCOUNT"]) == ("PASSIVE", "60000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    given = LlamacppDriver().environment(*request("llamacpp"))
    assert given["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in given


async def load_that_fails(tmp_path: Path, log: str) -> EngineFailed:
    log_path = tmp_path / "log"
    log_path.write_text(log)
    rendezvous.write(tmp_path, rendezvous.FAILED, {"message": "RuntimeError: Failed to init server"})
    handle = EngineHandle(
        engine="llamacpp", instance_id="i", pid=0, pid_started_at=0.0, run_dir=str(tmp_path), log_path=str(log_path)
    )
    with pytest.raises(EngineFailed) as found:
        await LlamacppDriver().load(handle, tmp_path / "w.gguf")
    return found.value


async def test_weights_that_llamacpp_does_not_know_are_hopeless_with_its_reason(tmp_path: Path) -> None:
    log = "I loading\nE llama_model_load: error loading model: unknown model architecture: 'foonet'\nE failed to load"
    error = await load_that_fails(tmp_path, log)
    assert error.message == "llama.cpp does not load these weights: unknown model architecture: 'foonet'"
    assert error.code in HOPELESS_CODES


@pytest.mark.parametrize("cut", ["------------\nWhile executing\n...{{ m | f }}...\nError: ", ""])
async def test_a_template_that_llamacpp_does_not_render_is_the_models_fault(tmp_path: Path, cut: str) -> None:
    log = f"I loading\nE srv init: chat template parsing error: {cut}Unknown filter 'f'\nE srv init: exiting"
    error = await load_that_fails(tmp_path, log)
    assert error.message == "llama.cpp does not render this model's chat template: Unknown filter 'f'"
    assert error.code == "engine_misconfigured"


@pytest.mark.parametrize("log", ["", "E llama_model_load: error loading model: unable to allocate CPU buffer"])
async def test_what_may_pass_is_tried_again(tmp_path: Path, log: str) -> None:
    error = await load_that_fails(tmp_path, log)
    assert error.code not in HOPELESS_CODES and "Failed to init server" in error.message


def a_spec(**changes: Any) -> dict[str, Any]:
    return {"max_concurrency": 8, "context_tokens": 2048, "kv_bytes": 0, **changes}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (a_spec(), (8, 2048)),
        (a_spec(kv_bytes=8 * 2048 * 1000), (8, 2048)),
        (a_spec(kv_bytes=3 * 2048 * 1000), (3, 2048)),
        (a_spec(kv_bytes=1024 * 1000), (1, 1024)),
        (a_spec(kv_bytes=1), (1, 256)),
        (a_spec(context_tokens=100_000), (8, 8192)),
    ],
)
def test_fewer_slots_first_a_shorter_context_last(spec: dict[str, Any], expected: tuple[int, int]) -> None:
    planned = plan_context(spec["max_concurrency"], spec["context_tokens"], spec["kv_bytes"], FACTS)
    assert planned == expected


def test_arguments_change_what_a_token_takes_and_how_far_the_context_goes() -> None:
    facts = replace(FACTS, kv_bytes_per_token=256, kv_numbers=(64, 64))
    assert as_asked(facts, {}) == facts
    assert as_asked(facts, {"cache_type_k": "q8_0"}).kv_bytes_per_token == 68 + 128
    assert as_asked(facts, {"cache_type_k": "q4_0", "cache_type_v": "q4_0"}, facts).kv_bytes_per_token == 72 + 256
    assert as_asked(facts, {"rope_scaling": "yarn", "rope_scale": 2.5}).context_tokens == 20480


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "engine_args.cache_type_v"),
        ({"rope_scale": 2}, "engine_args.rope_scaling"),
        ({"rope_scale": 2, "rope_scaling": "none"}, "engine_args.rope_scaling"),
    ],
)
def test_arguments_that_need_others_name_them(args: dict[str, Any], param: str) -> None:
    with pytest.raises(EngineMisconfigured) as refused:
        ARGUMENTS.check(args)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", ["Be brief.", 'You are "Ada".\n{{ not code }} {% nor %} \\this', "Fränzi 🦙"])
def test_the_system_prompt_is_text_and_comes_only_without_one(prompt: str) -> None:
    template = jinja2.Template(
        host.template_with_system("{% for m in messages %}<{{ m.content }}>{% endfor %}", prompt)
    )
    user = {"role": "user", "content": "hi"}
    assert template.render(messages=[user]) == f"<{prompt}><hi>"
    assert template.render(messages=[{"role": "system", "content": "own"}, user]) == "<own><hi>"


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_args": {"embeddings": True, "pooling": "foo"}}, "xllamacpp refuses the engine_args: KeyError"),
        ({"engine_args": {"n_ctx": 1 << 40}}, "xllamacpp refuses the engine_args"),
        (
            {"engine_args": {"n_ctx": 50_000}, "kv_bytes": 1 << 20},
            "engine_args.n_ctx cannot be 50000: the KV cache would",
        ),
        ({"engine_args": {}, "weights_bytes": 5}, "weights_bytes: 5 is less than"),
    ],
)
def test_a_wrong_argument_that_only_the_process_sees_is_a_fault_of_the_model(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    weights = sample_weights_path()
    spec = a_spec(weights_bytes=weights.stat().st_size, system_prompt="", model="m", gpu_kind="host", wait_s=5.0)
    rendezvous.write(tmp_path, rendezvous.SPEC, spec | {"host": "127.0.0.1", "port": 0, **changes})
    rendezvous.write(tmp_path, rendezvous.GO, {"path": str(weights)})
    ran = subprocess.run([sys.executable, "-m", host.__name__, str(tmp_path)], check=False, timeout=60)
    assert ran.returncode == 1
    failed = rendezvous.read(tmp_path, rendezvous.FAILED) or {}
    assert failed["code"] == "engine_misconfigured" and failed["message"].startswith(reason)


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_what_the_model_declares_becomes_flags() -> None:
    argv = vllm_args.server_argv(*request())
    assert value_of(argv, "--max-model-len") == "512"
    assert value_of(argv, "--max-num-seqs") == "3"
    assert value_of(argv, "--kv-cache-memory-bytes") == "256"
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 3] == ["Org/Model", "short"]
    assert (value_of(argv, "--host"), value_of(argv, "--port")) == ("127.0.0.1", "0")
    assert "--enforce-eager" in argv


def test_one_cpu_engine_runs_in_one_process_and_a_parallel_one_does_not() -> None:
    assert vllm_args.UNIPROC in vllm_args.server_argv(*request())
    assert vllm_args.UNIPROC not in vllm_args.server_argv(*request(engine_args={"data-parallel-size": 2}))
    assert vllm_args.UNIPROC not in vllm_args.server_argv(*request(gpus=(0, 1)))


@pytest.mark.parametrize("name", ["tensor-parallel-size", "pipeline_parallel_size", "nnodes"])
def test_how_many_workers_and_stages_there_are_is_no_engine_argument(name: str) -> None:
    with pytest.raises(EngineMisconfigured, match="is set by"):
        vllm_args.server_argv(*request(engine_args={name: 2}))


def test_a_group_has_a_worker_and_a_part_of_the_kv_cache_on_each_of_its_gpus() -> None:
    asked: dict[str, Any] = {"engine_args": {"num_threads": 2}, "num_gpus": 2, "gpus": (1, 3)}
    argv = vllm_args.server_argv(*request(**asked))
    assert (value_of(argv, "--tensor-parallel-size"), value_of(argv, "--kv-cache-memory-bytes")) == ("2", "128")
    assert value_of(argv, "--worker-cls") == vllm_args.SLEEPING_WORKER
    env = vllm_args.server_environment(*request(**asked))
    cpus = [part.split(",") for part in env["VLLM_CPU_OMP_THREADS_BIND"].split("|")]
    assert env["OMP_NUM_THREADS"] == "1"
    assert cpus == [["nobind"]] or (len(cpus) == 2 and not {*cpus[0]} & {*cpus[1]}), "no CPU belongs to two workers"
    on_gpus = vllm_args.server_environment(*request(gpu_kind="cuda", **asked))
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_group_of_more_workers_than_cpus_is_not_bound() -> None:
    asked = request(num_gpus=512, gpus=range(512))
    assert vllm_args.server_environment(*asked)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_stage_meets_the_others_and_only_the_first_one_has_a_server() -> None:
    asked: dict[str, Any] = {"num_stages": 2, "rendezvous": "127.0.0.1:29500", "address": "127.0.0.1"}
    argvs = [vllm_args.server_argv(*request(stage=stage, **asked)) for stage in (0, 1)]
    for stage, argv in enumerate(argvs):
        flags = ("pipeline-parallel-size", "nnodes", "node-rank", "master-addr", "master-port", "kv-cache-memory-bytes")
        values = [value_of(argv, f"--{flag}") for flag in flags]
        assert values == ["2", "2", str(stage), "127.0.0.1", "29500", "128"]
    assert ["--headless" in argv for argv in argvs] == [False, True]
    env = vllm_args.server_environment(*request(**asked))
    assert env["VLLM_HOST_IP"] == "127.0.0.1" and env["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert env["RES_OPTIONS"] == "timeout:1 attempts:1", "torch waits for a name server that does not answer"


@pytest.mark.parametrize("where", ["", "host", "host:", "host:many"])
def test_a_stage_without_a_place_to_meet_is_refused(where: str) -> None:
    with pytest.raises(EngineMisconfigured, match="GLOWPLUG_STAGE_PORTS"):
        vllm_args.server_argv(*request(num_stages=2, rendezvous=where))


def test_a_stage_that_is_not_to_be_reached_does_not_start() -> None:
    asked = request(num_stages=2, rendezvous="127.0.0.1:29500", address="no such name")
    with pytest.raises(EngineFailed, match="the other stages cannot reach"):
        vllm_args.server_environment(*asked)


def test_on_a_gpu_neither_the_executor_nor_eager_mode_is_chosen() -> None:
    argv = vllm_args.server_argv(*request(gpu_kind="cuda"))
    assert "--enforce-eager" not in argv
    assert "--distributed-executor-backend" not in argv
    assert vllm_args.server_environment(*request(gpu_kind="cuda"))["CUDA_VISIBLE_DEVICES"] == "2"


def test_what_asks_for_no_key_stays_off_and_who_sleeps_on_a_gpu_can_load_again() -> None:
    """Flags only; not measured on a GPU."""
    argv = vllm_args.server_argv(*request(gpu_kind="cuda"))
    assert "--enable-sleep-mode" in argv and "--enable-sleep-mode" not in vllm_args.server_argv(*request())
    assert value_of(argv, "--worker-extension-cls") == vllm_args.RELOADING_WORKER
    for kind in ("host", "cuda"):
        assert vllm_args.server_environment(*request(gpu_kind=kind))["VLLM_SERVER_DEV_MODE"] == "0"
    assert "--worker-cls" not in argv


@pytest.mark.parametrize(("first_bytes", "kept"), [(0, "0"), (40, "40"), (100, "0"), (200, "0")])
def test_a_replica_of_the_first_layers_is_told_their_bytes(first_bytes: int, kept: str) -> None:
    asked = request(weights_bytes=100, replica=True, num_bytes=first_bytes)
    assert vllm_args.server_environment(*asked)[vllm_args.FIRST_BYTES] == kept


def test_weights_are_shared_where_the_model_says_so_and_in_host_memory_alone() -> None:
    flags = {shared: vllm_args.server_environment(*request(weights_shared=shared)) for shared in (False, True)}
    assert [flags[shared][vllm_args.WEIGHTS_SHARED] for shared in (False, True)] == ["0", "1"]
    odd: list[dict[str, Any]] = [
        {"gpu_kind": "cuda"},
        {"num_gpus": 2},
        {"engine_args": {"worker-cls": "my.Worker"}},
        {"engine_args": {"quantization": "fp8"}},
    ]
    for changes in odd:
        with pytest.raises(EngineMisconfigured, match="weights_shared: vLLM shares weights only in host memory"):
            vllm_args.server_argv(*request(weights_shared=True, **changes))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float32"}, ["--dtype", "float32"]),
        ({"max-num-batched-tokens": 64}, ["--max-num-batched-tokens", "64"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"enable_prefix_caching": True}, ["--enable-prefix-caching"]),
        ({"override_generation_config": {"top_k": 5}}, ["--override-generation-config", '{"top_k": 5}']),
        ({"lora_modules": ["a=1", "b=2"]}, ["--lora-modules", "a=1", "b=2"]),
        ({"quantization": None}, []),
        ({"parked": False, "num_threads": 1}, []),
    ],
)
def test_engine_args_pass_through(given: dict[str, Any], words: list[str]) -> None:
    plain = vllm_args.server_argv(*request())
    assert vllm_args.server_argv(*request(engine_args=given)) == plain + words


def test_a_default_of_ours_can_be_overridden() -> None:
    argv = vllm_args.server_argv(*request(engine_args={"enforce_eager": False, "distributed_executor_backend": "mp"}))
    assert "--no-enforce-eager" in argv
    assert value_of(argv, "--distributed-executor-backend") == "mp"


@pytest.mark.parametrize("name", ["port", "served-model-name", "max_model_len", "api_key", "kv-cache-memory-bytes"])
def test_what_the_fleet_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadRequest, match=f"engine_args.{name} is set by"):
        vllm_args.server_argv(*request(engine_args={name: "x"}))


@pytest.mark.parametrize("value", [0, -1, "2", True, 1.5])
def test_a_number_of_threads_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="num_threads"):
        vllm_args.server_argv(*request(engine_args={"num_threads": value}))


def test_an_engine_is_parked_only_where_its_driver_and_the_node_say_so() -> None:
    linux = sys.platform == "linux"
    by_setting = [LlamacppDriver(EngineSettings(llamacpp_parked=is_on)).is_parked for is_on in (True, False)]
    assert by_setting == [linux, False]
    assert not any(cast(HostedDriver, driver(name)).is_parked for name in ("emulated", "command"))


def test_parked_is_the_nodes_default_unless_the_model_says_otherwise() -> None:
    assert vllm_args.wants_parked(request()[0].model, True)
    assert not vllm_args.wants_parked(request(engine_args={"parked": False})[0].model, True)
    assert vllm_args.num_threads(request(engine_args={"num-threads": 3})[0].model) == 3, "a dash is an underscore"
    with pytest.raises(BadRequest, match="parked"):
        vllm_args.wants_parked(request(engine_args={"parked": "yes"})[0].model, True)
