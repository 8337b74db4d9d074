"""What a router tells the fleet of its requests. Each fact has its request as its cause: the id and the trace of it."""

from collections.abc import Mapping

from glowplug.controllers.effects import Publish
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.errors import GlowplugError
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events import Event, facts


def waiting(model: Model, oldest: Request, num_waiting: int, router_id: str) -> Publish:
    """request.waiting: so many wait for `model`, and `oldest` for the longest."""
    fact = facts.RequestWaiting(
        model_key=model.key,
        request_id=oldest.request_id,
        router_id=router_id,
        num_waiting=num_waiting,
        waiting_since=oldest.arrived_at,
        deadline_at=oldest.arrived_at + model.max_wait_s,
    )
    return Publish(fact, _cause(oldest, router_id))


def rejected(request: Request, error: GlowplugError, router_id: str) -> Publish:
    """request.rejected: it was answered with `error`."""
    fact = facts.RequestRejected(
        model_key=request.model_key,
        request_id=request.request_id,
        router_id=router_id,
        status=error.status,
        code=error.code,
        retry_after_s=error.retry_after_s or 0.0,
    )
    return Publish(fact, _cause(request, router_id))


def load(
    queue: ModelQueue, running: Mapping[str, int], outlooks: Mapping[str, Outlook], slots_per_instance: int = 0
) -> ModelLoad:
    """What router.load_reported says of one model; `running` and `outlooks` by instance_id."""
    return ModelLoad(
        num_waiting=len(queue.waiting),
        num_in_flight=queue.num_running,
        last_active_at=queue.last_active_at,
        num_arrived=queue.num_arrived,
        num_dispatched=queue.num_dispatched,
        in_flight_by_instance=running,
        outlook_by_instance=outlooks,
        slots_per_instance=slots_per_instance,
    )


def _cause(request: Request, router_id: str) -> Event:
    return Event(
        event_id=request.request_id,
        type="request.arrived",
        occurred_at=request.arrived_at,
        issuer=router_id,
        data=None,
        traceparent=request.traceparent,
    )
