"""One agent in this process on a memory bus and store, with real emulated engine processes."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.bounds import kinds_of
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import process
from glowplug.engines.drivers import driver
from glowplug.engines.port import EngineDriver, EngineSettings
from glowplug.engines.probe import sample_sum
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.envelope import Event, from_json
from glowplug.services.agent.service import AgentService
from glowplug.services.agent.settings import AgentSettings
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.weights.region import Region, RegionInfo, region_digest
from glowplug_lab.emulated.driver import EmulatedDriver
from tests.fleet_builder import MIB, a_model, an_event
from tests.waiting import WAIT_S, until

NODE = "node-1"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPEED = 50.0


def emulated_model(name: str = "tiny", *, mib: int = 100, **fields: Any) -> Model:
    fields.setdefault("engine_args", {"time_scale": SPEED})
    fields.setdefault("weights", WeightsRef(uri=f"file:///weights/{name}", num_bytes=4))
    return a_model(name, mib=mib, **fields)


def write_weights(shm_dir: Path, model: Model, node_id: str = NODE, source: str = "file") -> Region:
    region = Region.at(shm_dir, node_id, region_digest(model.weights))
    region.begin()
    region.blob.write_bytes(b"seed")
    region.complete(RegionInfo(path=str(region.blob), num_bytes=4, sha256="", source=source, seconds=0.01))
    return region


async def complete(url: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "tell", "max_tokens": 4} | fields
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


async def until_runs(url: str, headers: dict[str, str] | None = None) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S, headers=headers) as client:

        async def runs() -> bool:
            metrics = await client.get(f"{url}/metrics")
            return sample_sum(metrics.content, EmulatedDriver.in_flight_samples) > 0

        await until(runs, "a request runs")


def start_command(model: Model, instance_id: str, *, gpu: int = 0, node_id: str = NODE, epoch: int = 1) -> Event:
    worker = Worker(
        worker_id=f"{instance_id}-0", node_id=node_id, gpu_id=f"{node_id}/{gpu}", num_bytes=model.memory_bytes
    )
    now_s = time.time()
    command = StartInstance(
        target=node_id,
        instance_id=instance_id,
        model=model,
        workers=(worker,),
        decision_id=f"d-{instance_id}",
        phases=(Phase(name=PhaseName.DECIDE, started_at=now_s - 0.02, ended_at=now_s),),
    )
    return an_event(command, issuer="placer-1", epoch=epoch, traceparent=TRACEPARENT)


def stop_command(instance_id: str, *, grace_s: float = 30.0, node_id: str = NODE, epoch: int = 1) -> Event:
    command = StopInstance(target=node_id, instance_id=instance_id, reason="idle", grace_s=grace_s)
    return an_event(command, issuer="autoscaler-1", epoch=epoch)


class AgentRig:
    """One agent; `crash` leaves its state directory and store for another start."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given: dict[str, Any] = {
            "node_id": NODE,
            "service_id": "agent-1",
            "state_dir": folder / "state",
            "shm_dir": folder / "shm",
            "gpu_budgets": "300MiB",
            "tick_s": 0.02,
            "resync_s": 0.2,
            "drain_quiet_s": 0.05,
            "stop_grace_s": 2.0,
            "health_timeout_s": 60.0,
        }
        given |= settings
        of_params, of_driver = (
            {name: given.pop(name) for name in kinds_of(kind).keys() & given.keys()}
            for kind in (AgentParams, EngineSettings)
        )
        self.settings = AgentSettings(**given, params=AgentParams(**of_params), driver=EngineSettings(**of_driver))
        self.broker, self.store = MemoryBroker(), MemoryStore()
        self.sender = MemoryBus(self.broker)
        self.service: AgentService

    def open(self, drivers: dict[str, EngineDriver] | None = None) -> AgentService:
        registry = CollectorRegistry()
        if drivers is None:
            drivers = {"emulated": driver("emulated", self.settings.driver)}
        self.service = AgentService(
            self.settings,
            MemoryBus(self.broker),
            self.store,
            ShellMetrics("agent", registry),
            drivers=drivers,
            registry=registry,
        )
        self.registry = registry
        return self.service

    async def start(self, drivers: dict[str, EngineDriver] | None = None) -> AgentService:
        service = self.open(drivers)
        await service.start("http://agent.test")
        await until(lambda: not service.not_ready(), "the agent is ready")
        return service

    async def run(self, model: Model, instance_id: str = "i-1", **fields: Any) -> Instance:
        write_weights(self.settings.shm_dir.absolute(), model)
        await self.send(start_command(model, instance_id), **fields)
        return await self.reaches(instance_id, InstanceState.READY)

    async def send(self, event: Event, **fields: Any) -> None:
        await self.sender.publish(replace(event, data=replace(event.data, **fields)))

    async def stop(self, instance_id: str, **how: Any) -> Instance:
        await self.send(stop_command(instance_id, **how))
        return await self.reaches(instance_id, InstanceState.STOPPED)

    async def crash(self) -> None:
        """End the agent as kill -9 does: without drain, publication or save; engines and files stay."""
        service = self.service
        for task in service._tasks:
            task.cancel()
        await service.shell.stop()
        await service.engines.close()
        await service._bus.close()
        service._lock.release()

    def instance(self, instance_id: str) -> Instance | None:
        holding = self.service.controller.holdings.get(instance_id)
        return holding.instance if holding else None

    async def reaches(self, instance_id: str, state: InstanceState) -> Instance:
        def seen() -> Instance | None:
            instance = self.instance(instance_id)
            return instance if instance and instance.state is state else None

        found: Instance = await until(seen, f"{instance_id} is {state} (is {self.instance(instance_id)})")
        return found

    def row(self, instance_id: str) -> Instance | None:
        raw = self.store.tables["instances"].get(instance_id)
        return from_json(raw, Instance) if raw else None

    def facts(self, instance_id: str) -> list[str]:
        found = [e for e in self.broker.published if e.type.startswith("instance.")]
        return [e.type for e in found if e.data.instance.instance_id == instance_id]

    def handle(self, instance_id: str) -> dict[str, Any]:
        path = self.settings.node_dir / "agent.json"
        written = json.loads(path.read_bytes()) if path.exists() else {"handles": {}}
        found: dict[str, Any] = written["handles"].get(instance_id, {})
        return found

    def used_bytes(self) -> int:
        return sum(gpu.used_bytes for gpu in self.service.controller.ledger.gpus)


