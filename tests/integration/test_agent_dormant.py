"""Sleeping engines and replicas, live: real processes of the emulated engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import InstanceState
from tests.agent_rig import DormantRig, complete, emulated_model, stop_command, until_runs, write_weights
from tests.fleet_builder import MIB
from tests.waiting import until


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[DormantRig]:
    live = DormantRig(tmp_path)
    await live.begin()
    yield live
    await live.service.stop()


async def test_a_replica_becomes_an_instance_in_the_same_process(live: DormantRig) -> None:
    assert live.service.controller.node(0.0).abilities == (
        "emulated:adapters",
        "emulated:first_layers",
        "emulated:prewarm",
        "emulated:stages",
        "emulated:swap",
    )
    row = await live.replica(live.model)
    assert not row.serves and live.granted() == {"prewarm": 60}
    pid = live.pid("r-1")
    ready = await live.grow()
    assert live.pid("i-1") == pid and live.granted() == {"weights": 60, "kv": 100}
    assert (live.instance("r-1") or row).state is InstanceState.STOPPED and ready.source == "r-1"
    assert [p.name.value for p in ready.phases] == ["decide", "load"]
    assert "ready" in live.service.engines.log_path("i-1").read_text()
    await live.stop("i-1", grace_s=0)
    assert not live.granted() and not live.processes


async def test_a_replica_of_the_first_layers_holds_their_bytes_and_serves_with_all(live: DormantRig) -> None:
    """WarmServe section 4: a third of the weights is loaded; the start takes the rest."""
    await live.replica(live.model, mib=20)
    assert live.granted() == {"prewarm": 20}
    spec = json.loads((live.service.engines.run_dir("r-1") / "spec.json").read_bytes())
    assert spec["first_bytes"] == 20 * MIB < spec["weights_bytes"]
    await live.grow()
    assert live.granted() == {"weights": 60, "kv": 100}


async def test_a_drained_engine_sleeps_outside_its_gpu_and_wakes(live: DormantRig) -> None:
    await live.run(live.model)
    pid = live.pid("i-1")
    await live.send(stop_command("i-1"), becomes="swapped_out")
    drain, sleep = (await live.reaches("i-1", InstanceState.SWAPPED_OUT)).spells
    assert not live.granted() and live.pid("i-1") == pid
    woken = await live.grow("i-2", "i-1")
    assert live.pid("i-2") == pid and woken.start_kind == "wake"
    assert (drain.name, sleep.name) == ("drain", "sleep")
    assert drain.ended_at == sleep.started_at < sleep.ended_at <= woken.phases[-1].started_at


async def test_what_sleeps_survives_its_agent(live: DormantRig) -> None:
    await live.replica(live.model)
    pid = live.pid("r-1")
    await live.crash()
    await live.start()
    await live.reaches("r-1", InstanceState.PREWARMED)
    assert live.granted() == {GrantOwner.PREWARM.value: 60}
    await live.grow()
    assert live.pid("i-1") == pid


@pytest.mark.parametrize("instance_id", ["r-1", "i-1"], ids=["asleep", "woken"])
async def test_an_engine_that_dies_is_noticed_and_nothing_is_left_of_it(live: DormantRig, instance_id: str) -> None:
    await live.replica(live.model)
    if instance_id == "i-1":
        await live.grow()
    live.kill(instance_id)
    assert "ended by itself" in (await live.reaches(instance_id, InstanceState.FAILED)).reason
    await until(lambda: not live.granted() and not live.processes, "nothing is left of it")


async def test_a_draining_engine_gives_up_kv_cache_for_a_replica_and_finishes_what_it_runs(live: DormantRig) -> None:
    """WarmServe section 4.1, live: 64 MiB of weights fit where a KV cache was."""
    wide = replace(live.model, kv_bytes=230 * MIB, context_tokens=64, engine_args={"time_scale": 1.0, "launch_s": 0.0})
    url = (await live.run(wide)).url
    running = asyncio.create_task(complete(url, model=wide.name, max_tokens=48, ignore_eos=True))
    await until_runs(url)
    await live.send(stop_command("i-1"), becomes="prewarmed")
    await until(lambda: live.granted().get("kv", 0) < 100, "its KV cache is cut")
    assert not running.done()
    other = emulated_model("other", mib=64)
    write_weights(live.settings.shm_dir.absolute(), other)
    await live.replica(other)
    answer = await running
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 48
    await live.reaches("i-1", InstanceState.PREWARMED)
    assert live.granted() == {"prewarm": 60 + 64}
