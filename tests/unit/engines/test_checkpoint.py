"""Checkpoints over a fake driver, and freezing of processes."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.errors import EngineFailed
from glowplug.engines import checkpoint, freezer, process
from glowplug.engines.checkpoint import CheckpointFailed, Checkpoints, CheckpointState, find
from glowplug.engines.command import CommandDriver
from glowplug.engines.freezer import Freezer, own_cgroup
from glowplug.engines.port import Ability, EngineHandle, EngineSettings
from tests.waiting import wait_until


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_STATE = 401


STATES = Enum("STATES", [f"CU_PROCESS_STATE_{name}" for name in ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED")])


class FakeDriver:
    """cuda.bindings.driver's checkpoint functions and order of states; a `stuck` process misses its lock timeout or
    fails its checkpoint."""

    CUresult = Status

    def __init__(self, pids: Sequence[int] = (), stuck: dict[int, str] | None = None, version: int = 13000) -> None:
        self.states = dict.fromkeys(pids, "RUNNING")
        self.stuck, self.version, self.num_devices = stuck or {}, version, 1
        self.calls: list[tuple[str, int]] = []

    def CUcheckpointLockArgs(self) -> Any:
        return SimpleNamespace(timeoutMs=0)

    def cuInit(self, flags: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> Any:
        return Status.CUDA_SUCCESS, self.num_devices

    def cuDriverGetVersion(self) -> Any:
        return Status.CUDA_SUCCESS, self.version

    def cuCheckpointProcessGetState(self, pid: int) -> Any:
        if pid not in self.states:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        return Status.CUDA_SUCCESS, STATES[f"CU_PROCESS_STATE_{self.states[pid]}"]

    def cuCheckpointProcessLock(self, pid: int, args: Any) -> Any:
        assert args.timeoutMs == 5000
        return self._to("Lock", pid, "RUNNING", "LOCKED", Status.CUDA_ERROR_NOT_READY)

    def cuCheckpointProcessCheckpoint(self, pid: int, args: None) -> Any:
        return self._to("Checkpoint", pid, "LOCKED", "CHECKPOINTED")

    def cuCheckpointProcessRestore(self, pid: int, args: None) -> Any:
        return self._to("Restore", pid, "CHECKPOINTED", "LOCKED")

    def cuCheckpointProcessUnlock(self, pid: int, args: None) -> Any:
        return self._to("Unlock", pid, "LOCKED", "RUNNING")

    def _to(self, verb: str, pid: int, before: str, after: str, error: Status = Status.CUDA_ERROR_ILLEGAL_STATE) -> Any:
        self.calls.append((verb, pid))
        if self.stuck.get(pid) == verb or self.states.get(pid) != before:
            return (error,)
        self.states[pid] = after
        return (Status.CUDA_SUCCESS,)


def test_every_cuda_process_is_locked_before_one_is_checkpointed_and_all_come_back() -> None:
    driver = FakeDriver([5, 7])
    made = Checkpoints(driver)
    assert checkpoint.swap_out(made, [3, 5, 7]) == [5, 7], "3 does not use CUDA"
    assert driver.calls == [("Lock", 5), ("Lock", 7), ("Checkpoint", 5), ("Checkpoint", 7)]
    assert made.state(5) is CheckpointState.CHECKPOINTED
    checkpoint.swap_in(made, [3, 5, 7])
    assert driver.calls[4:] == [("Restore", 5), ("Unlock", 5), ("Restore", 7), ("Unlock", 7)]
    assert set(driver.states.values()) == {"RUNNING"}


@pytest.mark.parametrize("verb", ["Lock", "Checkpoint"])
def test_what_fails_half_way_is_undone(verb: str) -> None:
    driver = FakeDriver([5, 7], stuck={7: verb})
    with pytest.raises(CheckpointFailed, match=f"cuCheckpointProcess{verb} of process 7: CUDA_ERROR"):
        checkpoint.swap_out(Checkpoints(driver), [5, 7])
    assert set(driver.states.values()) == {"RUNNING"}


def test_a_process_that_cannot_be_restored_is_an_error() -> None:
    driver = FakeDriver([5], stuck={5: "Restore"})
    made = Checkpoints(driver)
    checkpoint.swap_out(made, [5])
    with pytest.raises(CheckpointFailed, match="Restore of process 5"):
        checkpoint.swap_in(made, [5])
    driver.states[5] = "FAILED"
    with pytest.raises(CheckpointFailed, match="process 5 is failed"):
        checkpoint.swap_in(made, [5])


def test_a_process_that_was_moved_out_and_cannot_be_asked_is_an_error() -> None:
    driver = FakeDriver([5])
    made = Checkpoints(driver)
    moved = checkpoint.swap_out(made, [3, 5])
    driver.states.clear()
    with pytest.raises(CheckpointFailed, match="process 5 was moved out, and the driver says CUDA_ERROR_INVALID_VALUE"):
        checkpoint.swap_in(made, [3, 5], moved)


def test_another_agent_finds_the_cgroup_of_what_it_did_not_freeze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first := tmp_path / "first/glowplug-i-1").mkdir(parents=True)
    (first / "cgroup.freeze").write_text("1")
    places = {"self": tmp_path / "second", 5: first, 3: tmp_path / "first"}
    monkeypatch.setattr(freezer, "_cgroup_of", places.get)
    monkeypatch.setattr(freezer, "_signal", lambda *_: None)
    Freezer("i-1", pids=[3, 5]).thaw([3, 5])
    assert (first / "cgroup.freeze").read_text() == "0"


def test_without_a_process_on_a_gpu_there_is_nothing_to_move() -> None:
    with pytest.raises(CheckpointFailed, match=r"uses a GPU \(CUDA_ERROR_INVALID_VALUE\)"):
        checkpoint.swap_out(Checkpoints(FakeDriver()), [3])


def _no_package(_: str) -> Any:
    raise ImportError("no cuda")


def _without_checkpoints(_: str) -> Any:
    names = ("CUresult", "cuInit", "cuDeviceGetCount", "cuDriverGetVersion")
    return SimpleNamespace(**{name: getattr(FakeDriver(), name) for name in names})


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda _: FakeDriver(), ""),
        (lambda _: FakeDriver(version=12040), "CUDA is 12.4: checkpoints came with 12.8"),
        (_no_package, "the CUDA driver cannot be queried: no cuda"),
        (_without_checkpoints, "this cuda-python has no checkpoints"),
    ],
    ids=["driver", "old driver", "no package", "old package"],
)
def test_what_the_machine_has_decides(load: Any, why: str) -> None:
    found, reason = find(load)
    assert why in reason and bool(reason) == (found is None)


def test_a_driver_without_a_gpu_makes_none() -> None:
    driver = FakeDriver()
    driver.num_devices = 0
    assert find(lambda _: driver) == (None, "the NVIDIA driver has no GPU")


# servers by command

SERVERS = '[one]\ncommand = ["x"]\nsleep = "checkpoint"\n'


def command(tmp_path: Path, made: Any, why: str = "") -> CommandDriver:
    (tmp_path / "servers.toml").write_text(SERVERS)
    driver = CommandDriver(EngineSettings(servers=str(tmp_path / "servers.toml")))
    driver.checkpoints = (made, why)
    return driver


def test_a_checkpoint_is_an_ability_on_gpus_that_can_and_nowhere_else(tmp_path: Path) -> None:
    able = command(tmp_path, Checkpoints(FakeDriver()))
    assert able.abilities("cuda") == {Ability.SWAP} and able.abilities("host") == frozenset()
    assert command(tmp_path, None, "no driver").abilities("cuda") == frozenset()


def test_a_server_sleeps_in_one_way(tmp_path: Path) -> None:
    both = SERVERS + 'swap = {sleep = {path = "/a"}, wake = {path = "/b"}}\n'
    (tmp_path / "servers.toml").write_text(both)
    assert "declare one" in CommandDriver(EngineSettings(servers=str(tmp_path / "servers.toml"))).unavailable()


@pytest.fixture
def counting(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A group leader that keeps a file growing."""
    path = str(tmp_path / "n")
    code = f"import time\nwhile True:\n    open({path!r}, 'a').write('.')\n    time.sleep(.001)"
    made = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_until("it counts", (tmp_path / "n").exists, every_s=0.01)
    yield made
    made.kill()
    made.wait()


