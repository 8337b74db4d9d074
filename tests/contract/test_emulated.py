"""What is the emulated engine's own: faults that an agent and a router must live with, seen from outside."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineSettings
from tests.contract.engine_rig import EngineCase, eventually

FAST = {"time_scale": 50.0, "launch_s": 0.0, "warmup_s": 0.0}


@pytest.fixture
async def case() -> AsyncIterator[EngineCase]:
    with tempfile.TemporaryDirectory(prefix="gp-emulated-") as folder:
        case = EngineCase("emulated", Path(folder), EngineSettings(health_timeout_s=0.3))
        yield case
        await case.close()


async def test_a_crash_in_the_middle_breaks_the_stream_without_an_end(case: EngineCase) -> None:
    report = await case.start(engine_args={**FAST, "faults": {"crash_at_token": 5}})
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
    seen = b""
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=20) as client:
        with pytest.raises(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_bytes():
                    seen += part
    assert seen.count(b'"text": ') >= 5
    assert b"[DONE]" not in seen
    await eventually(lambda: not case.driver.adopt(report.handle), "the process is gone")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [({"hang_health": True}, "no answer"), ({"unhealthy": True}, "503"), ({"health_delay_s": 100.0}, "no answer")],
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