class DormantRig(AgentRig):
    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **({"reservation": "paper"} | settings))
        self.model = emulated_model(mib=60, kv_bytes=100 * MIB)

    async def begin(self) -> None:
        await self.start()
        write_weights(self.settings.shm_dir.absolute(), self.model)

    def granted(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for grant in self.service.controller.ledger.gpus[0].grants:
            found[grant.owner.value] = found.get(grant.owner.value, 0) + grant.num_bytes // MIB
        return found

    @property
    def processes(self) -> list[str]:
        written = json.loads((self.settings.node_dir / "agent.json").read_bytes())
        return sorted(written["handles"])

    def kill(self, instance_id: str) -> None:
        handle = self.handle(instance_id)
        process.kill_group(handle["pid"], handle["pid_started_at"])

    def pid(self, instance_id: str) -> int:
        pid: int = self.handle(instance_id)["pid"]
        return pid

    async def replica(self, model: Model, *, mib: int = 0, until: InstanceState = InstanceState.PREWARMED) -> Instance:
        event = start_command(model, "r-1")
        workers = tuple(replace(w, num_bytes=mib * MIB) for w in event.data.workers)
        await self.send(event, replica=True, workers=workers)
        return await self.reaches("r-1", until)

    async def grow(self, instance_id: str = "i-1", source: str = "r-1", model: Model | None = None) -> Instance:
        ready = await self.run(model or self.model, instance_id, source=source)
        answer = await complete(ready.url, model=self.model.name)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        return ready
