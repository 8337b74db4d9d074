"""Start the placer."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Query
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.operator import Cordon, DropFromHost, FetchToHost
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.costs import Verb
from glowplug.controllers.placer.reads import reads_of
from glowplug.domain.access import Role
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import NoCapacity, NotFound
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model, Rung
from glowplug.events.facts import NodeLeft
from glowplug.fleet.tables import find_model
from glowplug.policies.registry import choose
from glowplug.runtime.clock import CLOCK, published
from glowplug.runtime.control import ControlService
from glowplug.runtime.decision_search import DecisionSearch
from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import World, run
from glowplug.runtime.shell import DECISIONS_KEPT, DECISIONS_LOG
from glowplug.services.placer.settings import PlacerSettings
from glowplug.state.port import NotATable, StoreUnavailable
from glowplug.state.rows import read_rows
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import FailureCounter

REMEMBER_LOST_S = 3600.0


class FleetCollector(Collector):
    """`controller()` is None before the service connects."""

    def __init__(self, controller: Callable[[], PlacerController | None], clock: Callable[[], float]) -> None:
        self._controller, self._clock = controller, clock
        self._lost: dict[str, float] = {}

    def saw(self, effect: Any) -> None:
        fact = getattr(effect, "payload", None)
        if isinstance(fact, NodeLeft):
            self._lost[fact.node_id] = self._clock()

    def collect(self) -> Iterator[Metric]:
        nodes = GaugeMetricFamily(semconv.NODES, "Nodes alive, by state", labels=["state"])
        up = GaugeMetricFamily(semconv.NODE_UP, "1 alive, 0 silent", labels=["node"])
        pending = GaugeMetricFamily(semconv.PLACEMENTS_PENDING, "Placements not settled, by stage", labels=["stage"])
        controller = self._controller()
        if controller is not None:
            now_s = self._clock()
            alive = controller.view(now_s)
            num_draining = sum(node.draining for node in alive)
            nodes.add_metric(["draining"], num_draining)
            nodes.add_metric(["alive"], len(alive) - num_draining)
            for node_id, value in self._known([node.node_id for node in alive], now_s):
                up.add_metric([node_id], value)
            known = controller.placements.values()
            pending.add_metric(["start"], sum(placement.sent is not None for placement in known))
            lacking = (placement for placement in known if placement.sent is None and not placement.command.waits)
            pending.add_metric(["room"], sum(1 for _ in lacking))  # a start that will sleep just waits for free memory
        yield from (nodes, up, pending)

    def _known(self, alive: list[str], now_s: float) -> Iterator[tuple[str, int]]:
        self._lost = {n: at for n, at in self._lost.items() if n not in alive and now_s - at < REMEMBER_LOST_S}
        yield from ((node_id, 1) for node_id in alive)
        yield from ((node_id, 0) for node_id in sorted(self._lost))


def make(service: ControlService, settings: PlacerSettings, policies: dict[str, str]) -> FastAPI:
    app = make_app(
        "placer",
        settings.service_id,
        ready=service.not_ready,
        policies=lambda: policies,
        description="Chooses the GPUs of instances.",
    )
    _fleet(app, service)
    _decisions(app, service)
    _nodes_changed(app, service, settings)
    _models(app, service, settings)
    _leaders(app, service)
    return app


def _leaders(app: FastAPI, service: ControlService) -> None:
    @app.get("/v1/leaders", tags=["health"])
    async def leaders() -> dict[str, Any]:
        """The leader of each service that elects one, and since when; empty if no service does."""
        try:
            rows = await service.world.store.load(LEADERS)
        except NotATable as error:
            raise NoCapacity(f"the leaders cannot be read: {error}", retry_after_s=2) from error
        except StoreUnavailable as error:
            raise NoCapacity("the store, which keeps the leaders, does not answer", retry_after_s=2) from error
        found, _ = read_rows(LEADERS, rows, Leader)
        return {"object": "list", "data": [msgspec.to_builtins(found[key]) for key in sorted(found)]}


def instance_row(row: Instance, models: Mapping[str, Model]) -> dict[str, Any]:
    """`outdated`: its model has been declared anew since its start, and it will be replaced."""
    shown: dict[str, Any] = msgspec.to_builtins(published(row))
    model = models.get(row.model_key)
    return shown | {"outdated": model is not None and not row.state.is_gone and row.is_outdated(model)}


def _fleet(app: FastAPI, service: ControlService) -> None:
    @app.get("/v1/nodes", tags=["nodes"])
    async def nodes() -> dict[str, Any]:
        """Live nodes, with GPUs, grants, links and cached weights."""
        view = service.controller(PlacerController).view(CLOCK.now_s())
        return {"object": "list", "data": msgspec.to_builtins([published(node) for node in view])}

    @app.get("/v1/gpus/{gpu_id:path}/worth", tags=["nodes"])
    async def worth(gpu_id: str) -> dict[str, Any]:
        """The present worth of each holder of a GPU's memory: the probability of a request, the seconds that it saves,
        both over its bytes; and which holder leaves next."""
        found = service.controller(PlacerController).price_list.of(gpu_id, CLOCK.now_s())
        shown: dict[str, Any] = msgspec.to_builtins(found)
        return shown

    @app.get("/v1/cordons", tags=["nodes"])
    async def cordons() -> dict[str, Any]:
        """Nodes that an operator drains, including absent ones, which come back drained."""
        found = service.controller(PlacerController).cordons(CLOCK.now_s())
        return {"object": "list", "data": [{"node_id": name, "is_alive": alive} for name, alive in found.items()]}

    @app.get("/v1/instances", tags=["instances"])
    async def instances(model: str = "", gone: bool = False) -> dict[str, Any]:
        """Instances, newest first; `gone=true` shows stopped and failed ones too."""
        fleet = service.controller(PlacerController).fleet
        every = fleet.instances.by_id.values()
        rows = [i for i in every if (gone or not i.state.is_gone) and (not model or i.model_key == model)]
        rows.sort(key=lambda i: -i.created_at)
        return {"object": "list", "data": [instance_row(row, fleet.models) for row in rows]}

    @app.get("/v1/instances/{instance_id}", tags=["instances"])
    async def instance(instance_id: str) -> Any:
        """One instance with the phases of its start."""
        fleet = service.controller(PlacerController).fleet
        found = fleet.instances.by_id.get(instance_id)
        if found is None:
            raise NotFound(f"no instance {instance_id!r}")
        return instance_row(found, fleet.models)

    @app.get("/v1/placements", tags=["instances"])
    async def placements() -> dict[str, Any]:
        """Instances that wait for GPUs, or for their agent to start them."""
        now_s = CLOCK.now_s()
        rows = [
            {
                "instance_id": p.command.instance_id,
                "model_key": p.command.model.key,
                "need_bytes": p.command.model.memory_bytes,
                "waited_s": round(now_s - p.received_at, 3),
                "gpu_id": p.gpu_id,
                "victims": list(p.victims),
                "started": p.sent is not None,
            }
            for p in service.controller(PlacerController).placements.values()
        ]
        return {"object": "list", "data": rows}


class HostBody(BaseModel):
    """The node to fetch to or drop from; "": the placer chooses one to fetch to, and drops on all."""

    model_config = ConfigDict(extra="forbid")

    node: str = Field("", max_length=256)


def _models(app: FastAPI, service: ControlService, settings: PlacerSettings) -> None:
    operators = [Depends(admin(settings.admin_token, least=Role.OPERATOR, find=KeyReader(service.world.store).find))]

    def key_of(name: str) -> str:
        return find_model(service.controller(PlacerController).fleet.models, name).key

    async def ask(request: FetchToHost | DropFromHost) -> dict[str, Any]:
        await service.ask(request)
        controller, now_s = service.controller(PlacerController), CLOCK.now_s()
        holders = controller.host_memory.holders(controller.fleet.models[request.model_key], now_s)
        return {"model": controller.fleet.models[request.model_key].name, "nodes": [node.node_id for node in holders]}

    @app.get("/v1/models/{name:path}/cost", tags=["models"])
    async def cost(name: str, verb: Verb, rung: Rung | None = None, node: str = "") -> dict[str, Any]:
        """The present cost of a verb of the autoscaler's REST (or of fetch and drop here): seconds with their source,
        bytes, and the instances that would have to leave. `rung`: the target of load, the rung that unload empties, or
        the rung of pin."""
        controller = service.controller(PlacerController)
        found = controller.costs.of(key_of(name), verb, CLOCK.now_s(), rung=rung, node_id=node)
        shown: dict[str, Any] = msgspec.to_builtins(found)
        return shown

    @app.post("/v1/models/{name:path}/fetch", tags=["models"], dependencies=operators, status_code=202)
    async def fetch(name: str, body: HostBody | None = None) -> dict[str, Any]:
        """Fetch a model's weights into host memory of a node. Answers with the nodes that have them already."""
        return await ask(FetchToHost(key_of(name), body.node if body else ""))

    @app.post("/v1/models/{name:path}/drop", tags=["models"], dependencies=operators, status_code=202)
    async def drop(name: str, body: HostBody | None = None) -> dict[str, Any]:
        """Drop a model's weights from host memory, once no instance reads them; 409 while they are pinned there."""
        return await ask(DropFromHost(key_of(name), body.node if body else ""))


