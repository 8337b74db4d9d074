"""Several routers on one bus, the autoscaler that owns tenants and keys, and a scripted engine in the test's loop."""

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.contract.data_port_rig import FakeEngine, Reply, Served, a_model, an_instance
from tests.integration.router_process import RouterProcess, write_rows
from tests.ports import free_port
from tests.servers import Infra
from tests.waiting import WAIT_S, until

ADMIN = {"Authorization": "Bearer secret"}
CLOCKS = Path(__file__).parent / "shifted_clock"
USAGE = {"prompt_tokens": 4, "completion_tokens": 4}


async def say_little(served: Served) -> None:
    await served.json({"choices": [], "usage": USAGE})


@dataclass
class Answers:
    """All statuses, and (seconds since the epoch, router, status) of each."""

    each: list[tuple[float, int, int]] = field(default_factory=list)
    took_s: float = 0.0  # from first request to last answer

    def since(self, at: float) -> Counter[int]:
        return Counter(status for when, _, status in self.each if when >= at)

    @property
    def statuses(self) -> Counter[int]:
        return self.since(0.0)


@dataclass
class RouterFleet:
    infra: Infra
    folder: Path
    engine: FakeEngine
    routers: list[RouterProcess]
    admin_port: int
    client: httpx.AsyncClient
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def autoscaler_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.client.request(method, self.autoscaler_url + path, json=body, headers=ADMIN)
        assert answer.status_code < 300, answer.text
        return answer.json()

    async def tenant(self, name: str, **limits: int) -> None:
        await self.admin("PUT", f"/v1/tenants/{name}", {"limits": limits})

    async def key(self, tenant: str, **fields: Any) -> tuple[str, str]:
        row = await self.admin("POST", "/v1/keys", {"tenant": tenant, "name": "k"} | fields)
        return row["key_id"], row["key"]

    async def ask(self, router: int, key: str, **fields: Any) -> httpx.Response:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]} | fields
        url = f"{self.routers[router].url}/v1/chat/completions"
        return await self.client.post(url, json=body, headers={"Authorization": f"Bearer {key}"})

    async def everywhere(self, key: str, status: int) -> None:
        async def so() -> bool:
            answers = await asyncio.gather(*(self.ask(n, key) for n in range(len(self.routers))))
            return all(answer.status_code == status for answer in answers)

        await until(so, f"{status} of all routers", every_s=0.02)

    async def flood(self, key: str, nums: Sequence[int]) -> Answers:
        answers = Answers()
        await asyncio.gather(*(self._ask(answers, n, key) for n, num in enumerate(nums) for _ in range(num)))
        return answers

    async def offer(self, key: str, per_s: Sequence[float], seconds: float) -> Answers:
        answers, began = Answers(), time.monotonic()
        due = sorted((k / rate, n) for n, rate in enumerate(per_s) if rate for k in range(int(rate * seconds)))
        async with asyncio.TaskGroup() as tasks:
            for at, n in due:
                await asyncio.sleep(max(began + at - time.monotonic(), 0.0))
                tasks.create_task(self._ask(answers, n, key))
        answers.took_s = time.monotonic() - began
        return answers

    async def _ask(self, answers: Answers, router: int, key: str) -> None:
        at = time.time()
        answers.each.append((at, router, (await self.ask(router, key)).status_code))


@contextlib.asynccontextmanager
async def router_fleet(
    infra: Infra, folder: Path, *, clocks_s: Sequence[float] = (0.0, 0.0, 0.0), reply: Reply = say_little, **env: str
) -> AsyncIterator[RouterFleet]:
    """A router per entry of `clocks_s`, the seconds by which its clock is ahead."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await FakeEngine(reply).start()
        stack.push_async_callback(engine.stop)
        rows = a_model(max_concurrency=4096), an_instance("i-1", engine.url, max_concurrency=4096)
        await write_rows(infra.valkey.url, *rows)
        limits = httpx.Limits(max_connections=600, max_keepalive_connections=600)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=WAIT_S, limits=limits))
        fleet = RouterFleet(infra, folder, engine, [], free_port(), client)
        stack.push_async_callback(_stop, fleet)
        await _start_autoscaler(fleet, env)
        for number, off_s in enumerate(clocks_s, start=1):
            place = folder / f"router-{number}"
            place.mkdir()
            path = os.pathsep.join(filter(None, (str(CLOCKS), os.environ.get("PYTHONPATH", ""))))
            router = RouterProcess(infra.nats.url, infra.valkey.url, place)
            fleet.routers.append(router)
            own = {"GLOWPLUG_SERVICE_ID": f"router-{number}", "PYTHONPATH": path, "CLOCK_OFF_S": str(off_s)}
            await router.start(wait=False, **env | own)
        for router in fleet.routers:
            await router.until_ready()
        await until(lambda: _is_ready(client, fleet.autoscaler_url), "the autoscaler is ready", every_s=0.1)
        yield fleet


async def _start_autoscaler(fleet: RouterFleet, env: dict[str, str]) -> None:
    (fleet.folder / "models").mkdir()
    own = {
        "GLOWPLUG_PORT": str(fleet.admin_port),
        "GLOWPLUG_STATE_DIR": str(fleet.folder),
        "GLOWPLUG_MODELS_DIR": str(fleet.folder / "models"),
        "GLOWPLUG_SERVICE_ID": "autoscaler-1",
        "GLOWPLUG_ADMIN_TOKEN": "secret",
    }
    argv = (sys.executable, "-m", "glowplug.services.autoscaler")
    with (fleet.folder / "autoscaler.log").open("ab") as log:
        given = os.environ | fleet.infra.env | own | env
        fleet.processes.append(await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log, env=given))


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(f"{url}/ready")).status_code == 200
    return False


async def _stop(fleet: RouterFleet) -> None:
    for router in fleet.routers:
        await router.kill()
    for process in fleet.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def seconds_until(look: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Fails after `within_s`."""
    began = time.monotonic()
    await until(look, "a change that all routers feel", within_s=within_s, every_s=0.01)
    return time.monotonic() - began


__all__ = ["Answers", "RouterFleet", "router_fleet", "say_little", "seconds_until"]
