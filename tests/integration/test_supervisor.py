"""Child processes for real: restarts, crash loops, the embedded servers, what is left when the supervisor is killed."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import nats
import psutil
import pytest
from redis.asyncio import Redis

from glowplug.bus.streams import stream_configs
from glowplug.runtime.privileges import USERS, inbox_of
from glowplug.runtime.supervisor import embedded
from glowplug.runtime.supervisor.child import Child, ChildSpec, ChildState
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.probe import http_status
from glowplug.runtime.supervisor.sweep import MARK, processes_of, sweep

WAIT_S = 30.0


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def ready_at_once(_pid: int) -> bool:
    return True


def spec(*argv: str, is_ready: Callable[[int], Awaitable[bool]] = ready_at_once, **env: str) -> ChildSpec:
    return ChildSpec(name="child", argv=lambda: argv, env={**os.environ, **env}, is_ready=is_ready)


def child(of: ChildSpec, tmp_path: Path, states: list[ChildState] | None = None) -> Child:
    output = Output(tmp_path / "logs", max_bytes=100_000, stream=io.StringIO())
    seen = states if states is not None else []
    return Child(of, output, lambda c: seen.append(c.state), longest_wait_s=0.2)


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    states: list[ChildState] = []
    process = child(spec(sys.executable, "-c", "import time; time.sleep(600)"), tmp_path, states)
    process.start()
    await asyncio.wait_for(process.ready.wait(), WAIT_S)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: process.num_restarts == 1 and process.ready.is_set())
    assert process.pid != first
    assert process.exit_reason == "killed by SIGKILL"
    await process.stop(grace_s=5)
    assert states == [
        ChildState.STARTING,
        ChildState.READY,
        ChildState.WAITING,
        ChildState.STARTING,
        ChildState.READY,
        ChildState.STOPPED,
        ChildState.STOPPED,
    ]
    assert not psutil.pid_exists(process.pid or first)


PAGE = (
    "import http.server, os, pathlib, sys\n"
    "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
    "part = pathlib.Path(sys.argv[1] + '.part')\n"
    "part.write_text(f'{os.getpid()} {server.server_port}')\n"
    "part.rename(sys.argv[1])\n"
    "server.serve_forever()\n"
)


async def test_a_process_that_lives_and_does_not_answer_is_killed_and_started_again(tmp_path: Path) -> None:
    told = tmp_path / "port"
    asked = 0

    def url(pid: int | None = None) -> str:
        """Of the process with that pid; "" while it has not told its port."""
        owner, port = told.read_text().split() if told.exists() else ("", "")
        return f"http://127.0.0.1:{port}/" if pid is None or owner == str(pid) else ""

    async def is_ready(pid: int) -> bool:
        return bool(at := url(pid)) and await http_status(at, 0.5) == 200

    async def is_live() -> bool:
        nonlocal asked
        asked += 1
        return await http_status(url(), 0.1) == 200

    made = replace(spec(sys.executable, "-c", PAGE, str(told), is_ready=is_ready), is_live=is_live)
    process = child(made, tmp_path)
    process.live_poll_s, process.hang_misses = 0.05, 4
    process.start()
    await asyncio.wait_for(process.ready.wait(), WAIT_S)
    first = process.pid
    await eventually(lambda: asked > 10)
    assert process.num_restarts == 0, "one that answers is left alone"
    os.kill(first, signal.SIGSTOP)
    await eventually(lambda: process.num_restarts == 1 and process.ready.is_set())
    assert process.pid != first and process.exit_reason == "killed by SIGKILL"
    stream = process.output._stream
    assert isinstance(stream, io.StringIO) and "hangs: 4 questions in a row" in stream.getvalue()
    await process.stop(grace_s=5)


async def test_a_crash_loop_is_told_with_the_last_lines_and_still_retried(tmp_path: Path) -> None:
    async def never(_pid: int) -> bool:
        return False

    process = child(spec(sys.executable, "-c", "print('no config'); raise SystemExit(3)", is_ready=never), tmp_path)
    process.start()
    await asyncio.wait_for(process.crash_looping.wait(), WAIT_S)
    assert process.exit_reason == "exit code 3"
    assert "no config" in process.tail
    told = process.num_restarts
    await eventually(lambda: process.num_restarts > told)
    await process.stop(grace_s=5)
    assert process.state is ChildState.STOPPED


async def test_a_program_that_is_not_there_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    process = child(spec(str(tmp_path / "missing")), tmp_path)
    process.start()
    await asyncio.wait_for(process.crash_looping.wait(), WAIT_S)
    assert "cannot start" in process.exit_reason
    await process.stop(grace_s=5)


async def test_one_that_ignores_sigterm_is_killed_with_its_helpers(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, flush=True);"
        "time.sleep(600)"
    )
    process = child(spec(sys.executable, "-c", code), tmp_path)
    process.start()
    await eventually(lambda: bool(process.tail))
    pid, helper = process.pid, int(process.tail[0])
    await process.stop(grace_s=0.3)
    await eventually(lambda: not _lives(pid) and not _lives(helper))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_long_lines_and_halves_reach_the_log(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('x' * 200_000 + '\\nhalf'); sys.stdout.flush(); import time; time.sleep(600)"
    process = child(spec(sys.executable, "-c", code), tmp_path)
    process.start()
    await eventually(lambda: sum(map(len, process.tail)) >= 200_000)
    await process.stop(grace_s=5)
    assert process.tail[-1] == "half"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_with_a_killed_supervisor_and_engines_are_swept(tmp_path: Path) -> None:
    """A child dies with us; an engine, in a session of its own, outlives us until the next start sweeps it."""
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
    deadline = time.monotonic() + WAIT_S
    while _lives(service) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(service)
    assert _lives(engine)
    assert [p.pid for p in processes_of(tmp_path)] == [engine]
    assert sweep(tmp_path / "another") == 0
    assert sweep(tmp_path) == 1
    assert not _lives(engine)


async def _up(of: ChildSpec, tmp_path: Path) -> Child:
    process = child(of, tmp_path)
    process.start()
    await asyncio.wait_for(process.ready.wait(), WAIT_S)
    return process


async def _killed(process: Child) -> None:
    num = process.num_restarts
    os.kill(process.pid, signal.SIGKILL)
    await eventually(lambda: process.num_restarts > num and process.ready.is_set())


PASSWORDS = {user: f"secret-of-{user}" for user in USERS}


async def test_nats_comes_back_on_its_port_with_its_streams_and_asks_who_comes(tmp_path: Path) -> None:
    server = embedded.EmbeddedNats(embedded.find_nats(), tmp_path, PASSWORDS)
    process = await _up(server.spec(os.environ), tmp_path)
    url = server.url("placer")
    client = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, inbox_prefix=inbox_of(url))
    stream = stream_configs(1)[0]
    await client.jetstream().add_stream(stream)
    subject = "glowplug.v1.evt.node.left._.node-1"
    await client.jetstream().publish(subject, b"kept")
    await _killed(process)
    assert server.url("placer") == url
    await eventually(lambda: client.is_connected)
    assert (await client.jetstream().stream_info(str(stream.name))).state.messages == 1
    await client.close()
    for wrong in ("", "placer:wrong@", f"placer:{PASSWORDS['router']}@"):
        with pytest.raises(Exception, match=r"(?i)authorization|no servers"):
            await nats.connect(
                url.replace(f"placer:{PASSWORDS['placer']}@", wrong), allow_reconnect=False, connect_timeout=2
            )
    assert (tmp_path / "nats.conf").stat().st_mode & 0o077 == 0
    await process.stop(grace_s=5)


@pytest.mark.parametrize("folder", ["short", "x" * 120])
async def test_valkey_keeps_what_it_took_over_kill_9(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    server = embedded.EmbeddedValkey(embedded.find_valkey(), place, PASSWORDS)
    assert len(str(server.socket)) <= embedded.SOCKET_PATH_LIMIT
    process = await _up(server.spec(os.environ), tmp_path)
    redis = Redis.from_url(server.url("agent"))
    await redis.hset("glowplug:v1:nodes", "k", "v")
    aof = place / "appendonlydir"
    await eventually(lambda: any(b"\r\nk\r\n" in f.read_bytes() for f in aof.glob("*.aof")))
    await redis.aclose()
    await _killed(process)
    redis = Redis.from_url(server.url("agent"))
    assert await redis.hget("glowplug:v1:nodes", "k") == b"v"
    await redis.aclose()
    await process.stop(grace_s=5)
    server.remove()
    assert not server.socket.exists()


def test_valkey_listens_on_no_port(tmp_path: Path) -> None:
    argv = list(embedded.EmbeddedValkey(Path("valkey-server"), tmp_path, PASSWORDS).argv())
    assert argv[argv.index("--port") + 1] == "0"


def test_no_password_stands_on_a_command_line_and_its_file_is_its_owners(tmp_path: Path) -> None:
    nats_server = embedded.EmbeddedNats(Path("nats-server"), tmp_path, PASSWORDS)
    (tmp_path / "users.acl").write_text("of an earlier run")
    (tmp_path / "users.acl").chmod(0o644)
    lines = [*nats_server.argv(), *embedded.EmbeddedValkey(Path("valkey-server"), tmp_path, PASSWORDS).argv()]
    assert not [word for word in lines for password in PASSWORDS.values() if password in word]
    for name in ("nats.conf", "users.acl"):
        text = (tmp_path / name).read_text()
        assert all(password in text for password in PASSWORDS.values())
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
