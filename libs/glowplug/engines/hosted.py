"""The driver of engines in a process of ours (`python -m glowplug.engines.<host>`)."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from glowplug.domain.address import http_url, reachable
from glowplug.domain.errors import EngineFailed, WeightsDropped
from glowplug.domain.instance import EngineFigures, Phase, PhaseName
from glowplug.domain.model import Model
from glowplug.engines import landing, probe, process, rendezvous
from glowplug.engines.apis import EVERYTHING, EngineApi
from glowplug.engines.declaration import EngineArguments, EngineWeights, WeightsForm
from glowplug.engines.port import (
    Ability,
    EngineCapabilities,
    EngineHandle,
    EngineSettings,
    Health,
    LoadReport,
    Place,
)
from glowplug.engines.zygote import ChildZygote
from glowplug.events.commands import StartInstance

_log = logging.getLogger(__name__)


def phases_of(message: Mapping[str, Any]) -> tuple[Phase, ...]:
    return tuple(Phase(name=PhaseName(n), started_at=start, ended_at=end) for n, start, end in message["phases"])


class HostedDriver:
    """EngineDriver except for the host module, its spec, and its count of requests."""

    name = ""
    capabilities = EngineCapabilities()
    arguments = EngineArguments(engine="")
    weights = EngineWeights(kind="", form=WeightsForm.ANY)
    module = ""
    in_flight_samples: tuple[str, ...] = ()

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self._settings = settings or EngineSettings()

    @property
    def _python(self) -> str:
        return sys.executable

    @property
    def is_parked(self) -> bool:
        """Fork engines from a process with `module` imported (zygote.py), where possible."""
        return False

    @cached_property
    def zygote(self) -> ChildZygote:
        return ChildZygote(self._python, self.module, process.engine_environment(self.standing_environment()))

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        return frozenset()

    @staticmethod
    def api(model: Model) -> EngineApi:
        return EVERYTHING

    def unavailable(self) -> str:
        return ""

    async def warm(self) -> None:
        """Begin to park; unparked, a start takes a fraction of a second too."""
        if self.is_parked and not self.unavailable():
            self.zygote.park()

    async def close(self) -> None:
        if self.is_parked:
            self.zygote.close()

    def spec(self, command: StartInstance, place: Place) -> dict[str, Any]:
        """The host's input, as plain JSON. Raises EngineMisconfigured for wrong engine_args."""
        model = command.model
        self.arguments.check(model.engine_args)
        return {
            "instance_id": command.instance_id,
            "launched_at": time.time(),
            "wait_s": self._settings.load_timeout_s + self._settings.launch_timeout_s,
            "model": model.name,
            "names": list(model.names),
            "weights_bytes": model.weights_bytes,
            "kv_bytes": model.kv_bytes,
            "context_tokens": model.context_tokens,
            "max_concurrency": model.max_concurrency,
            "system_prompt": model.system_prompt,
            "gpu_kind": place.devices.kind,
            "adapter_slots": command.adapter_slots,
            "host": place.host,
            "port": place.port,
            "engine_args": dict(model.engine_args),
        }

    def standing_environment(self) -> dict[str, str]:
        """Return variables common to all of its engines: libraries read some on import."""
        return {"PYTHONUNBUFFERED": "1"}

    def environment(self, command: StartInstance, place: Place) -> dict[str, str]:
        gpus = str(place.devices.ordinals[0]) if place.devices.kind == "cuda" else ""
        env = {"CUDA_VISIBLE_DEVICES": gpus, "TRACEPARENT": place.traceparent, rendezvous.API_KEY: place.api_key}
        return self.standing_environment() | env

    async def launch(self, command: StartInstance, place: Place) -> EngineHandle:
        spec = self.spec(command, place)
        if self.is_parked:
            rendezvous.write(place.run_dir, rendezvous.SPEC, spec)
            if pid := self._fork(place, process.engine_environment(self.environment(command, place))):
                return self._handle(command, place, pid, parked="true")
        return self._spawn(command, place, spec)

    def _spawn(self, command: StartInstance, place: Place, spec: Mapping[str, Any]) -> EngineHandle:
        """Start a fresh interpreter. Raises EngineFailed."""
        rendezvous.write(place.run_dir, rendezvous.SPEC, dict(spec))
        env = process.engine_environment(self.environment(command, place))
        argv = [self._python, "-m", self.module, str(place.run_dir)]
        try:
            pid = process.spawn(argv, cwd=place.run_dir, log_path=place.log_path, env=env)
        except OSError as error:
            raise EngineFailed(f"{self.name} cannot start {argv[0]}: {error}") from error
        return self._handle(command, place, pid)

    def _fork(self, place: Place, env: Mapping[str, str]) -> int:
        """Return 0, with the reason in the log, where a fork fails now."""
        try:
            return self.zygote.start(place.run_dir, place.log_path, env)
        except EngineFailed as error:
            reason = error.message
            _log.warning("the parked process did not start %s, so a fresh interpreter does: %s", self.name, reason)
        with contextlib.suppress(EngineFailed):
            self.zygote.park()
        return 0

    def _handle(self, command: StartInstance, place: Place, pid: int, **data: str) -> EngineHandle:
        """Raises EngineFailed when the process is gone already."""
        started = process.started_at(pid)
        if started is None:
            raise EngineFailed(f"{self.name} ended at once\n{process.log_tail(place.log_path)}")
        return EngineHandle(
            engine=self.name,
            instance_id=command.instance_id,
            pid=pid,
            pid_started_at=started,
            run_dir=str(place.run_dir),
            log_path=str(place.log_path),
            host=place.host,
            port=place.port,
            devices=place.devices,
            data=data,
            api_key=place.api_key,
        )

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        run_dir = Path(handle.run_dir)
        async with self._loading(handle, weights_path):
            rendezvous.write(run_dir, rendezvous.GO, {"path": str(weights_path)})
            ready = await self._wait_ready(handle, run_dir, weights_path)
        return self._report(handle, ready)

    @contextlib.asynccontextmanager
    async def _loading(self, handle: EngineHandle, weights_path: Path) -> AsyncIterator[None]:
        """End the process where its load fails. Raises WeightsDropped where its weights were dropped, whatever the
        engine reports: only a worker may have noticed."""
        generation = landing.generation_of(weights_path)
        try:
            yield
        except EngineFailed as error:
            await process.stop_group(handle.pid, handle.pid_started_at, grace_s=0.0)
            if generation and landing.are_dropped(weights_path, generation):
                raise WeightsDropped(error.message) from error
            raise

    def _report(self, handle: EngineHandle, ready: Mapping[str, Any]) -> LoadReport:
        url = http_url(reachable(handle.host), ready["port"])
        figures = msgspec.convert(ready, EngineFigures, strict=False)
        return LoadReport(handle=replace(handle, url=url, figures=figures), phases=phases_of(ready))

    async def _wait_ready(
        self, handle: EngineHandle, run_dir: Path, weights_path: Path | None, name: str = rendezvous.READY
    ) -> dict[str, Any]:
        """The deadline restarts while weights at that path still arrive (the start bounds that). Raises
        EngineFailed."""
        deadline = asyncio.get_running_loop().time() + self._settings.load_timeout_s
        while True:
            alive = self.adopt(handle)  # first: messages written before its death are still read below
            if (ready := rendezvous.read(run_dir, name)) is not None and alive:
                return ready
            if (failed := rendezvous.read(run_dir, rendezvous.FAILED)) is not None:
                if "code" not in failed:
                    raise self._failure(handle, failed["message"])
                error = EngineFailed(f"{self.name}: {failed['message']}")  # the full reason: no log is needed
                error.code = failed["code"]
                raise error
            if not alive:
                raise self._failure(handle, "the process ended before it was ready")
            if asyncio.get_running_loop().time() > deadline:
                if weights_path is not None and landing.is_arriving(weights_path):
                    deadline += self._settings.load_timeout_s
                    continue
                raise self._failure(handle, f"not ready within {self._settings.load_timeout_s:g} s")
            await asyncio.sleep(process.POLL_S)

    def _failure(self, handle: EngineHandle, reason: str) -> EngineFailed:
        log_tail = process.log_tail(Path(handle.log_path))
        return EngineFailed(f"{self.name} {handle.instance_id}: {reason}\n{log_tail}".rstrip())

    def health_path(self, handle: EngineHandle) -> str:
        return "/health"

    def samples_in_flight(self, handle: EngineHandle) -> tuple[str, ...]:
        """Names in /metrics of running and waiting requests. Raises EngineFailed where none is known."""
        return self.in_flight_samples

    async def health(self, handle: EngineHandle) -> Health:
        if not self.adopt(handle):
            return Health(ok=False, reason="the process is gone", alive=False)
        if not handle.url:
            return Health(ok=False, reason="not loaded yet")
        try:
            path = self.health_path(handle)
            status, body = await probe.ask(handle.url, path, self._settings.health_timeout_s, api_key=handle.api_key)
        except EngineFailed as error:
            return Health(ok=False, reason=error.message)
        except TimeoutError:
            return Health(ok=False, reason=f"no answer within {self._settings.health_timeout_s:g} s")
        except OSError as error:
            alive = self.adopt(handle)
            return Health(ok=False, reason=str(error) if alive else "the process is gone", alive=alive)
        return self.judged(path, status, body)

    def judged(self, path: str, status: int, body: bytes) -> Health:
        if status != 200:
            return Health(ok=False, reason=f"{path} says {status}: {body[:200].decode('utf-8', 'replace')}")
        return Health(ok=True)

    async def num_in_flight(self, handle: EngineHandle) -> int:
        samples = self.samples_in_flight(handle)
        status, body = await self._ask(handle, "/metrics", self._settings.health_timeout_s)
        if status != 200:
            raise EngineFailed(f"{self.name} {handle.instance_id}: /metrics says {status}")
        return int(probe.sample_sum(body, samples))

    async def _ask(
        self, handle: EngineHandle, path: str, timeout_s: float, *, method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Raises EngineFailed for an incomplete answer."""
        try:
            return await probe.ask(handle.url, path, timeout_s, method=method, body=body, api_key=handle.api_key)
        except (OSError, TimeoutError) as error:
            raise EngineFailed(
                f"{self.name} {handle.instance_id} does not answer {path}: {type(error).__name__} {error}"
            ) from error

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        await process.stop_group(handle.pid, handle.pid_started_at, grace_s)

    def adopt(self, handle: EngineHandle) -> bool:
        return process.is_alive(handle.pid, handle.pid_started_at)
