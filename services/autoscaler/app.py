"""REST of the autoscaler: the models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel, ConfigDict, Field

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.keeping import why_unable
from glowplug.domain.errors import BadRequest, InvalidModelFile, ModelNotFound
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.fleet.status import ModelState, model_state
from glowplug.runtime.control import ControlService
from glowplug.runtime.model_files import ModelFile, json_schema
from glowplug.runtime.rest import admin, make_app
from glowplug.weights.files import NoAnswer
from services.autoscaler.model_watch import ModelWatch
from services.autoscaler.settings import AutoscalerSettings


class VerbBody(BaseModel):
    """Where a verb leads to, what it leaves, or where it keeps, and on which node. Without a body: ready, everything,
    anywhere."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    to: Rung | None = Field(None, description="of load: ready, prewarmed or asleep; host is the placer's (fetch)")
    node: str = Field("", max_length=256, description="of load: that node alone")
    from_: Rung | None = Field(None, alias="from", description="of unload: what stands there alone; host: the placer's")
    at: Rung | None = Field(None, description="of pin: ready, asleep or host")


VERBS: dict[str, tuple[frozenset[str], Callable[[str, VerbBody], Any]]] = {  # with the fields of the body it takes
    "load": (frozenset({"to", "node"}), lambda key, body: operator.Load(key, _below(body.to, "to"), body.node)),
    "wake": (frozenset(), lambda key, body: operator.Load(key)),
    "unload": (frozenset({"from"}), lambda key, body: operator.Unload(key, _left(body.from_))),
    "sleep": (frozenset(), lambda key, body: operator.Sleep(key)),
    "drain": (frozenset(), lambda key, body: operator.Suspend(key)),
    "pin": (frozenset({"at"}), lambda key, body: operator.Pin(key, True, _kept(body.at))),
    "unpin": (frozenset(), lambda key, body: operator.Pin(key, False)),
}


def _below(rung: Rung | None, param: str) -> Rung:
    """Where an instance is brought. Raises BadRequest for host memory, which is the placer's."""
    if rung is Rung.HOST:
        raise BadRequest(
            "weights in host memory are the placer's: POST /v1/models/{name}/fetch or /drop there", param=param
        )
    return rung or Rung.READY


def _left(rung: Rung | None) -> Rung | None:
    return None if rung is None else _below(rung, "from")


def _kept(rung: Rung | None) -> Rung:
    """Where a copy is kept. Raises BadRequest for a replica: those are the placer's to drop."""
    if rung is Rung.PREWARMED:
        raise BadRequest(
            "a copy is kept at ready, asleep or host: replicas come and go with what is expected", param="at"
        )
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
    app.include_router(_changing(service, watch), dependencies=[Depends(admin(settings.admin_token))])
    return app


