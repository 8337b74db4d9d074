"""The executor with engines in stages."""

import asyncio
import errno
import time
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import Consolidation, ConsolidationState, Holding, State
from glowplug.domain.engine_key import engine_key
from glowplug.domain.errors import EngineFailed
from glowplug.domain.instance import EngineFigures, StageAddress
from glowplug.engines import process
from glowplug.engines.port import EngineHandle
from glowplug.events.facts import NodeLeft
from glowplug.fleet.start_times import StartKind
from glowplug.services.agent import executor
from glowplug.services.agent.processes import kill_orphans
from glowplug.weights.pieces import Layout
from glowplug.weights.region import Region, RegionInfo, region_digest
from tests.agent_rig import write_weights
from tests.fleet_builder import a_start, an_event, an_instance
from tests.unit.agent.executor_rig import MODEL, FakeMover, FakeSleeper, Rig, rig_of
from tests.waiting import until


async def test_stages_serve_and_become_whole(launched: Rig) -> None:
    launched.settings.engine_secret = "secret"
    later = StageAddress(instance_id="i-1.1", url="http://node-2:9000", key_id="k")
    await launched.do(msg.ServeStages("i-1", (later,)))
    ready = await launched.outcome(msg.EngineReady)
    assert (ready.url, ready.figures) == ("http://127.0.0.1:1", EngineFigures(num_slots=16, kv_tokens=900))
    assert f"stage http://node-2:9000 {engine_key('secret', 'k')}" in launched.driver.calls
    launched.driver.may_become_whole.set()
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    await asyncio.sleep(0.05)
    assert not launched.saw(msg.EngineConsolidated), "the rest of its weights is on its way"
    write_weights(launched.settings.shm_dir.absolute(), MODEL)
    whole = await launched.outcome(msg.EngineConsolidated)
    assert whole.kv_tokens == 1200 and [phase.name for phase in whole.phases] == ["fetch", "load"]
    assert "whole blob" in launched.driver.calls
    assert launched.state.handles["i-1"].figures.kv_tokens == 1200, "a wake reports it"


@pytest.mark.parametrize("left", [None, 77])
async def test_a_consolidation_that_is_given_up_says_what_it_has_left(launched: Rig, left: int | None) -> None:
    launched.driver.left = left
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    await launched.do(msg.AbandonConsolidation("i-1"))
    if left is None:
        assert (await launched.outcome(msg.ConsolidationFailed)).reason == "given up"
    else:
        assert (await launched.outcome(msg.EngineConsolidated)).kv_tokens == 77
    assert len([o for o in launched.outcomes if isinstance(o, msg.EngineConsolidated | msg.ConsolidationFailed)]) == 1


@pytest.mark.parametrize("error", [EngineFailed("a stage is gone"), RuntimeError("a stage is gone")])
async def test_stages_that_fail_are_reported(launched: Rig, error: Exception) -> None:
    launched.driver.errors["stages"] = error
    write_weights(launched.settings.shm_dir.absolute(), MODEL)
    await launched.do(msg.ServeStages("i-1"))
    assert "a stage is gone" in (await launched.outcome(msg.EngineStartFailed)).reason
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    assert "a stage is gone" in (await launched.outcome(msg.ConsolidationFailed)).reason


async def test_an_engine_that_does_not_answer_says_nothing_of_its_consolidation(launched: Rig) -> None:
    launched.driver.errors["stages"] = EngineFailed("no answer")
    launched.outcomes.clear()
    await launched.do(msg.AbandonConsolidation("i-1"))
    await asyncio.sleep(0.05)
    assert not launched.outcomes, "its bytes stay granted, and the controller asks again"


@pytest.mark.parametrize("is_launched", [True, False])
async def test_an_engine_without_stages_says_so(rig: Rig, is_launched: bool) -> None:
    """The ability normally prevents such a command."""
    if is_launched:
        await rig.launch("r-1", replica=True)
    why = "does not" if is_launched else "this agent has no engine"
    await rig.do(msg.ServeStages("r-1"))
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == ("engine_unable" if is_launched else "engine_failed") and why in failed.reason
    await rig.do(msg.ConsolidateEngine("r-1", MODEL))
    assert why in (await rig.outcome(msg.ConsolidationFailed)).reason
    if is_launched:
        rig.outcomes.clear()
        await rig.do(msg.AbandonConsolidation("r-1"))
        assert why in (await rig.outcome(msg.ConsolidationFailed)).reason