def _decisions(app: FastAPI, service: ControlService) -> None:
    async def newest() -> list[DecisionRecord]:
        try:
            raw = await service.world.store.tail(DECISIONS_LOG, DECISIONS_KEPT)
        except NotATable as error:
            raise NoCapacity(f"the decisions cannot be read: {error}", retry_after_s=2) from error
        except StoreUnavailable as error:
            raise NoCapacity("the store, which keeps the decisions, does not answer", retry_after_s=2) from error
        found, _ = read_rows(DECISIONS_LOG, {str(place): row for place, row in enumerate(raw)}, DecisionRecord)
        return list(found.values())

    @app.get("/v1/decisions", tags=["decisions"])
    async def decisions(
        wanted: Annotated[DecisionSearch, Depends()], limit: int = Query(100, ge=1, le=DECISIONS_KEPT)
    ) -> dict[str, Any]:
        """Decisions of all services, newest first; filters are exact, `q` looks anywhere, `instance` finds victims
        too."""
        found = islice(filter(wanted.wants, await newest()), limit)
        return {"object": "list", "data": msgspec.to_builtins(list(found))}

    @app.get("/v1/decisions/{decision_id}", tags=["decisions"])
    async def decision(decision_id: str) -> dict[str, Any]:
        """One decision with its inputs, rule, rivals and reason."""
        for record in await newest():
            if record.decision_id == decision_id:
                shown: dict[str, Any] = msgspec.to_builtins(record)
                return shown
        raise NotFound(f"no decision {decision_id!r} is kept (the newest {DECISIONS_KEPT} are)")


