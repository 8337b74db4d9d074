"""Checks of a machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.cli.doctor import machine
from glowplug.cli.doctor.findings import Finding, Level
from glowplug.cli.doctor.machine import ProcessLimits, Program
from glowplug.runtime.supervisor.settings import FleetSettings


def settings(**fields: Any) -> FleetSettings:
    """As under `glowplug up`, whatever the environment."""
    return FleetSettings(state_dir=Path("/somewhere/.glowplug"), **fields)


OK, WARN, FAIL, SKIPPED = Level
GIB = 1 << 30
TAKEN = [(8001, "the console", "python (pid 7)")]
WELL, BROKEN, ABSENT = Program(version="1.0"), Program(problem="it cannot run"), Program(problem="no vLLM", absent=True)
DRIVER, NO_DRIVER = Program(version="550.54.15"), Program(problem="no driver")
H200 = [("H200", 139 * GIB, 0)]
VARIABLE = "GLOWPLUG_NODES: must be less, not '99'"


@pytest.mark.parametrize(
    ("level", "words", "found"),
    [
        (OK, "3.11.7", machine.python((3, 11, 7))),
        (FAIL, "3.10.1 is too old", machine.python((3, 10, 1))),
        (OK, "in range", machine.setting("")),
        (FAIL, "GLOWPLUG_NODES", machine.setting(VARIABLE)),
        (OK, "50 GiB free", machine.disk(settings(), "", 50 * GIB)),
        (FAIL, "100 MiB free", machine.disk(settings(), "", 100 << 20)),
        (FAIL, "not writable", machine.disk(settings(), "/x is not writable for this user", 50 * GIB)),
        (WARN, "only 500 MiB", machine.disk(settings(), "", 500 << 20)),
        (OK, "8.0 GiB available", machine.memory(8 * GIB)),
        (WARN, "600 MiB available", machine.memory(600 << 20)),
        (OK, "4.0 GiB free", machine.shm(4 * GIB)),
        (WARN, "64 MiB free", machine.shm(64 << 20)),
        (WARN, "missing", machine.shm(None)),
        (OK, "up to 65536", machine.open_files(65536)),
        (FAIL, "at most 256", machine.open_files(256)),
        (WARN, "at most 1024", machine.open_files(1024)),
        (OK, "2 of 8 cores", machine.cgroup(ProcessLimits(memory_bytes=16 * GIB, cpus=2.0, pids=4096), 8)),
        (OK, "no limits", machine.cgroup(ProcessLimits(), 8)),
        (WARN, "512 MiB", machine.cgroup(ProcessLimits(memory_bytes=512 << 20), 8)),
        (WARN, "100 processes", machine.cgroup(ProcessLimits(pids=100), 8)),
        (OK, "works", machine.loopback("", ("127.0.0.1", "::1"))),
        (FAIL, "unreachable", machine.loopback("Network is unreachable", ("127.0.0.1",))),
        (WARN, "`localhost` is ::1", machine.loopback("", ("::1",))),
        (WARN, "http_proxy is set", machine.proxy("http_proxy")),
        (OK, "are free", machine.ports(settings(), [])),
        (FAIL, "8001 on 127.0.0.1, needed by the console, is taken by python", machine.ports(settings(), TAKEN)),
        (SKIPPED, "running fleet", machine.ports(settings(), None)),
        (OK, "1.0", machine.server("nats", WELL)),
        (FAIL, "cannot run", machine.server("nats", BROKEN)),
    ],
)
def test_each_value_has_one_finding_and_what_is_wrong_a_remedy(
    level: Level, words: str, found: Iterator[Finding]
) -> None:
    (finding,) = found
    assert finding.level is level and words in finding.says
    assert bool(finding.do) == (level in (WARN, FAIL)) or level is SKIPPED


def test_a_proxy_that_is_not_in_the_way_is_not_spoken_of() -> None:
    assert list(machine.proxy("")) == []


@pytest.mark.parametrize(
    ("about", "level", "words", "found"),
    [
        ("llama.cpp", OK, "1.0", machine.engines("llamacpp", WELL, WELL)),
        ("llama.cpp", WARN, "cannot run", machine.engines("llamacpp", BROKEN, WELL)),
        ("vllm", OK, "1.0", machine.engines("llamacpp", WELL, WELL)),
        ("vllm", SKIPPED, "no vLLM", machine.engines("llamacpp", WELL, ABSENT)),
        ("vllm", WARN, "does not work", machine.engines("llamacpp", WELL, BROKEN)),
        ("vllm", FAIL, "cannot run", machine.engines("vllm", WELL, BROKEN)),
        ("gpu", SKIPPED, "no driver", machine.nvidia("host", NO_DRIVER, "", [])),
        ("gpu", FAIL, "no driver", machine.nvidia("cuda", NO_DRIVER, "", [])),
        ("gpu", FAIL, "there is no GPU", machine.nvidia("host", DRIVER, "12.4", [])),
        ("gpu driver", OK, "CUDA 12.4", machine.nvidia("host", DRIVER, "12.4", H200)),
        ("gpu driver", WARN, "470.1 is older", machine.nvidia("host", Program(version="470.1"), "", H200)),
        ("gpu 0", OK, "H200", machine.nvidia("host", DRIVER, "12.4", H200)),
        ("gpu 0", WARN, "most of it is taken", machine.nvidia("host", DRIVER, "12.4", [("A", 10, 9)])),
        ("containers", OK, "1.0", machine.containers(WELL, True, has_gpus=True)),
        ("containers", SKIPPED, "cannot run", machine.containers(BROKEN, None, has_gpus=True)),
        ("containers", WARN, "no NVIDIA runtime", machine.containers(WELL, False, has_gpus=True)),
    ],
)
def test_programs_and_devices(about: str, level: Level, words: str, found: Iterator[Finding]) -> None:
    (finding,) = (one for one in found if one.about == about)
    assert finding.level is level and words in finding.says
    assert finding.do or level in (OK, SKIPPED)


def test_this_very_machine_can_be_looked_at(tmp_path: Path) -> None:
    found = {finding.about: finding for finding in machine.look(tmp_path / "s", fleet_runs=False)}
    assert found["nats"].level is found["valkey"].level is OK
    assert {"python", "disk", "memory", "open files", "llama.cpp"} <= set(found)
    assert not (tmp_path / "s").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {finding.about: finding for finding in machine.look(tmp_path / "file" / "s", fleet_runs=False)}
    assert "is not a directory" in found["disk"].says


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
    assert machine.loopback_problem() == ""
    assert machine.loopback_problem("192.0.2.1") != ""  # TEST-NET
