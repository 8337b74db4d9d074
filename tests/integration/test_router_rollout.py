"""Two routers behind a balancer that only checks readiness."""

import asyncio
import contextlib
import itertools
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.contract.data_port_rig import DONE, TOKEN, FakeEngine, a_model, an_instance, streaming
from tests.integration.router_process import RouterProcess, chat_body, write_rows
from tests.servers import Infra
from tests.waiting import WAIT_S, until

DELAY_S = 3.0
NUM_CLIENTS = 3


class Balancer:
    """Copies bytes to one of the backends last seen ready, in turn. It checks sixty times while a stopping router still
    serves, and skips a backend that refuses connections."""

    def __init__(self, backends: list[RouterProcess]) -> None:
        self._backends, self._ready = backends, set(range(len(backends)))
        self._turns = itertools.count()
        self._copies: set[asyncio.Task[None]] = set()
        self.taken: Counter[int] = Counter()

    async def start(self) -> "Balancer":
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._asking = asyncio.create_task(self._ask())
        return self

    async def stop(self) -> None:
        self._asking.cancel()
        self._server.close()
        for copy in list(self._copies):
            copy.cancel()

    async def _ask(self) -> None:
        async with httpx.AsyncClient(timeout=DELAY_S / 3) as client:
            while True:
                for k, backend in enumerate(self._backends):
                    ok = False
                    with contextlib.suppress(httpx.HTTPError):
                        ok = (await client.get(f"{backend.admin_url}/ready")).status_code == 200
                    (self._ready.add if ok else self._ready.discard)(k)
                await asyncio.sleep(DELAY_S / 60)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for k in self._in_turn():
            try:
                there = await asyncio.open_connection("127.0.0.1", self._backends[k].data_port)
            except OSError:
                continue
            self.taken[k] += 1
            for source, sink in ((reader, there[1]), (there[0], writer)):
                task = asyncio.create_task(_copy(source, sink))
                self._copies.add(task)
                task.add_done_callback(self._copies.discard)
            return
        writer.close()

    def _in_turn(self) -> list[int]:
        ready = sorted(self._ready) or list(range(len(self._backends)))
        first = next(self._turns) % len(ready)
        return ready[first:] + ready[:first]


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    with contextlib.suppress(OSError):
        sink.close()


async def restart(router: RouterProcess, **env: str) -> None:
    router.terminate()
    assert await router.ended() == 0, router.log()
    await router.start(**env)


async def test_a_rolling_restart_of_two_routers_loses_no_request(infra: Infra, tmp_path: Path) -> None:
    engine = await FakeEngine(streaming(TOKEN, TOKEN, TOKEN, DONE, every_s=0.05)).start()
    await write_rows(infra.valkey.url, a_model("rolled"), an_instance("i-roll", engine.url, model_key="rolled"))
    envs, routers = [], []
    for k in (1, 2):
        folder = tmp_path / f"router-{k}"
        folder.mkdir()
        env = {"GLOWPLUG_SERVICE_ID": f"rolled-{k}", "GLOWPLUG_DRAIN_DELAY_S": str(DELAY_S)}
        envs.append(env)
        routers.append(await RouterProcess(infra.nats.url, infra.valkey.url, folder).start(**env))
    balancer = await Balancer(routers).start()
    url, ends, over = f"http://127.0.0.1:{balancer.port}/v1/chat/completions", Counter[str](), asyncio.Event()

    async def client(keep_alive: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if keep_alive else 0)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as session:
            while not over.is_set():
                try:
                    answer = await session.post(url, json=chat_body("rolled", stream=True))
                    whole = answer.content == TOKEN * 3 + DONE
                    ends["done" if whole else f"{answer.status_code} {answer.content[-200:]!r}"] += 1
                except httpx.HTTPError as error:
                    ends[repr(error)] += 1
                await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client(k % 2 == 0)) for k in range(NUM_CLIENTS)]
    try:
        for router, env in zip(routers, envs, strict=True):
            before = ends["done"]
            await restart(router, **env)
            await until(lambda before=before: ends["done"] >= before + 20)
    finally:
        over.set()
        await asyncio.gather(*clients)
        await balancer.stop()
        for router in routers:
            await router.kill()
        await engine.stop()
    assert set(ends) == {"done"}, ends
    assert balancer.taken[0] and balancer.taken[1]


async def test_a_router_that_leaves_serves_on_and_says_so(infra: Infra, tmp_path: Path) -> None:
    engine = await FakeEngine().start()
    await write_rows(infra.valkey.url, a_model("left"), an_instance("i-left", engine.url, model_key="left"))
    router = RouterProcess(infra.nats.url, infra.valkey.url, tmp_path)
    await router.start(GLOWPLUG_DRAIN_DELAY_S="10", GLOWPLUG_SERVICE_ID="leaving-1")
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        router.terminate()
        async with asyncio.timeout(WAIT_S):
            while (await client.get(f"{router.admin_url}/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        assert (await client.get(f"{router.url}/ready")).json() == {"ready": False, "reason": "stopping"}
        assert (await client.get(f"{router.admin_url}/live")).status_code == 200
        answer = await client.post(f"{router.url}/v1/chat/completions", json=chat_body("left", stream=True))
        assert answer.status_code == 200 and answer.headers["connection"] == "close"
        assert await router.ended() == 0
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{router.url}/ready")
    await engine.stop()
