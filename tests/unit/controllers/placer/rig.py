"""Rig for placer tests."""

from collections.abc import Callable, Sequence
from typing import Any

from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import NodeBeat, RequestFinished, RouterRequestsFinished
from glowplug.policies.registry import choose
from tests.fleet_builder import an_event


def a_placer(
    *nodes: Node,
    place: str | Callable[..., Any] = "first_fit",
    evict: str = "lru",
    prewarm: str = "",
    models: Sequence[Model] = (),
    priors: dict[str, Any] | None = None,
    **params: Any,
) -> PlacerController:
    """A placer of epoch 3 that has read the tables and ticked at 0."""
    names = {"placement": place if isinstance(place, str) else place.__name__, "eviction": evict, "prewarming": prewarm}
    controller = PlacerController(
        choose("placement", place) if isinstance(place, str) else place,
        choose("eviction", evict),
        names,
        3,
        PlacerParams(**params),
        prewarm=choose("prewarming", prewarm) if prewarm else None,
        **({} if priors is None else {"priors": priors}),
    )
    controller.restore("nodes", {node.node_id: node for node in nodes}, 0.0)
    controller.restore("models", {model.key: model for model in models}, 0.0)
    controller.handle(Tick(), 0.0)
    return controller


def beat(controller: PlacerController, now_s: float, *nodes: Node) -> list[Effect]:
    return [effect for node in nodes for effect in controller.handle(an_event(NodeBeat(node=node)), now_s)]


def asked(
    model: Model, instance_id: str = "i-new", epoch: int = 1, wanted_at: float = 9.0, is_awaited: bool = True
) -> Event:
    command = PlaceInstance(
        instance_id=instance_id, model=model, reason="1 waiting", wanted_at=wanted_at, is_awaited=is_awaited
    )
    return an_event(command, issuer="autoscaler-1", epoch=epoch)


def finished(model_key: str = "m", **fields: Any) -> RequestFinished:
    """A warm request: 1 s queued, 1 s of prefill, 100 steps of 0.1 s."""
    given: dict[str, Any] = {
        "request_id": "r", "router_id": "router-1", "instance_id": "i-1", "status": 200, "arrived_at": 0.0,
        "finished_at": 12.0, "queue_s": 1.0, "ttft_s": 2.0, "e2e_s": 12.0, "prompt_tokens": 5,
        "response_tokens": 101, "tokens_exact": True, "cold": False,
    }  # fmt: skip
    return RequestFinished(model_key=model_key, **(given | fields))


def told(*requests: RequestFinished) -> Event:
    return an_event(RouterRequestsFinished(router_id="router-1", requests=requests))


def payloads(effects: list[Effect], cls: type) -> list[Any]:
    return [e.payload for e in effects if isinstance(e, Publish) and isinstance(e.payload, cls)]
