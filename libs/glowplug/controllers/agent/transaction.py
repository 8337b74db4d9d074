"""One handling of one stimulus: the holdings it changes and the effects it asks for, in the order they are done."""

from dataclasses import dataclass, field, replace
from typing import Any

from glowplug.controllers.agent.messages import Holding
from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events import Event
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceLoading,
    InstancePrewarmed,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    InstanceSwappedOut,
)

INSTANCES = "instances"
_FACTS = {
    InstanceState.STARTING: InstanceStarting,
    InstanceState.LOADING: InstanceLoading,
    InstanceState.READY: InstanceReady,
    InstanceState.DRAINING: InstanceDraining,
    InstanceState.STOPPED: InstanceStopped,
    InstanceState.PREWARMED: InstancePrewarmed,
    InstanceState.SWAPPED_OUT: InstanceSwappedOut,
}


def fact_of(instance: Instance, code: str = "") -> Any:
    """The fact that tells an instance's state."""
    if instance.state is InstanceState.FAILED:
        return InstanceFailed(instance=instance, code=code or "engine_failed")
    return _FACTS[instance.state](instance=instance)


def _rank(effect: Effect) -> int:
    """What needs nobody else goes first, so that a slow bus or store delays no engine."""
    return {Publish: 1, Save: 2, Remove: 2}.get(type(effect), 0)


@dataclass(slots=True)
class Turn:
    """`holdings` is the controller's own map; changes go through `keep` and `tell`."""

    now_s: float
    holdings: dict[str, Holding]
    event: Event | None = None
    effects: list[Effect] = field(default_factory=list)
    is_dirty: bool = False  # what a restart must know has changed

    def ask(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def keep(self, holding: Holding) -> Holding:
        """Remember the holding as it is now."""
        self.holdings[holding.instance.instance_id] = holding
        self.is_dirty = True
        return holding

    def tell(self, holding: Holding, code: str = "", **changes: Any) -> Holding:
        """Change the instance, raise its revision, and tell bus and store."""
        instance = replace(holding.instance, changed_at=self.now_s, revision=holding.instance.revision + 1, **changes)
        cause = None if self.event is not None else holding.cause  # None: the shell takes the event in hand
        self.ask(Publish(fact_of(instance, code), cause), Save(INSTANCES, instance.instance_id, instance))
        return self.keep(replace(holding, instance=instance))

    def in_order(self) -> list[Effect]:
        return sorted(self.effects, key=_rank)
