"""vLLM's command line from a model file."""

from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_args
from glowplug.engines.port import LaunchRequest


def request(gpu_kind: str = "host", **changes: Any) -> LaunchRequest:
    values: dict[str, Any] = {
        "name": "Org/Model",
        "key": "org-model",
        "engine": "vllm",
        "weights": WeightsRef(uri="file:/w"),
        "weights_bytes": 1,
        "kv_bytes": 256,
        "context_tokens": 512,
        "max_concurrency": 3,
        "aliases": ("short",),
        **changes,
    }
    return LaunchRequest(
        instance_id="i-1",
        model=Model(**values),
        num_bytes=257,
        run_dir=Path("/r"),
        log_path=Path("/r/log"),
        gpu_kind=gpu_kind,
        gpu_index=2,
    )


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_what_the_model_declares_becomes_flags() -> None:
    argv = vllm_args.server_argv(request())
    assert value_of(argv, "--max-model-len") == "512"
    assert value_of(argv, "--max-num-seqs") == "3"
    assert value_of(argv, "--kv-cache-memory-bytes") == "256"
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 3] == ["Org/Model", "short"]
    assert (value_of(argv, "--host"), value_of(argv, "--port")) == ("127.0.0.1", "0")
    assert "--enforce-eager" in argv


def test_one_cpu_engine_runs_in_one_process_and_a_parallel_one_does_not() -> None:
    assert vllm_args.UNIPROC in vllm_args.server_argv(request())
    for size in ("pipeline_parallel_size", "tensor-parallel-size"):
        assert vllm_args.UNIPROC not in vllm_args.server_argv(request(engine_args={size: 2}))


def test_on_a_gpu_neither_the_executor_nor_eager_mode_is_chosen() -> None:
    argv = vllm_args.server_argv(request("cuda"))
    assert "--enforce-eager" not in argv
    assert "--distributed-executor-backend" not in argv
    assert vllm_args.server_environment(request("cuda"))["CUDA_VISIBLE_DEVICES"] == "2"


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
    plain = vllm_args.server_argv(request())
    assert vllm_args.server_argv(request(engine_args=given)) == plain + words


def test_a_default_of_ours_can_be_overridden() -> None:
    argv = vllm_args.server_argv(request(engine_args={"enforce_eager": False, "distributed_executor_backend": "mp"}))
    assert "--no-enforce-eager" in argv
    assert value_of(argv, "--distributed-executor-backend") == "mp"


@pytest.mark.parametrize("name", ["port", "served-model-name", "max_model_len", "api_key", "kv-cache-memory-bytes"])
def test_what_the_fleet_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadRequest, match=f"engine_args.{name} is set by"):
        vllm_args.server_argv(request(engine_args={name: "x"}))


@pytest.mark.parametrize("value", [0, -1, "2", True, 1.5])
def test_a_number_of_threads_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="num_threads"):
        vllm_args.server_argv(request(engine_args={"num_threads": value}))


def test_parked_is_the_nodes_default_unless_the_model_says_otherwise() -> None:
    assert vllm_args.wants_parked(request().model, True)
    assert not vllm_args.wants_parked(request(engine_args={"parked": False}).model, True)
    assert vllm_args.num_threads(request(engine_args={"num-threads": 3}).model) == 3, "a dash is an underscore"
    with pytest.raises(BadRequest, match="parked"):
        vllm_args.wants_parked(request(engine_args={"parked": "yes"}).model, True)
