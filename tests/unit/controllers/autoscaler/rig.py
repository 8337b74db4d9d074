"""Rig for autoscaler tests."""

from collections.abc import Callable
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.effects import Effect, Publish
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events.envelope import Event
from glowplug.events.facts import InstanceReady, RequestWaiting
from glowplug.policies.scaling.baselines import reactive
from tests.fleet_builder import an_event

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def autoscaler(
    *models: Model, scale: Callable[..., Any] = reactive, policy: str = "reactive", **params: Any
) -> AutoscalerController:
    """An autoscaler of epoch 7, its models deployed at 0."""
    controller = AutoscalerController(scale, policy, 7, AutoscalerParams(**params))
    for model in models:
        controller.handle(operator.Deploy(model=model), 0.0)
    return controller


def holds(
    num: int = 1, *, since: float = 1.0, router_id: str = "router-1", deadline_at: float = 60.0
) -> RequestWaiting:
    """Requests of m wait at a router."""
    return RequestWaiting(
        model_key="m", request_id="r-1", router_id=router_id, num_waiting=num, waiting_since=since,
        deadline_at=deadline_at,
    )  # fmt: skip


def waiting(num: int = 1, since: float = 1.0) -> Event:
    return an_event(holds(num, since=since), traceparent=TRACE)


def is_ready(controller: AutoscalerController, now_s: float, *instances: Instance) -> list[Effect]:
    """Agents report these READY, or as in their rows."""
    return [e for row in instances for e in controller.handle(an_event(InstanceReady(instance=row)), now_s)]


def published(effects: list[Effect], cls: type) -> list[Any]:
    return [e.payload for e in effects if isinstance(e, Publish) and isinstance(e.payload, cls)]
