"""One engine of each kind for the contract test, with a model and weights good and bad."""

import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.hardware import Devices
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_sample
from glowplug.engines.drivers import driver
from glowplug.engines.port import EngineDriver, EngineHandle, EngineSettings, LoadReport, Place
from glowplug.engines.samples import sample_weights_path
from glowplug.engines.vllm import VllmDriver
from tests.fleet_builder import a_start
from tests.waiting import until

ENGINES = (
    "emulated",
    pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    pytest.param("vllm", marks=pytest.mark.vllm),
)
_ENGINE_ARGS: dict[str, dict[str, object]] = {
    "emulated": {"time_scale": 5.0, "launch_s": 1.0},
    "llamacpp": {},
    "vllm": {},
}


_PARKED = tempfile.TemporaryDirectory(prefix="gp-z-", ignore_cleanup_errors=True)


def parked_dir() -> str:
    """Shared by all tests of this process: parking takes longer than most of them."""
    return _PARKED.name


@cache
def lease(path: str) -> socket.socket:
    """Keep that vLLM parked until this process ends, across test files."""
    held = socket.socket(socket.AF_UNIX)
    held.connect(path)
    held.sendall(json.dumps({"op": "lease"}).encode() + b"\n")
    assert json.loads(held.makefile().readline())["ok"]
    return held


async def park(driver: VllmDriver) -> None:
    await driver._zygote.ensure()
    lease(str(driver._zygote.socket_path))


@dataclass
class EngineCase:
    """Engines of one kind, each in its own directory, all stopped at the end."""

    name: str
    folder: Path
    settings: EngineSettings = field(
        default_factory=lambda: EngineSettings(
            health_timeout_s=10.0, launch_timeout_s=240.0, extra={"vllm_parked_dir": parked_dir()}
        )
    )
    handles: list[EngineHandle] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = ""

    def __post_init__(self) -> None:
        self.driver: EngineDriver = driver(self.name, self.settings)

    @property
    def weights(self) -> Path:
        if self.name == "llamacpp":
            return sample_weights_path()
        if self.name == "vllm":
            return vllm_sample.prepare()
        path = self.folder / "emulated.weights"
        path.write_bytes(b"stand-in")
        return path

    def model(self, **changes: object) -> Model:
        values: dict[str, object] = {
            "name": "Contract/Tiny",
            "key": "contract-tiny",
            "engine": self.name,
            "weights": WeightsRef(uri="file:unused"),
            "weights_bytes": 300 << 20,
            "kv_bytes": 128 << 20,
            "context_tokens": 1024,
            "max_concurrency": 4,
            "aliases": ("tiny-alias",),
            "engine_args": _ENGINE_ARGS.get(self.name, {}),
            **changes,
        }
        return Model(**values)  # type: ignore[arg-type]

    async def launch(
        self, *, first_bytes: int = 0, start: Mapping[str, Any] | None = None, **changes: object
    ) -> EngineHandle:
        """`first_bytes`: granted to a replica; `start`: fields of its command."""
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        model = self.model(**changes)
        place = Place(
            run_dir=run_dir,
            log_path=run_dir / "engine.log",
            devices=Devices(num_bytes=first_bytes or model.memory_bytes),
            host=self.host,
            port=self.port,
            api_key=self.api_key,
        )
        command = a_start(model, f"i-{run_dir.name}", replica=bool(first_bytes), **(start or {}))
        handle = await self.driver.launch(command, place)
        self.handles.append(handle)
        return handle

    async def start(self, *, first_bytes: int = 0, **changes: object) -> LoadReport:
        report = await self.driver.load(await self.launch(first_bytes=first_bytes, **changes), self.weights)
        self.handles.append(report.handle)
        return report

    async def stop_all(self) -> None:
        while self.handles:
            await self.driver.stop(self.handles.pop(), grace_s=0.0)

    async def close(self) -> None:
        await self.stop_all()
        await self.driver.close()


@contextlib.asynccontextmanager
async def engine_case(name: str, **options: Any) -> AsyncIterator[EngineCase]:
    """Skips the test if no engine of that kind can run."""
    with tempfile.TemporaryDirectory(prefix="gp-engine-") as folder:
        case = EngineCase(name, Path(folder), **options)
        if reason := case.driver.unavailable():
            pytest.skip(reason)
        try:
            await (park(case.driver) if isinstance(case.driver, VllmDriver) else case.driver.warm())
            yield case
        finally:
            await case.close()


async def until_idle(case: EngineCase, handle: EngineHandle) -> None:
    async def is_idle() -> bool:
        return await case.driver.num_in_flight(handle) == 0

    await until(is_idle, "the engine has no request in flight")
