"""Replicas and engines asleep, live: real processes of the emulated engine, parked and woken by a real agent."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.engines import process
from tests.agent_rig import AgentRig, complete, emulated_model, start_command, stop_command, write_weights
from tests.fleet_builder import MIB
from tests.waiting import until


class Live(AgentRig):
    """An agent whose node has memory for two small models, and one such model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, kv_reservation="paper")
        self.model = emulated_model(mib=60, kv_bytes=100 * MIB)

    async def begin(self) -> None:
        await self.start()
        write_weights(self.settings.shm_dir.absolute(), self.model)

    def granted(self) -> dict[str, int]:
        """MiB of the node's GPU by owner."""
        found: dict[str, int] = {}
        for grant in self.service.controller.ledger.gpus[0].grants:
            found[grant.owner.value] = found.get(grant.owner.value, 0) + grant.num_bytes // MIB
        return found

    @property
    def processes(self) -> list[str]:
        """Instances whose engine processes are written down."""
        written = json.loads((self.settings.node_dir / "agent.json").read_bytes())
        return sorted(written["handles"])

    def kill(self, instance_id: str) -> None:
        """kill -9 of an engine."""
        handle = self.handle(instance_id)
        process.kill_group(handle["pid"], handle["pid_started_at"])

    def pid(self, instance_id: str) -> int:
        pid: int = self.handle(instance_id)["pid"]
        return pid

    async def replica(self, model: Model, *, mib: int = 0, until: InstanceState = InstanceState.PREWARMED) -> Instance:
        """r-1, whose worker names `mib` MiB, or leaves the bytes to the agent."""
        event = start_command(model, "r-1")
        workers = tuple(replace(w, num_bytes=mib * MIB) for w in event.data.workers)
        await self.send(event, replica=True, workers=workers)
        return await self.reaches("r-1", until)

    async def grow(self, instance_id: str = "i-1", source: str = "r-1", model: Model | None = None) -> Instance:
        """A start from what lies dormant. The instance answers once it is READY."""
        ready = await self.run(model or self.model, instance_id, source=source)
        answer = await complete(ready.url, model=self.model.name)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        return ready


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    live = Live(tmp_path)
    await live.begin()
    yield live
    await live.service.stop()


async def test_a_replica_becomes_an_instance_in_the_same_process(live: Live) -> None:
    assert live.service.controller.node(0.0).abilities == (
        "emulated:first_layers",
        "emulated:prewarm",
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


async def test_a_replica_of_the_first_layers_holds_their_bytes_and_serves_with_all(live: Live) -> None:
    """WarmServe section 4: a third of the weights is granted and loaded; the start that grows from it takes all."""
    await live.replica(live.model, mib=20)
    assert live.granted() == {"prewarm": 20}
    spec = json.loads((live.service.engines.run_dir("r-1") / "spec.json").read_bytes())
    assert spec["first_bytes"] == 20 * MIB < spec["weights_bytes"]
    await live.grow()
    assert live.granted() == {"weights": 60, "kv": 100}


async def test_an_activation_waits_for_the_load_that_is_under_way(live: Live) -> None:
    slow = replace(live.model, engine_args={"time_scale": 1.0, "launch_s": 0.1, "load_bytes_per_s": 120 * MIB})
    await live.replica(slow, until=InstanceState.LOADING)
    await live.grow(model=slow)
    assert live.processes == ["i-1"]


async def test_a_drained_engine_sleeps_outside_its_gpu_and_wakes(live: Live) -> None:
    await live.run(live.model)
    pid = live.pid("i-1")
    await live.send(stop_command("i-1"), becomes="swapped_out")
    await live.reaches("i-1", InstanceState.SWAPPED_OUT)
    assert not live.granted() and live.pid("i-1") == pid
    await live.grow("i-2", "i-1")
    assert live.pid("i-2") == pid


async def test_what_sleeps_survives_its_agent(live: Live) -> None:
    await live.replica(live.model)
    pid = live.pid("r-1")
    await live.crash()
    await live.start()
    await live.reaches("r-1", InstanceState.PREWARMED)
    assert live.granted() == {GrantOwner.PREWARM.value: 60}
    await live.grow()
    assert live.pid("i-1") == pid


@pytest.mark.parametrize("instance_id", ["r-1", "i-1"], ids=["asleep", "woken"])
async def test_an_engine_that_dies_is_noticed_and_nothing_is_left_of_it(live: Live, instance_id: str) -> None:
    await live.replica(live.model)
    if instance_id == "i-1":
        await live.grow()
    live.kill(instance_id)
    assert "ended by itself" in (await live.reaches(instance_id, InstanceState.FAILED)).reason
    await until(lambda: not live.granted() and not live.processes, "nothing is left of it")


async def test_a_draining_engine_gives_up_kv_cache_for_a_replica_and_finishes_what_it_runs(live: Live) -> None:
    """WarmServe section 4.1, live: 64 MiB of weights find room where a KV cache was."""
    wide = replace(live.model, kv_bytes=230 * MIB, context_tokens=64, engine_args={"time_scale": 1.0, "launch_s": 0.0})
    url = (await live.run(wide)).url
    running = asyncio.create_task(complete(url, model=wide.name, max_tokens=48, ignore_eos=True))
    await asyncio.sleep(0.2)
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