def model_row(controller: AutoscalerController, watch: ModelWatch, model: Model) -> dict[str, Any]:
    """One model as this REST and `glowplug models` show it."""
    shown: dict[str, Any] = msgspec.to_builtins(model)
    instances = controller.instances.living(model.key).values()
    failed = [i for i in controller.instances.of(model.key).values() if i.state is InstanceState.FAILED]
    last_failure = max(failed, key=lambda i: i.changed_at, default=None)
    load = controller.loads.of(model.key)
    state = model_state(instances)
    is_running = state in (ModelState.READY, ModelState.DRAINING)
    return shown | {
        "memory_bytes": model.memory_bytes,
        "state": "suspended" if model.suspended else state.summary,
        "instances": [
            {"instance_id": i.instance_id, "state": i.state, "node_id": i.node_id, "gpu_id": i.gpu_id}
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
    """Why a model that is to have a copy asleep has none, "" where it has or may get one."""
    if model.pinned_at is not Rung.ASLEEP:
        return ""
    why = why_unable(model, Rung.ASLEEP, controller.nodes)
    return f"no copy is kept asleep: {why}" if why else ""


def _find(controller: AutoscalerController, name: str) -> Model:
    """By key, name or alias."""
    for model in controller.models.values():
        if name == model.key or name in model.names:
            return model
    raise ModelNotFound(f"no model {name!r} is deployed", param="model")


def _reading(service: ControlService, watch: ModelWatch) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Every deployed model with its state; `errors` names model files that are not in force;
        `files_read` says whether each file has been read since this process started."""
        controller = service.controller(AutoscalerController)
        rows = [model_row(controller, watch, m) for m in sorted(controller.models.values(), key=lambda m: m.key)]
        return {"object": "list", "data": rows, "errors": watch.errors, "files_read": watch.has_read}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model, by key, name or alias."""
        controller = service.controller(AutoscalerController)
        return model_row(controller, watch, _find(controller, name))

    @router.get("/v1/model-schema")
    async def schema() -> dict[str, Any]:
        """The JSON schema of a model file."""
        return json_schema()

    return router


def _changing(service: ControlService, watch: ModelWatch) -> APIRouter:
    router = APIRouter(tags=["models"])

    async def modelled(body: ModelFile) -> Model:
        """The size of weights may be asked of a file system or a source, which may not answer."""
        try:
            return await watch.reader.run(
                f"weights of {body.name}", lambda: body.to_model("api", Path.cwd(), watch.measure)
            )
        except NoAnswer as error:
            raise InvalidModelFile(f"weights: cannot be read: {error.strerror}", param="weights") from error

    async def tell(request: Any) -> None:
        assert service.shell is not None
        await service.shell.ask(request)

    def described(controller: AutoscalerController, key: str) -> dict[str, Any]:
        return model_row(controller, watch, controller.models[key])

    @router.post("/v1/models", status_code=201)
    async def create(body: ModelFile) -> dict[str, Any]:
        """Deploy a new model; 409 when its name is taken."""
        controller = service.controller(AutoscalerController)
        model = await modelled(body)
        await tell(operator.Deploy(model=model, create=True))
        return described(controller, model.key)

    @router.put("/v1/models/{name:path}")
    async def update(name: str, body: ModelFile) -> dict[str, Any]:
        """Create or change a model. Running instances keep what they were started with."""
        controller = service.controller(AutoscalerController)
        model = await modelled(body)
        if name not in (model.key, *model.names):
            raise InvalidModelFile(f"name: the address says {name!r}, the body {model.name!r}", param="name")
        await tell(operator.Deploy(model=model))
        return described(controller, model.key)

    @router.delete("/v1/models/{name:path}")
    async def delete(name: str) -> dict[str, Any]:
        """Undeploy: its instances drain. A model that comes from a file returns with the next change of the file."""
        controller = service.controller(AutoscalerController)
        model = _find(controller, name)
        await tell(operator.Undeploy(model.key))
        return {"key": model.key, "deleted": True}

    @router.post("/v1/models/{name:path}/{verb}", status_code=202)
    async def act(name: str, verb: str, body: VerbBody | None = None) -> dict[str, Any]:
        """load (`to` a rung, on a `node`) or wake, unload (`from` a rung), sleep (unload, its engine kept asleep where
        it can), drain (unload and stay so until load), pin (`at` a rung), unpin. What it will take: the placer's
        /v1/models/{name}/cost."""
        controller = service.controller(AutoscalerController)
        if verb not in VERBS:
            raise BadRequest(f"no verb {verb!r}: one of {', '.join(VERBS)}", param="verb")
        takes, make = VERBS[verb]
        given = (body or VerbBody()).model_dump(by_alias=True, exclude_unset=True)
        if unknown := sorted(given.keys() - takes):
            raise BadRequest(f"{verb} takes no {unknown[0]!r}", param=unknown[0])
        model = _find(controller, name)
        await tell(make(model.key, body or VerbBody()))
        return described(controller, model.key)

    return router
