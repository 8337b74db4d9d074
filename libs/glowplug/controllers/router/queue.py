"""The requests of a router, the queue of each model, and facts caused by requests, with their id and trace."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from glowplug.controllers.effects import Publish
from glowplug.controllers.router.messages import RequestArrived
from glowplug.domain.access import Priority
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event, facts
from glowplug.policies.fairness.port import Claim, Discipline


class Request(Struct, eq=False):
    """One request between arrival and end. `instance_id` is "" while it is held."""

    ticket: int
    arrival: RequestArrived
    model_key: str
    arrived_at: float
    prompt_tokens: int = 0  # 0: unknown
    expected_tokens: int = 0  # of its answer
    text_tokens: int = 0  # of its answer, suggested by its text; 0: not read
    instance_id: str = ""
    num_dispatches: int = 0
    cold: bool = False
    head_sent: bool = False  # its client has a 200: it can no longer be refused
    num_continued: int = 0  # instances lost mid-stream
    broken_at: float = 0.0
    sent_at: float = 0.0
    is_read: bool = False
    gives_way: bool = False  # recalled for another request, and still at its instance
    gave_way_at: float = 0.0  # since then it waits for another request; 0: it does not
    leaves: Instance | None = None  # still answers it, while it moves to `instance_id`
    stays: bool = False  # not moved off a draining instance
    no_move_before: float = 0.0
    num_moves_failed: int = 0
    held_at: float = 0.0  # 0: not held
    waited_s: float = 0.0  # in earlier holds; for batch requests
    has_aged: bool = False  # a batch request that counts as standard after a long wait
    cached_tokens: int = -1  # of its prompt, as reported by its engine at the end; -1: not reported
    gpu_s: float = 0.0  # GPU-seconds (balance.py) at earlier instances, and of the start made for it
    stay_from_s: float = 0.0

    @property
    def counts_as(self) -> Priority:
        return Priority.STANDARD if self.has_aged else self.arrival.priority

    @property
    def waits_since(self) -> float:
        return self.gave_way_at or self.broken_at or self.arrived_at

    @property
    def claim(self) -> Claim:
        return Claim(
            self.ticket,
            self.arrival.tenant,
            self.arrival.weight,
            self.arrival.priority,
            self.arrived_at,
            self.prompt_tokens,
            self.expected_tokens,
            bool(self.broken_at) and not self.gave_way_at,
        )

    @property
    def is_back(self) -> bool:
        return bool(self.broken_at or self.gave_way_at)

    def most_s(self, max_wait_s: float, continue_within_s: float) -> float:
        """Bound in seconds from `waits_since`."""
        if self.gave_way_at or (self.broken_at and self.arrival.priority is Priority.BATCH):
            return max(max_wait_s, continue_within_s)
        return continue_within_s if self.broken_at else max_wait_s

    def is_over(self, max_wait_s: float, continue_within_s: float, now_s: float) -> bool:
        return now_s - self.waits_since >= self.most_s(max_wait_s, continue_within_s)

    def go_on_behind(self, num_tokens: int, now_s: float) -> None:
        """Count the client's `num_tokens` as prompt, for the instance that continues the stream."""
        self.head_sent, self.broken_at = True, now_s
        if self.prompt_tokens:
            self.prompt_tokens += num_tokens
            self.expected_tokens = max(self.expected_tokens - num_tokens, 1)


@dataclass(slots=True)
class ModelQueue:
    """Held requests of one model in ticket order (tickets grow with arrival), and running counts. `discipline` orders
    several tenants or classes; None while all are of `tenant` and `priority`."""

    waiting: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    num_running: int = 0
    num_arrived: int = 0  # since this router started
    num_batch_arrived: int = 0
    num_dispatched: int = 0  # likewise
    last_active_at: float = 0.0
    urgent_at: float = 0.0  # likewise, without batch
    published_at: float = 0.0  # last request.waiting
    asked_back: deque[float] = field(default_factory=deque)
    discipline: Discipline | None = None
    tenant: str = ""
    priority: Priority = Priority.STANDARD
    num_slots: int = 0  # of ready instances, at the last look; only with a discipline
    num_instances: int = 0  # likewise

    @property
    def is_standard(self) -> bool:
        is_alike = self.discipline is None and self.priority is Priority.STANDARD
        return is_alike and self.urgent_at >= self.last_active_at

    def arrived(self, priority: Priority, now_s: float) -> None:
        self.last_active_at = now_s
        self.num_arrived += 1
        if priority is Priority.BATCH:
            self.num_batch_arrived += 1
        else:
            self.urgent_at = now_s

    def active(self, priority: Priority, now_s: float) -> None:
        self.last_active_at = now_s
        if priority is not Priority.BATCH:
            self.urgent_at = now_s

    def hold(self, request: Request, now_s: float) -> None:
        request.held_at = request.held_at or now_s
        if self.discipline is not None:
            self.discipline.hold(request.claim, now_s)
        newest = next(reversed(self.waiting), 0)
        self.waiting[request.ticket] = request
        if request.ticket > newest:
            return
        self.waiting.move_to_end(request.ticket, last=False)
        second = next(self._after_first(), None)
        if second is not None and second < request.ticket:
            self.waiting = OrderedDict(sorted(self.waiting.items()))

    def remove(self, ticket: int) -> None:
        if self.waiting.pop(ticket, None) is not None and self.discipline is not None:
            self.discipline.remove(ticket)

    def _after_first(self) -> Iterator[int]:
        tickets = iter(self.waiting)
        next(tickets, None)
        return tickets

    def in_turn(self, now_s: float) -> list[Request]:
        if self.discipline is None:
            return list(self.waiting.values())
        return [self.waiting[ticket] for ticket in self.discipline.order(now_s)]

    def num_ahead(self, ticket: int, now_s: float) -> int:
        order = self.waiting if self.discipline is None else self.discipline.order(now_s)
        return list(order).index(ticket)

    def oldest(self) -> Request | None:
        return next(iter(self.waiting.values())) if self.waiting else None


def waiting_fact(
    model: Model, oldest: Request, num_waiting: int, by_class: Mapping[str, int], most_s: float, router_id: str
) -> Publish:
    fact = facts.RequestWaiting(
        model_key=model.key,
        request_id=oldest.arrival.request_id,
        router_id=router_id,
        num_waiting=num_waiting,
        waiting_since=oldest.waits_since,
        deadline_at=oldest.waits_since + most_s,
        by_class=by_class,
    )
    return Publish(fact, _cause(oldest, router_id))


def rejected_fact(request: Request, error: GlowplugError, router_id: str) -> Publish:
    fact = facts.RequestRejected(
        model_key=request.model_key,
        request_id=request.arrival.request_id,
        router_id=router_id,
        status=error.status,
        code=error.code,
        retry_after_s=error.retry_after_s or 0.0,
        tenant=request.arrival.tenant,
        key_id=request.arrival.key_id,
    )
    return Publish(fact, _cause(request, router_id))


def _cause(request: Request, router_id: str) -> Event:
    return Event(
        event_id=request.arrival.request_id,
        type="request.arrived",
        occurred_at=request.arrived_at,
        issuer=router_id,
        data=None,
        traceparent=request.arrival.traceparent,
    )
