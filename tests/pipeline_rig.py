"""Several agents and a placer in this process, on one memory bus and store, with real emulated engine processes.
Instances are pipelines of two stages on two nodes. Weights arrive at once, when released, or never."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.agent.record import State
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placing import PlacePolicy
from glowplug.controllers.placer.reads import READS
from glowplug.domain.engine_key import engine_key
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines.process import is_alive, kill_group
from glowplug.events.commands import ConsolidateInstance, FetchWeights, PlaceInstance
from glowplug.events.envelope import Event, to_json
from glowplug.events.facts import ModelDeployed, WeightsFetched, WeightsFetchFailed, WeightsPartFetched
from glowplug.events.subjects import commands_to
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu, stage_bytes
from glowplug.policies.registry import choose
from glowplug.runtime.shell import Shell
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.weights.region import Region, RegionInfo, region_digest
from tests.agent_rig import SPEED, TRACEPARENT, AgentRig, emulated_model
from tests.fleet_builder import MIB, an_event
from tests.waiting import WAIT_S, until

SECRET = "shared by agents and routers"
PARAMS = PlacerParams(
    node_lease_s=5.0,
    repeat_s=0.2,
    give_up_s=60.0,
    settle_s=0.1,
    impossible_s=60.0,
    retry_s=0.1,
    follows_parts=True,
    hole_grace_s=8.0,
)


def on_the_first_nodes(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    return _in_two_stages(request, sorted(node.node_id for node in view.nodes if not node.draining)[:2])


def on_the_last_nodes(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """Stages are in reverse order."""
    return _in_two_stages(request, sorted(node.node_id for node in view.nodes if not node.draining)[:-3:-1])


def _in_two_stages(request: PlaceRequest, nodes: list[str]) -> PlaceDecision:
    model = request.model
    if len(nodes) < 2:
        return PlaceDecision(reason="one node is no pipeline")
    stages = []
    for number, node_id in enumerate(nodes):
        first, last = stage_bytes(model, number, 2)
        fetch_bytes = (last or model.fetch_bytes) - first
        need = bytes_per_gpu(model, 2)
        stages.append(
            StageDecision(
                node_id=node_id,
                gpu_ids=(f"{node_id}/0",),
                bytes_per_gpu=need,
                first_byte=first,
                fetch_bytes=fetch_bytes,
            )
        )
    return PlaceDecision(stages=tuple(stages), reason="two stages, as the test wants")


def _name(fetch: FetchWeights) -> str:
    return fetch.instance_id + ("/rest" if fetch.background else "")


class PipelineRig:
    """`withheld`: names of instances and stages whose weights (`name/rest`: the rest of them) do not arrive; `failing`:
    such a name -> its error code, once."""

    def __init__(self, folder: Path, num_nodes: int = 3, **settings: Any) -> None:
        self.broker, self.store, self.folder = MemoryBroker(), MemoryStore(), folder
        given: dict[str, Any] = {
            "gpu_budgets": "4GiB",
            "beat_s": 0.2,
            "engine_secret": SECRET,
            "health_every_s": 0.2,
            "health_timeout_s": 60.0,
            "shm_dir": folder / "shm",
        }
        self.agents: dict[str, AgentRig] = {}
        for number in range(1, num_nodes + 1):
            node_id = f"node-{number}"
            own = {"node_id": node_id, "service_id": f"agent-{number}", "state_dir": folder / node_id}
            self.agents[node_id] = rig = AgentRig(folder, **(given | settings | own))
            rig.broker, rig.store = self.broker, self.store
        self.bus = MemoryBus(self.broker)
        self.withheld: set[str] = set()
        self.failing: dict[str, str] = {}
        self.lost: set[str] = set()
        self._waiting: list[Event] = []
        self.engines: dict[str, tuple[int, float]] = {}
        self.placer: Shell

    async def start(self) -> None:
        for rig in self.agents.values():
            await rig.start()
        self.placer = await self.start_placer(1)
        for node_id in self.agents:
            await self.bus.subscribe([commands_to("prefetcher", node_id)], self._fetch, durable=f"prefetcher-{node_id}")
        await until(lambda: len(self.controller.fleet.nodes.by_id) == len(self.agents), "the placer knows the nodes")

    async def start_placer(self, epoch: int, place: PlacePolicy = on_the_first_nodes) -> Shell:
        name, registry = f"placer-{epoch}", CollectorRegistry()
        policies = {"placement": "two stages", "eviction": "lru", "prewarming": "none"}
        evict = choose("eviction", "lru")
        controller = PlacerController(place, evict, policies, epoch, PARAMS)
        metrics = ShellMetrics("placer", registry)
        bus = MemoryBus(self.broker)
        shell = Shell(
            "placer",
            name,
            controller,
            bus,
            self.store,
            metrics,
            epoch=epoch,
            reads=READS,
            tick_s=0.05,
            resync_s=0.2,
        )
        await shell.start()
        await bus.subscribe(READS.telemetry_filters(), shell.on_event)
        await bus.subscribe(READS.fact_filters(), shell.on_event, durable=f"{name}-facts")
        await bus.subscribe(READS.command_filters(), shell.on_event, durable=f"{name}-commands")
        return shell

    @property
    def controller(self) -> PlacerController:
        assert isinstance(self.placer.controller, PlacerController)
        return self.placer.controller

    async def stop(self) -> None:
        self._note_engines()
        await self.placer.stop()
        for process in self.engines.values():
            kill_group(*process)
        for node_id in self.agents.keys() - self.lost:
            await self.agents[node_id].crash()

    async def kill_agent(self, node_id: str) -> None:
        self._note_engines()
        await self.agents[node_id].crash()
        await self.agents[node_id].start()

    async def lose(self, node_id: str) -> None:
        self.lost.add(node_id)
        await self.agents[node_id].crash()

    async def place(self, model: Model, instance_id: str) -> None:
        await self.store.put("models", model.key, to_json(model))
        await self.bus.publish(an_event(ModelDeployed(model=model)))
        command = PlaceInstance(instance_id=instance_id, model=model, reason="a test", wanted_at=0.0)
        await self.bus.publish(an_event(command, issuer="autoscaler-1", epoch=1, traceparent=TRACEPARENT))

    async def consolidate(self, instance_id: str, node_id: str = "node-1") -> None:
        command = ConsolidateInstance(target=node_id, instance_id=instance_id, reason="a test")
        await self.bus.publish(an_event(command, issuer="autoscaler-1", epoch=1, traceparent=TRACEPARENT))

    async def _fetch(self, event: Event) -> None:
        data: FetchWeights = event.data
        name = _name(data)
        if name in self.withheld:
            self._waiting.append(event)
            return
        region = Region.at(self.folder / "shm", data.target, region_digest(data.weights))
        if code := self.failing.pop(name, ""):
            region.fail(code, f"broken: {code}", failed_at=time.time(), instance_ids=(data.instance_id,))
            about = {"node_id": data.target, "model_key": data.model_key, "digest": data.weights.digest}
            fact: Any = WeightsFetchFailed(**about, code=code, message=f"broken: {code}")
            await self.bus.publish(an_event(fact, issuer="prefetcher"))
            return
        region.begin()
        seed = region.blob.with_suffix(".seed")
        seed.write_bytes(b"seed")
        seed.replace(region.blob)  # atomically: an engine may be reading an earlier fetch's bytes
        came: dict[str, Any] = {"node_id": data.target, "model_key": data.model_key, "digest": data.weights.digest}
        came |= {"num_bytes": data.weights.num_bytes, "seconds": 0.0, "source": "file"}
        path = str(region.blob.absolute())
        if data.num_stages > 1:
            part = RegionInfo(path=path, num_bytes=1, sha256="", source="file", seconds=0.0)
            region.complete_stage(part, data.stage, data.num_stages)
            fact = WeightsPartFetched(instance_id=data.instance_id, **came)
        else:
            size = data.weights.num_bytes
            region.complete(RegionInfo(path=path, num_bytes=size, sha256="", source="file", seconds=0.0))
            fact = WeightsFetched(**came)
        await self.bus.publish(an_event(fact, issuer="prefetcher"))

    def asked_for(self) -> set[str]:
        return {_name(event.data) for event in self._waiting}

    async def let(self, *names: str) -> None:
        self.withheld -= set(names)
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            await self._fetch(event)

    def holding(self, instance_id: str) -> Any:
        found = (rig.service.controller.holdings.get(instance_id) for rig in self.agents.values())
        return next((holding for holding in found if holding is not None), None)

    def holdings(self, instance_id: str) -> list[Any]:
        found = (rig.service.controller.holdings.get(instance_id) for rig in self.agents.values())
        return [holding for holding in found if holding is not None]

    def in_states(self, *states: State) -> list[str]:
        return [
            f"{i} on {node_id}"
            for node_id, rig in self.agents.items()
            for i, holding in rig.service.controller.holdings.items()
            if holding.state in states
        ]

    def state(self, instance_id: str) -> State | None:
        holding = self.holding(instance_id)
        return holding.state if holding is not None else None

    async def reaches(self, instance_id: str, *states: State) -> Instance:
        def seen() -> Instance | None:
            holding = self.holding(instance_id)
            return holding.instance if holding is not None and holding.state in states else None

        found: Instance = await until(seen, f"{instance_id} is {states}, not {self.holding(instance_id)}")
        self._note_engines()
        return found

    def _note_engines(self) -> None:
        for rig in self.agents.values():
            for instance_id, handle in rig.service.engines._state.handles.items():
                self.engines[instance_id] = handle.pid, handle.pid_started_at

    @property
    def living(self) -> set[str]:
        return {name for name, process in self.engines.items() if is_alive(*process)}

    def granted(self, node_id: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for grant in self.agents[node_id].service.controller.ledger.gpus[0].all_grants:
            found[grant.holder] = found.get(grant.holder, 0) + grant.num_bytes // MIB
        return found

    async def ask(self, instance: Instance, num_tokens: int = 4) -> httpx.Response:
        headers = {"authorization": f"Bearer {engine_key(SECRET, instance.key_id)}"}
        body = {"model": instance.model_key, "prompt": "tell", "max_tokens": num_tokens, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            return await client.post(f"{instance.url}/v1/completions", json=body, headers=headers)

    def outcome(self, instance_id: str) -> tuple[InstanceState, str] | None:
        row = next(iter(self.agents.values())).row(instance_id)
        return (row.state, row.reason) if row is not None and row.state.is_gone else None


def staged_model(name: str, **engine_args: Any) -> Model:
    weights = WeightsRef(uri=f"file:///weights/{name}", num_bytes=4000)
    args = {"time_scale": SPEED, "stage_timeout_s": 8.0, "profile": "qwen2.5-7b/a10"} | engine_args
    return emulated_model(name, mib=60, kv_bytes=100 * MIB, weights=weights, engine_args=args, max_concurrency=2)


def quick(model: Model) -> Model:
    """Drop the engine arguments that delay its start."""
    return replace(model, engine_args=dict(staged_model(model.name).engine_args))


@asynccontextmanager
async def pipelines(folder: Path, num_nodes: int = 3, **settings: Any) -> AsyncIterator[PipelineRig]:
    rig = PipelineRig(folder, num_nodes, **settings)
    await rig.start()
    try:
        yield rig
    finally:
        await asyncio.shield(rig.stop())
