"""The executor's watch on arriving weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.domain.model import WeightsRef
from glowplug.engines.drivers import driver
from glowplug.engines.port import Ability
from glowplug.fleet.start_times import StartKind
from glowplug.services.agent.service import engine_kind
from tests.agent_rig import AgentRig
from tests.arriving_region import ArrivingRegion
from tests.unit.agent.executor_rig import FakeEngineDriver, Rig, rig_of


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, FakeEngineDriver()) as made:
        yield made


async def arriving(rig: Rig, folder: Path, *, streams: bool = True) -> ArrivingRegion:
    source = folder / "weights"
    source.write_bytes(bytes(range(256)) * 64)
    ref = WeightsRef(uri=f"file:{source}")
    region = ArrivingRegion(source, rig.settings.shm_dir.absolute() / rig.settings.node)
    assert region.region.directory.name == ref.digest
    await rig.await_weights("i-1", ref, streams=streams)
    return region


async def test_an_engine_that_streams_is_given_its_weights_as_they_arrive(rig: Rig, tmp_path: Path) -> None:
    region = await arriving(rig, tmp_path)
    assert (await rig.outcome(msg.WeightsArriving)).path == str(region.root)
    await region.land()
    region.complete()
    assert (await rig.outcome(msg.WeightsComplete)).found is StartKind.COLD


async def test_weights_that_are_dropped_and_come_again_are_reported_before_they_are_complete(
    rig: Rig, tmp_path: Path
) -> None:
    region = await arriving(rig, tmp_path)
    await rig.outcome(msg.WeightsArriving)
    region.region.clear_bytes()
    again = region.taken_up()
    await again.land()
    again.complete()
    await rig.outcome(msg.WeightsComplete)
    assert [type(o) for o in rig.outcomes][:2] == [msg.WeightsArriving, msg.WeightsReplaced]


async def test_an_engine_that_does_not_stream_waits_for_all(rig: Rig, tmp_path: Path) -> None:
    region = await arriving(rig, tmp_path, streams=False)
    await asyncio.sleep(0.05)
    assert not rig.outcomes
    region.region.fail("weights_corrupt", "checksum differs", failed_at=1.0)
    assert (await rig.outcome(msg.WeightsFailed)).code == "weights_corrupt"


@pytest.mark.parametrize("name", ["llamacpp", "vllm"])
def test_an_operator_may_have_engines_wait(name: str) -> None:
    made = driver(name)
    assert Ability.STREAM in engine_kind(made, "host").abilities
    without = engine_kind(made, "host", streams=False)
    assert without.abilities == engine_kind(made, "host").abilities - {Ability.STREAM}


@pytest.mark.parametrize(("ports", "offered"), [("29400-29999", {"emulated:stages", "vllm:stages"}), ("", set())])
def test_a_node_without_stage_ports_offers_no_engine_for_stages(tmp_path: Path, ports: str, offered: set[str]) -> None:
    rig = AgentRig(tmp_path, gpu_kind="emulated", stage_ports=ports)
    service = rig.open({name: driver(name) for name in ("emulated", "vllm")})
    abilities = set(service.controller.node(0.0).abilities)
    assert {ability for ability in abilities if ability.endswith(f":{Ability.STAGES}")} == offered
    assert "vllm:stream" in abilities
    service._lock.release()
