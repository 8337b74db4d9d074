"""Engines ended for host memory, process measurements, ports."""

import os
import socket
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest

from glowplug.controllers.agent.messages import EngineOverLimit
from glowplug.domain.address import PortRange
from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineHandle
from glowplug.runtime.errors import WrongSetting
from glowplug.services.agent.processes import LIMIT, MIB, EnginePorts, MemoryWatch, private_bytes
from glowplug.services.agent.settings import AgentSettings

HOST = "127.0.0.9"  # unshared: its free ports stay free


def a_handle(instance_id: str, pid: int, limit: int | None = 100 * MIB) -> EngineHandle:
    return EngineHandle(
        engine="fake",
        instance_id=instance_id,
        pid=pid,
        pid_started_at=1.0,
        run_dir="",
        log_path="",
        data={} if limit is None else {LIMIT: str(limit)},
    )


class Watched:
    def __init__(self, *handles: EngineHandle) -> None:
        self.handles = {handle.instance_id: handle for handle in handles}
        self.used: dict[int, int] = {}
        self.alive = {handle.pid for handle in handles}
        self.outcomes: list[Any] = []
        self.asked: list[set[int]] = []
        self.watch = MemoryWatch(lambda: self.handles, lambda handle: handle.pid in self.alive, self.keep, self.read)

    async def keep(self, stimulus: Any) -> None:
        self.outcomes.append(stimulus)

    def read(self, leaders: Collection[int]) -> dict[int, int]:
        self.asked.append(set(leaders))
        return {pid: num_bytes for pid, num_bytes in self.used.items() if pid in leaders}


async def test_an_engine_over_its_limit_is_reported_once_with_both_figures() -> None:
    watched = Watched(a_handle("i-1", 1), a_handle("i-2", 2))
    watched.used = {1: 100 * MIB, 2: 100 * MIB}
    await watched.watch.look()
    assert watched.outcomes == []
    watched.used[2] += MIB
    await watched.watch.look()
    await watched.watch.look()
    (over,) = watched.outcomes
    assert isinstance(over, EngineOverLimit) and over.instance_id == "i-2"
    assert "took 101 MiB of host memory, more than its limit of 100 MiB" in over.reason


async def test_an_engine_without_a_limit_or_gone_is_left_alone() -> None:
    watched = Watched(a_handle("old", 1, limit=None), a_handle("gone", 2))
    watched.used, watched.alive = {1: 900 * MIB, 2: 900 * MIB}, {1}
    await watched.watch.look()
    assert watched.outcomes == [] and watched.asked == [{2}]


async def test_the_next_process_under_the_same_pid_is_reported_anew() -> None:
    watched = Watched(a_handle("i-1", 1))
    watched.used = {1: 900 * MIB}
    await watched.watch.look()
    watched.handles = {}
    await watched.watch.look()
    watched.handles = {"i-2": a_handle("i-2", 1)}
    await watched.watch.look()
    assert [over.instance_id for over in watched.outcomes] == ["i-1", "i-2"]


def test_private_memory_of_a_whole_group_is_measured_and_shared_files_are_not() -> None:
    child = "x = b'x' * (60 << 20); print(flush=True); input()"
    parent = f"import subprocess, sys; x = b'x' * (50 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin and process.stdout
    process.stdout.readline()
    try:
        used = private_bytes({process.pid})
    finally:
        process.communicate(b"\n")
    assert 110 * MIB <= used[process.pid] < 200 * MIB
    assert private_bytes({os.getpid()}).keys() == {os.getpid()}
    assert private_bytes(set()) == {}


def test_without_a_range_the_kernel_chooses() -> None:
    assert EnginePorts(HOST, None).take("i-1", ()) == 0


def test_hands_out_each_port_once_and_in_turn() -> None:
    ports = EnginePorts(HOST, PortRange(21000, 21002))
    assert [ports.take(f"i-{k}", ()) for k in range(3)] == [21000, 21001, 21002]
    with pytest.raises(EngineFailed, match=r"no free port in GLOWPLUG_ENGINE_PORTS=21000-21002: 3 are in use"):
        ports.take("i-3", ())
    ports.settled("i-0")
    assert ports.take("i-3", ()) == 21000
    ports.settled("i-3")
    ports.settled("i-1")
    assert ports.take("i-4", ()) == 21001
    with pytest.raises(EngineFailed):
        ports.take("i-5", (21000,))


def test_passes_over_a_port_that_somebody_listens_on() -> None:
    with socket.socket() as other:
        other.bind((HOST, 21010))
        other.listen()
        assert EnginePorts(HOST, PortRange(21010, 21011)).take("i-1", ()) == 21011


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(EngineFailed, match=r"engines cannot listen on 192\.0\.2\.1"):
        EnginePorts("192.0.2.1", PortRange(21000, 21001)).take("i-1", ())


def test_a_wrong_range_is_one_clear_line() -> None:
    with pytest.raises(WrongSetting) as caught:
        AgentSettings.of({"engine_ports": "9-1"})
    assert str(caught.value).startswith("GLOWPLUG_ENGINE_PORTS: expected first-last")


async def test_no_process_is_looked_at_while_no_engine_has_a_limit() -> None:
    watched = Watched(a_handle("old", 1, limit=None))
    await watched.watch.look()
    assert watched.asked == []
    watched.handles["i-2"] = a_handle("i-2", 2)
    await watched.watch.look()
    assert watched.asked == [{2}]
