"""Usage end to end: the ledger's sums equal the engine's counts to the token, over kills of router and console and a
locked database. The kills cost 10 to 40 s, mostly of starting processes; the rest 2 s."""

import asyncio
import contextlib
import json
import os
import secrets
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.domain.usage import UsageRecord
from glowplug.events.facts import UsageRecorded
from tests.console_server import ConsoleUnderTest, serving
from tests.contract.data_port_rig import DONE, TOKEN, FakeEngine, Served, a_model, an_instance, streaming
from tests.integration.router_process import RouterProcess, chat_body, write_rows
from tests.ports import free_port
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until

DAY = 1_800_057_600  # a midnight


def record(number: int, **given: Any) -> UsageRecord:
    known: dict[str, Any] = {
        "record_id": f"x-{number}",
        "request_id": f"r-{number}",
        "tenant": "team-a",
        "key_id": "abcdefgh",
        "model_key": "chat",
        "path": "/v1/chat/completions",
        "arrived_at": DAY + 1.0,
        "finished_at": DAY + 2.0,
        "prompt_tokens": 1000,
        "cached_tokens": 100,
        "response_tokens": 10,
        "tokens_exact": True,
        "held_s": 0.5,
        "cold": False,
        "instance_id": "i-1",
        "status": 200,
    }
    return UsageRecord(**known | given)


@contextlib.asynccontextmanager
async def a_ledger(tmp_path: Path) -> AsyncIterator[ConsoleUnderTest]:
    prices = tmp_path / "prices.yaml"
    prices.write_text("models: {chat: {prompt: 1000, cached: 100, response: 5000}}")
    async with serving(state_dir=tmp_path, usage_prices=str(prices)) as at:
        at.clock.stopped_at = DAY + 86400 + 7200
        batch = UsageRecorded(
            router_id="router-1",
            batch=1,
            records=(
                record(1),
                record(2, tenant="team-b", key_id="bbbbbbbb", finished_at=DAY + 3700.0),
                record(3, model_key="free", finished_at=DAY + 86400.0, tokens_exact=False),
            ),
        )
        await at.tell(batch, batch)
        await until(lambda: at.registry.get_sample_value("glowplug_usage_repeated_total") == 3, "all six records")
        yield at


async def test_openais_usage_api(tmp_path: Path) -> None:
    async with a_ledger(tmp_path) as at:
        path = "/v1/organization/usage/completions"
        page = await at.read(path, start_time=str(DAY), bucket_width="1d", limit="1")
        assert (page["object"], page["has_more"], page["next_page"]) == ("page", True, str(DAY + 86400))
        (bucket,) = page["data"]
        assert (bucket["object"], bucket["start_time"], bucket["end_time"]) == ("bucket", DAY, DAY + 86400)
        assert bucket["results"] == [
            {
                "object": "organization.usage.completions.result",
                "input_tokens": 2000,
                "output_tokens": 20,
                "input_cached_tokens": 200,
                "input_audio_tokens": 0,
                "output_audio_tokens": 0,
                "num_model_requests": 2,
                "project_id": None,
                "user_id": None,
                "api_key_id": None,
                "model": None,
                "batch": None,
            }
        ]
        last = await at.read(path, start_time=str(DAY), page=page["next_page"], group_by="model")
        assert not last["has_more"] and [r["model"] for r in last["data"][0]["results"]] == ["free"]
        groups = await at.read(path, start_time=str(DAY), bucket_width="1h", group_by="project_id,api_key_id")
        found = [(r["project_id"], r["api_key_id"]) for bucket in groups["data"] for r in bucket["results"]]
        assert found == [("team-a", "gp-abcdefgh"), ("team-b", "gp-bbbbbbbb")] and len(groups["data"]) == 24
        minutes = await at.read(path, start_time=str(DAY), end_time=str(DAY + 60), bucket_width="1m", models="chat")
        assert [r["num_model_requests"] for r in minutes["data"][0]["results"]] == [1]
        for wrong in ({"bucket_width": "2d"}, {"group_by": "colour"}, {"page": "x"}):
            answer = await at.get(path, **{"start_time": str(DAY), **wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))
        assert (await at.get(path, start_time=str(DAY), end_time="0")).status_code == 400
        costs = await at.read("/v1/organization/costs", start_time=str(DAY), group_by="line_item")
        results = [(r["line_item"], r["amount"]) for bucket in costs["data"] for r in bucket["results"]]
        assert results == [
            ("chat", {"value": pytest.approx(1.92), "currency": "usd"}),
            ("free", {"value": 0.0, "currency": "usd"}),
        ]


async def test_plain_usage_as_json_and_csv(tmp_path: Path) -> None:
    async with a_ledger(tmp_path) as at:
        page = await at.read("/v1/usage", by="tenant,model", since="2w")
        rows = [(r["tenant"], r["model"], r["num_requests"], r["num_exact"], r["cost"]) for r in page["data"]]
        assert rows == [
            ("team-a", "chat", 1, 1, 0.96),
            ("team-a", "free", 1, 0, None),
            ("team-b", "chat", 1, 1, 0.96),
        ]
        text = (await at.get("/v1/usage", by="key,hour", since="2w", format="csv")).text.splitlines()
        assert text[0].startswith("key,hour,num_requests")
        assert text[1] == "gp-abcdefgh,2027-01-16T00:00Z,1,0,1,1000,100,10,0.5,,0.96"
        assert [r["tenant"] for r in (await at.read("/v1/usage", by="tenant", since="2h"))["data"]] == ["team-a"]
        assert (await at.get("/v1/usage", since="yesterday")).status_code == 400
        assert (await at.get("/v1/usage", by="colour")).status_code == 400


