"""Start the autoscaler."""

import asyncio
import collections
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.keeping import why_unable
from glowplug.controllers.autoscaler.reads import READS
from glowplug.domain.access import Role
from glowplug.domain.declared import check_owner
from glowplug.domain.errors import BadRequest, InvalidModelFile
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model, Rung, Temperature
from glowplug.fleet.status import ModelState, model_state, temperature
from glowplug.fleet.tables import find_model
from glowplug.policies.registry import choose
from glowplug.runtime.control import ControlService
from glowplug.runtime.model_files import ModelFile, fewer_slots
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import World, run
from glowplug.runtime.shell import Shell
from glowplug.services.autoscaler import access_api, model_files_api
from glowplug.services.autoscaler.access_api import OfResource
from glowplug.services.autoscaler.access_watch import AccessWatch
from glowplug.services.autoscaler.file_watch import READ_S
from glowplug.services.autoscaler.model_files_api import modelled
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.services.autoscaler.settings import AutoscalerSettings
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap
from glowplug.weights.measure import ASK_S, measured


class ModelCollector(Collector):
    """Read the autoscaler's controller at each scrape; `controller()` is None before the service connects."""

    def __init__(self, controller: Callable[[], AutoscalerController | None]) -> None:
        self._controller, self._cap = controller, LabelCap()

    def collect(self) -> Iterator[Metric]:
        models = GaugeMetricFamily(semconv.MODELS, "Models deployed, by temperature", labels=["temperature"])
        instances = GaugeMetricFamily(
            semconv.MODEL_INSTANCES, "Instances that are not gone, by state", labels=["model", "state"]
        )
        controller = self._controller()
        if controller is not None:
            rows = {key: controller.instances.living(key).values() for key in controller.models}
            temperatures = collections.Counter(map(temperature, rows.values()))
            for one in Temperature:
                models.add_metric([one.value], temperatures[one])
            counts = collections.Counter(
                (self._cap(key), row.state.value) for key, mine in rows.items() for row in mine
            )
            for labels, count in sorted(counts.items()):
                instances.add_metric(labels, count)
        yield from (models, instances)


# REST API of models and operators' verbs; access_api.py has tenants and keys.


