"""The agent's state file."""

import os
from pathlib import Path

import pytest

from glowplug.controllers.agent.messages import AgentMemory
from glowplug.domain.hardware import Devices
from glowplug.domain.instance import EngineFigures
from glowplug.engines.port import EngineHandle
from glowplug.events.commands import StopInstance
from glowplug.services.agent.state_file import NodeLock, NodeTaken, StateFile
from tests.agent_steps import NODE, make
from tests.fleet_builder import an_event

HANDLE = EngineHandle(
    engine="emulated", instance_id="i-1", pid=7, pid_started_at=1.5, run_dir="/r", log_path="/l", data={"a": "b"}
)


ODD = [
    b"",
    b"{",
    b"[]",
    b'{"schema": 4, "memory": 7}',
    b'{"schema": 4, "handles": {"i": {}}}',
    b"\xff\x00",
    b'{"schema": 4, "handles": {"\xff": {}}}',
    b'{"schema": 4, "memory": {"fence": {"placer": "\xff"}}}',
    b'{"schema": 4, "x": ' + b"[" * 100_000,
    b'{"schema": 4, "memory": {"fence": {"placer": 1e400}}}',
    b'{"schema": 4, "memory": {"fence": {"placer": ' + b"9" * 5000 + b"}}}",
    b'{"schema": 4, "memory": {"fence": {"placer": "nan"}}}',
    b'{"schema": "two"}',
]


def test_memory_and_handles_come_back(tmp_path: Path) -> None:
    memory = make().ready().memory()
    first = StateFile(tmp_path / "agent.json")
    first.remember(memory)
    first.put_handle(HANDLE)
    again = StateFile(tmp_path / "agent.json")
    assert again.memory == memory and again.handles == {"i-1": HANDLE}
    again.drop_handle("i-1")
    assert StateFile(tmp_path / "agent.json").handles == {}


def test_two_files_share_nothing(tmp_path: Path) -> None:
    StateFile(tmp_path / "a.json").put_handle(HANDLE)
    assert StateFile(tmp_path / "b.json").handles == {} and StateFile(tmp_path / "b.json").memory == AgentMemory()


@pytest.mark.parametrize("raw", ODD)
def test_unreadable_memory_counts_as_none(tmp_path: Path, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "agent.json").write_bytes(raw)
    assert StateFile(tmp_path / "agent.json").memory == AgentMemory()
    assert "cannot read its state file" in caplog.text


@pytest.mark.parametrize("said", ["", '"schema": 1, ', '"schema": 2, ', '"schema": 3, '])
def test_memory_of_another_version_is_refused_by_name(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.json").write_text(f'{{{said}"memory": {{"holdings": [], "fence": {{"placer": 3}}}}}}')
    assert StateFile(tmp_path / "agent.json").memory == AgentMemory()
    number = said[10:11] or "1"
    assert f"has schema {number} and this version reads schema 4" in caplog.text and "ends the engines" in caplog.text


def test_a_handle_that_an_earlier_version_left_in_a_run_directory_reads() -> None:
    said = b'"engine": "vllm", "instance_id": "i-1", "pid": 7, "pid_started_at": 1.5, "run_dir": "/r", "log_path": "/l"'
    handle = EngineHandle.from_json(b"{" + said + b', "data": {"gpu_kind": "host", "holds": "{}"}}')
    assert (handle.pid, handle.figures, handle.devices) == (7, EngineFigures(), Devices())


def test_a_lock_whose_owner_cannot_be_read_is_taken_all_the_same(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path, "node-1")
    (tmp_path / "agent.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(NodeTaken):
        NodeLock(tmp_path, "node-1")
    lock.release()


def test_disk_that_takes_nothing_is_said_once_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.tmp").mkdir()  # blocks the scratch file
    state = StateFile(tmp_path / "agent.json")
    state.put_handle(HANDLE)
    state.remember(AgentMemory())
    assert state.handles == {"i-1": HANDLE} and state.failure
    assert caplog.text.count("cannot write its state file") == 1
    (tmp_path / "agent.tmp").rmdir()
    state.remember(AgentMemory())
    assert not state.failure and StateFile(tmp_path / "agent.json").handles == {"i-1": HANDLE}


def test_a_full_disk_leaves_the_file_as_it_was_and_gets_it_once_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    StateFile(path).put_handle(HANDLE)
    state = StateFile(path)
    (tmp_path / "agent.tmp").symlink_to("/dev/full")  # fails with ENOSPC
    state.drop_handle("i-1")
    assert "No space left" in state.failure
    assert StateFile(path).handles == {"i-1": HANDLE}, "the old memory is whole"
    state.retry()
    assert state.failure
    (tmp_path / "agent.tmp").unlink()
    state.retry()
    assert not state.failure and StateFile(path).handles == {}


def test_lock_names_its_owner_and_is_free_after(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path, "node-1")
    with pytest.raises(NodeTaken, match=f"node node-1 has an agent already \\(pid {os.getpid()}"):
        NodeLock(tmp_path, "node-1")
    lock.release()
    NodeLock(tmp_path, "node-1").release()


def test_times_to_come_are_of_a_clock_that_was_set_back(tmp_path: Path) -> None:
    agent = make().ready()
    stop = StopInstance(target=NODE, instance_id="i-1", reason="idle", grace_s=10.0)
    agent.handle(an_event(stop, issuer="autoscaler-1", epoch=1), 3600.0)
    StateFile(tmp_path / "agent.json", lambda: 3601.0).remember(agent.memory())
    (holding,) = StateFile(tmp_path / "agent.json", lambda: 101.0).memory.holdings
    assert holding.drain is not None and holding.drain.deadline_at == 110.0
    (same,) = StateFile(tmp_path / "agent.json", lambda: 7200.0).memory.holdings
    assert same == agent.memory().holdings[0]
