"""Engine processes: started, found again, stopped for sure."""

import os
import signal
import sys
from pathlib import Path

import pytest

from glowplug.engines import process

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)",
]


def start(argv: list[str], folder: Path) -> tuple[int, float]:
    pid = process.spawn(argv, cwd=folder, log_path=folder / "log", env=os.environ)
    started = process.started_at(pid)
    assert started is not None
    while "up" not in process.log_tail(folder / "log"):
        assert process.is_alive(pid, started)
    return pid, started


async def test_a_process_leads_its_own_session_and_ends_on_sigterm(tmp_path: Path) -> None:
    pid, started = start(SLEEPER, tmp_path)
    assert os.getsid(pid) == pid
    await process.stop_group(pid, started, grace_s=10.0)
    assert not process.is_alive(pid, started)


async def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    pid, started = start(STUBBORN, tmp_path)
    assert len(process.group_members(pid, started)) == 2
    await process.stop_group(pid, started, grace_s=0.2)
    assert process.group_members(pid, started) == []


async def test_children_left_by_a_dead_leader_are_ended_too(tmp_path: Path) -> None:
    pid, started = start(STUBBORN, tmp_path)
    os.kill(pid, signal.SIGKILL)
    while process.is_alive(pid, started):
        pass
    assert len(process.group_members(pid, started)) == 1
    await process.stop_group(pid, started, grace_s=0.0)
    assert process.group_members(pid, started) == []


async def test_another_process_with_that_pid_is_left_alone(tmp_path: Path) -> None:
    pid, started = start(SLEEPER, tmp_path)
    assert not process.is_alive(pid, started - 5.0)
    await process.stop_group(pid, started - 5.0, grace_s=0.1)
    assert process.is_alive(pid, started)
    process.kill_group(pid, started)


def test_engines_do_not_get_our_settings_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_ADMIN_TOKEN", "secret")
    env = process.engine_environment({"X": "1"})
    assert "GLOWPLUG_ADMIN_TOKEN" not in env
    assert env["X"] == "1"


def test_log_tail_gives_the_last_lines_that_say_something(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert process.log_tail(path) == ""
    path.write_text("".join(f"line {i}\n\n" for i in range(100)))
    assert process.log_tail(path, num_lines=2) == "line 98\nline 99"