class VerbBody(BaseModel):
    """The arguments of a verb: the rung to load to, to unload from or to pin at, and the node. Without a body: load to
    ready on any node, unload everything, pin at ready."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    to: Rung | None = Field(None, description="of load: ready, prewarmed or asleep; host is the placer's (fetch)")
    node: str = Field("", max_length=256, description="of load: only on that node")
    from_: Rung | None = Field(
        None, alias="from", description="of unload: only instances at this rung; host is the placer's (drop)"
    )
    at: Rung | None = Field(None, description="of pin: ready, asleep or host")


VERBS: dict[str, tuple[frozenset[str], Callable[[str, VerbBody], Any]]] = {
    "load": (frozenset({"to", "node"}), lambda key, body: operator.Load(key, _below(body.to, "to"), body.node)),
    "wake": (frozenset(), lambda key, body: operator.Load(key)),
    "unload": (frozenset({"from"}), lambda key, body: operator.Unload(key, _left(body.from_))),
    "sleep": (frozenset(), lambda key, body: operator.Sleep(key)),
    "drain": (frozenset(), lambda key, body: operator.Suspend(key)),
    "pin": (frozenset({"at"}), lambda key, body: operator.Pin(key, True, _kept(body.at))),
    "unpin": (frozenset(), lambda key, body: operator.Pin(key, False)),
}


def _below(rung: Rung | None, param: str) -> Rung:
    """Raises BadRequest for host memory, which the placer manages."""
    if rung is Rung.HOST:
        raise BadRequest(
            "weights in host memory are the placer's: POST /v1/models/{name}/fetch or /drop there", param=param
        )
    return rung or Rung.READY


def _left(rung: Rung | None) -> Rung | None:
    return None if rung is None else _below(rung, "from")


def _kept(rung: Rung | None) -> Rung:
    """Raises BadRequest for a replica, which the placer may drop."""
    if rung is Rung.PREWARMED:
        raise BadRequest("a copy is kept ready, asleep or in host memory; replicas follow the forecast", param="at")
    return rung or Rung.READY


def make(service: ControlService, settings: AutoscalerSettings, watch: ModelWatch) -> FastAPI:
    app = make_app(
        "autoscaler",
        settings.service_id,
        ready=service.not_ready,
        policies=lambda: {"scaling": settings.policy_scaling},
        description="Models and how many instances each has.",
    )
    app.include_router(_reading(service, watch))
    operators = admin(settings.admin_token, least=Role.OPERATOR, find=access_api.finder(service))
    app.include_router(_changing(service, watch), dependencies=[Depends(operators)])
    app.include_router(access_api.routes(service, settings.admin_token))
    drafts = admin(settings.admin_token, least=Role.OPERATOR, find=access_api.finder(service), changes=False)
    app.include_router(model_files_api.routes(service, watch, drafts))
    return app


def model_row(controller: AutoscalerController, watch: ModelWatch, model: Model) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(model)
    instances = controller.instances.living(model.key).values()
    failed = [i for i in controller.instances.of(model.key).values() if i.state is InstanceState.FAILED]
    last_failure = max(failed, key=lambda i: i.changed_at, default=None)
    load = controller.loads.of(model.key)
    state = model_state(instances, num_waiting=load.num_waiting, has_failed=last_failure is not None)
    is_running = state in (ModelState.READY, ModelState.DRAINING)
    return shown | {
        "memory_bytes": model.memory_bytes,
        "state": "suspended" if model.suspended else state.summary,
        "model_state": state,
        "instances": [
            {
                "instance_id": i.instance_id,
                "state": i.state,
                "node_id": i.node_id,
                "gpu_id": i.gpu_id,
                "outdated": i.is_outdated(model),
            }
            for i in instances
        ],
        "num_waiting": load.num_waiting,
        "num_in_flight": load.num_in_flight,
        "last_failure": last_failure.reason if last_failure and not is_running else "",
        "config_error": watch.errors.get(model.source, ""),
        "pinned_at": model.pinned_at or "",
        "is_being_put_away": controller.is_put_away(model.key),
        "warning": _warning(controller, model),
    }


def _warning(controller: AutoscalerController, model: Model) -> str:
    if model.pinned_at is not Rung.ASLEEP:
        return ""
    why = why_unable(model, Rung.ASLEEP, controller.nodes)
    return f"no copy is kept asleep: {why}" if why else ""


def _reading(service: ControlService, watch: ModelWatch) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Every deployed model with its state; `errors` names model files that are not applied; `files_read` tells
        whether each file has been read since this process started."""
        controller = service.controller(AutoscalerController)
        rows = [model_row(controller, watch, m) for m in sorted(controller.models.values(), key=lambda m: m.key)]
        return {"object": "list", "data": rows, "errors": watch.errors, "files_read": watch.has_read}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model, by key, name or alias."""
        controller = service.controller(AutoscalerController)
        return model_row(controller, watch, find_model(controller.models, name))

    return router


def _changing(service: ControlService, watch: ModelWatch) -> APIRouter:
    router = APIRouter(tags=["models"])

    def described(controller: AutoscalerController, key: str) -> dict[str, Any]:
        return model_row(controller, watch, controller.models[key])

    def deployed(controller: AutoscalerController, model: Model, body: ModelFile) -> dict[str, Any]:
        row = described(controller, model.key)
        said = [row["warning"], fewer_slots(body.max_concurrency, model)]
        return row | {"warning": "; ".join(filter(None, said))}

    @router.post("/v1/models", status_code=201)
    async def create(body: ModelFile) -> dict[str, Any]:
        """Deploy a new model; 409 when its name is taken."""
        controller = service.controller(AutoscalerController)
        model = await modelled(watch, body)
        await service.ask(operator.Deploy(model=model, create=True))
        return deployed(controller, model, body)

    @router.put("/v1/models/{name:path}")
    async def update(name: str, body: ModelFile, source: OfResource = "") -> dict[str, Any]:
        """Create or change a model. Instances that run as declared before are replaced, one at a time. 409 where a
        custom resource declares it and is not the `source`, or the reverse."""
        controller = service.controller(AutoscalerController)
        model = await modelled(watch, body, source or "api")
        if name not in (model.key, *model.names):
            raise InvalidModelFile(f"name: the address says {name!r}, the body {model.name!r}", param="name")
        await service.ask(operator.Deploy(model=model))
        return deployed(controller, model, body)

    @router.delete("/v1/models/{name:path}")
    async def delete(name: str, source: OfResource = "") -> dict[str, Any]:
        """Undeploy a model and drain its instances. A model from a file returns with the next change of the file, one
        of a custom resource at its operator's next look."""
        controller = service.controller(AutoscalerController)
        model = find_model(controller.models, name)
        if source:
            check_owner(f"model {model.name!r}", model.source, source)
        await service.ask(operator.Undeploy(model.key))
        return {"key": model.key, "deleted": True}

    @router.post("/v1/models/{name:path}/{verb}", status_code=202)
    async def act(name: str, verb: str, body: VerbBody | None = None) -> dict[str, Any]:
        """Act on a model: load (`to` a rung, on a `node`) or wake, unload (`from` a rung), sleep (unload, with the
        engine kept asleep if it can), drain (unload until the next load), pin (`at` a rung), unpin. The placer's
        /v1/models/{name}/cost tells the cost before."""
        controller = service.controller(AutoscalerController)
        if verb not in VERBS:
            raise BadRequest(f"no verb {verb!r}: one of {', '.join(VERBS)}", param="verb")
        takes, make = VERBS[verb]
        given = (body or VerbBody()).model_dump(by_alias=True, exclude_unset=True)
        if unknown := sorted(given.keys() - takes):
            raise BadRequest(f"{verb} takes no {unknown[0]!r}", param=unknown[0])
        model = find_model(controller.models, name)
        await service.ask(make(model.key, body or VerbBody()))
        return described(controller, model.key)

    return router


async def serve(stopping: asyncio.Event) -> None:
    settings = AutoscalerSettings.read()
    service = ControlService(World.open("autoscaler", settings), READS)
    REGISTRY.register(ModelCollector(lambda: service.controller(AutoscalerController) if service.shell else None))
    scale = choose("scaling", settings.policy_scaling)
    options, ask_s = settings.source_options(), min(ASK_S, 0.8 * READ_S)
    measure = partial(measured, options=options, timeout_s=ask_s)
    watch, access_watch = ModelWatch(settings.models_dir, measure=measure), AccessWatch(settings.access_dir)

    def controller(epoch: int) -> AutoscalerController:
        return AutoscalerController(scale, settings.policy_scaling, epoch, settings.params)

    async def follow(shell: Shell) -> None:
        await asyncio.gather(access_watch.run(shell), watch.run(shell))

    await service.run(stopping, make(service, settings, watch), controller, background=follow)


def main() -> None:
    run(serve)