def _nodes_changed(app: FastAPI, service: ControlService, settings: PlacerSettings) -> None:
    operators = [Depends(admin(settings.admin_token, least=Role.OPERATOR, find=KeyReader(service.world.store).find))]

    async def cordon(node_id: str, cordoned: bool) -> dict[str, Any]:
        fleet = service.controller(PlacerController).fleet
        is_known = node_id in fleet.nodes.by_id or (not cordoned and node_id in fleet.capacity.cordoned)
        if not is_known:
            raise NotFound(f"no node {node_id!r}" + ("" if cordoned else ", and no cordon of that name"))
        await service.ask(Cordon(node_id, cordoned))
        return {"node_id": node_id, "draining": cordoned}

    @app.post("/v1/nodes/{node_id}/drain", tags=["nodes"], dependencies=operators, status_code=202)
    async def drain(node_id: str) -> dict[str, Any]:
        """Place no more instances on a node, and drain those that run there."""
        return await cordon(node_id, True)

    @app.post("/v1/nodes/{node_id}/undrain", tags=["nodes"], dependencies=operators, status_code=202)
    async def undrain(node_id: str) -> dict[str, Any]:
        """Lift a node's cordon, so that instances may be placed there again. Works for an absent node too."""
        return await cordon(node_id, False)


async def serve(stopping: asyncio.Event) -> None:
    settings = PlacerSettings.read()
    policies = {
        "placement": settings.policy_placement,
        "eviction": settings.policy_eviction,
        "prewarming": settings.policy_prewarming,
    }
    place, evict, prewarm = (choose(kind, name) for kind, name in policies.items())
    service = ControlService(World.open("placer", settings), reads_of(place, prewarm))
    collector = FleetCollector(lambda: service.controller(PlacerController) if service.shell else None, CLOCK.now_s)
    service.world.metrics.observers += [collector.saw, FailureCounter().saw]
    REGISTRY.register(collector)
    params = settings.controller_params()

    def controller(epoch: int) -> PlacerController:
        return PlacerController(place, evict, policies, epoch, params, prewarm=prewarm)

    await service.run(stopping, make(service, settings, policies), controller)


def main() -> None:
    run(serve)
