"""The registry, and what each driver refuses before it starts a process."""

import re
from pathlib import Path
from typing import Any

import pytest

from glowplug.controllers.router.failures import HOPELESS_CODES
from glowplug.domain.errors import BadRequest, EngineFailed, EngineMisconfigured
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines.drivers import NAMES, driver
from glowplug.engines.port import EngineSettings, LaunchRequest


def a_request(engine: str, run_dir: Path, **engine_args: Any) -> LaunchRequest:
    model = Model(
        name="M",
        key="m",
        engine=engine,
        weights=WeightsRef(uri="file:x"),
        weights_bytes=1,
        kv_bytes=1,
        engine_args=engine_args,
    )
    return LaunchRequest(instance_id="i-1", model=model, num_bytes=2, run_dir=run_dir, log_path=run_dir / "log")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_driver_that_says_what_it_is(name: str) -> None:
    made = driver(name)
    assert made.name == name
    assert made.capabilities.emulated == (name == "emulated")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="llamacpp, vllm, emulated"):
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
        ("emulated", {"faults": {"ttft_s": float("inf")}}, "ttft_s: float expected"),
        ("emulated", {"faults": {"hangs": True}}, "hangs: unknown option"),
        ("emulated", {"profil": "x"}, "engine_args.profil"),
        ("emulated", {"profile": "gpt/abacus"}, "engine_args.profile"),
        ("emulated", {"profile": ["x"]}, "engine_args.profile"),
        ("emulated", {"time_scale": 0}, "engine_args.time_scale"),
        ("emulated", {"launch_s": -1.0}, "engine_args.launch_s"),
        ("emulated", {"seed": 1.5}, "engine_args.seed"),
        ("emulated", {"faults": {"hang": 3}}, 'engine_args.faults cannot be {"hang": 3} (hang: bool expected)'),
    ],
)
async def test_a_wrong_engine_argument_is_named(engine: str, args: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(EngineMisconfigured, match=re.escape(named)) as found:
        await driver(engine).launch(a_request(engine, tmp_path, **args))
    assert found.value.code in HOPELESS_CODES, "the next start would be given the same arguments"
    assert found.value.param == f"engine_args.{next(iter(args))}"
    assert list(tmp_path.iterdir()) == []


async def test_an_interpreter_that_is_not_there_is_the_reason(tmp_path: Path) -> None:
    made = driver("emulated", EngineSettings(python="/nowhere/python"))
    assert made.unavailable() == "no interpreter at /nowhere/python"
    with pytest.raises(EngineFailed, match="/nowhere/python"):
        await made.launch(a_request("emulated", tmp_path))


async def test_a_startup_failure_made_by_hand_is_the_reason(tmp_path: Path) -> None:
    made = driver("emulated", EngineSettings(emulated_time_scale=1000.0))
    handle = await made.launch(a_request("emulated", tmp_path, faults={"startup_failure": "no such GPU"}))
    weights = tmp_path / "weights"
    weights.write_bytes(b"x")
    with pytest.raises(EngineFailed, match="no such GPU"):
        await made.load(handle, weights)
    assert not made.adopt(handle)


async def test_a_modelled_network_overlaps_the_launch_and_ends_before_the_load(tmp_path: Path) -> None:
    made = driver("emulated", EngineSettings(emulated_time_scale=100.0))
    handle = await made.launch(a_request("emulated", tmp_path, launch_s=1.0, fetch_bytes_per_s=0.02))  # one byte: 50 s
    try:
        phases = {phase.name.value: phase for phase in (await made.load(handle, tmp_path)).phases}
    finally:
        await made.stop(handle, grace_s=5.0)
    assert phases["fetch"].actual_s >= 0.5
    assert phases["fetch"].started_at == phases["launch"].started_at
    assert phases["fetch"].ended_at <= phases["load"].started_at
