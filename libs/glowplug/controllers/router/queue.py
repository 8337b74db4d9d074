"""Per model: who waits, in order of arrival, and who runs where."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field


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
    head_sent: bool = False  # its client has a 200 already: it can be refused no more


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


@dataclass(slots=True)
class Quarantine:
    """Instances that could not be reached a moment ago. A newer revision or the end of `for_s` frees them."""

    for_s: float = 1.0
    until: dict[str, float] = field(default_factory=dict)

    def add(self, instance_id: str, now_s: float) -> None:
        self.until[instance_id] = now_s + self.for_s

    def holds(self, instance_id: str, now_s: float) -> bool:
        until = self.until.get(instance_id)
        if until is None:
            return False
        if now_s < until:
            return True
        del self.until[instance_id]
        return False

    def expire(self, now_s: float) -> list[str]:
        """Let go of those whose time is over, and say who they were."""
        over = [instance_id for instance_id, until in self.until.items() if now_s >= until]
        for instance_id in over:
            del self.until[instance_id]
        return over

    def free(self, instance_id: str) -> None:
        self.until.pop(instance_id, None)
