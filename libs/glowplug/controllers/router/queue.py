"""The requests of a router, the queue of each model in order of arrival, and what is published of them.

Each fact has its request as its cause: the id and the trace of it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from glowplug.controllers.effects import Publish
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event, facts


@dataclass(slots=True)
class Request:
    """One request between arrival and end. `instance_id` is "" while it is held."""

    ticket: int
    request_id: str
    model_key: str
    arrived_at: float
    traceparent: str
    instance_id: str = ""
    num_dispatches: int = 0  # that reached an engine
    cold: bool = False
    prompt_tokens: int = 0  # 0: not known
    expected_tokens: int = 0  # of its answer
    text_tokens: int = 0  # ... as its text says; 0: it was not read
    head_sent: bool = False  # its client has a 200 already: it can be refused no more
    num_continued: int = 0  # instances that were lost in the middle of its stream
    broken_at: float = 0.0  # when the last one was
    sent_at: float = 0.0  # when it went to its instance
    leaves: Instance | None = None  # it is asked for at `instance_id`, and this one answers it still
    stays: bool = False  # it does not leave an instance that drains
    no_move_before: float = 0.0
    num_moves_failed: int = 0  # instances that were asked and did not take it

    @property
    def waits_since(self) -> float:
        """When it arrived, or its stream broke."""
        return self.broken_at or self.arrived_at

    def go_on_behind(self, num_tokens: int, now_s: float) -> None:
        """Another instance goes on with its stream, of which its client has so many tokens: that one reads them too."""
        self.head_sent, self.broken_at = True, now_s
        if self.prompt_tokens:
            self.prompt_tokens += num_tokens
            self.expected_tokens = max(self.expected_tokens - num_tokens, 1)


@dataclass(slots=True)
class ModelQueue:
    """The held requests of one model in ticket order (tickets grow with arrival) and its running counts."""

    waiting: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    num_running: int = 0
    num_arrived: int = 0  # since this router started
    num_dispatched: int = 0  # likewise
    last_active_at: float = 0.0
    published_at: float = 0.0  # last request.waiting
    asked_back: deque[float] = field(default_factory=deque)  # when those that were refused may come again, in order

    def hold(self, request: Request) -> None:
        """Put a request at its place by ticket: almost always the end, or the front when it comes back."""
        newest = next(reversed(self.waiting), 0)
        self.waiting[request.ticket] = request
        if request.ticket > newest:
            return
        self.waiting.move_to_end(request.ticket, last=False)
        second = next(self._after_first(), None)
        if second is not None and second < request.ticket:
            self.waiting = OrderedDict(sorted(self.waiting.items()))

    def _after_first(self) -> Iterator[int]:
        tickets = iter(self.waiting)
        next(tickets, None)
        return tickets

    def oldest(self) -> Request | None:
        return next(iter(self.waiting.values()), None)


def waiting_fact(model: Model, oldest: Request, num_waiting: int, most_s: float, router_id: str) -> Publish:
    """request.waiting: so many wait for `model`, and `oldest` comes first, which waits for at most `most_s`."""
    fact = facts.RequestWaiting(
        model_key=model.key,
        request_id=oldest.request_id,
        router_id=router_id,
        num_waiting=num_waiting,
        waiting_since=oldest.waits_since,
        deadline_at=oldest.waits_since + most_s,
    )
    return Publish(fact, _cause(oldest, router_id))


def rejected_fact(request: Request, error: GlowplugError, router_id: str) -> Publish:
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


def _cause(request: Request, router_id: str) -> Event:
    return Event(
        event_id=request.request_id,
        type="request.arrived",
        occurred_at=request.arrived_at,
        issuer=router_id,
        data=None,
        traceparent=request.traceparent,
    )
