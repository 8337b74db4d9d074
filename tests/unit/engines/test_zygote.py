"""A parked process with a stand-in host and real forks."""

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from glowplug.domain.errors import EngineFailed
from glowplug.engines import process
from glowplug.engines.zygote import ChildZygote
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, and forks that are no threads")

# Describes itself, then waits for SIGTERM.
HOST = """
    import json, os, pathlib, signal, sys

    def main():
        links = [pathlib.Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        says = {
            "argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "leads": os.getsid(0) == os.getpid(),
            "fds": sorted(os.readlink(link) for link in links if link.is_symlink()),
            "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
        }
        print("up", file=sys.stderr)
        pathlib.Path("says.part").write_text(json.dumps(says))
        os.rename("says.part", "says.json")
        signal.pause()

    if __name__ == "__main__":
        sys.exit(main())
"""

Park = Callable[..., ChildZygote]


@pytest.fixture
def park(tmp_path: Path) -> Iterator[Park]:
    """Parks HOST, with `line` first in its module."""
    made: list[ChildZygote] = []

    def parked(line: str = "", answer_s: float = WAIT_S) -> ChildZygote:
        (tmp_path / "parked_host.py").write_text(line + "\n" + textwrap.dedent(HOST))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
        made.append(ChildZygote(sys.executable, "parked_host", environment, answer_s=answer_s))
        return made[-1]

    yield parked
    for zygote in made:
        zygote.close()
    for child in psutil.process_iter(["cwd", "pid"]):
        if str(child.info["cwd"]).startswith(str(tmp_path)):
            child.kill()


def start(zygote: ChildZygote, folder: Path, **env: str) -> int:
    folder.mkdir(exist_ok=True)
    zygote.until_parked(WAIT_S)
    return zygote.start(folder, folder / "logs" / "log", env)


def says(folder: Path) -> dict[str, Any]:
    wait_until("the host has begun", (folder / "says.json").exists, every_s=0.01)
    return dict(json.loads((folder / "says.json").read_text()))


def test_a_fork_is_what_a_fresh_process_would_be(park: Park, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path), "COLOUR": "red", "LC_CTYPE": "C.UTF-8"}
    fork = start(park(), tmp_path / "a", **environment)
    forked = says(tmp_path / "a")
    (tmp_path / "b").mkdir()
    argv = [sys.executable, "-m", "parked_host", str(tmp_path / "b")]
    fresh = process.spawn(argv, cwd=tmp_path / "b", log_path=tmp_path / "b" / "logs" / "log", env=environment)
    plain = says(tmp_path / "b")
    assert forked == json.loads(json.dumps(plain).replace(str(tmp_path / "b"), str(tmp_path / "a")))
    assert (tmp_path / "a" / "logs" / "log").read_text() == (tmp_path / "b" / "logs" / "log").read_text() == "up\n"
    assert psutil.Process(fork).name() == "parked_host"
    os.kill(fresh, signal.SIGKILL)
    os.waitpid(fresh, 0)


def test_an_engine_that_ends_leaves_no_zombie(park: Park, tmp_path: Path) -> None:
    zygote = park()
    pid = start(zygote, tmp_path / "a")
    os.kill(pid, signal.SIGTERM)
    wait_until("it is reaped", lambda: not psutil.pid_exists(pid), every_s=0.01)
    assert start(zygote, tmp_path / "a") != pid


def test_engines_outlive_it_and_are_found_again(park: Park, tmp_path: Path) -> None:
    """By pid and start time, as after an agent's restart."""
    zygote = park()
    pid, parent = start(zygote, tmp_path / "a"), zygote.pid
    says(tmp_path / "a")
    started_at = process.started_at(pid)
    zygote.close()
    assert not psutil.pid_exists(parent)
    assert started_at is not None and process.is_alive(pid, started_at)


def test_it_ends_with_its_driver(park: Park, tmp_path: Path) -> None:
    park()
    code = (
        "import os, sys; from glowplug.engines.zygote import ChildZygote;"
        "zygote = ChildZygote(sys.executable, 'parked_host', os.environ); zygote.until_parked(20);"
        "print(zygote.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    pid = process.spawn([sys.executable, "-c", code], cwd=tmp_path, log_path=tmp_path / "log", env=environment)
    os.waitpid(pid, 0)
    zygote = int((tmp_path / "log").read_text().split()[-1])
    wait_until("it has ended", lambda: process.started_at(zygote) is None, every_s=0.01)


def test_no_start_waits_for_imports(park: Park, tmp_path: Path) -> None:
    zygote = park("import time; time.sleep(60)")
    for _ in range(2):
        with pytest.raises(EngineFailed, match="is not parked yet"):
            zygote.start(tmp_path, tmp_path / "log", {})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        ("device = open('/dev/zero')", "has opened /dev/zero"),
    ],
)
def test_what_cannot_be_forked_is_not_parked_and_not_tried_again(
    park: Park, tmp_path: Path, line: str, why: str
) -> None:
    zygote = park(line)
    for _ in range(2):
        with pytest.raises(EngineFailed, match=why):
            zygote.until_parked(WAIT_S)
        assert zygote.pid == 0


def test_one_that_was_killed_is_parked_again_for_the_start_after_next(park: Park, tmp_path: Path) -> None:
    zygote = park()
    start(zygote, tmp_path / "a")
    os.kill(zygote.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="the parked process is gone"):
        start(zygote, tmp_path / "b")
    assert says(tmp_path / "a")["leads"], "its engines live on"
    assert start(zygote, tmp_path / "b")


def test_one_that_hangs_is_ended_and_the_engine_of_that_start_never_begins(park: Park, tmp_path: Path) -> None:
    zygote = park(answer_s=5.0)
    start(zygote, tmp_path / "a")
    parent = zygote.pid
    os.kill(parent, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=r"has not answered for 5 s"):
        start(zygote, tmp_path / "b")
    assert not psutil.pid_exists(parent) and not (tmp_path / "b" / "says.json").exists()


@pytest.mark.parametrize(
    ("line", "folder", "why"),
    [
        ("import os\ndef fork(): raise BlockingIOError(11, 'no process left')\nos.fork = fork", "a", "no process left"),
        ("import os\nos.setsid = lambda: os._exit(3)", "a", "ended before it could begin"),
        ("import os\nos.chdir = lambda _: os.stat('/no/such')", "a", "No such file or directory: '/no/such'"),
    ],
)
def test_a_fork_that_fails_is_refused_with_the_reason_and_the_next_is_tried(
    park: Park, tmp_path: Path, line: str, folder: str, why: str
) -> None:
    zygote = park(line)
    for _ in range(2):
        with pytest.raises(EngineFailed, match=why):
            start(zygote, tmp_path / folder)
    assert zygote.pid and not (tmp_path / folder / "says.json").exists()
