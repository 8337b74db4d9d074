"""REST of the autoscaler: the models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.errors import BadRequest, InvalidModelFile, ModelNotFound
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model
from glowplug.fleet.status import ModelState, model_state
from glowplug.runtime.control import ControlService
from glowplug.runtime.model_files import ModelFile, json_schema
from glowplug.runtime.rest import admin, make_app
from glowplug.weights.files import NoAnswer
from services.autoscaler.model_watch import ModelWatch
from services.autoscaler.settings import AutoscalerSettings

VERBS: dict[str, Callable[[str], Any]] = {
    "load": operator.Load,
    "wake": operator.Load,
    "unload": operator.Unload,
    "sleep": operator.Sleep,
    "drain": operator.Suspend,
    "pin": lambda key: operator.Pin(key, True),
    "unpin": lambda key: operator.Pin(key, False),
}


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
    }


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
        """Every deployed model with its state; `errors` names model files that are not in force."""
        controller = service.controller(AutoscalerController)
        rows = [model_row(controller, watch, m) for m in sorted(controller.models.values(), key=lambda m: m.key)]
        return {"object": "list", "data": rows, "errors": watch.errors}

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
    async def act(name: str, verb: str) -> dict[str, Any]:
        """load or wake, unload, sleep (unload, its engine kept asleep where it can), drain (unload and stay so until
        load), pin, unpin."""
        controller = service.controller(AutoscalerController)
        make = VERBS.get(verb)
        if make is None:
            raise BadRequest(f"no verb {verb!r}: one of {', '.join(VERBS)}", param="verb")
        model = _find(controller, name)
        await tell(make(model.key))
        return described(controller, model.key)

    return router
