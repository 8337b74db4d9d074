"""Sleep and wake: same answers, bytes given back, no drift.

Lane: fast (the emulated engine; llama.cpp), system (vLLM, 75 s).
"""

import asyncio
import json
import os
import signal
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import pytest_asyncio

from glowplug.domain.errors import EngineFailed, EngineMisconfigured
from glowplug.domain.instance import InstanceState
from glowplug.engines.port import Ability, EngineHandle, LoadReport, RefusingSleeper, Sleeper
from glowplug.engines.process import anonymous_bytes
from glowplug.engines.vllm import VllmDriver
from glowplug.telemetry.semconv import HEADER_REFUSED
from tests.arriving_region import ArrivingRegion
from tests.contract.data_port_rig import a_model, a_rig, an_instance, post
from tests.contract.engine_rig import ENGINES, EngineCase, engine_case
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MIB = 1 << 20
NUM_RACES = 6
LEFT_RATIO = {"llamacpp": 0.6, "vllm": 0.8}  # of its memory awake; vLLM is two processes
DRIFT_BYTES = 8 * MIB


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[EngineCase]:
    async with engine_case(request.param) as case:
        if not case.driver.abilities("host") & {Ability.PREWARM, Ability.SWAP}:
            pytest.skip("its engines do not sleep on host memory")
        yield case


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(case: EngineCase) -> LoadReport:
    return await case.start()


@pytest_asyncio.fixture
async def awake(case: EngineCase, started: LoadReport) -> EngineHandle:
    await sleeper(case).wake(started.handle)
    return started.handle


def sleeper(case: EngineCase) -> Sleeper:
    assert isinstance(case.driver, Sleeper)
    return cast(Sleeper, case.driver)


