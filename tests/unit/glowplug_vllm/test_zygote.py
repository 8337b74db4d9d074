"""The zygote's loop with a stand-in for vLLM: real forks and socket."""

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from glowplug_vllm import process
from glowplug_vllm.parked import protocol, zygote

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pidfd, /proc and prctl")

# Writes its environment, then exits as told or waits for a signal.
SCRIPT = textwrap.dedent("""
    import json, os, pathlib, signal, sys
    from glowplug_vllm.parked import zygote

    def boot(question):
        links = [pathlib.Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        fds = [os.readlink(link) for link in links if link.is_symlink()]
        print("serving", flush=True)
        told = {"pgid": os.getpgid(0), "cwd": os.getcwd(), "fds": fds, "env": dict(os.environ)}
        part = pathlib.Path("told.part")
        part.write_text(json.dumps(told))
        part.rename("told.json")
        if (status := question.env.get("STATUS")) is not None:
            os._exit(int(status))
        signal.pause()

    path = pathlib.Path(sys.argv[1])
    with zygote.lock(path) as held:
        zygote.Zygote(path, boot, keep=lambda p: p.exists(), linger_s=float(sys.argv[2]), inherited=(held,)).run()
""")


class Parked:
    def __init__(self, folder: Path, linger_s: float = 60.0) -> None:
        self.folder = folder
        self.path = folder / "z.sock"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(self.path), str(linger_s)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(zygote.__file__).parents[2])},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.exits: dict[int, int] = {}
        assert "parked" in json.loads(self.out.readline())

    def ask(self, **question: Any) -> dict[str, Any]:
        return protocol.ask(self.path, question)

    def start(self, name: str, **env: str | None) -> int:
        run_dir = self.folder / name
        run_dir.mkdir()
        return int(self.ask(op="start", run_dir=str(run_dir), log=str(run_dir / "log"), env=env)["pid"])

    def received(self, name: str) -> dict[str, Any]:
        path = self.folder / name / "told.json"
        while not path.exists():
            assert self.process.poll() is None, "the zygote has ended"
            select.select([], [], [], 0.01)
        return dict(json.loads(path.read_text()))

    def exit_of(self, pid: int) -> int:
        while pid not in self.exits:
            said = json.loads(self.out.readline())
            if "exited" in said:
                self.exits[said["exited"]] = said["code"]
        return self.exits[pid]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.out.close()


@pytest.fixture
def parked(tmp_path: Path) -> Iterator[Parked]:
    zygote_process = Parked(tmp_path)
    yield zygote_process
    for received in tmp_path.glob("*/told.json"):
        pid = json.loads(received.read_text())["pgid"]
        if pid not in zygote_process.exits:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    zygote_process.end()


def test_a_server_leads_its_own_session_in_its_run_directory_with_its_environment(parked: Parked) -> None:
    pid = parked.start("a", COLOUR="red", HOME=None)
    received = parked.received("a")
    assert received["pgid"] == pid
    assert received["cwd"] == str(parked.folder / "a")
    assert received["env"]["COLOUR"] == "red"
    assert "HOME" not in received["env"]
    assert (parked.folder / "a" / "log").read_text() == "serving\n"


def test_a_server_holds_neither_the_socket_nor_the_lock_of_the_zygote(parked: Parked) -> None:
    parked.start("a")
    held = parked.received("a")["fds"]
    assert not [name for name in held if name.startswith("socket:") or name.endswith(".lock")]


def test_the_exit_status_is_reported_and_the_zygote_lives_on(parked: Parked) -> None:
    assert parked.exit_of(parked.start("a", STATUS="7")) == 7
    killed = parked.start("b")
    parked.received("b")
    os.kill(killed, signal.SIGKILL)
    assert parked.exit_of(killed) == -signal.SIGKILL
    assert parked.ask(op="hello")["num_servers"] == 0


def test_a_signal_sent_as_soon_as_the_pid_is_known_is_not_lost(parked: Parked) -> None:
    pid = parked.start("a")
    os.kill(pid, signal.SIGTERM)
    assert parked.exit_of(pid) == -signal.SIGTERM


def test_of_a_server_that_has_ended_it_writes_nothing_where_it_ran(parked: Parked) -> None:
    """Its driver takes it for stopped, and its directory may be gone, before the zygote knows."""
    pid = parked.start("a", STATUS="0")
    parked.exit_of(pid)
    assert {path.name for path in (parked.folder / "a").iterdir()} == {"log", "told.json"}


def test_only_the_owner_may_open_the_socket(parked: Parked) -> None:
    assert stat.S_IMODE(parked.path.stat().st_mode) == 0o600


def test_bad_lines_are_answered_and_change_nothing(parked: Parked) -> None:
    assert "op must be one of" in parked.ask(op="dance")["error"]
    assert not parked.ask(op="start", run_dir="rel", log="/l")["ok"]
    assert parked.ask(op="keep", tokenizer=str(parked.folder)) == {"ok": True, "kept": True}
    assert parked.ask(op="hello")["ok"]


