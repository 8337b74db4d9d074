"""One engine of each kind for the contract test: its driver, a model it can serve, weights good and bad."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_sample
from glowplug.engines.drivers import driver
from glowplug.engines.port import EngineDriver, EngineHandle, EngineSettings, LaunchRequest, LoadReport
from glowplug.engines.samples import sample_weights_path
from tests.waiting import WAIT_S

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


@dataclass
class EngineCase:
    """Starts engines of one kind, each in a directory of its own, and stops what is left at the end."""

    name: str
    folder: Path
    settings: EngineSettings = field(default_factory=EngineSettings)
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
        self, *, first_bytes: int = 0, part: Mapping[str, Any] | None = None, **changes: object
    ) -> EngineHandle:
        """`part`: fields of the LaunchRequest of a pipeline's stage."""
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        model = self.model(**changes)
        request = LaunchRequest(
            instance_id=f"i-{run_dir.name}",
            model=model,
            num_bytes=model.memory_bytes,
            run_dir=run_dir,
            log_path=run_dir / "engine.log",
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            first_bytes=first_bytes,
            **(part or {}),
        )
        handle = await self.driver.launch(request)
        self.handles.append(handle)
        return handle

    async def start(self, *, first_bytes: int = 0, **changes: object) -> LoadReport:
        report = await self.driver.load(await self.launch(first_bytes=first_bytes, **changes), self.weights)
        self.handles.append(report.handle)
        return report

    async def close(self) -> None:
        for handle in self.handles:
            await self.driver.stop(handle, grace_s=0.0)
        await self.driver.close()


@contextlib.asynccontextmanager
async def engine_case(name: str, **options: Any) -> AsyncIterator[EngineCase]:
    """Engines of that kind in a folder of their own; the test is skipped where none can run."""
    with tempfile.TemporaryDirectory(prefix="gp-engine-") as folder:
        case = EngineCase(name, Path(folder), **options)
        if reason := case.driver.unavailable():
            pytest.skip(reason)
        try:
            await case.driver.warm()
            yield case
        finally:
            await case.close()


async def until_idle(case: EngineCase, handle: EngineHandle) -> int:
    """Requests in flight once the engine is idle, or what is left after the wait."""
    num_left = await case.driver.num_in_flight(handle)
    for _ in range(int(WAIT_S / 0.05)):
        if num_left == 0:
            break
        await asyncio.sleep(0.05)
        num_left = await case.driver.num_in_flight(handle)
    return num_left