async def continued(handle: EngineHandle, prompt: str, num_tokens: int = 16, **options: Any) -> dict[str, Any]:
    body = {"model": "Contract/Tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **options}
    async with httpx.AsyncClient(base_url=handle.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return {"text": choice["text"], "finish_reason": choice["finish_reason"], "usage": answer.json()["usage"]}


def private_bytes(handle: EngineHandle) -> int:
    leader = psutil.Process(handle.pid)
    return sum(anonymous_bytes(process.pid) for process in (leader, *leader.children(recursive=True)))


def resident_bytes(handle: EngineHandle) -> int:
    """Shared pages count in part."""
    leader = psutil.Process(handle.pid)
    return sum(process.memory_full_info().pss for process in (leader, *leader.children(recursive=True)))


async def settle(case: EngineCase, handle: EngineHandle) -> None:
    """Make what an engine makes once. vLLM's core reads its tokenizer with its first structured answer, else by itself
    some seconds later; the first wake leaves the embeddings in the pages of their file."""
    if isinstance(case.driver, VllmDriver):
        await continued(handle, "One two three", response_format={"type": "json_object"})
    for becomes in ("prewarmed", "swapped_out"):
        await sleeper(case).sleep(handle, becomes)
        await sleeper(case).wake(handle)


@pytest.mark.parametrize("becomes", ["prewarmed", "swapped_out"])
async def test_it_answers_after_the_wake_as_before_its_sleep(
    case: EngineCase, awake: EngineHandle, becomes: str
) -> None:
    prompts = ["Once upon a time there was a small", "Once upon a time there was a great", "The capital of France is"]
    before = [(await continued(awake, prompt))["text"] for prompt in prompts]
    for prompt in prompts:  # none may rely on the cache that the sleep discarded
        await sleeper(case).sleep(awake, becomes)
        await sleeper(case).wake(awake)
        assert (await continued(awake, prompt))["text"] == before[prompts.index(prompt)]
    assert all(answer["text"] for answer in await asyncio.gather(*(continued(awake, prompt) for prompt in prompts)))


async def test_weights_that_arrive_while_it_loads_make_the_same_engine(
    case: EngineCase, awake: EngineHandle, tmp_path: Path
) -> None:
    if Ability.STREAM not in case.driver.abilities("host"):
        pytest.skip("its engines do not load while their weights arrive")
    arriving = ArrivingRegion(case.weights, tmp_path)
    handle = await case.launch()
    await arriving.land(0.5)
    loading = asyncio.create_task(case.driver.load(handle, arriving.root))
    await asyncio.sleep(1.0)
    assert not loading.done(), "half of its weights have not come"
    await arriving.land()
    arriving.complete()
    handle = (await loading).handle
    case.handles.append(handle)
    expected = [await continued(awake, prompt) for prompt in ("The sea is", "Once upon")]
    assert [await continued(handle, prompt) for prompt in ("The sea is", "Once upon")] == expected
    for becomes in ("prewarmed", "swapped_out"):
        await sleeper(case).sleep(handle, becomes)
        await sleeper(case).wake(handle)
        assert (await continued(handle, "The sea is"))["text"] == expected[0]["text"]
    await case.driver.stop(handle, 0.0)


async def test_asleep_it_keeps_its_process_and_its_port_and_says_that_it_is_healthy(
    case: EngineCase, awake: EngineHandle
) -> None:
    await sleeper(case).sleep(awake, "swapped_out")
    assert case.driver.adopt(awake)
    assert (await case.driver.health(awake)).ok
    assert await case.driver.num_in_flight(awake) == 0


async def test_a_replica_of_the_first_layers_holds_them_alone_until_it_serves(case: EngineCase) -> None:
    """WarmServe section 4: the missing part comes from host memory at its wake."""
    if Ability.FIRST_LAYERS not in case.driver.abilities("host"):
        pytest.skip("its replicas hold all of their weights")
    handle = (await case.start(first_bytes=case.model().weights_bytes // 2)).handle
    answer = (await continued(handle, "One two three"))["text"]
    held = []
    for _ in range(2):
        await sleeper(case).sleep(handle, "prewarmed")
        held.append(resident_bytes(handle))  # a CPU that packs no weights reads them in the pages of their file
        await sleeper(case).wake(handle)
        assert (await continued(handle, "One two three"))["text"] == answer
    await case.driver.stop(handle, 0.0)
    if not case.driver.capabilities.emulated:
        assert held[0] + 64 * MIB < held[1], "the second time it holds all of its weights"


async def test_engines_that_share_their_weights_answer_alike_and_hold_less(
    case: EngineCase, awake: EngineHandle
) -> None:
    if Ability.SHARE not in case.driver.abilities("host"):
        pytest.skip("its engines have their weights for themselves")
    when_asked = case.driver.capabilities.shares_when_asked
    report = await case.start(weights_shared=when_asked)
    handle = report.handle
    answer = (await continued(awake, "One two three"))["text"]
    assert (await continued(handle, "One two three"))["text"] == answer
    assert report.handle.figures.shared_bytes > 90 * MIB
    if when_asked:
        own = (await case.start()).handle  # as loaded: after a wake a CPU may read the pages of the file
        assert private_bytes(handle) + 200 * MIB < private_bytes(own)
        await case.driver.stop(own, 0.0)
    for becomes in ("prewarmed", "swapped_out"):
        await sleeper(case).sleep(handle, becomes)
        await sleeper(case).wake(handle)
        assert (await continued(handle, "One two three"))["text"] == answer
    await case.driver.stop(handle, 0.0)


async def test_weights_that_are_not_in_memory_as_in_their_file_are_not_shared(case: EngineCase) -> None:
    if not case.driver.capabilities.shares_when_asked:
        pytest.skip("it is not asked to share, and says what it shares")
    with pytest.raises(EngineFailed, match=r"weights_shared: .* differs between its files and memory") as failed:
        await case.start(weights_shared=True, engine_args={"dtype": "float32"})
    assert failed.value.code == EngineMisconfigured.code


async def test_weights_wake_before_their_kv_cache(case: EngineCase, awake: EngineHandle) -> None:
    """Awake without the KV cache, it is "prewarmed"; vLLM's tags."""
    if not isinstance(case.driver, VllmDriver):
        pytest.skip("it wakes as a whole")
    answer = (await continued(awake, "One two three"))["text"]
    whole = private_bytes(awake)
    await case.driver.sleep(awake, "swapped_out")
    with pytest.raises(EngineFailed, match="its weights are away"):
        await case.driver.wake(awake, ["kv_cache"])
    asleep = private_bytes(awake)
    await case.driver.wake(awake, ["weights"])
    assert asleep + DRIFT_BYTES < private_bytes(awake) <= whole + DRIFT_BYTES
    await case.driver.wake(awake, ["kv_cache"])
    assert (await continued(awake, "One two three"))["text"] == answer


async def test_sleep_and_wake_may_come_twice(case: EngineCase, awake: EngineHandle) -> None:
    text = (await continued(awake, "One two three"))["text"]
    for _ in range(2):
        await sleeper(case).sleep(awake, "swapped_out")
    for _ in range(2):
        await sleeper(case).wake(awake)
    assert (await continued(awake, "One two three"))["text"] == text


@pytest.mark.parametrize("num_cycles", [12, pytest.param(50, marks=pytest.mark.long)])
async def test_bytes_come_back_and_do_not_grow_over_many_cycles(case: EngineCase, num_cycles: int) -> None:
    if case.driver.capabilities.emulated:
        pytest.skip("no memory stands behind an emulated GPU")
    handle = (await case.start()).handle
    answer = (await continued(handle, "One two three"))["text"]
    awake_bytes, asleep_bytes = private_bytes(handle), []
    await settle(case, handle)
    for cycle in range(num_cycles):
        await sleeper(case).sleep(handle, "swapped_out" if cycle % 2 else "prewarmed")
        asleep_bytes.append(private_bytes(handle))
        await sleeper(case).wake(handle)
        assert answer.startswith((await continued(handle, "One two three", 4))["text"])
    assert min(asleep_bytes) <= LEFT_RATIO[case.name] * awake_bytes
    for of_one_kind in (asleep_bytes[0::2], asleep_bytes[1::2]):
        early, late = of_one_kind[: num_cycles // 4], of_one_kind[num_cycles // 4 :]
        assert statistics.median(late) - statistics.median(early) <= DRIFT_BYTES, asleep_bytes
    assert (await continued(handle, "One two three"))["text"] == answer


@pytest.mark.parametrize("becomes", ["prewarmed", "swapped_out"])
async def test_no_request_goes_on_with_a_cache_that_is_gone(case: EngineCase, becomes: str) -> None:
    """Running requests are ended, or the engine refuses and its agent stops it."""
    handle = (await case.start()).handle
    answer = (await continued(handle, "One two three"))["text"]
    running = asyncio.gather(*(continued(handle, f"Chapter {n}. Once", 400) for n in range(4)), return_exceptions=True)
    await until(lambda: case.driver.num_in_flight(handle), "they run")
    try:
        await sleeper(case).sleep(handle, becomes)
    except EngineFailed:
        assert (case.name, becomes) == ("llamacpp", "prewarmed")
        await case.driver.stop(handle, 0.0)
        # Those that finished before the stop have whole answers.
        ended = [one for one in await running if isinstance(one, dict)]
        assert all(one["finish_reason"] == "stop" or one["usage"]["completion_tokens"] == 400 for one in ended)
        return
    await running
    await sleeper(case).wake(handle)
    assert (await continued(handle, "One two three"))["text"] == answer


async def test_an_engine_that_is_gone_neither_sleeps_nor_wakes(case: EngineCase) -> None:
    handle = (await case.start()).handle
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: not case.driver.adopt(handle), "the process is seen to be gone")
    with pytest.raises(EngineFailed):
        await sleeper(case).sleep(handle, "swapped_out")
    with pytest.raises(EngineFailed):
        await sleeper(case).wake(handle)


async def test_a_kv_cache_is_cut_down_under_running_requests_and_grows_again(case: EngineCase) -> None:
    """WarmServe Eq. 1: free blocks leave at once, used ones when their requests end."""
    if Ability.PREWARM not in case.driver.abilities("host") or case.name == "llamacpp":
        pytest.skip("its KV cache stays as it was started")
    handle = (await case.start()).handle
    whole = (await continued(handle, "Once upon a time", 64))["text"]  # one: in a batch, bfloat16 rounds as others come
    for num_beside in (0, 2):
        prompts = ["Once upon a time", *(f"Chapter {number}." for number in range(num_beside))]
        running = asyncio.gather(*(continued(handle, prompt, 64) for prompt in prompts))
        await asyncio.sleep(0.3)
        await sleeper(case).limit_kv(handle, 64 * MIB)
        answers = await running
        assert num_beside or answers[0]["text"] == whole
        assert all(answer["text"] for answer in answers)
    assert await sleeper(case).kv_bytes_used(handle) <= 64 * MIB
    await sleeper(case).sleep(handle, "prewarmed")
    await sleeper(case).wake(handle)
    assert (await continued(handle, "Once upon a time", 64))["text"] == whole


async def test_an_engine_that_refuses_sleeps_at_once_and_answers_nothing_until_its_wake(
    case: EngineCase, awake: EngineHandle
) -> None:
    """A late request is refused, with the header that makes its router try elsewhere."""
    if not isinstance(case.driver, RefusingSleeper):
        pytest.skip("its engines refuse nothing")
    body = {"model": "Contract/Tiny", "prompt": "One two three", "max_tokens": 200, "temperature": 0, "stream": True}
    async with (
        httpx.AsyncClient(base_url=awake.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        assert await case.driver.sleep_if_idle(awake, "swapped_out") == 1
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]" and len(rest) > 20, "busy, it goes on and cuts nothing short"
    for becomes in ("prewarmed", "swapped_out"):
        assert await case.driver.sleep_if_idle(awake, becomes) == 0
        before = private_bytes(awake)
        async with httpx.AsyncClient(base_url=awake.url, timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
        assert {(a.status_code, a.headers.get(HEADER_REFUSED)) for a in answers} == {(503, "asleep")}
        assert (await case.driver.health(awake)).ok and await case.driver.num_in_flight(awake) == 0
        assert private_bytes(awake) < before + 16 * MIB, "nothing of it came back for them"
        await sleeper(case).wake(awake)
        assert (await continued(awake, "One two three"))["text"]


async def test_requests_sent_while_it_falls_asleep_are_all_answered(case: EngineCase, awake: EngineHandle) -> None:
    """A router that believes it READY may send at any moment.

    A refusal that arrives after the fact that it serves on keeps the router off it for a second: time has to pass."""
    if not isinstance(case.driver, RefusingSleeper):
        pytest.skip("its engines refuse nothing")
    name, num_asleep = "Contract/Tiny", 0
    question = post("/v1/completions", json.dumps({"model": name, "prompt": "One two three", "max_tokens": 3}).encode())
    async with a_rig(models=(a_model(name, key="m"),)) as rig, rig.ticking():
        for number in range(NUM_RACES):
            rig.tell(an_instance(f"i-{number}", awake.url))
            assert (await rig.ask(question)).status == 200, "its connection is pooled, and used for what comes next"
            asked = asyncio.create_task(case.driver.sleep_if_idle(awake, "swapped_out"))
            await asyncio.sleep(number * 2e-3)
            clients = [await rig.sent(question) for _ in range(2)]
            is_asleep = await asked == 0
            if is_asleep:
                num_asleep += 1
                rig.tell(an_instance(f"i-{number}", "", InstanceState.SWAPPED_OUT, revision=2))
                await sleeper(case).wake(awake)
                rig.tell(an_instance(f"i-{number}-awake", awake.url))
            else:
                rig.tell(an_instance(f"i-{number}", awake.url, InstanceState.DRAINING, revision=2))
                rig.tell(an_instance(f"i-{number}", awake.url, revision=3))  # its drain is taken back
            answers = await asyncio.wait_for(asyncio.gather(*(client.answer() for client in clients)), WAIT_S)
            assert [(a.status, a.complete) for a in answers] == [(200, True)] * 2, (number, is_asleep, answers)
            rig.tell(an_instance(f"i-{number}{'-awake' * is_asleep}", "", InstanceState.STOPPED, revision=4))
    assert num_asleep, "some came too late for it"
