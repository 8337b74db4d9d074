"""The classes of a router's requests as its load reports tell them, and batch requests that give way.

A batch request that has waited for `patience_s` (policies/worth.py) is reported as a standard one, waiting and then
running to its end: its model is started as for any other, so that nobody waits for ever. One that runs on an instance
whose drain is short is taken back at once, since others wait for the memory: it waits again, and a stream goes on later
where it stopped.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from glowplug.controllers.router.messages import Recall
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.access import Priority
from glowplug.domain.instance import Instance, slots_per_instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ClassLoad, ModelLoad, Outlook
from glowplug.fleet.tables import Fleet
from glowplug.policies.worth import patience_s

SHORT_S: Final = 2.0  # batch requests leave an instance at once whose drain is no longer than this


def load_of(
    model_key: str,
    queue: ModelQueue,
    fleet: Fleet,
    in_flight: Mapping[str, int],
    outlooks: Mapping[str, Outlook],
    requests: Mapping[int, Request],
) -> ModelLoad:
    """One router's load of a model."""
    mine = fleet.of(model_key)
    return ModelLoad(
        num_waiting=len(queue.waiting),
        num_in_flight=queue.num_running,
        last_active_at=queue.last_active_at,
        num_arrived=queue.num_arrived,
        num_dispatched=queue.num_dispatched,
        in_flight_by_instance={i: in_flight[i] for i in mine if i in in_flight},
        outlook_by_instance=outlooks,
        slots_per_instance=slots_per_instance(mine.values()),
        by_class={} if queue.is_standard else _by_class(model_key, queue, requests),
        num_batch_arrived=queue.num_batch_arrived,
    )


def num_by_class(queue: ModelQueue) -> dict[str, int]:
    """How many of the requests that wait are of each class other than standard."""
    found: dict[str, int] = {}
    for request in () if queue.is_standard else queue.waiting.values():
        if request.counts_as is not Priority.STANDARD:
            name = request.counts_as.value
            found[name] = found.get(name, 0) + 1
    return found


def _by_class(model_key: str, queue: ModelQueue, requests: Mapping[int, Request]) -> dict[str, ClassLoad]:
    waiting, running = num_by_class(queue), dict[str, dict[str, int]]()
    for request in requests.values():
        if request.model_key == model_key and request.instance_id and request.counts_as is not Priority.STANDARD:
            here = running.setdefault(request.counts_as.value, {})
            here[request.instance_id] = here.get(request.instance_id, 0) + 1
    alone_s = max(0.0, queue.last_active_at - queue.urgent_at)
    batch = {Priority.BATCH.value} if alone_s else set[str]()
    return {
        name: ClassLoad(
            num_waiting=waiting.get(name, 0),
            in_flight_by_instance=running.get(name, {}),
            alone_s=alone_s if name == Priority.BATCH else 0.0,
        )
        for name in sorted(waiting.keys() | running.keys() | batch)
    }


def age(queue: ModelQueue, model: Model, now_s: float) -> None:
    """Count batch requests as standard ones that have waited long enough in all."""
    most_s = patience_s(model.max_wait_s)
    for request in () if queue.is_standard else queue.waiting.values():
        if request.priority is Priority.BATCH and request.waited_s + now_s - request.held_at >= most_s:
            request.has_aged = True


def gives_way(instance: Instance, requests: Iterable[Request]) -> list[Recall]:
    """Take back the batch requests of an instance whose drain is short, but for those that another instance takes."""
    if instance.drain_ends_at - instance.changed_at > SHORT_S:
        return []
    recalls = []
    for request in requests:
        if request.instance_id == instance.instance_id and request.counts_as is Priority.BATCH:
            if request.leaves or request.gives_way:
                continue
            request.gives_way = True
            recalls.append(Recall(request.ticket, instance.reason or "others wait for the memory", gives_way=True))
    return recalls
