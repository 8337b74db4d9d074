"""A real vLLM beyond the contract: parked starts, bad starts, cores that die or hang.

Needs `make vllm-env`.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from glowplug.domain.errors import EngineFailed
from glowplug.domain.hardware import Devices
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm, vllm_env, vllm_sample
from glowplug.engines.port import EngineHandle, EngineSettings, LoadReport, Place
from glowplug.engines.process import kill_group
from glowplug.engines.vllm import VllmDriver
from glowplug.events.commands import StartInstance
from glowplug.services.agent.executor import KV_MOVES_S
from glowplug.weights.region import RegionInfo
from tests import tiny_llama
from tests.agent_rig import AgentRig, start_command, write_weights
from tests.contract.engine_rig import park, parked_dir
from tests.fleet_builder import a_start
from tests.ports import free_port
from tests.waiting import WAIT_S, lives, until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


PROMPT = range(10, 60)  # token ids


@dataclass
class Lane:
    folder: Path
    driver: VllmDriver
    weights: Path

    def request(
        self, weights: Path | None = None, num_gpus: int = 1, **engine_args: Any
    ) -> tuple[StartInstance, Place]:
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        model = Model(
            name="smol",
            key="smol",
            engine="vllm",
            weights=WeightsRef(uri=f"file:{weights or self.weights}"),
            weights_bytes=270_000_000,
            kv_bytes=128 << 20,
            context_tokens=512,
            engine_args=engine_args,
            num_gpus=num_gpus,
        )
        devices = Devices(ordinals=tuple(range(num_gpus)))
        place = Place(run_dir=run_dir, log_path=run_dir / "engine.log", devices=devices)
        return a_start(model, run_dir.name), place

    async def start(self, **engine_args: Any) -> LoadReport:
        return await self.driver.load(await self.driver.launch(*self.request(**engine_args)), self.weights)

    def settings(self, **extra: Any) -> EngineSettings:
        return EngineSettings(launch_timeout_s=240.0, extra={"vllm_parked_dir": parked_dir(), **extra})

    async def zygote(self) -> psutil.Process:
        await self.driver._zygote.ensure()
        return psutil.Process((await self.driver._zygote._ask({"op": "hello"}))["pid"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lane() -> AsyncIterator[Lane]:
    if reason := vllm_env.missing(vllm_env.interpreter()):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="gp-vllm-") as folder:
        lane = Lane(Path(folder), VllmDriver(), vllm_sample.prepare())
        lane.driver = VllmDriver(lane.settings(vllm_hung_after_s=2.0))
        await park(lane.driver)
        yield lane
        await lane.driver.close()


async def say(url: str) -> str:
    body = {"model": "smol", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"])


async def tokens(url: str, prompt: Sequence[int] = PROMPT, num: int = 12) -> list[int]:
    body = {"model": "smol", "prompt": list(prompt), "max_tokens": num, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True})
    return list(answer.json()["choices"][0]["token_ids"])


@dataclass
class Tiny:
    """Two workers can share its heads; in float32 partial sums add up to the whole. `expected`: one engine's tokens."""

    weights: Path
    expected: list[int] = field(default_factory=list)


TINY_ARGS: dict[str, Any] = {"dtype": "float32", "num_threads": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(lane: Lane) -> Tiny:
    tiny = Tiny(tiny_llama.write(lane.folder / "tiny"))
    alone = await lane.driver.load(await lane.driver.launch(*lane.request(tiny.weights, **TINY_ARGS)), tiny.weights)
    tiny.expected = await tokens(alone.handle.url)
    await lane.driver.stop(alone.handle, 5.0)
    return tiny


def core_of(handle: EngineHandle) -> psutil.Process:
    return next(p for p in psutil.Process(handle.pid).children(recursive=True) if "EngineCore" in p.name())


async def until_unhealthy(lane: Lane, handle: EngineHandle) -> str:
    async def reason() -> str | None:
        health = await lane.driver.health(handle)
        return None if health.ok else health.reason

    return str(await until(reason, "the server is unhealthy"))


async def test_a_parked_server_is_a_fork_of_the_zygote_and_says_what_a_plain_one_says(lane: Lane) -> None:
    parked = await lane.start(num_threads=1)
    zygote = await lane.zygote()
    assert psutil.Process(parked.handle.pid).ppid() == zygote.pid
    said = await say(parked.handle.url)
    await lane.driver.stop(parked.handle, 10.0)
    plain = await lane.start(num_threads=1, parked=False)
    assert psutil.Process(plain.handle.pid).ppid() != zygote.pid
    assert await say(plain.handle.url) == said
    await lane.driver.stop(plain.handle, 10.0)


async def test_a_flag_vllm_does_not_know_is_named_and_the_zygote_lives_on(lane: Lane) -> None:
    zygote = await lane.zygote()
    with pytest.raises(EngineFailed, match=r"unrecognized arguments: --no-such-flag 3"):
        await lane.start(no_such_flag=3)
    assert zygote.is_running()


async def test_weights_that_are_broken_are_named_as_the_cause(lane: Lane) -> None:
    broken = lane.folder / "broken"
    broken.mkdir()
    for file in lane.weights.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    whole = (lane.weights / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-1000])
    handle = await lane.driver.launch(*lane.request())
    with pytest.raises(EngineFailed, match=r"model\.safetensors has \d+ bytes, its header promises"):
        await lane.driver.load(handle, broken)
    assert not lane.driver.adopt(handle)


