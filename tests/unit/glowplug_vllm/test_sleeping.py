"""A vLLM server's routes for sleep and wake. Lane: fast, 0.2 s."""

from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from glowplug_vllm import reloading, sleeping

OURS, THEIRS = "glowplug_vllm.worker.SleepingCpuWorker", "vllm.v1.worker.gpu_worker.Worker"
EXTENSION = "glowplug_vllm.reloading.ReloadingWorker"


class FakeClient:
    """vLLM's engine client. `holds`: whether each worker could reload its weights."""

    def __init__(self, worker: str, extension: str = "", holds: tuple[bool, ...] = (True,)) -> None:
        parallel = Namespace(worker_cls=worker, worker_extension_cls=extension)
        model = Namespace(enable_sleep_mode=worker == THEIRS)
        self.vllm_config = Namespace(parallel_config=parallel, model_config=model)
        self.asked: list[str] = []
        self._holds = list(holds)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",)

    async def pause_generation(self, mode: str) -> None:
        self.asked.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        self.asked.append(f"sleep {level} {mode}")

    async def release_kv_cache_memory(self) -> None:
        self.asked.append("release")

    async def wake_up(self, tags: list[str] | None) -> None:
        self.asked.append(f"wake {' '.join(tags or ['all'])}")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(" ".join(map(str, (method, *args))))
        return self._holds if method == "glowplug_hold_weights" else [None]

    def since(self, name: str) -> list[str]:
        """Calls after the first `name`, without pauses."""
        found = [one for one in self.asked if not one.startswith("pause")]
        return found[found.index(name) + 1 :]


class Server:
    def __init__(self, client: FakeClient, first_bytes: int = 0) -> None:
        app, engine = FastAPI(), sleeping.Sleeping(client, first_bytes)
        app.include_router(sleeping.routes(lambda: engine))
        self.client = client
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")

    async def sleep(self, becomes: str) -> httpx.Response:
        return await self.http.post("/glowplug/sleep", json={"becomes": becomes})

    async def wake(self, *tags: str) -> httpx.Response:
        return await self.http.post("/glowplug/wake", json={"tags": list(tags)} if tags else {})

    async def asleep_as(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get("/glowplug/sleep")).json()
        return found


@pytest_asyncio.fixture
async def on_gpu() -> AsyncIterator[Server]:
    server = Server(FakeClient(THEIRS, EXTENSION))
    async with server.http:
        yield server


@pytest_asyncio.fixture
async def on_cpu() -> AsyncIterator[Server]:
    server = Server(FakeClient(OURS), first_bytes=1000)
    async with server.http:
        yield server


async def test_on_a_gpu_weights_that_host_memory_has_are_dropped_and_loaded_again_before_the_kv_cache(
    on_gpu: Server,
) -> None:
    assert (await on_gpu.sleep("swapped_out")).status_code == 200
    assert await on_gpu.asleep_as() == {"asleep_as": "swapped_out", "level": 2}
    assert (await on_gpu.wake()).status_code == 200
    assert on_gpu.client.since("sleep 2 abort") == [
        "wake weights", "glowplug_reload_weights", "wake kv_cache", "resume",
    ]  # fmt: skip
    assert await on_gpu.asleep_as() == {"asleep_as": "", "level": 0}


@pytest.mark.parametrize(
    "client", [FakeClient(THEIRS, EXTENSION, holds=(True, False)), FakeClient(THEIRS)], ids=["one cannot", "no mixin"]
)
async def test_on_a_gpu_weights_that_host_memory_has_not_are_copied_there(client: FakeClient) -> None:
    server = Server(client)
    async with server.http:
        await server.sleep("swapped_out")
        assert await server.asleep_as() == {"asleep_as": "swapped_out", "level": 1}
        await server.wake()
    assert client.since("sleep 1 abort") == ["wake weights", "wake kv_cache", "resume"]


async def test_weights_woken_alone_make_it_prewarmed_and_it_serves_with_its_kv_cache(on_gpu: Server) -> None:
    await on_gpu.sleep("swapped_out")
    assert (await on_gpu.wake("weights")).status_code == 200
    assert (await on_gpu.asleep_as())["asleep_as"] == "prewarmed"
    assert on_gpu.client.asked[-2:] == ["wake weights", "glowplug_reload_weights"]
    await on_gpu.wake("kv_cache")
    assert on_gpu.client.asked[-2:] == ["wake kv_cache", "resume"]


async def test_a_kv_cache_without_weights_and_an_unknown_part_are_refused(on_gpu: Server) -> None:
    await on_gpu.sleep("swapped_out")
    refused = await on_gpu.wake("kv_cache")
    assert refused.status_code == 400 and "weights are away" in refused.json()["detail"]
    assert "no 'fish'" in (await on_gpu.wake("fish")).json()["detail"]
    assert (await on_gpu.sleep("prewarmed")).status_code == 400
    assert (await on_gpu.sleep("dreaming")).status_code == 400
    assert (await on_gpu.asleep_as())["asleep_as"] == "swapped_out"


async def test_a_replica_of_the_first_layers_keeps_them_until_it_has_served(on_cpu: Server) -> None:
    await on_cpu.sleep("prewarmed")
    assert on_cpu.client.asked[-2:] == ["release", "keep_first 1000"]
    await on_cpu.wake()
    assert on_cpu.client.asked[-2:] == ["wake kv_cache", "resume"]
    await on_cpu.sleep("prewarmed")  # by then all its weights are granted
    assert on_cpu.client.asked[-1] == "release"


async def test_workers_that_do_not_sleep_say_so() -> None:
    server = Server(FakeClient("vllm.v1.worker.cpu_worker.CPUWorker"))
    async with server.http:
        answer = await server.sleep("swapped_out")
    assert answer.status_code == 500 and "do not sleep" in answer.json()["detail"] and not server.client.asked


@pytest.mark.parametrize("path", ["/glowplug/sleep", "/glowplug/wake", "/glowplug/kv"])
async def test_only_who_has_the_key_may_ask(on_gpu: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    body = {"becomes": "swapped_out", "num_bytes": 1}
    for key in ("", "Bearer wrong", "secre"):
        assert (await on_gpu.http.post(path, json=body, headers={"authorization": key})).status_code == 401
    assert (await on_gpu.http.get("/glowplug/sleep", headers={"authorization": "Bearer secret"})).status_code == 200
    assert not on_gpu.client.asked


class _Region:
    """Stands in for the weights' files."""

    def __init__(self, directory: Any) -> None:
        self.is_readable = str(directory) == "whole"

    def items(self) -> list[str]:
        return ["tensors"]


@pytest.mark.parametrize(
    ("directory", "quantization", "can"), [("whole", None, True), ("odd", None, False), ("whole", "fp8", False)]
)
def test_a_gpu_worker_holds_its_files_and_loads_from_them(
    directory: str, quantization: str | None, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "glowplug_vllm.region", Namespace(Region=_Region))
    loaded: list[Any] = []
    worker = reloading.ReloadingWorker()
    worker.model_config = Namespace(model=directory, quantization=quantization)
    worker.model_runner = Namespace(reload_weights=lambda weights_iterator: loaded.append(weights_iterator))
    assert worker.glowplug_hold_weights() is can
    if can:
        worker.glowplug_reload_weights()
        assert loaded == [["tensors"]]