def test_an_endless_line_is_cut_off(parked: Parked) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(parked.path))
        with pytest.raises(OSError):
            for _ in range(64):
                connection.sendall(b"x" * protocol.MAX_LINE_BYTES)
    assert parked.ask(op="hello")["ok"]


def test_servers_live_on_when_the_zygote_is_stopped(parked: Parked) -> None:
    pid = parked.start("a")
    parked.received("a")
    assert parked.ask(op="stop") == {"ok": True}
    assert parked.process.wait(20) == 0
    assert not parked.path.exists()
    os.kill(pid, 0)
    os.kill(pid, signal.SIGKILL)


def lease(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(protocol.encode({"op": "lease"}))
    assert connection.recv(100) == b'{"ok":true}\n'
    return connection


def test_the_last_lease_given_back_ends_it(parked: Parked) -> None:
    first, second = lease(parked.path), lease(parked.path)
    for connection in (first, second):
        assert parked.process.poll() is None
        connection.sendall(protocol.encode({"op": "release"}))
        connection.recv(100)
        connection.close()
    assert parked.process.wait(20) == 0


def test_a_broken_lease_leaves_it_a_while_and_a_new_one_keeps_it(tmp_path: Path) -> None:
    short = Parked(tmp_path, linger_s=3.0)
    try:
        lease(short.path).close()
        again = lease(short.path)
        assert short.ask(op="hello")["num_leases"] == 1
        again.close()
        assert short.process.wait(30) == 0
    finally:
        short.end()


def test_two_cannot_park_at_one_socket(parked: Parked) -> None:
    with pytest.raises(zygote.AlreadyParked):
        zygote.lock(parked.path)


@pytest.mark.parametrize(
    ("env", "cpus"),
    [
        ({"GOMP_CPU_AFFINITY": "0 2"}, {0, 2}),
        ({"OMP_PLACES": "{0,1}"}, {0, 1}),
        ({"GOMP_CPU_AFFINITY": "3", "OMP_PLACES": "{0}"}, {3}),
        ({}, set()),
    ],
)
def test_cpus_are_read_as_vllm_writes_them(env: dict[str, str], cpus: set[int]) -> None:
    assert process.cpus_of(env) == cpus


def test_the_bound_port_is_the_one_that_does_not_listen_yet() -> None:
    with socket.socket() as listening, socket.socket() as bound, socket.socket():
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        bound.bind(("127.0.0.1", 0))
        mine = {bound.getsockname()[1], listening.getsockname()[1]}
        found = {s.getsockname()[1] for _, s in process.tcp_sockets()}
        assert mine <= found
        assert process.bound_port() != listening.getsockname()[1]


def test_a_child_that_drops_server_sockets_frees_the_port() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = listener.getsockname()
    done, received = os.pipe()
    child = os.fork()
    if child == 0:
        process.drop_server_sockets()
        os.write(received, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(done, 1) == b"x"
        listener.close()
        with socket.socket() as again, pytest.raises(ConnectionRefusedError):
            again.connect(address)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(done)
        os.close(received)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_child_dies_with_its_parent(heeds: bool) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from glowplug_vllm import process\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    signal.signal(signal.SIGTERM, signal.{'SIG_DFL' if heeds else 'SIG_IGN'})\n"
        f"    process.die_with_parent({60.0 if heeds else 0.1})\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[1])},
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait()
        ended, _, _ = select.select([child], [], [], 20)
        assert ended == [child]
    finally:
        os.close(child)
        parent.stdout.close()


def test_a_start_carries_its_directory_log_and_environment() -> None:
    sent = {"op": "start", "run_dir": "/r", "log": "/r/log", "env": {"A": "1", "B": None}}
    question = protocol.decode(protocol.encode(sent))
    assert (question.run_dir, question.log, question.env) == ("/r", "/r/log", {"A": "1", "B": None})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "op must be one of"),
        (b'{"op": "dance"}', "op must be one of"),
        (b'{"op": "hello", "colour": 1}', "unknown field 'colour'"),
        (b'{"op": "start", "run_dir": "rel", "log": "/l"}', "absolute paths"),
        (b'{"op": "start", "run_dir": "/r", "log": 5}', "are strings"),
        (b'{"op": "start", "run_dir": "/r", "log": "/l", "env": {"A": 5}}', "every value is a string or null"),
    ],
)
def test_a_bad_line_is_refused_with_the_reason(line: bytes, why: str) -> None:
    with pytest.raises(protocol.BadQuestion, match=why):
        protocol.decode(line)


def test_a_message_is_one_line() -> None:
    assert protocol.encode({"error": "two\nlines"}).count(b"\n") == 1
    assert json.loads(protocol.encode({"ok": True})) == {"ok": True}
