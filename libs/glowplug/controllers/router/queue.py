"""The requests of a router, the queue of each model, and the facts about them.

Each fact names its request as its cause, with the request's id and trace.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from glowplug.controllers.effects import Publish
from glowplug.domain.access import Priority
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event, facts
from glowplug.policies.fairness.port import Claim, Discipline
from glowplug.policies.routing.prefix_index import Prefix


@dataclass(slots=True)
class Request:
    """One request between arrival and end. `instance_id` is "" while it is held."""

    ticket: int
    request_id: str
    model_key: str
    arrived_at: float
    traceparent: str
    instance_id: str = ""
    num_dispatches: int = 0  # dispatches that reached an engine
    cold: bool = False
    prompt_tokens: int = 0  # 0: not known
    max_tokens: int = 0  # of its answer; 0: no limit, or not known
    expected_tokens: int = 0  # of its answer
    text_tokens: int = 0  # of its answer, as its text suggests; 0: the text was not read
    head_sent: bool = False  # its client has a 200: the request can no longer be refused
    num_continued: int = 0  # instances lost in the middle of its stream
    broken_at: float = 0.0  # when its stream last broke
    sent_at: float = 0.0  # when it went to its instance
    is_read: bool = False  # its instance has begun its answer
    gives_way: bool = False  # it was recalled for another request, and has not left its instance yet
    gave_way_at: float = 0.0  # when it last did and waits since; 0: it does not wait for that reason
    leaves: Instance | None = None  # instance that still answers it, while it moves to `instance_id`
    stays: bool = False  # it is not moved off a draining instance
    no_move_before: float = 0.0
    num_moves_failed: int = 0  # instances that were asked to take its stream and did not
    tenant: str = ""
    weight: float = 1.0  # of its tenant
    priority: Priority = Priority.STANDARD
    held_at: float = 0.0  # since when it is held; 0: it is not
    waited_s: float = 0.0  # in earlier holds; counted for batch requests
    has_aged: bool = False  # a batch request that counts as a standard one, since it has waited for long
    key_id: str = ""
    prefix: Prefix = ()  # blocks of its prompt; (): unknown, or of no use
    cached_tokens: int = -1  # of its prompt, as its engine says at its end; -1: it does not
    gpu_s: float = 0.0  # GPU-seconds (balance.py) at instances that it has left, and of the start that was for it
    stay_from_s: float = 0.0  # what the integral of its instance was when it came

    @property
    def counts_as(self) -> Priority:
        """The class that demand is reported of."""
        return Priority.STANDARD if self.has_aged else self.priority

    @property
    def waits_since(self) -> float:
        """When it arrived or, for a broken stream, when the stream broke, or when it gave way to another request."""
        return self.gave_way_at or self.broken_at or self.arrived_at

    @property
    def claim(self) -> Claim:
        """The request as a fairness policy sees it."""
        return Claim(
            self.ticket,
            self.tenant,
            self.weight,
            self.priority,
            self.arrived_at,
            self.prompt_tokens,
            self.expected_tokens,
            bool(self.broken_at) and not self.gave_way_at,
        )

    @property
    def is_back(self) -> bool:
        """Whether a held request was at an instance before."""
        return bool(self.broken_at or self.gave_way_at)

    def most_s(self, max_wait_s: float, continue_within_s: float) -> float:
        """Seconds that the request may wait since `waits_since`."""
        if self.gave_way_at or (self.broken_at and self.priority is Priority.BATCH):
            return max(max_wait_s, continue_within_s)
        return continue_within_s if self.broken_at else max_wait_s

    def is_over(self, max_wait_s: float, continue_within_s: float, now_s: float) -> bool:
        """Whether a held request has waited as long as it may."""
        return now_s - self.waits_since >= self.most_s(max_wait_s, continue_within_s)

    def go_on_behind(self, num_tokens: int, now_s: float) -> None:
        """Count `num_tokens` that the client has as prompt, for the instance that continues the stream."""
        self.head_sent, self.broken_at = True, now_s
        if self.prompt_tokens:
            self.prompt_tokens += num_tokens
            self.expected_tokens = max(self.expected_tokens - num_tokens, 1)


@dataclass(slots=True)
class ModelQueue:
    """The held requests of one model in ticket order (tickets grow with arrival) and its running counts. `discipline`:
    what orders the requests of several tenants or classes; None while all are of `tenant` and `priority`."""

    waiting: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    num_running: int = 0
    num_arrived: int = 0  # since this router started
    num_batch_arrived: int = 0  # likewise, of the batch class
    num_dispatched: int = 0  # likewise
    last_active_at: float = 0.0
    urgent_at: float = 0.0  # likewise of requests that are not batch
    published_at: float = 0.0  # last request.waiting
    asked_back: deque[float] = field(default_factory=deque)  # when refused clients may ask again, in order
    discipline: Discipline | None = None
    tenant: str = ""
    priority: Priority = Priority.STANDARD
    num_slots: int = 0  # of all ready instances, at the last look; only where there is a discipline
    num_instances: int = 0  # likewise

    @property
    def is_standard(self) -> bool:
        """Return whether all requests here, and the last ones, are of the standard class."""
        is_alike = self.discipline is None and self.priority is Priority.STANDARD
        return is_alike and self.urgent_at >= self.last_active_at

    def arrived(self, priority: Priority, now_s: float) -> None:
        """Count an arrival."""
        self.active(priority, now_s)
        self.num_arrived += 1
        self.num_batch_arrived += priority is Priority.BATCH

    def active(self, priority: Priority, now_s: float) -> None:
        """Note an arrival or an end."""
        self.last_active_at = now_s
        if priority is not Priority.BATCH:
            self.urgent_at = now_s

    def hold(self, request: Request, now_s: float) -> None:
        """Insert a request by ticket: almost always at the end, or at the front when it comes back."""
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
        """Take out a request that waits no more, if it is there."""
        if self.waiting.pop(ticket, None) is not None and self.discipline is not None:
            self.discipline.remove(ticket)

    def _after_first(self) -> Iterator[int]:
        tickets = iter(self.waiting)
        next(tickets, None)
        return tickets

    def in_turn(self, now_s: float) -> list[Request]:
        """The held requests in the order in which they are likely to be dispatched."""
        if self.discipline is None:
            return list(self.waiting.values())
        return [self.waiting[ticket] for ticket in self.discipline.order(now_s)]

    def num_ahead(self, ticket: int, now_s: float) -> int:
        """The number of held requests that go before this one."""
        order = self.waiting if self.discipline is None else self.discipline.order(now_s)
        return list(order).index(ticket)

    def oldest(self) -> Request | None:
        return next(iter(self.waiting.values())) if self.waiting else None


def waiting_fact(
    model: Model, oldest: Request, num_waiting: int, by_class: Mapping[str, int], most_s: float, router_id: str
) -> Publish:
    """Make request.waiting: `num_waiting` requests wait for `model`, first `oldest`, for at most `most_s`."""
    fact = facts.RequestWaiting(
        model_key=model.key,
        request_id=oldest.request_id,
        router_id=router_id,
        num_waiting=num_waiting,
        waiting_since=oldest.waits_since,
        deadline_at=oldest.waits_since + most_s,
        by_class=by_class,
    )
    return Publish(fact, _cause(oldest, router_id))


def rejected_fact(request: Request, error: GlowplugError, router_id: str) -> Publish:
    """Make request.rejected: the request was answered with `error`."""
    fact = facts.RequestRejected(
        model_key=request.model_key,
        request_id=request.request_id,
        router_id=router_id,
        status=error.status,
        code=error.code,
        retry_after_s=error.retry_after_s or 0.0,
        tenant=request.tenant,
        key_id=request.key_id,
    )
    return Publish(fact, _cause(request, router_id))


def _cause(request: Request, router_id: str) -> Event:
    return Event(
        event_id=request.request_id,
        type="request.arrived",
        occurred_at=request.arrived_at,
        issuer=router_id,
        data=None,
        traceparent=request.traceparent,
    )
