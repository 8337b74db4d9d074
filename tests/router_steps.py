"""A router's controller with its clock; makers of stimuli and readers of effects."""

from typing import Any

from glowplug.controllers.effects import Publish
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from tests.fleet_builder import a_model, an_instance, instance_event

NOW = 1000.0


def model(key: str = "m", **fields: Any) -> Model:
    """A queue of three for ten seconds, two running per instance."""
    return a_model(key, **({"max_concurrency": 2, "max_queue": 3, "max_wait_s": 10.0} | fields))


def instance(
    instance_id: str = "i-1", state: InstanceState = InstanceState.READY, *, model_key: str = "m", **fields: Any
) -> Instance:
    given = {"url": f"http://{instance_id}:1", "max_concurrency": 2}
    return an_instance(instance_id, model_key, state, **(given | fields))


class Run:
    def __init__(self, *models: Model, **params: Any) -> None:
        self.controller = RouterController(RouterParams(**params))
        self.now_s = NOW
        self.ticket = 0
        self.controller.restore("models", {m.key: m for m in models or (model(),)}, self.now_s)

    def handle(self, stimulus: Any, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        return self.controller.handle(stimulus, self.now_s)

    def instance(self, *given: Any, code: str = "", after_s: float = 0.0, **fields: Any) -> list[Any]:
        return self.handle(instance_event(instance(*given, **fields), code), after_s)

    def arrive(self, name: str = "m", prompt: int = 0, expected: int = 0, most: int = 0, **by: Any) -> list[Any]:
        self.ticket += 1
        asked = msg.RequestArrived(self.ticket, name, f"r-{self.ticket}", "", prompt, most, expected, **by)
        return self.handle(asked)


def warm(*models: Model, **fields: Any) -> Run:
    run = Run(*models)
    run.instance(**fields)
    return run


def dispatched(effects: list[Any]) -> list[tuple[int, str]]:
    return [(e.ticket, e.instance.instance_id) for e in effects if isinstance(e, msg.Dispatch)]


def rejected(effects: list[Any]) -> list[tuple[int, int, str]]:
    return [(e.ticket, e.error.status, e.error.code) for e in effects if isinstance(e, msg.Reject)]


def published(effects: list[Any], kind: type) -> list[Any]:
    return [e.payload for e in effects if isinstance(e, Publish) and isinstance(e.payload, kind)]
