"""Engines that several models share: a base's engine serves its adapters too (Instance.host_id).

Such a host's slots are one count, whichever model a request names, and a slot that comes free goes to the request that
has waited longest among the models that the host serves.
"""

from collections.abc import Callable, Container, Iterable, Mapping

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.queue import ModelQueue
from glowplug.domain.instance import Instance

Member = tuple[str, str]  # model_key, instance_id


class Hosts:
    """The adapters' instances at each host. `instances`: all that the router knows."""

    def __init__(self, instances: Mapping[str, Instance], of: Callable[[str], Mapping[str, Instance]]) -> None:
        self._instances, self._of = instances, of
        self.riders: dict[str, dict[str, str]] = {}  # host's instance_id -> adapter's instance_id -> its model_key

    def changed(self, instance: Instance) -> None:
        """Take the new row of an adapter's instance."""
        if not instance.state.is_gone:
            self.riders.setdefault(instance.host_id, {})[instance.instance_id] = instance.model_key
            return
        here = self.riders.get(instance.host_id, {})
        here.pop(instance.instance_id, None)
        if not here:
            self.riders.pop(instance.host_id, None)

    def forget(self, known: Container[str]) -> None:
        """Drop instances that are no longer known."""
        for host_id, here in list(self.riders.items()):
            for instance_id in [i for i in here if i not in known]:
                del here[instance_id]
            if not here:
                del self.riders[host_id]

    def members(self, instance: Instance) -> list[Member]:
        """All instances that the same engine serves; the host itself first, where it is known."""
        host = self._instances.get(instance.engine_id)
        riders = self.riders.get(instance.engine_id, {})
        first = [(host.model_key, host.instance_id)] if host is not None else []
        found = [*first, *((key, instance_id) for instance_id, key in riders.items())]
        return found or [(instance.model_key, instance.instance_id)]

    def in_turn(
        self, model_key: str, queues: Mapping[str, ModelQueue], send: Callable[[str], list[Effect]]
    ) -> list[Effect]:
        """Give free slots of the engines that serve a model to the requests that wait for them, the oldest first.
        `send(model_key)` dispatches one held request of a model, if any may go now."""
        beside = {key for row in self._of(model_key).values() for key, _ in self.members(row)}
        held = {key for key in (model_key, *beside) if key in queues}
        effects: list[Effect] = []
        while waiting := sorted((held_since(queues[key]), key) for key in held if queues[key].waiting):
            for _, key in waiting:
                num_before = len(queues[key].waiting)
                effects += send(key)
                if len(queues[key].waiting) < num_before:
                    break
                held.discard(key)
        return effects


def held_since(queue: ModelQueue) -> float:
    """When the oldest held request of a queue began to wait."""
    oldest = queue.oldest()
    return oldest.waits_since if oldest is not None else 0.0


def together(counts: Mapping[str, int], members: Iterable[Member]) -> int:
    """The sum of some count of the members' instances."""
    return sum(counts.get(instance_id, 0) for _, instance_id in members)