@pytest.mark.parametrize("code", ["weights_corrupt", "weights_unavailable"])
async def test_weights_that_do_not_come_end_a_consolidation(launched: Rig, code: str) -> None:
    """A failure of an earlier try does not count."""
    region = write_weights(launched.settings.shm_dir.absolute(), MODEL)
    region.fail("no_space", "the memory was full", failed_at=time.time() - 1.0, instance_ids=("i-1",))
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    await asyncio.sleep(0.05)
    assert not launched.saw(msg.ConsolidationFailed)
    region.fail(code, "the registry is away", failed_at=time.time(), instance_ids=("i-1",))
    failed = await launched.outcome(msg.ConsolidationFailed)
    assert "the registry is away" in failed.reason and failed.code == code


async def test_a_full_disk_ends_a_consolidation_with_its_code(launched: Rig) -> None:
    launched.driver.errors["stages"] = OSError(errno.ENOSPC, "No space left on device")
    write_weights(launched.settings.shm_dir.absolute(), MODEL)
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    assert (await launched.outcome(msg.ConsolidationFailed)).code == "no_space"


async def test_a_stage_waits_for_its_part_of_the_weights(rig: Rig) -> None:
    region = Region.at(rig.settings.shm_dir.absolute(), "node-1", region_digest(MODEL.weights))
    region.begin()
    region.blob.write_bytes(bytes(40))
    came = RegionInfo(path=str(region.blob), num_bytes=10, sha256="", source="file", seconds=0.0)
    region.complete_stage(came, 2, 4)
    await rig.await_weights("i-1", stage=1, num_stages=4)
    await asyncio.sleep(0.05)
    assert not rig.saw(msg.WeightsComplete)
    region.complete_stage(came, 1, 4)
    complete = await rig.outcome(msg.WeightsComplete)
    assert complete.path == str(region.blob) and complete.found is StartKind.COLD


async def becomes_whole(rig: Rig) -> EngineHandle:
    """Return the handle of the stage."""
    stage = await rig.launch()
    write_weights(rig.settings.shm_dir.absolute(), MODEL)
    rig.driver.may_become_whole.set()
    await rig.do(msg.ConsolidateEngine("i-1", MODEL))
    return stage