def runs(path: Path, within_s: float = 0.05) -> bool:
    before, deadline = path.stat().st_size, time.monotonic() + within_s
    while time.monotonic() < deadline:
        if path.stat().st_size != before:
            return True
        time.sleep(0.002)
    return False


def handle_of(running: "subprocess.Popen[bytes]", tmp_path: Path) -> EngineHandle:
    started = process.started_at(running.pid)
    assert started is not None
    return EngineHandle(
        engine="command",
        instance_id=f"i-{running.pid}",
        pid=running.pid,
        pid_started_at=started,
        run_dir=str(tmp_path),
        log_path="",
        data={"server": "one"},
    )


async def test_a_server_is_checkpointed_frozen_and_stopped_at_once(tmp_path: Path, counting: Any) -> None:
    fake = FakeDriver([counting.pid])
    driver, handle = command(tmp_path, Checkpoints(fake)), handle_of(counting, tmp_path)
    await driver.sleep(handle, "swapped_out")
    assert fake.states == {counting.pid: "CHECKPOINTED"} and not runs(tmp_path / "n") and driver.adopt(handle)
    await driver.stop(handle, grace_s=60.0)
    assert not driver.adopt(handle)


async def test_another_agent_wakes_it(tmp_path: Path, counting: Any) -> None:
    fake = FakeDriver([counting.pid])
    handle = handle_of(counting, tmp_path)
    await command(tmp_path, Checkpoints(fake)).sleep(handle, "swapped_out")
    later = command(tmp_path, Checkpoints(fake))
    later._move_in(handle, [counting.pid, 1])
    wait_until("it counts on", lambda: runs(tmp_path / "n"), every_s=0.01)
    assert fake.states == {counting.pid: "RUNNING"}


