"""Two processes with one service id: the second does not start; a dead one frees its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ha_fleet import HaFleet
from tests.servers import Infra
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("service", ["predictor", pytest.param("router", marks=pytest.mark.long)])
def test_a_second_process_of_one_name_is_refused_and_the_name_of_a_dead_one_is_free(
    tmp_path: Path, infra: Infra, service: str
) -> None:
    fleet = HaFleet(tmp_path, infra, lease_s=0)
    (tmp_path / "state").mkdir()
    name = f"{service}-{os.getpid()}"
    first = fleet.add(name)
    try:
        wait_until("the first is ready", first.start().ready, 90)
        second = fleet.add(name)
        env = second.env | {"GLOWPLUG_STATE_DIR": str(tmp_path / "state-2")}
        done = subprocess.run(
            [sys.executable, "-m", f"glowplug.services.{service}"], env=env, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        assert f"the service id {name} belongs to a process that runs at {first.url}" in said, said
        assert done.returncode == 1
        assert first.ready()
        first.kill()
        wait_until("the next has the name", second.start().ready, 90)
        assert "belongs to a process" not in second.log()
    finally:
        first.kill()
        fleet.stop()
