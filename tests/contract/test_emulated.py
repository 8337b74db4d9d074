"""Faults special to the emulated engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineSettings, Sleeper
from tests.contract.engine_rig import EngineCase, engine_case
from tests.waiting import WAIT_S, until

FAST = {"time_scale": 50.0, "launch_s": 0.0, "warmup_s": 0.0}


@pytest.fixture
async def case() -> AsyncIterator[EngineCase]:
    async with engine_case("emulated", settings=EngineSettings(health_timeout_s=3.0)) as case:
        yield case


async def test_a_crash_in_the_middle_breaks_the_stream_without_an_end(case: EngineCase) -> None:
    report = await case.start(engine_args={**FAST, "faults": {"crash_at_token": 5}})
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
    seen = b""
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=WAIT_S) as client:
        with pytest.raises(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_bytes():
                    seen += part
    assert seen.count(b'"text": ') >= 5
    assert b"[DONE]" not in seen
    await until(lambda: not case.driver.adopt(report.handle), "the process is gone")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [({"hang_health": True}, "no answer"), ({"unhealthy": True}, "503"), ({"health_delay_s": 1000.0}, "no answer")],
)
async def test_a_sick_engine_is_alive_and_not_well(case: EngineCase, faults: dict[str, object], reason: str) -> None:
    report = await case.start(engine_args={**FAST, "faults": faults})
    health = await case.driver.health(report.handle)
    assert (health.ok, health.alive) == (False, True)
    assert reason in health.reason


async def test_one_that_never_gets_ready_in_time_fails_and_is_gone(case: EngineCase) -> None:
    case.driver = type(case.driver)(replace(case.settings, load_timeout_s=0.5))  # type: ignore[call-arg]
    handle = await case.launch(engine_args={"launch_s": 100.0})
    with pytest.raises(EngineFailed, match=r"not ready within 0\.5 s"):
        await case.driver.load(handle, case.weights)
    assert not case.driver.adopt(handle)


async def test_a_small_kv_grant_preempts_and_everyone_still_ends(case: EngineCase) -> None:
    report = await case.start(engine_args=FAST, kv_bytes=1, context_tokens=256, max_concurrency=8)
    body = {"prompt": "x" * 200, "max_tokens": 150, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(4)))
        metrics = (await client.get("/metrics")).text
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [150] * 4
    preempted = next(line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total{"))
    assert float(preempted.split()[-1]) > 0


async def test_it_sleeps_and_wakes_and_its_kv_cache_can_be_cut(case: EngineCase) -> None:
    report = await case.start(engine_args=FAST, kv_bytes=1 << 30, context_tokens=64)
    driver, handle = case.driver, report.handle
    assert isinstance(driver, Sleeper)
    async with httpx.AsyncClient(base_url=handle.url, timeout=WAIT_S) as client:
        body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
        assert (await client.get("/admin/kv")).json() == {"used_bytes": 0, "total_bytes": 1 << 30}
        await driver.limit_kv(handle, 100 << 20)
        assert (await client.get("/admin/kv")).json()["total_bytes"] == 96 << 20  # whole blocks of 8 MiB
        await driver.limit_kv(handle, 0)
        assert (await client.get("/admin/kv")).json()["total_bytes"] == 5 * (8 << 20)
        await driver.sleep(handle, "swapped_out")
        await driver.wake(handle)
        assert (await client.get("/admin/kv")).json()["total_bytes"] == 1 << 30, "who wakes has its whole grant"
        assert (await client.post("/admin/kv", json={"num_bytes": -1})).status_code == 400
        for becomes in ("prewarmed", "swapped_out"):
            await driver.sleep(handle, becomes)
            waiting = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.05)
            assert not waiting.done() and (await client.get("/is_paused")).json()["is_paused"]
            await driver.wake(handle)
            assert (await waiting).json()["usage"]["completion_tokens"] == 8
        assert await driver.kv_bytes_used(handle) == 0