async def test_a_server_that_cannot_be_checkpointed_runs_on(tmp_path: Path, counting: Any) -> None:
    handle = handle_of(counting, tmp_path)
    stuck = FakeDriver([counting.pid], stuck={counting.pid: "Checkpoint"})
    for made, why in ((Checkpoints(stuck), ""), (None, "no driver")):
        with pytest.raises(EngineFailed, match="cannot be checkpointed"):
            await command(tmp_path, made, why).sleep(handle, "swapped_out")
        assert runs(tmp_path / "n", 10.0) and not (tmp_path / "asleep.json").exists()


# freezing


def test_a_process_is_frozen_by_signals_where_cgroups_are_not_ours(tmp_path: Path, counting: Any) -> None:
    freezer = Freezer("x", tmp_path / "none")
    assert freezer.freeze([counting.pid]) == "signals" and not runs(tmp_path / "n")
    freezer.thaw([counting.pid])
    wait_until("it counts on", lambda: runs(tmp_path / "n"), every_s=0.01)


def test_a_process_is_frozen_in_a_cgroup_of_its_own_where_that_may_be_made(tmp_path: Path, counting: Any) -> None:
    freezer = Freezer(f"test-{counting.pid}")
    if freezer.freeze([counting.pid]) == "signals":
        freezer.thaw([counting.pid])
        pytest.skip("the cgroups of this machine are not ours to write")
    assert not runs(tmp_path / "n")
    Freezer(f"test-{counting.pid}").thaw([counting.pid])
    wait_until("it counts on", lambda: runs(tmp_path / "n"), every_s=0.01)
    assert freezer._cgroup is not None and not freezer._cgroup.exists()


@pytest.mark.parametrize(
    ("mounts", "cgroups", "place"),
    [
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", "0::/a/b\n", "/sys/fs/cgroup/a/b"),
        ("cgroup2 /u cgroup2 rw\nx /y cgroup rw", "4:memory:/m\n0::/\n", "/u"),
        ("x /y cgroup rw 0 0", "0::/\n", None),
        ("cgroup2 /u cgroup2 rw", "4:memory:/m\n", None),
    ],
)
def test_where_a_process_is_among_the_cgroups(mounts: str, cgroups: str, place: str | None) -> None:
    assert own_cgroup(mounts, cgroups) == (Path(place) if place else None)