async def test_a_dead_engine_core_is_noticed(lane: Lane) -> None:
    handle = (await lane.start()).handle
    core_of(handle).kill()
    assert await until_unhealthy(lane, handle)
    await lane.driver.stop(handle, 5.0)


async def test_a_hung_engine_core_is_noticed_though_the_server_answers(lane: Lane) -> None:
    handle = (await lane.start()).handle
    core_of(handle).suspend()
    assert "has not answered for" in await until_unhealthy(lane, handle)
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        assert (await client.get(f"{handle.url}/health")).status_code == 200  # vLLM's own status
    await lane.driver.stop(handle, 0.5)
    assert not lane.driver.adopt(handle)


async def test_a_killed_api_server_takes_its_engine_along(lane: Lane) -> None:
    handle = (await lane.start()).handle
    core = core_of(handle)
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: not lives(core), "the core ends too")
    await lane.driver.stop(handle, 0.0)


async def test_a_stop_leaves_no_shared_memory_of_a_worker_behind(lane: Lane) -> None:
    def segments() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("psm_*")}

    before = segments()
    handle = (await lane.start(distributed_executor_backend="mp")).handle
    made = segments() - before
    assert made, "the worker's message queues are segments"
    await lane.driver.stop(handle, 15.0)
    await until(lambda: not (made & segments()), "the segments are gone")


