"""While the disk is full, every request is accounted for, warm ones are served, failed starts are reported, and all
recovers. Emulated engine, real processes."""

import asyncio
import json

import httpx
import pytest

from tests.chaos.test_kill_services import Ledger, under_load
from tests.fleet_runner import EMULATED, Fleet
from tests.small_disk import small_disk
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(500)]
COLD = [f"cold-{i}" for i in range(6)]
HELD_S = 60.0
MODEL = EMULATED.replace("max_wait_s: 180", f"max_wait_s: {HELD_S:g}")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with small_disk(tmp_path_factory.mktemp("full") / "disk", 96) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(disk):
    models = {"warm": MODEL.format(name="warm", keep_alive_s=-1)}
    models |= {name: MODEL.format(name=name, keep_alive_s=1) for name in COLD}
    started = Fleet.start(disk.path, models, GLOWPLUG_EMULATED_TIME_SCALE="4", GLOWPLUG_MIN_FREE_BYTES="0")
    assert started.chat("warm").status_code == 200
    yield started
    disk.free()
    started.stop()


def traffic(fleet: Fleet, models: list[str], seconds: float, per_second: float) -> Ledger:
    return asyncio.run(under_load(fleet.url("data"), models, seconds, per_second, lambda: None))


def ready_reason(fleet: Fleet, service: str) -> str:
    return str(httpx.get(f"{fleet.process(service)['url']}/ready", timeout=30).json()["reason"])


def says_so(fleet: Fleet, service: str, disk) -> bool:
    disk.fill()  # again: a segment of usage records gives its unused room back
    return "stores no events" in ready_reason(fleet, service)


def test_a_full_disk_is_told_survived_and_over_once_there_is_space(fleet, disk):
    disk.fill()
    during = traffic(fleet, ["warm", *COLD], 12.0, 10)
    assert not during.open
    assert during.ends["done"] >= sum(during.ends.values()) / 7 - 2, during.ends
    assert set(during.ends) <= {"done", "503", "error event"}, (during.ends, during.broken[:3])

    for service in ("autoscaler", "placer"):
        wait_until(f"{service} says so", lambda s=service: says_so(fleet, s, disk))
    nats = wait_until("the supervisor says so", lambda: _problem_of(fleet))
    assert "no space left on device" in nats, nats
    doctor = fleet.cli("doctor")
    assert doctor.returncode == 1 and "no space left on device" in doctor.stdout, doctor.stdout
    started = fleet.chat("cold-0")
    assert started.status_code == 503 and "cannot be started now" in started.json()["error"]["message"], started.text
    assert started.elapsed.total_seconds() < HELD_S / 2, "it was held"
    assert fleet.chat("warm").status_code == 200

    size_when_full = (fleet.state_dir / "logs" / "nats.log").stat().st_size
    disk.free()
    wait_until("every process is ready again", fleet.ready)
    after = traffic(fleet, ["warm", *COLD], 8.0, 10)
    assert set(after.ends) == {"done"}, (after.ends, after.broken[:3])
    logs = fleet.state_dir / "logs"
    assert "the supervisor restarts nats: it stores no events" in (logs / "supervisor.log").read_text()
    assert (logs / "nats.log").stat().st_size > size_when_full, "logs are written again"


def _problem_of(fleet: Fleet) -> str:
    """NATS' own /healthz: fleet.json cannot be written now."""
    (ports,) = (fleet.state_dir / "nats").glob("nats-server_*.ports")
    monitor = json.loads(ports.read_text())["monitoring"][0]
    answer = httpx.get(f"{monitor}/healthz", timeout=30)
    return str(answer.json().get("error", ""))
