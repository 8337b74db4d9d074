"""Any server by its command line, on a server that knows nothing of us. Lane: fast, 6 s."""

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.domain.errors import EngineFailed, EngineMisconfigured
from glowplug.engines.drivers import driver
from glowplug.engines.port import Ability, EngineDriver, EngineSettings, Sleeper
from tests.contract.engine_rig import EngineCase
from tests.waiting import WAIT_S, lives, until

ROOT = Path(__file__).parents[2]
SERVERS = f"""
[plain]
command = ["{sys.executable}", "-m", "tests.plain_server", "--port", "{{port}}", "--model", "{{weights}}"]
env = {{PYTHONPATH = "{ROOT}"}}
health = "/alive"
args = ["--name", "--no-such-argument"]
in_flight = ["plain_running", "plain_waiting"]
swap = {{sleep = {{path = "/doze"}}, wake = {{path = "/rise"}}}}

[false]
command = ["{sys.executable}", "-c", "raise SystemExit('no such card')"]
swap = {{sleep = {{path = "/doze"}}, wake = {{path = "/rise"}}}}

[mute]
command = ["{sys.executable}", "-m", "tests.plain_server", "--port", "{{port}}", "--model", "{{weights}}"]
env = {{PYTHONPATH = "{ROOT}"}}
health = "/alive"
swap = {{sleep = {{path = "/no-such-path"}}, wake = {{path = "/rise"}}}}
"""


class CommandCase(EngineCase):
    def __init__(self, folder: Path, servers: str = SERVERS) -> None:
        (folder / "servers.toml").write_text(servers)
        super().__init__("command", folder, EngineSettings(servers=str(folder / "servers.toml")))

    @property
    def weights(self) -> Path:
        path = self.folder / "weights"
        path.write_bytes(b"x" * 1000)
        return path


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[CommandCase]:
    made = CommandCase(tmp_path)
    yield made
    await made.close()


def sleeper(made: EngineDriver) -> Sleeper:
    assert isinstance(made, Sleeper)
    return made


async def answer(url: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        return await client.post("/v1/completions", json={"prompt": "x"})


async def test_it_starts_answers_sleeps_wakes_and_leaves_nothing(case: CommandCase) -> None:
    report = await case.start(engine_args={"server": "plain", "args": ["--name", "mine"]})
    handle = report.handle
    assert (await case.driver.health(handle)).ok and await case.driver.num_in_flight(handle) == 0
    assert (await answer(handle.url)).json()["choices"][0]["text"] == "mine has 1000 bytes"
    await sleeper(case.driver).sleep(handle, "swapped_out")
    assert (await answer(handle.url)).status_code == 503 and case.driver.adopt(handle)
    await sleeper(case.driver).wake(handle)
    assert (await answer(handle.url)).status_code == 200
    children = psutil.Process(handle.pid).children()
    await case.driver.stop(handle, grace_s=5.0)
    assert children
    await until(lambda: not any(lives(child) for child in children), "its server has ended too")


async def test_a_server_that_sleeps_is_not_asked_again(case: CommandCase) -> None:
    """Its agent may have died before it recorded the sleep."""
    handle = (await case.start(engine_args={"server": "plain"})).handle
    await sleeper(case.driver).sleep(handle, "swapped_out")
    later = CommandCase(case.folder, SERVERS.replace("/doze", "/no-such-path"))
    await sleeper(later.driver).sleep(handle, "swapped_out")
    await sleeper(later.driver).wake(handle)
    assert (await answer(handle.url)).status_code == 200
    with pytest.raises(EngineFailed, match="404"):
        await sleeper(later.driver).sleep(handle, "swapped_out")


async def test_a_server_that_dies_takes_its_process_with_it(case: CommandCase) -> None:
    handle = (await case.start(engine_args={"server": "plain"})).handle
    (server,) = psutil.Process(handle.pid).children()
    server.kill()
    await until(lambda: not case.driver.adopt(handle), "the agent sees that it is gone")


@pytest.mark.parametrize(
    ("engine_args", "why"),
    [
        ({"server": "false"}, "ended with status 1 before it was healthy"),
        ({"server": "plain", "args": ["--no-such-argument"]}, "ended with status 2"),
    ],
)
async def test_a_command_that_fails_says_why(case: CommandCase, engine_args: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineFailed, match=why) as failed:
        await case.start(engine_args=engine_args)
    assert any(said in failed.value.message for said in ("no such card", "unrecognized arguments"))


@pytest.mark.parametrize(
    "engine_args",
    [
        {"server": "other"},
        {},
        {"server": "plain", "args": "--name"},
        {"server": "plain", "args": ["--host=0.0.0.0"]},
        {"servr": "x"},
    ],
)
async def test_what_the_node_does_not_declare_is_refused(case: CommandCase, engine_args: dict[str, Any]) -> None:
    with pytest.raises(EngineMisconfigured, match="engine_args"):
        await case.launch(engine_args=engine_args)


async def test_a_server_that_leaves_the_file_is_not_healthy_and_still_stops(case: CommandCase) -> None:
    handle = (await case.start(engine_args={"server": "plain"})).handle
    later = CommandCase(case.folder, '[other]\ncommand = ["x"]\n').driver
    health = await later.health(handle)
    assert (health.ok, health.alive) == (False, True) and "no server 'plain'" in health.reason
    await later.stop(handle, grace_s=5.0)
    assert not later.adopt(handle)


async def test_what_is_not_declared_of_a_server_is_an_error(case: CommandCase) -> None:
    handle = (await case.start(engine_args={"server": "mute"})).handle
    for attempt in (
        case.driver.num_in_flight(handle),
        sleeper(case.driver).sleep(handle, "prewarmed"),
        sleeper(case.driver).sleep(handle, "swapped_out"),
        sleeper(case.driver).limit_kv(handle, 1),
    ):
        with pytest.raises(EngineFailed):
            await attempt
    assert case.driver.adopt(handle)


def test_abilities_are_those_that_every_server_has(tmp_path: Path) -> None:
    assert CommandCase(tmp_path).driver.abilities("cuda") == {Ability.SWAP}
    assert CommandCase(tmp_path, '[one]\ncommand = ["x"]\n' + SERVERS).driver.abilities("cuda") == frozenset()
    assert driver("command").abilities("cuda") == frozenset()


def test_without_a_file_the_engine_is_not_available() -> None:
    assert "GLOWPLUG_SERVERS" in driver("command").unavailable()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[x", "is not TOML"),
        ("[x]\n", "x.*command|command"),
        ('[x]\ncommand = ["{gpu}"]\n', "is one of weights"),
        ('[x]\ncommand = ["a"]\nhealth = "alive"\n', "health"),
        ('[x]\ncommand = ["a"]\nsleeps = true\n', "sleeps"),
        ('[x]\ncommand = ["a"]\nswap = {sleep = {path = "/a"}}\n', "swap.wake"),
    ],
    ids=["no TOML", "no command", "unknown place", "no path", "unknown field", "half a pair"],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, why: str) -> None:
    assert re.search(why, CommandCase(tmp_path, text).driver.unavailable())


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    made = driver("command", EngineSettings(servers=str(tmp_path / "none.toml")))
    assert "cannot be read" in made.unavailable()
