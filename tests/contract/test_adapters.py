"""LoRA adapters: each request gets the answer of its adapter's merged weights, whatever runs beside it.

Lane: fast (llama.cpp, 40 s; the emulated engine, 15 s), system (vLLM, 80 s).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest
import pytest_asyncio

from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model
from glowplug.engines import vllm_sample
from glowplug.engines.drivers import api_of
from glowplug.engines.port import Ability, AdapterHost, EngineHandle
from glowplug.engines.samples import prepare
from tests import adapters
from tests.adapters import Adapter
from tests.contract.engine_rig import ENGINES, EngineCase, engine_case
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODULES = ("attn_q", "attn_v", "ffn_down")
SLOTS, RANK = 2, 8
NUM_ROUNDS = 30
A, B, LARGE = "Poets/A", "Poets/B", "Poets/Large"
CLOSE = 0.1  # of log probabilities: a prompt with a cached beginning is computed in another shape, 0.07 off
PROMPT = "The capital of France is"
ENGINE_ARGS = {"vllm": {"dtype": "float32"}}  # else merged weights are rounded, unlike a delta


@dataclass
class Fleet:
    case: EngineCase
    handle: EngineHandle
    base: Model
    made: dict[str, Adapter]

    @property
    def driver(self) -> AdapterHost:
        assert isinstance(self.case.driver, AdapterHost)
        return cast(AdapterHost, self.case.driver)

    @property
    def is_real(self) -> bool:
        return self.case.name != "emulated"

    def adapter(self, name: str) -> Model:
        return self.case.model(name=name, key=name.lower().replace("/", "-"), base=self.base.key, aliases=())

    def weights(self, name: str) -> Path:
        folder = self.case.folder / name.replace("/", "-")
        if self.case.name == "vllm":
            return adapters.write_peft(self.made[name], folder)
        return adapters.write_gguf(self.made[name], folder.with_suffix(".gguf"))

    async def load(self, *names: str) -> None:
        for name in names:
            await self.driver.load_adapter(self.handle, self.adapter(name), self.weights(name))

    async def answer(self, name: str, num_tokens: int = 16, url: str = "") -> str:
        model = self.adapter(name) if name else self.base
        asked = {"prompt": PROMPT, "model": model.name, "max_tokens": num_tokens, "temperature": 0}
        async with httpx.AsyncClient(base_url=url or self.handle.url, timeout=120) as client:
            answer = await client.post("/v1/completions", json=asked | dict(api_of(model).names_adapter))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def first_token(self, name: str) -> float:
        """Its log probability; 0 for an engine that computes none."""
        model = self.adapter(name) if name else self.base
        asked = {"prompt": PROMPT, "model": model.name, "max_tokens": 2, "temperature": 0, "logprobs": 1}
        async with httpx.AsyncClient(base_url=self.handle.url, timeout=120) as client:
            answer = await client.post("/v1/completions", json=asked | dict(api_of(model).names_adapter))
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0].get("logprobs") or {}
        if "content" in said:  # llama.cpp's form
            return float(said["content"][0]["logprob"])
        return float((said.get("token_logprobs") or [0.0])[0])

    async def answer_of_merged(self, name: str) -> str:
        """Of an engine without adapters."""
        out = self.case.folder / f"merged-{name.replace('/', '-')}"
        if self.case.name == "vllm":
            path = adapters.merged_hf(vllm_sample.prepare(), out, self.made[name])
        else:
            path = adapters.merged(prepare(), out, self.made[name], MODULES)
        report = await self.case.driver.load(await self.case.launch(engine_args=self.base.engine_args), path)
        self.case.handles.append(report.handle)
        try:
            return await self.answer("", url=report.handle.url)
        finally:
            await self.case.driver.stop(report.handle, 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with engine_case(request.param) as case:
        if Ability.ADAPTERS not in case.driver.abilities("host"):
            pytest.skip("its engines take no adapters")
        args = ENGINE_ARGS.get(case.name, {}) or case.model().engine_args
        start = {"adapter_slots": SLOTS, "adapter_rank": RANK}
        handle = await case.launch(start=start, engine_args=args)
        path = (
            adapters.merged(prepare(), case.folder / "base", None, MODULES) if case.name == "llamacpp" else case.weights
        )
        report = await case.driver.load(handle, path)
        case.handles.append(report.handle)
        made = {A: adapters.make(1, RANK, modules=MODULES), B: adapters.make(2, RANK, modules=MODULES)}
        made[LARGE] = adapters.make(3, 2 * RANK, modules=MODULES)
        yield Fleet(case, report.handle, case.model(engine_args=args), made)


async def test_each_adapter_answers_as_its_merged_weights_do_and_the_base_as_before(fleet: Fleet) -> None:
    before = await fleet.answer("")
    await fleet.load(A, B, A)  # idempotent
    answers = [await fleet.answer(name) for name in (A, "", B, "", A)]
    assert answers[1] == answers[3] == before and answers[0] == answers[4]
    if fleet.is_real:
        assert len({before, answers[0], answers[2]}) == 3
        assert [await fleet.answer_of_merged(A), await fleet.answer_of_merged(B)] == [answers[0], answers[2]]


async def test_requests_of_different_adapters_run_side_by_side_and_never_mix(fleet: Fleet) -> None:
    await fleet.load(A, B)
    names = ("", A, B)
    alone = {name: await fleet.first_token(name) for name in names}
    if fleet.is_real:  # so far apart that rounding, which varies by batch, cannot confuse them
        apart = [abs(alone[one] - alone[other]) for one, other in (("", A), ("", B), (A, B))]
        assert min(apart) > 3 * CLOSE, apart
    for _ in range(2):
        together = await asyncio.gather(*(fleet.first_token(name) for name in names * 3))
        assert together == pytest.approx([alone[name] for name in names * 3], abs=CLOSE)


async def test_an_adapter_is_counted_by_its_own_requests(fleet: Fleet) -> None:
    """Its own count lets it leave while its base is busy."""
    await fleet.load(A, B)

    async def num_of(name: str) -> int:
        return await fleet.driver.num_of_adapter(fleet.handle, fleet.adapter(name))

    assert [await num_of(name) for name in (A, B)] == [0, 0]
    asked = {"prompt": PROMPT, "model": A, "max_tokens": 400, "min_tokens": 400, "ignore_eos": True, "stream": True}
    asked |= dict(api_of(fleet.adapter(A)).names_adapter)
    async with (
        httpx.AsyncClient(base_url=fleet.handle.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        lines = answer.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            continue
        assert [await num_of(name) for name in (A, B)] == [1, 0]
    await until(lambda: _is_zero(num_of(A)), "the request of a client that has left is no longer counted")


async def _is_zero(num: Awaitable[int]) -> bool:
    return await num == 0


async def test_an_adapter_that_does_not_fit_is_refused_with_the_reason_and_the_base_serves_on(fleet: Fleet) -> None:
    before = await fleet.answer("")
    for name in (A, B):
        await fleet.driver.unload_adapter(fleet.handle, fleet.adapter(name))
        await fleet.driver.unload_adapter(fleet.handle, fleet.adapter(name))  # idempotent
    if fleet.is_real:
        other = adapters.Shape(layers=2, hidden=640, heads=10, kv_heads=5, ffn=1536)
        fleet.made["Other/Base"] = adapters.make(4, RANK, other, MODULES)
        with pytest.raises(EngineFailed):
            await fleet.load("Other/Base")
    if fleet.case.name == "vllm":
        with pytest.raises(EngineFailed, match="rank"):
            await fleet.load(LARGE)
    with pytest.raises(EngineFailed):
        await fleet.driver.load_adapter(fleet.handle, fleet.adapter(B), fleet.case.folder / "missing")
    await fleet.load(A)
    assert await fleet.answer("") == before and await fleet.answer(A)


async def test_an_adapter_replaced_under_its_name_answers_as_the_new_one(fleet: Fleet) -> None:
    """Nothing cached from the old weights is reused."""
    await fleet.load(A, B)
    new = await fleet.answer(B)
    await fleet.answer(A)
    for name in (A, B):
        await fleet.driver.unload_adapter(fleet.handle, fleet.adapter(name))
    await fleet.driver.load_adapter(fleet.handle, fleet.adapter(A), fleet.weights(B))
    if fleet.is_real:
        assert await fleet.answer(A) == new


async def test_adapters_that_come_and_go_leave_no_bytes_behind(fleet: Fleet) -> None:
    """Each has its own name and 4 MB. An engine's permanent allocations are complete after a few."""
    for name in (A, B):
        await fleet.driver.unload_adapter(fleet.handle, fleet.adapter(name))
    process, weights = psutil.Process(fleet.handle.pid), fleet.weights(A)
    num_bytes = sum(file.stat().st_size for file in ([weights] if weights.is_file() else weights.iterdir()))
    used = list[int]()
    for number in range(NUM_ROUNDS):
        one = fleet.adapter(f"Poets/N{number}")
        await fleet.driver.load_adapter(fleet.handle, one, weights)
        await fleet.answer(one.name, num_tokens=1)
        await fleet.driver.unload_adapter(fleet.handle, one)
        await fleet.answer("", num_tokens=1)  # llama.cpp frees an adapter with the next batch
        used.append(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))))
    first, num_left = max(used[: NUM_ROUNDS // 3]), NUM_ROUNDS - NUM_ROUNDS // 3
    assert used[-1] - first < num_left * num_bytes / 4, used
