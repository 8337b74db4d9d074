"""What a fork does to its own process, shown on real sockets and a real child."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glowplug_vllm import process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and calls prctl")


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
    done, told = os.pipe()
    child = os.fork()
    if child == 0:
        process.drop_server_sockets()
        os.write(told, b"x")
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
        os.close(told)


def test_a_child_dies_with_its_parent() -> None:
    script = (
        "import os, signal, sys, time\n"
        "from glowplug_vllm import process\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    process.die_with_parent()\n"
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
