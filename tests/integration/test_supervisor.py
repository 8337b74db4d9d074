"""Real child processes: restarts, crash loops, embedded servers, a killed supervisor."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from glowplug.runtime.supervisor.child import Child, ChildSpec, ChildState
from glowplug.runtime.supervisor.probe import http_status
from glowplug.runtime.supervisor.sweep import MARK, processes_of, sweep
from tests.integration.conftest import Children, up
from tests.waiting import WAIT_S, lives, until, wait_until

SLEEP = "import time; time.sleep(600)"


async def ready_at_once(_pid: int) -> bool:
    return True


async def never(_pid: int) -> bool:
    return False


def spec(*argv: str, is_ready: Callable[[int], Awaitable[bool]] = ready_at_once) -> ChildSpec:
    return ChildSpec(name="child", argv=lambda: argv, env=os.environ, is_ready=is_ready)


def python(code: str, *argv: str, is_ready: Callable[[int], Awaitable[bool]] = ready_at_once) -> ChildSpec:
    return spec(sys.executable, "-c", code, *argv, is_ready=is_ready)


def said(process: Child) -> str:
    stream = process.output._stream
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


async def test_a_killed_process_is_started_again(children: Children) -> None:
    process = children.make(python(SLEEP))
    await up(process)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.num_restarts == 1 and process.ready.is_set())
    assert process.pid != first
    assert process.exit_reason == "killed by SIGKILL"
    await process.stop(grace_s=5)
    assert " ".join(children.states) == "starting ready waiting starting ready stopped stopped"
    assert not psutil.pid_exists(process.pid or first)


PAGE = (
    "import http.server, os, pathlib, sys\n"
    "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
    "part = pathlib.Path(sys.argv[1] + '.part')\n"
    "part.write_text(f'{os.getpid()} {server.server_port}')\n"
    "part.rename(sys.argv[1])\n"
    "server.serve_forever()\n"
)


async def test_a_process_that_lives_and_does_not_answer_is_killed_and_started_again(
    children: Children, tmp_path: Path
) -> None:
    num_before = tmp_path / "port"
    asked = 0

    def url(pid: int | None = None) -> str:
        """Empty until the process has told its port."""
        owner, port = num_before.read_text().split() if num_before.exists() else ("", "")
        return f"http://127.0.0.1:{port}/" if pid is None or owner == str(pid) else ""

    async def is_ready(pid: int) -> bool:
        return bool(at := url(pid)) and await http_status(at, 0.5) == 200

    async def is_live() -> bool:
        nonlocal asked
        asked += 1
        return await http_status(url(), 0.1) == 200

    made = replace(python(PAGE, str(num_before), is_ready=is_ready), is_live=is_live)
    process = children.make(made, live_poll_s=0.05, hang_misses=4)
    await up(process)
    first = process.pid
    await until(lambda: asked > 10)
    assert process.num_restarts == 0, "one that answers is left alone"
    os.kill(first, signal.SIGSTOP)
    await until(lambda: process.num_restarts == 1 and process.ready.is_set())
    assert process.pid != first
    assert process.exit_reason == "killed by SIGKILL (it hangs: 4 health checks in a row without an answer)"
    assert "hangs: 4 health checks in a row" in said(process)


async def test_a_crash_loop_is_told_with_the_last_lines_and_still_retried(children: Children) -> None:
    process = children.make(python("print('no config'); raise SystemExit(3)", is_ready=never))
    process.start()
    await asyncio.wait_for(process.crash_looping.wait(), WAIT_S)
    assert process.exit_reason == "exit code 3"
    assert "no config" in process.tail
    num_before = process.num_restarts
    await until(lambda: process.num_restarts > num_before)
    await process.stop(grace_s=5)
    assert process.state is ChildState.STOPPED


async def test_a_program_that_is_not_there_is_a_reason_and_no_crash(children: Children, tmp_path: Path) -> None:
    process = children.make(spec(str(tmp_path / "missing")))
    process.start()
    await asyncio.wait_for(process.crash_looping.wait(), WAIT_S)
    assert "cannot start" in process.exit_reason


async def test_one_that_ignores_sigterm_is_killed_with_its_helpers(children: Children) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, flush=True);"
        "time.sleep(600)"
    )
    process = children.make(python(code))
    process.start()
    await until(lambda: bool(process.tail))
    pid, helper = process.pid, int(process.tail[0])
    await process.stop(grace_s=0.3)
    await until(lambda: not lives(pid) and not lives(helper))


async def test_long_lines_and_halves_reach_the_log(children: Children) -> None:
    code = "import sys; sys.stdout.write('x' * 200_000 + '\\nhalf'); sys.stdout.flush(); import time; time.sleep(600)"
    process = children.make(python(code))
    process.start()
    await until(lambda: sum(map(len, process.tail)) >= 200_000)
    await process.stop(grace_s=5)
    assert process.tail[-1] == "half"


async def test_a_start_that_never_answers_is_made_again_with_twice_the_time_and_the_reason_told(
    children: Children,
) -> None:
    process = children.make(python(SLEEP, is_ready=never), start_timeout_s=0.2)
    process.start()
    await until(lambda: process.num_restarts >= 2)
    await until(lambda: ": no answer within 0.2 s of its start" in said(process))
    await until(lambda: ": no answer within 0.4 s of its start" in said(process))
    assert process.exit_reason.startswith("killed by SIGKILL (no answer within 0.")


async def test_a_start_that_is_answered_gives_the_next_one_the_first_ones_time(children: Children) -> None:
    answers = {"now": False}

    async def is_ready(_pid: int) -> bool:
        return answers["now"]

    process = children.make(python(SLEEP, is_ready=is_ready), start_timeout_s=0.2)
    process.start()
    await until(lambda: "no answer within 0.2 s" in said(process))
    answers["now"] = True
    await until(process.ready.is_set)
    num_before = said(process).count("no answer within 0.2 s")
    answers["now"] = False
    process.kill()
    await until(lambda: said(process).count("no answer within 0.2 s") > num_before)


async def test_an_error_of_the_asking_is_told_once_and_the_process_is_asked_again(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    errors = {"ready": 2, "live": 2}

    async def is_ready(_pid: int) -> bool:
        errors["ready"] -= 1
        if errors["ready"] >= 0:
            raise KeyError("no such row")
        return True

    async def is_live() -> bool:
        errors["live"] -= 1
        if errors["live"] >= 0:
            raise KeyError("no such row")
        return True

    made = replace(python(SLEEP, is_ready=is_ready), is_live=is_live)
    process = children.make(made, live_poll_s=0.01)
    await up(process)
    await until(lambda: errors["live"] < -2)
    assert process.num_restarts == 0 and process.state is ChildState.READY
    assert said(process).count("the supervisor cannot check on child and lets it run: KeyError 'no such row'") == 1
    (record,) = [record for record in caplog.records if record.name.endswith("supervisor.child")]
    assert record.exc_info is not None and record.exc_info[0] is KeyError


async def test_a_start_that_answers_and_is_not_ready_is_left_to_wait(children: Children) -> None:
    asked = 0

    async def is_live() -> bool:
        nonlocal asked
        asked += 1
        return True

    made = replace(python(SLEEP, is_ready=never), is_live=is_live)
    process = children.make(made, start_timeout_s=0.5, live_poll_s=0.01)
    process.start()
    await until(lambda: asked > 30)
    assert process.num_restarts == 0 and process.state is ChildState.STARTING


async def test_a_process_that_cannot_work_is_started_again_once_that_helps(children: Children) -> None:
    problems, helps = {"now": ""}, {"now": False}

    async def problem() -> str:
        return problems["now"]

    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(600)"
    made = replace(python(code), problem=problem, restart_helps=lambda: helps["now"])
    process = children.make(made, live_poll_s=0.02)
    await up(process)
    problems["now"] = "no space left on device"
    await until(lambda: process.state is ChildState.FAILING)
    assert process.problem == "no space left on device" and process.num_restarts == 0
    problems["now"] = ""
    await until(lambda: process.state is ChildState.READY)
    assert process.num_restarts == 0, "it works again by itself"
    problems["now"] = "no space left on device"
    await until(lambda: process.state is ChildState.FAILING)
    helps["now"] = True
    await until(lambda: process.num_restarts == 1)
    assert "no space left on device" in process.exit_reason
    problems["now"] = ""
    await until(lambda: process.ready.is_set() and not process.problem)


async def test_a_process_goes_on_writing_while_nobody_reads_its_lines(children: Children, tmp_path: Path) -> None:
    """The supervisor's event loop is blocked, as under SIGSTOP: with a pipe the process would block after 64 KiB."""
    code = (
        "import pathlib, sys, time\n"
        "for i in range(4000): print(f'{i:06d} ' + 'x' * 100)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    done = tmp_path / "done"
    process = children.make(python(code, str(done)))
    await up(process)
    wait_until("the child is done", done.exists, WAIT_S)  # nothing of ours may run meanwhile
    await until(lambda: bool(process.tail) and process.tail[-1].startswith("003999 "))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_with_a_killed_supervisor_and_engines_are_swept(tmp_path: Path) -> None:
    """An engine, in its own session, survives until the next start sweeps it."""
    code = f"""
import asyncio, io, os, subprocess, sys
from pathlib import Path
from glowplug.runtime.supervisor.child import Child, ChildSpec
from glowplug.runtime.supervisor.output import Output
engine = "import time; time.sleep(600)"
service = ("import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', " + repr(engine) + "],"
           " start_new_session=True); print(p.pid, flush=True); time.sleep(600)")
async def ready(_): return True
async def main():
    env = {{**os.environ, "{MARK}": "{tmp_path}"}}
    spec = ChildSpec(name="c", argv=lambda: (sys.executable, "-c", service), env=env, is_ready=ready)
    child = Child(spec, Output(Path("{tmp_path}"), max_bytes=9999, stream=io.StringIO()), lambda c: None)
    child.start()
    while not child.tail: await asyncio.sleep(0.01)
    print(child.pid, child.tail[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    service, engine = map(int, supervisor.stdout.readline().split())
    supervisor.kill()
    supervisor.wait()
    wait_until("the service ends", lambda: not lives(service))
    assert lives(engine)
    assert [p.pid for p in processes_of(tmp_path)] == [engine]
    assert sweep(tmp_path / "another") == 0
    assert sweep(tmp_path) == 1
    wait_until("the engine ends", lambda: not lives(engine))
