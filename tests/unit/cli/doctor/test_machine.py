"""Each check of a machine, both ways: what is well is ok, what is broken is named with what to do."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.cli.doctor import machine
from glowplug.cli.doctor.findings import Level
from glowplug.cli.doctor.machine import GpuFacts, MachineFacts, Program, TakenPort, check
from glowplug.runtime.supervisor.settings import FleetSettings


def settings(**fields: Any) -> FleetSettings:
    """As `glowplug up` would have them, whatever this environment says."""
    return FleetSettings.model_construct(state_dir=Path("/somewhere/.glowplug"), **fields)


OK, WARN, FAIL, SKIPPED = Level
GIB = 1 << 30
WELL = MachineFacts(
    python=(3, 11, 7),
    settings=settings(),
    disk_free_bytes=50 * GIB,
    memory_available_bytes=8 * GIB,
    memory_limit_bytes=16 * GIB,
    cpu_limit=2.0,
    pids_limit=4096,
    num_cpus=8,
    shm_free_bytes=4 * GIB,
    open_files=65536,
    ports_taken=(),
    localhost=("127.0.0.1", "::1"),
    clock_synchronised=True,
    nats=Program(version="nats-server: v2.15.1"),
    valkey=Program(version="Valkey server v=9.1.2"),
    llamacpp=Program(version="xllamacpp 1 imports"),
    vllm=Program(version="vllm 1 imports"),
    driver=Program(version="550.54.15"),
    cuda="12.4",
    gpus=(GpuFacts(name="H200", total_bytes=139 * GIB, used_bytes=0),),
    container=Program(version="docker 27"),
    container_has_gpu=True,
)
TAKEN = TakenPort(port=8001, owner="the console", holder="python (pid 7)")
BROKEN = Program(problem="it cannot run")


def test_a_machine_that_is_well_has_nothing_to_do() -> None:
    found = check(WELL)
    assert {finding.level for finding in found} == {OK}
    assert all(not finding.do for finding in found)


@pytest.mark.parametrize(
    ("about", "level", "words", "changes"),
    [
        ("python", FAIL, "3.10.1 is too old", {"python": (3, 10, 1)}),
        ("settings", FAIL, "GLOWPLUG_NODES", {"wrong_setting": "GLOWPLUG_NODES: must be less, not '99'"}),
        ("disk", FAIL, "100 MiB free", {"disk_free_bytes": 100 << 20}),
        ("disk", FAIL, "not writable", {"state_dir_problem": "/x is not writable for this user"}),
        ("disk", WARN, "only 500 MiB", {"disk_free_bytes": 500 << 20}),
        ("memory", WARN, "600 MiB available", {"memory_available_bytes": 600 << 20}),
        ("shm", WARN, "64 MiB free", {"shm_free_bytes": 64 << 20}),
        ("shm", WARN, "not there", {"shm_free_bytes": None}),
        ("open files", FAIL, "at most 256", {"open_files": 256}),
        ("open files", WARN, "at most 1024", {"open_files": 1024}),
        ("cgroup", WARN, "512 MiB", {"memory_limit_bytes": 512 << 20}),
        ("cgroup", WARN, "100 processes", {"pids_limit": 100}),
        ("loopback", FAIL, "unreachable", {"ipv4_loopback": "Network is unreachable"}),
        ("loopback", WARN, "`localhost` is ::1", {"localhost": ("::1",)}),
        ("ipv6", SKIPPED, "does not work", {"ipv6_loopback": "Cannot assign requested address"}),
        ("proxy", WARN, "http_proxy is set", {"proxy": "http_proxy"}),
        ("ports", FAIL, "8001 on 127.0.0.1, needed by the console, is taken by python", {"ports_taken": (TAKEN,)}),
        ("ports", SKIPPED, "running fleet", {"ports_taken": None}),
        ("clock", SKIPPED, "nothing synchronises", {"clock_synchronised": False}),
        ("clock", SKIPPED, "does not tell", {"clock_synchronised": None}),
        ("nats", FAIL, "cannot run", {"nats": BROKEN}),
        ("valkey", FAIL, "cannot run", {"valkey": BROKEN}),
        ("llama.cpp", WARN, "cannot run", {"llamacpp": BROKEN}),
        ("vllm", SKIPPED, "no vLLM", {"vllm": Program(problem="no vLLM here", absent=True)}),
        ("vllm", WARN, "does not work", {"vllm": BROKEN}),
        ("vllm", FAIL, "cannot run", {"vllm": BROKEN, "settings": settings(engine="vllm")}),
        ("gpu", SKIPPED, "no driver", {"driver": Program(problem="no driver")}),
        ("gpu", FAIL, "no driver", {"driver": Program(problem="no driver"), "settings": settings(gpu_kind="cuda")}),
        ("gpu", FAIL, "there is no GPU", {"gpus": ()}),
        ("gpu driver", WARN, "470.1 is older", {"driver": Program(version="470.1")}),
        ("gpu 0", WARN, "most of it is taken", {"gpus": (GpuFacts(name="A", total_bytes=10, used_bytes=9),)}),
        ("containers", SKIPPED, "cannot run", {"container": BROKEN}),
        ("containers", WARN, "no NVIDIA runtime", {"container_has_gpu": False}),
    ],
)
def test_what_is_wrong_is_named(about: str, level: Level, words: str, changes: dict[str, Any]) -> None:
    before = [f for f in check(WELL) if f.about == about]
    (found,) = (f for f in check(replace(WELL, **changes)) if f.about == about)
    assert found.level is level
    assert words in found.says
    assert found.do or level is SKIPPED
    assert found not in before


def test_this_very_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = machine.gather(tmp_path / "s", fleet_runs=False)
    assert not facts.nats.problem and not facts.valkey.problem
    assert facts.disk_free_bytes > 0 and facts.open_files > 0
    assert not (tmp_path / "s").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a directory" in machine.gather(tmp_path / "file" / "s", fleet_runs=False).state_dir_problem


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, ""),
        ({"http_proxy": "http://p:3128"}, "http_proxy"),
        ({"HTTP_PROXY": "http://p:3128", "NO_PROXY": "example.org"}, "HTTP_PROXY"),
        ({"http_proxy": "http://p:3128", "no_proxy": "localhost, 127.0.0.1"}, ""),
        ({"https_proxy": "http://p:3128"}, ""),
    ],
)
def test_a_proxy_that_would_take_loopback_requests_is_seen(environ: dict[str, str], variable: str) -> None:
    assert machine.proxy_in_the_way(environ) == variable


def test_programs_are_asked_with_an_end() -> None:
    assert machine.said(["sh", "-c", "echo one; echo two"]).version == "two"
    assert machine.said(["sh", "-c", "echo broken >&2; exit 3"]).problem == "sh fails: broken"
    assert "did not answer within 0.2 s" in machine.said(["sleep", "30"], 0.2).problem
    assert "cannot run" in machine.said(["no-such-program"]).problem


def test_loopback_is_tried_with_a_byte() -> None:
    assert machine.loopback(socket.AF_INET, "127.0.0.1") == ""
    assert machine.loopback(socket.AF_INET, "192.0.2.1") != ""  # TEST-NET: never an address of this machine