async def test_usage_asks_for_the_consoles_key(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path, console_key="secret") as at:
        for path in (
            "/v1/usage",
            "/v1/organization/usage/completions?start_time=0",
            "/v1/organization/costs?start_time=0",
        ):
            assert (await at.get(path)).status_code == 401


class CountingEngine:
    """Half of its answers are streams. After `gate_after` requests it waits for `gate`."""

    def __init__(self, gate_after: int) -> None:
        self.counts: dict[str, tuple[int, int, int]] = {}  # request id -> prompt, cached, response, of whole answers
        self.gate, self.gate_after = asyncio.Event(), gate_after
        self.num_begun = self.num_waiting = 0

    async def reply(self, served: Served) -> None:
        self.num_begun += 1
        if (number := self.num_begun) > self.gate_after and not self.gate.is_set():
            self.num_waiting += 1
            await self.gate.wait()
        details = {"cached_tokens": number}
        usage = {"prompt_tokens": 100 + number, "completion_tokens": 7 + number, "prompt_tokens_details": details}
        if json.loads(served.body)["stream"]:
            end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            await streaming(TOKEN, TOKEN, end, DONE, every_s=0.0)(served)
        else:
            await served.json({"choices": [], "usage": usage})
        request_id = served.header("x-request-id")
        assert request_id
        self.counts[request_id] = (100 + number, number, 7 + number)


class ConsoleProcess:
    def __init__(self, nats_url: str, redis_url: str, state_dir: Path) -> None:
        self.port, self.state_dir = free_port(), state_dir
        self._env = {
            "GLOWPLUG_NATS_URL": nats_url,
            "GLOWPLUG_REDIS_URL": redis_url,
            "GLOWPLUG_STATE_DIR": str(state_dir),
            "GLOWPLUG_PORT": str(self.port),
            "GLOWPLUG_SERVICE_ID": "console-1",
        }
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> Path:
        return self.state_dir / "console" / "usage.db"

    async def start(self) -> None:
        argv = (sys.executable, "-m", "glowplug.services.console")
        with (self.state_dir / "console.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, env=os.environ | self._env
            )

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def sums(self) -> dict[str, Any]:
        """The only row; {} before there is one."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=WAIT_S) as client:
                answer = await client.get(f"{self.url}/v1/usage", params={"by": "model"})
                if answer.status_code == 200 and (data := answer.json()["data"]):
                    return dict(data[0])
        return {}


class Clients:
    def __init__(self, url: str, num: int) -> None:
        self._url, self._num = url, num
        self.whole: list[str] = []
        self.num_asked = 0

    async def run(self, num_clients: int = 8) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(self._ask())

    async def _ask(self) -> None:
        while self.num_asked < self._num:
            self.num_asked += 1
            number = self.num_asked
            while not await self._asked(f"{number}-{secrets.token_hex(4)}", chat_body(stream=bool(number % 2))):
                await asyncio.sleep(0.05)

    async def _asked(self, request_id: str, body: dict[str, Any]) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=WAIT_S) as client:
                answer = await client.post(
                    f"{self._url}/v1/chat/completions", json=body, headers={"x-request-id": request_id}
                )
                if answer.status_code == 200:
                    self.whole.append(request_id)
                    return True
        return False


async def test_sums_equal_the_engines_counts_over_kills_of_router_and_console_and_a_locked_database(
    own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path
) -> None:
    counting = CountingEngine(gate_after=100)
    engine = await FakeEngine(counting.reply).start()
    await write_rows(own_valkey.url, a_model(), an_instance("i-1", engine.url))
    router = await RouterProcess(own_nats.url, own_valkey.url, tmp_path).start()
    console = ConsoleProcess(own_nats.url, own_valkey.url, tmp_path)
    try:
        await console.start()
        clients = Clients(router.url, 200)
        asking = asyncio.create_task(clients.run())
        await until(lambda: counting.num_waiting == 8, "eight requests at the engine")
        await asyncio.sleep(0.1)
        await router.kill()
        await console.kill()
        counting.gate.set()
        await router.start()
        await asyncio.wait_for(asking, WAIT_S)
        await console.start()
        async with asyncio.timeout(WAIT_S):
            while (await console.sums()).get("num_requests", 0) < 100:
                await asyncio.sleep(0.1)
        lock = sqlite3.connect(console.database)
        lock.execute("BEGIN IMMEDIATE")
        more = Clients(router.url, 20)
        await more.run()
        await asyncio.sleep(3.0)
        lock.rollback()
        lock.close()
        whole, num_lost = [*clients.whole, *more.whole], counting.num_waiting
        assert len(whole) == 220
        async with asyncio.timeout(WAIT_S):
            while (found := await console.sums()).get("num_requests", 0) < len(whole) + num_lost:
                await asyncio.sleep(0.1)
        with contextlib.closing(sqlite3.connect(console.database)) as database:
            columns = "request_id, error_code, prompt_tokens, cached_tokens, response_tokens"
            rows = database.execute(f"SELECT {columns} FROM usage_records").fetchall()
        kept = {id_: tuple(counts) for id_, code, *counts in rows if not code}
        lost = {id_: tuple(counts) for id_, code, *counts in rows if code == "router_lost"}
        assert kept == {id_: counting.counts[id_] for id_ in whole}
        assert len(lost) == num_lost == 8 and all(counts[1:] == (0, 0) for counts in lost.values())
        assert (found["num_requests"], found["num_exact"], found["num_failed"]) == (228, 220, 8)
        sums = [sum(counts[part] for counts in (kept | lost).values()) for part in range(3)]
        assert [found[name] for name in ("prompt_tokens", "cached_tokens", "response_tokens")] == sums
        router.terminate()
        assert await router.ended() == 0
        assert not list((tmp_path / "router-1" / "usage").glob("*"))
    finally:
        await router.kill()
        await console.kill()
        await engine.stop()
