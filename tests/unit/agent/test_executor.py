"""The executor with misbehaving drivers."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.errors import EngineFailed
from glowplug.domain.instance import EngineFigures
from glowplug.domain.model import WeightsRef
from glowplug.engines import drivers, process
from glowplug.fleet.start_times import StartKind
from glowplug.runtime.host_memory import memory_bytes, sleepers_bytes
from glowplug.services.agent.engine_files import KEPT_LOGS
from glowplug.services.agent.executor import file_name
from glowplug.services.agent.processes import kill_orphans
from glowplug.services.agent.service import gpu_kind, with_bound
from glowplug.services.agent.settings import AgentSettings
from tests.agent_rig import write_weights
from tests.fleet_builder import a_model
from tests.unit.agent.executor_rig import MODEL, FakeEngineDriver, Rig
from tests.waiting import until


async def test_whole_life(rig: Rig) -> None:
    handle = await rig.launch()
    await rig.do(msg.LoadEngine("i-1", "/weights"))
    await rig.outcome(msg.EngineReady)
    assert rig.engines.living() == {"i-1"}
    await until(lambda: "hello" in rig.engines.log_path("i-1").read_text(), "the engine writes its log")
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean
    assert not process.is_alive(handle.pid, handle.pid_started_at) and not rig.state.handles
    assert not rig.saw(msg.EngineExited)
    assert not rig.engines.run_dir("i-1").exists() and "hello" in rig.engines.log_path("i-1").read_text()
    await rig.do(msg.ForgetEngine("i-1"))
    assert not rig.engines.log_path("i-1").exists()


async def test_exit_is_told_at_once_with_the_end_of_the_log(rig: Rig) -> None:
    handle = await rig.launch()
    await until(lambda: "hello" in rig.engines.log_path("i-1").read_text(), "the engine writes its log")
    os.kill(handle.pid, signal.SIGKILL)
    exited = await rig.outcome(msg.EngineExited)
    assert exited.reason.splitlines() == ["the engine process ended by itself", "hello from the engine"]


@pytest.mark.parametrize(
    ("error", "code"), [(EngineFailed("no such binary"), "engine_failed"), (RuntimeError("bug"), "internal_error")]
)
async def test_launch_that_fails_is_told(rig: Rig, error: Exception, code: str) -> None:
    rig.driver.errors["launch"] = error
    await rig.begin_launch()
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == code and str(error) in failed.reason


async def test_load_that_fails_is_told(launched: Rig) -> None:
    launched.driver.errors["load"] = EngineFailed("not a model\nlast line of the log")
    await launched.do(msg.LoadEngine("i-1", "/weights"))
    assert "last line" in (await launched.outcome(msg.EngineStartFailed)).reason


async def test_stop_during_a_launch_leaves_no_process(rig: Rig) -> None:
    rig.driver.launch_s = 0.1
    await rig.begin_launch()
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean and not rig.state.handles
    assert not kill_orphans(rig.settings.node_dir / "run", ())


async def test_stop_during_a_load_gives_it_up(launched: Rig) -> None:
    launched.driver.may_load.clear()
    await launched.do(msg.LoadEngine("i-1", "/weights"))
    await launched.do(msg.StopEngine("i-1", 0.0))
    assert (await launched.outcome(msg.EngineGone)).clean
    assert not launched.saw(msg.EngineReady, msg.EngineStartFailed)


async def test_process_that_outlives_its_stop_is_not_called_gone(launched: Rig) -> None:
    launched.driver.is_immortal = True
    await launched.do(msg.StopEngine("i-1", 0.0))
    assert not (await launched.outcome(msg.EngineGone)).clean and "i-1" in launched.state.handles
    launched.driver.is_immortal = False
    await asyncio.sleep(0.05)
    launched.outcomes.clear()
    await launched.do(msg.StopEngine("i-1", 0.0))
    assert (await launched.outcome(msg.EngineGone)).clean and not launched.state.handles


async def test_stop_that_breaks_is_not_called_gone(launched: Rig) -> None:
    launched.driver.errors["stop"] = RuntimeError("bug")
    await launched.do(msg.StopEngine("i-1", 0.0))
    assert not (await launched.outcome(msg.EngineGone)).clean and "i-1" in launched.state.handles


async def test_stop_of_nothing_is_over_at_once(rig: Rig) -> None:
    await rig.do(msg.StopEngine("i-404", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean


async def test_weights_are_waited_for(rig: Rig) -> None:
    await rig.await_weights("i-1")
    await asyncio.sleep(0.05)
    assert not rig.outcomes
    region = write_weights(rig.settings.shm_dir.absolute(), MODEL)
    complete = await rig.outcome(msg.WeightsComplete)
    assert complete.path == str(region.blob) and complete.found is StartKind.COLD


async def test_weights_in_memory_already_are_cached(rig: Rig) -> None:
    write_weights(rig.settings.shm_dir.absolute(), MODEL)
    await rig.await_weights("i-1")
    assert (await rig.outcome(msg.WeightsComplete)).found is StartKind.CACHED


async def test_weights_that_the_node_reads_from_its_own_disk_are_no_cold_start(rig: Rig) -> None:
    await rig.await_weights("i-1")
    await asyncio.sleep(0.01)
    write_weights(rig.settings.shm_dir.absolute(), MODEL, source="disk")
    assert (await rig.outcome(msg.WeightsComplete)).found is StartKind.DISK


async def test_weights_kept_for_another_model_are_held_against_the_bytes_that_this_one_declares(rig: Rig) -> None:
    sha256 = "ab" * 32
    write_weights(rig.settings.shm_dir, a_model("m", weights=WeightsRef(uri="file:///w/m", sha256=sha256)))
    await rig.await_weights("i-1", WeightsRef(uri="file:///w/m", sha256=sha256, num_bytes=5))
    failed = await rig.outcome(msg.WeightsFailed)
    assert (failed.code, failed.reason) == ("weights_corrupt", "file:///w/m: 4 bytes, expected 5")


async def test_weights_that_fail_are_told_to_those_who_wait(rig: Rig) -> None:
    region = write_weights(rig.settings.shm_dir.absolute(), MODEL)
    region.fail("weights_corrupt", "checksum differs", failed_at=1.0, instance_ids=("i-2",))
    await rig.await_weights("i-1")
    await rig.await_weights("i-2")
    failed = await rig.outcome(msg.WeightsFailed)
    assert failed == msg.WeightsFailed("i-2", "weights_corrupt", "checksum differs")
    await asyncio.sleep(0.05)
    assert len(rig.outcomes) == 1


async def test_checksum_that_is_none_is_refused(rig: Rig) -> None:
    await rig.await_weights("i-1", WeightsRef(uri="file:///w", sha256="../../etc"))
    assert (await rig.outcome(msg.WeightsFailed)).code == "invalid_model_file"


async def test_health_of_an_engine_nobody_knows(rig: Rig) -> None:
    await rig.do(msg.CheckHealth("i-404"))
    assert not (await rig.outcome(msg.HealthSeen)).alive


async def test_a_replica_is_parked_once_loaded_and_goes_on_under_a_new_id(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    assert rig.driver.calls == ["load /w", "prewarmed"]
    pid = rig.state.handles["r-1"].pid
    await rig.activate()
    ready = await rig.outcome(msg.EngineReady)
    assert rig.driver.calls[2:] == ["wake"] and ready.url == "http://127.0.0.1:1"
    assert [phase.name.value for phase in ready.phases] == ["load"]
    said = EngineFigures(num_slots=3, kv_tokens=6144, lacks=("tool_choice",), step_s=0.02)
    assert ready.figures == said, "as its load has said"
    handles = rig.state.handles
    assert list(handles) == ["i-1"] and (handles["i-1"].pid, handles["i-1"].instance_id) == (pid, "i-1")
    process.kill_group(pid, handles["i-1"].pid_started_at)
    assert (await rig.outcome(msg.EngineExited)).instance_id == "i-1"


@pytest.mark.parametrize("is_new", [False, True])
async def test_weights_that_were_fetched_anew_are_no_longer_shared(rig: Rig, tmp_path: Path, is_new: bool) -> None:
    """The engine keeps those of its open file."""
    weights, rig.driver.shared_bytes = tmp_path / "w", 60
    weights.write_bytes(b"seed")
    await rig.launch("r-1", replica=True)
    await rig.do(msg.LoadEngine("r-1", str(weights)))
    assert (await rig.outcome(msg.EnginePrewarmed)).figures.shared_bytes == 60
    if is_new:
        (tmp_path / "again").write_bytes(b"seed")
        (tmp_path / "again").replace(weights)
    await rig.activate()
    assert (await rig.outcome(msg.EngineReady)).figures.shared_bytes == (0 if is_new else 60)


@pytest.mark.parametrize(("gpu_kind", "waits"), [("cuda", True), ("host", False)])
async def test_on_a_gpu_a_wake_begins_once_the_engines_that_gave_way_are_gone(
    rig: Rig, gpu_kind: str, waits: bool
) -> None:
    for name in ("r-1", "r-2"):
        await rig.begin_launch(name, replica=True, gpu_kind=gpu_kind)
        await until(lambda name=name: name in rig.state.handles, "it is launched")
        await rig.do(msg.LoadEngine(name, "/w"))
    await until(lambda: rig.driver.calls.count("prewarmed") == 2, "both are prewarmed")
    rig.driver.may_stop.clear()
    await rig.activate()
    await rig.do(msg.StopEngine("r-2", 0.0))  # in one transaction, in any order
    await asyncio.sleep(0.05)
    assert ("wake" in rig.driver.calls) is not waits
    rig.driver.may_stop.set()
    assert (await rig.outcome(msg.EngineReady)).instance_id == "i-1" and "wake" in rig.driver.calls


async def test_a_load_and_an_activation_in_one_turn_load_once(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    rig.driver.may_load.clear()
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.activate()
    await asyncio.sleep(0.01)
    rig.driver.may_load.set()
    assert (await rig.outcome(msg.EngineReady)).instance_id == "i-1"
    assert rig.driver.calls == ["load /w", "wake"]
    assert not rig.saw(msg.EnginePrewarmed, msg.EngineStartFailed)


async def test_a_stop_right_behind_an_activation_ends_the_process(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    handle = rig.state.handles["r-1"]
    await rig.activate()
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).instance_id == "i-1"
    assert not rig.state.handles and not process.is_alive(handle.pid, handle.pid_started_at)


async def test_an_engine_that_was_several_instances_leaves_its_run_directory_with_its_process(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    await rig.activate()
    await rig.outcome(msg.EngineReady)
    assert rig.engines.run_dir("r-1").exists()
    await rig.do(msg.StopEngine("i-1", 0.0))
    await rig.outcome(msg.EngineGone)
    assert not rig.engines.run_dir("r-1").exists()


async def test_of_engines_that_have_ended_the_newest_logs_stay(rig: Rig) -> None:
    folder = rig.settings.node_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(KEPT_LOGS + 5):
        log = folder / f"old-{number}.log"
        log.write_text("it ended")
        os.link(log, folder / f"other-{number}.log")
        os.utime(log, (number, number))
    await rig.launch("i-2")
    await rig.begin_launch("i-1")
    await until(lambda: "i-1" in rig.state.handles, "the second runs, too")
    os.utime(rig.engines.log_path("i-2"), (0, 0))
    await rig.do(msg.StopEngine("i-1", 0.0))
    await rig.outcome(msg.EngineGone)
    left = {path.stem for path in folder.iterdir()}
    kept = range(6, KEPT_LOGS + 5)
    assert left == {"i-1", "i-2", *(f"{name}-{n}" for n in kept for name in ("old", "other"))}


async def test_what_ended_while_no_agent_ran_is_removed(rig: Rig) -> None:
    gone = rig.engines.run_dir("gone")
    gone.mkdir(parents=True)
    await rig.launch("i-1")
    rig.engines.tidy()
    assert rig.engines.run_dir("i-1").exists() and not gone.exists()


async def test_an_activation_of_what_is_gone_fails(rig: Rig) -> None:
    await rig.activate()
    failed = await rig.outcome(msg.EngineStartFailed)
    assert (failed.instance_id, failed.code) == ("i-1", "engine_failed") and "r-1 is gone" in failed.reason


@pytest.mark.parametrize("error", [EngineFailed("it will not"), ValueError("it will not")])
async def test_an_engine_that_cannot_sleep_says_why(rig: Rig, error: Exception) -> None:
    """It lives on until the controller stops it."""
    await rig.launch("r-1", replica=True)
    rig.driver.errors["sleep"] = error
    await rig.do(msg.SleepEngine("r-1", "swapped_out"))
    failed = await rig.outcome(msg.SleepFailed)
    assert failed.instance_id == "r-1" and "it will not" in failed.reason and "r-1" in rig.state.handles
    assert not rig.saw(msg.EngineAsleep, msg.EngineGone)


async def test_an_engine_that_dies_over_its_sleep_is_reported_once_with_its_log(rig: Rig) -> None:
    handle = await rig.launch("r-1", replica=True)
    await until(lambda: "hello" in Path(handle.log_path).read_text(), "it has begun to run")
    rig.driver.errors["sleep"] = EngineFailed("the connection broke")
    process.kill_group(handle.pid, handle.pid_started_at)
    await rig.do(msg.SleepEngine("r-1", "swapped_out"))
    assert "hello from the engine" in (await rig.outcome(msg.EngineExited)).reason
    assert not rig.saw(msg.SleepFailed)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_wake_that_fails_says_why_and_one_that_dies_shows_its_log(rig: Rig, dies: bool) -> None:
    handle = await rig.launch("r-1", replica=True)
    await until(lambda: "hello" in Path(handle.log_path).read_text(), "it has begun to run")
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    rig.driver.errors["wake"] = EngineFailed("it answers otherwise than at its start")
    rig.driver.dies_at_wake = dies
    await rig.activate()
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.instance_id == "i-1" and ("answers otherwise" in failed.reason) is not dies
    assert not dies or "ended by itself while it woke\nhello from the engine" in failed.reason


async def test_one_that_sleeps_says_so(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    await rig.do(msg.SleepEngine("r-1", "swapped_out"))
    seen = await rig.outcome(msg.EngineAsleep)
    assert seen.num_bytes > 0, "on host memory its process is looked at"
    assert rig.driver.calls == ["swapped_out"]
    await rig.do(msg.SleepEngine("i-404", "prewarmed"))
    assert (await rig.outcome(msg.SleepFailed)).instance_id == "i-404"


async def test_of_limits_that_come_fast_the_newest_counts(rig: Rig) -> None:
    await rig.launch("r-1", replica=True)
    await rig.do(msg.LimitKv("r-1", 30))
    await asyncio.sleep(0.01)
    for num_bytes in (20, 10):
        await rig.do(msg.LimitKv("r-1", num_bytes))
    rig.driver.may_limit.set()
    await asyncio.sleep(0.01)
    assert rig.driver.calls == ["kv 30", "kv 10"]
    await rig.do(msg.LimitKv("r-1", 40))
    await asyncio.sleep(0.01)
    assert rig.driver.calls[2:] == ["kv 40"]


async def test_several_gpus_are_for_engines_that_say_so(rig: Rig) -> None:
    await rig.begin_launch("i-1", 0, 1)
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == "engine_unavailable" and "not on 2" in failed.reason


def test_every_effect_has_an_executor(tmp_path: Path) -> None:
    """The reporter handles reports (see AgentService)."""
    reports = {msg.ReportStart, msg.ReportDrain, msg.ReportConsolidation}
    assert {*Rig(tmp_path, FakeEngineDriver()).executors} | reports == set(msg.EFFECTS)


def test_orphans_are_found_by_where_they_work_and_the_known_are_spared(tmp_path: Path) -> None:
    run_root = tmp_path / "run"
    (run_root / "i-1").mkdir(parents=True)
    (run_root / "i-2").mkdir()
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    lost, known = (subprocess.Popen(argv, cwd=run_root / i, start_new_session=True) for i in ("i-1", "i-2"))
    elsewhere = subprocess.Popen(argv, cwd=tmp_path, start_new_session=True)
    try:
        assert kill_orphans(run_root, {known.pid}) == [lost.pid]
        assert lost.wait(10) == -signal.SIGKILL and known.poll() is None and elsewhere.poll() is None
    finally:
        for child in (lost, known, elsewhere):
            child.kill()
            child.wait()


ODD = ("", ".", "..", "/", "/etc", "../../x", "a/b", "a\\b", "\x00", "x" * 5000, "é", "\udc80", ".hidden", "a\nb", " ")


@given(st.text(st.characters(codec=None)) | st.sampled_from(ODD))
def test_a_name_is_one_name(given: str) -> None:
    name = file_name(given)
    assert Path("/folder", name).parent == Path("/folder") and Path(name).name == name
    assert len(name.encode()) <= 128 and not name.startswith(".") and name.isprintable()


def test_names_that_the_control_plane_gives_stay_and_others_differ() -> None:
    for name in ("m-1x9-1", "i-1.2", "smol-chat-kx3f-2"):
        assert file_name(name) == name
    assert len({file_name(name) for name in ODD}) == len(ODD)


@pytest.mark.parametrize("instance_id", ODD)
def test_engines_keep_to_their_node(tmp_path: Path, instance_id: str) -> None:
    rig = Rig(tmp_path, FakeEngineDriver())
    assert rig.engines.run_dir(instance_id).resolve().parent == (rig.settings.node_dir / "run").resolve()
    assert rig.engines.log_path(instance_id).resolve().parent == (rig.settings.node_dir / "logs").resolve()


def test_sleepers_are_bounded_by_the_memory_there_is_unless_a_setting_says_how_much() -> None:
    assert with_bound(AgentParams(), "host").swap_host_bytes == sleepers_bytes(memory_bytes())
    assert with_bound(AgentParams(), "emulated").swap_host_bytes is None, "they hold next to nothing"
    assert with_bound(AgentParams(swap_host_bytes=0), "cuda").swap_host_bytes == 0


def test_budgets_are_emulated_where_only_emulated_engines_can_have_them() -> None:
    settings = AgentSettings().driver
    emulated, real = drivers.driver("emulated", settings), drivers.driver("llamacpp", settings)
    assert gpu_kind("host", {"emulated": emulated}) == "emulated"
    assert gpu_kind("host", {"emulated": emulated, "llamacpp": real}) == "host"
    assert gpu_kind("host", {}) == "host", "a node without engines emulates nothing"
    assert gpu_kind("cuda", {"emulated": emulated}) == "cuda", "devices that were read are devices"
