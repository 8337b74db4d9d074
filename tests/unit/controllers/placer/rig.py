"""What a placer is given in these tests, and what it publishes."""

from typing import Any

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import NodeBeat
from tests.fleet_builder import an_event


def beat(controller: PlacerController, now_s: float, *nodes: Node) -> list[Effect]:
    return [effect for node in nodes for effect in controller.handle(an_event(NodeBeat(node=node)), now_s)]


def asked(model: Model, instance_id: str = "i-new", epoch: int = 1, wanted_at: float = 9.0) -> Event:
    command = PlaceInstance(instance_id=instance_id, model=model, reason="1 waiting", wanted_at=wanted_at)
    return an_event(command, issuer="autoscaler-1", epoch=epoch)


def payloads(effects: list[Effect], cls: type) -> list[Any]:
    return [e.payload for e in effects if isinstance(e, Publish) and isinstance(e.payload, cls)]