@pytest.mark.parametrize("fault", [None, EngineFailed("no answer")])
async def test_a_stage_that_becomes_whole_in_another_process_is_that_process_from_then_on(
    tmp_path: Path, fault: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache is read out first: on hearing of it, routers move streams and the placer ends later stages."""
    monkeypatch.setattr(executor, "STREAMS_MOVE_S", 0.01)
    monkeypatch.setattr(executor, "KV_KEPT_S", 0.01)
    async with rig_of(tmp_path, FakeMover()) as rig:
        if fault is not None:
            rig.driver.errors["move"] = fault
        stage = await becomes_whole(rig)
        whole = await rig.outcome(msg.EngineConsolidated)
        assert (whole.url, whole.kv_tokens) == ("http://127.0.0.1:2", 1200) and rig.driver.ports == [0]
        assert [phase.name for phase in whole.phases] == ["fetch", "load"] and rig.driver.calls[-1] == "move"
        await rig.do(msg.FinishStages("i-1", time.time() + 60))
        assert not (await rig.outcome(msg.StagesFinished)).cut
        await until(lambda: rig.driver.calls[-1] == "forget", "the stage ends, and what was moved is forgotten")
        assert rig.driver.calls[-3:] == ["move", "end stage", "forget"]
        (moved,) = rig.driver.moved
        assert moved.pid == rig.state.handles["i-1"].pid == rig.driver.beside.pid != stage.pid
        process.kill_group(stage.pid, stage.pid_started_at)
        await asyncio.sleep(0.05)
        assert not rig.saw(msg.EngineExited), "the end of the stage's own process is none of the engine's"
        process.kill_group(moved.pid, moved.pid_started_at)
        await rig.outcome(msg.EngineExited)


async def ends_while_its_requests_move(rig: Rig) -> None:
    rig.driver.may_move.clear()
    stage = await becomes_whole(rig)
    await until(lambda: "move" in rig.driver.calls, "its requests move")
    process.kill_group(stage.pid, stage.pid_started_at)


async def test_a_stage_that_ends_while_its_requests_move_does_not_end_the_engine(tmp_path: Path) -> None:
    """A later stage was killed, which ended the first; the whole engine recomputes running requests."""
    async with rig_of(tmp_path, FakeMover()) as rig:
        await ends_while_its_requests_move(rig)
        await rig.do(msg.CheckHealth("i-1"))
        await asyncio.sleep(0.1)
        assert not rig.saw(msg.EngineExited, msg.HealthSeen)
        rig.driver.errors["move"] = EngineFailed("it does not answer")
        rig.driver.may_move.set()
        assert (await rig.outcome(msg.EngineConsolidated)).url == "http://127.0.0.1:2"
        await asyncio.sleep(0.05)
        assert not rig.saw(msg.EngineExited) and rig.state.handles["i-1"].pid == rig.driver.beside.pid


async def test_a_stage_that_was_asked_for_its_health_before_it_ended_does_not_end_the_engine(tmp_path: Path) -> None:
    """The answer may precede the end of the move."""
    async with rig_of(tmp_path, FakeMover()) as rig:
        stage = await rig.launch()
        rig.driver.may_answer.clear()
        await rig.do(msg.CheckHealth("i-1"))
        await asyncio.sleep(0)
        rig.outcomes.clear()
        whole = await rig.launch("i-2")
        rig.state.put_handle(replace(whole, instance_id="i-1"))
        process.kill_group(stage.pid, stage.pid_started_at)
        await until(lambda: not rig.driver.adopt(stage), "the stage has ended")
        rig.driver.may_answer.set()
        await asyncio.sleep(0.01)
        assert not rig.saw(msg.EngineExited, msg.HealthSeen)


async def test_a_stage_that_ends_while_its_requests_move_in_vain_ends_the_engine(tmp_path: Path) -> None:
    async with rig_of(tmp_path, FakeMover()) as rig:
        await ends_while_its_requests_move(rig)
        rig.driver.errors["move"] = RuntimeError("a fault of ours")
        rig.driver.may_move.set()
        await rig.outcome(msg.EngineExited)
        assert not rig.saw(msg.EngineConsolidated)


async def test_a_kv_cache_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "KV_MOVES_S", 0.05)
    async with rig_of(tmp_path, FakeMover()) as rig:
        rig.driver.may_move.clear()
        await becomes_whole(rig)
        assert (await rig.outcome(msg.EngineConsolidated)).url == "http://127.0.0.1:2"
        await asyncio.sleep(0.01)


async def test_an_engine_that_ends_before_it_is_whole_leaves_the_stage(tmp_path: Path) -> None:
    driver = FakeMover()
    driver.whole = lambda handle: None  # type: ignore[method-assign]
    async with rig_of(tmp_path, driver) as rig:
        stage = await becomes_whole(rig)
        assert "has ended" in (await rig.outcome(msg.ConsolidationFailed)).reason
        assert rig.state.handles["i-1"].pid == stage.pid and not rig.saw(msg.EngineConsolidated)


@pytest.mark.parametrize("is_new", [True, False])
async def test_what_was_computed_with_other_bytes_does_not_come_over(tmp_path: Path, is_new: bool) -> None:
    """A stage's part has no checksum: after a refetch it may have read wrong bytes."""
    async with rig_of(tmp_path, FakeMover()) as rig:
        region = Region.at(rig.settings.shm_dir.absolute(), "node-1", region_digest(MODEL.weights))
        region.begin()
        region.write_layout(Layout.of([("", 40)]))
        region.complete_stage(RegionInfo(path="/w", num_bytes=20, sha256="", source="file", seconds=0.0), 0, 2)
        await rig.await_weights("i-1", num_stages=2)
        await rig.outcome(msg.WeightsComplete)
        if is_new:
            region.write_layout(Layout.of([("", 40)]))
        await becomes_whole(rig)
        await rig.outcome(msg.EngineConsolidated)
        await asyncio.sleep(0.01)
        assert ("move" in rig.driver.calls) is not is_new


@pytest.mark.parametrize("state", [None, *ConsolidationState])
async def test_what_an_agent_that_was_killed_has_left_of_a_stage_is_ended_by_the_next(
    tmp_path: Path, state: ConsolidationState | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after the consolidation: until then the stage may have requests."""
    monkeypatch.setattr(executor, "KV_KEPT_S", 0.01)
    async with rig_of(tmp_path, FakeMover()) as rig:
        await rig.launch()
        holding = Holding(
            state=State.READY,
            instance=an_instance("i-1"),
            command=a_start(MODEL),
            cause=an_event(NodeLeft(node_id="node-1", reason="")),
            consolidation=Consolidation(state=state, deadline_at=0.0) if state is not None else None,
        )
        rig.state.remember(msg.AgentMemory(holdings=(holding,)))
        later = executor.EngineExecutor(rig.settings, {"fake": rig.driver}, rig.state)
        later.connect(rig.keep)
        assert later.living() == {"i-1"}
        if state is None:
            await until(lambda: rig.driver.calls == ["end stage", "forget"], "it is over")
        await asyncio.sleep(0.01)
        assert rig.driver.calls == (["end stage", "forget"] if state is None else [])
        await later.close()


async def test_an_agent_that_starts_again_knows_the_stage_beside_a_whole_engine(tmp_path: Path) -> None:
    async with rig_of(tmp_path, FakeMover()) as rig:
        stage = await becomes_whole(rig)
        await rig.outcome(msg.EngineConsolidated)
        whole = rig.state.handles["i-1"]
        assert rig.engines.processes() == {whole.pid, stage.pid} and whole.pid != stage.pid
        assert kill_orphans(rig.settings.node_dir / "run", rig.engines.processes()) == []
        process.kill_group(stage.pid, stage.pid_started_at)
        await until(lambda: rig.engines.processes() == {whole.pid}, "a pid that may be another's by now is none")


@pytest.mark.parametrize("left_s", [60.0, 0.05])
async def test_a_stage_ends_after_what_runs_there_or_once_its_time_is_over(
    tmp_path: Path, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer may still have requests."""
    for name in ("STREAMS_MOVE_S", "STAGE_POLL_S"):
        monkeypatch.setattr(executor, name, 0.01)
    monkeypatch.setattr(executor, "KV_KEPT_S", 0.15)
    async with rig_of(tmp_path, FakeMover()) as rig:
        await rig.launch()
        rig.driver.is_over = False
        await rig.do(msg.FinishStages("i-1", time.time() + left_s))
        if left_s > 1:
            await asyncio.sleep(0.03)
            rig.driver.errors["over"] = EngineFailed("no answer")
            await asyncio.sleep(0.03)
            assert not rig.saw(msg.StagesFinished) and not rig.driver.calls
            del rig.driver.errors["over"]
            rig.driver.is_over = True
        assert (await rig.outcome(msg.StagesFinished)).cut is (left_s < 1)
        await until(lambda: rig.driver.calls == ["end stage", "forget"], "the stage's process ends")


async def test_an_engine_that_goes_to_sleep_keeps_nothing_of_the_stage_that_it_was(tmp_path: Path) -> None:
    """This cancels the task that would forget the moved requests."""

    class SleepingMover(FakeMover, FakeSleeper):
        pass

    async with rig_of(tmp_path, SleepingMover()) as rig:
        await rig.launch()
        rig.driver.is_over = False
        await rig.do(msg.FinishStages("i-1", time.time() + 60))
        await rig.do(msg.SleepEngine("i-1", "swapped_out"))
        await rig.outcome(msg.EngineAsleep)
        assert rig.driver.calls == ["end stage", "forget", "swapped_out"]


async def test_stages_of_an_engine_that_became_whole_itself_are_over(launched: Rig) -> None:
    await launched.do(msg.FinishStages("i-1", 0.0))
    assert not (await launched.outcome(msg.StagesFinished)).cut


async def test_stop_ends_a_consolidation(launched: Rig) -> None:
    await launched.do(msg.ConsolidateEngine("i-1", MODEL))
    await launched.do(msg.StopEngine("i-1", 0.0))
    assert (await launched.outcome(msg.EngineGone)).clean
    assert not launched.saw(msg.EngineConsolidated, msg.ConsolidationFailed)