async def test_an_agent_grants_what_a_vllm_instance_has_for_itself(lane: Lane, tmp_path: Path) -> None:
    """A replica of the first layers takes their bytes and answers in full; shared weights count once."""
    await lane.zygote()  # parked before the first start's clock runs
    rig, model = AgentRig(tmp_path, gpu_budgets="1400MiB"), lane.request()[0].model
    await rig.start({"vllm": VllmDriver(lane.settings())})
    region = write_weights(rig.settings.shm_dir.absolute(), model)
    region.complete(RegionInfo(path=str(lane.weights), num_bytes=4, sha256="", source="file", seconds=0.01))
    try:
        ordered = start_command(model, "r-1")
        half = tuple(replace(worker, num_bytes=model.weights_bytes // 2) for worker in ordered.data.workers)
        await rig.send(ordered, replica=True, workers=half)
        await rig.reaches("r-1", InstanceState.PREWARMED)
        assert rig.used_bytes() == model.weights_bytes // 2
        await rig.send(start_command(model, "i-1"), source="r-1")
        grown = await rig.reaches("i-1", InstanceState.READY)
        said = await say(grown.url)
        assert said and rig.used_bytes() == model.memory_bytes
        shared = replace(model, weights_shared=True)
        await rig.send(start_command(shared, "i-2"))
        ready = await rig.reaches("i-2", InstanceState.READY)
        assert await say(ready.url) == said
        assert rig.used_bytes() == model.memory_bytes + shared.memory_bytes
        assert 200 << 20 < ready.shared_bytes <= shared.weights_bytes
        await rig.send(start_command(shared, "i-3"))
        also = await rig.reaches("i-3", InstanceState.READY)
        assert await say(also.url) == said
        assert rig.used_bytes() == model.memory_bytes + 2 * shared.memory_bytes - also.shared_bytes
    finally:
        await rig.service.engines.end_all()
        await rig.service.stop()


async def test_servers_outlive_their_zygote_and_another_driver_parks_anew(lane: Lane) -> None:
    handle = (await lane.start()).handle
    zygote = await lane.zygote()
    zygote.kill()
    await until(lambda: not lives(zygote), "it is gone")
    assert (await lane.driver.health(handle)).ok
    assert await say(handle.url)
    later = VllmDriver(lane.settings())
    again = EngineHandle.from_json(handle.to_json())
    assert later.adopt(again)
    await later.stop(again, 10.0)
    parked = await later.load(await later.launch(*lane.request()), lane.weights)
    assert parked.handle.data["parked"] == "true"
    await later.stop(parked.handle, 10.0)
    await later.close()


@pytest.mark.long
async def test_two_workers_answer_as_one_and_give_their_kv_cache_back(lane: Lane, tiny: Tiny) -> None:
    pair = lane.request(tiny.weights, num_gpus=2, **TINY_ARGS)
    started = await lane.driver.load(await lane.driver.launch(*pair), tiny.weights)
    workers = [p for p in psutil.Process(started.handle.pid).children(recursive=True) if "Worker_TP" in p.name()]
    assert len(workers) == 2
    assert await tokens(started.handle.url) == tiny.expected
    await lane.driver.limit_kv(started.handle, 64 << 20)
    await lane.driver.sleep(started.handle, "prewarmed")
    await lane.driver.wake(started.handle)
    assert await tokens(started.handle.url) == tiny.expected
    await lane.driver.stop(started.handle, 10.0)
    await until(lambda: not any(lives(worker) for worker in workers), "no worker is left")


async def launched_stages(lane: Lane, weights: Path) -> list[EngineHandle]:
    places = lane.request()[1], lane.request()[1]
    command = lane.request(weights, **TINY_ARGS)[0]
    command = replace(command, num_stages=2, rendezvous=f"127.0.0.1:{free_port()}")
    return [await lane.driver.launch(replace(command, stage=n), place) for n, place in enumerate(places)]


async def test_two_stages_with_their_own_weights_alone_answer_as_one_engine(lane: Lane, tiny: Tiny) -> None:
    """HydraServe section 4. A later stage has no server and ends with the first one."""
    launched = await launched_stages(lane, tiny.weights)
    parts = [tiny_llama.part(tiny.weights, lane.folder / f"part-{n}", n, 2) for n in range(2)]
    first, later = await asyncio.gather(*(lane.driver.load(h, at) for h, at in zip(launched, parts, strict=True)))
    assert (first.handle.url, later.handle.url) == ("", "")
    whole = await lane.driver.serve_stages(first.handle)
    assert await tokens(whole.handle.url) == tiny.expected
    assert whole.handle.figures.kv_tokens > 0 and await lane.driver.num_in_flight(later.handle) == 0
    for stage in (whole.handle, EngineHandle.from_json(later.handle.to_json())):
        assert (await lane.driver.health(stage)).ok
    with pytest.raises(EngineFailed, match="is not the first stage"):
        await lane.driver.serve_stages(later.handle)
    os.kill(whole.handle.pid, signal.SIGKILL)
    await until(lambda: not lane.driver.adopt(later.handle), "the later stage ends by itself")
    for stage in (whole.handle, later.handle):
        await lane.driver.stop(stage, 0.0)


async def begin(url: str, prompt: Sequence[int], said: list[int]) -> None:
    body = {"model": "smol", "prompt": list(prompt), "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    asked = {**body, "stream": True, "return_token_ids": True}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["token_ids"] or []


async def test_a_stage_becomes_whole_and_goes_on_with_what_runs(lane: Lane, tiny: Tiny) -> None:
    """HydraServe section 6. Without the KV cache, or with a wrong one, the tokens would differ or be recomputed."""
    prompts = range(400, 700), range(100, 400)
    said: tuple[list[int], list[int]] = ([], [])
    handles = await launched_stages(lane, tiny.weights)
    first, later = await asyncio.gather(*(lane.driver.load(handle, tiny.weights) for handle in handles))
    serving = (await lane.driver.serve_stages(first.handle)).handle
    model = lane.request(tiny.weights, **TINY_ARGS)[0].model
    assert lane.driver.whole(serving) is None
    await lane.driver.consolidate(serving, model, tiny.weights)
    report = lane.driver.whole(serving)
    assert report is not None
    whole = report.handle
    assert await lane.driver.consolidate(whole, model, tiny.weights) == whole.figures.kv_tokens
    directory = vllm.kv_directory(serving.run_dir)
    streams = [asyncio.create_task(begin(serving.url, *one)) for one in zip(prompts, said, strict=True)]
    await until(lambda: all(said), "both streams have begun")
    moved = await lane.driver.move_requests(whole)
    assert await lane.driver.num_in_flight(whole) == 2 and not await lane.driver.is_stage_over(whole)
    streams[0].cancel()
    await streams[1]
    assert len(said[1]) == 80 > len(said[0]), "what nobody takes away ends in the stages"
    while not await lane.driver.is_stage_over(whole):
        await asyncio.sleep(0.02)
    await lane.driver.end_stage(whole)
    assert not lane.driver.adopt(serving), "the stage's own process has ended"
    (one, other) = [[*prompt, *tokens] for prompt, tokens in zip(prompts, said, strict=True)]
    assert moved.num_requests == moved.num_pulled == 2, "both ran, and had enough of a KV cache"
    assert (await lane.driver.move_requests(whole)).num_requests == 0
    cache = next(p for p in directory.glob("*.json") if json.loads(p.read_text())["token_ids"][0] == other[0])
    kv_file = cache.with_name(f"{cache.stem}.tp0.kv")
    header = 8 + int.from_bytes(kv_file.read_bytes()[:8], "little")
    kv_file.write_bytes(kv_file.read_bytes()[:header].ljust(kv_file.stat().st_size, b"\0"))
    pulled, from_zeros = await tokens(whole.url, one), await tokens(whole.url, other)
    assert not list(directory.iterdir()), "what has been pulled is gone"
    alone = await lane.driver.load(await lane.driver.launch(*lane.request(tiny.weights, **TINY_ARGS)), tiny.weights)
    assert pulled == await tokens(alone.handle.url, one)
    assert from_zeros != await tokens(alone.handle.url, other)
    await until(lambda: not lane.driver.adopt(later.handle), "the later stage ends with its pipeline")
    for handle in (whole, later.handle, alone.handle):
        await lane.driver.stop(handle, 0.0)
    assert not directory.exists()


@pytest.mark.long
async def test_a_consolidation_that_is_given_up_leaves_the_stages_as_they_were(lane: Lane, tiny: Tiny) -> None:
    handles = await launched_stages(lane, tiny.weights)
    first, later = await asyncio.gather(*(lane.driver.load(handle, tiny.weights) for handle in handles))
    serving = (await lane.driver.serve_stages(first.handle)).handle
    model = lane.request(tiny.weights, **TINY_ARGS)[0].model
    coming = asyncio.create_task(lane.driver.consolidate(serving, model, tiny.weights))
    beside = Path(serving.run_dir) / vllm.WHOLE / vllm.HANDLE
    await until(beside.exists, "the whole engine is launched")
    process = EngineHandle.from_json(beside.read_bytes())
    coming.cancel()
    assert await lane.driver.abandon_consolidation(serving) is None
    assert not lane.driver.adopt(process) and not beside.exists()
    assert await tokens(serving.url) == tiny.expected
    for handle in (serving, later.handle):
        await lane.driver.stop(handle, 0.0)


@pytest.mark.long
async def test_a_later_stage_that_dies_under_a_move_costs_the_kv_cache_alone(lane: Lane, tiny: Tiny) -> None:
    """The wait for it does not delay the move; the whole engine recomputes the streams."""
    handles = await launched_stages(lane, tiny.weights)
    first, later = await asyncio.gather(*(lane.driver.load(handle, tiny.weights) for handle in handles))
    serving = (await lane.driver.serve_stages(first.handle)).handle
    await lane.driver.consolidate(serving, lane.request(tiny.weights, **TINY_ARGS)[0].model, tiny.weights)
    report = lane.driver.whole(serving)
    assert report is not None
    said: list[int] = []
    stream = asyncio.create_task(begin(serving.url, range(400, 700), said))
    await until(lambda: said, "the stream has begun")
    kill_group(later.handle.pid, later.handle.pid_started_at)
    with pytest.raises((EngineFailed, TimeoutError)):
        async with asyncio.timeout(KV_MOVES_S):
            await lane.driver.move_requests(report.handle)
    await lane.driver.end_stage(report.handle)
    with contextlib.suppress(httpx.RemoteProtocolError):  # the stages break it off
        await stream
    assert lane.driver.adopt(report.handle) and await tokens(report.handle.url) == tiny.expected
    assert await lane.driver.abandon_consolidation(report.handle) == report.handle.figures.kv_tokens, "no way back"
    for handle in (report.handle, later.handle):
        await lane.driver.stop(handle, 0.0)
    assert not vllm.kv_directory(serving.run_dir).exists()
