"""Several tenants or classes at one model: the next request to dispatch, and the one to refuse.

While all requests of a model are of one tenant and class, its queue has no discipline: it goes in order of arrival, and
a full queue refuses the newcomer. The first request of another one makes the fairness policy's discipline, which learns
of all present requests; it is dropped when one tenant and class is left.
"""

from collections.abc import Callable, Mapping

from glowplug.controllers.router.balance import Balances
from glowplug.controllers.router.messages import Recall
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.fleet.tables import FleetTables
from glowplug.policies.fairness.port import Discipline

MakeDiscipline = Callable[[], Discipline]


class Sharing:
    def __init__(
        self, make: MakeDiscipline, fleet: FleetTables, balances: Balances, requests: Mapping[int, Request]
    ) -> None:
        self._make, self._fleet, self._balances, self._requests = make, fleet, balances, requests

    def meet(self, model_key: str, queue: ModelQueue, request: Request, now_s: float) -> None:
        """Take a request of another tenant or class: an empty queue takes that one as its own, others get a
        discipline."""
        if not queue.waiting and not queue.num_running:
            queue.tenant, queue.priority = request.arrival.tenant, request.arrival.priority
            return
        discipline = self._make()
        for other in self._requests.values():
            if other.model_key == model_key and other.instance_id:
                discipline.sent(other.claim, now_s)
                if other.is_read:
                    discipline.read(other.ticket, now_s)
        for other in queue.waiting.values():
            discipline.hold(other.claim, now_s)
        queue.discipline = discipline
        self._count(model_key, queue)

    def look(self, model_key: str, queue: ModelQueue, now_s: float) -> None:
        if queue.discipline is None:
            return
        if queue.discipline.is_shared(now_s):
            self._count(model_key, queue)
            return
        queue.discipline = None
        here = (r for r in self._requests.values() if r.model_key == model_key)
        if (one := next(here, None)) is not None:
            queue.tenant, queue.priority = one.arrival.tenant, one.arrival.priority

    def next(self, model_key: str, queue: ModelQueue, now_s: float) -> Request | None:
        if queue.discipline is None or not queue.waiting:
            return queue.oldest()
        num_free = self._num_free(model_key, queue)
        ticket = queue.discipline.next(queue.num_slots, num_free, now_s, queue.num_instances)
        return None if ticket is None else queue.waiting[ticket]

    def recalls(self, model_key: str, queue: ModelQueue, now_s: float) -> list[Recall]:
        """Recall the request that has to give way to another one, if any; one at a time."""
        if queue.discipline is None:
            return []
        num_free = self._num_free(model_key, queue)
        ticket = queue.discipline.recall(queue.num_slots, num_free, now_s, queue.num_instances)
        if ticket is None:
            return []
        request = self._requests[ticket]
        if request.leaves is not None:
            queue.discipline.stays(ticket)
            return []
        request.gives_way = True
        return [
            Recall(ticket, "it gives way to a request that is more urgent, or of a tenant with less", gives_way=True)
        ]

    def gave_way(self, request: Request, num_tokens: int | None, now_s: float) -> None:
        """Hold a recalled request again. `num_tokens`: its client's, of a begun stream; None: no part of this engine's
        answer came."""
        request.gives_way = False
        if num_tokens is not None:
            request.go_on_behind(num_tokens, now_s)
        request.gave_way_at = now_s

    def stays(self, queue: ModelQueue, request: Request) -> None:
        request.gives_way = False
        if queue.discipline is not None:
            queue.discipline.stays(request.ticket)

    def goes_at_once(self, request: Request, queue: ModelQueue, now_s: float) -> bool:
        """Return whether nothing waits, more than half of the slots are free and no prompt speaks against the
        request."""
        if queue.waiting or self._num_free(request.model_key, queue) <= queue.num_slots // 2:
            return False
        assert queue.discipline is not None
        return queue.discipline.goes_at_once(request.arrival.tenant, request.prompt_tokens, queue.num_instances, now_s)

    def _num_free(self, model_key: str, queue: ModelQueue) -> int:
        if self._balances.hosts.riders:  # other models may have taken slots too
            return sum(max(0, i.max_concurrency - self._balances.taken(i)) for i in self._fleet.ready(model_key))
        return queue.num_slots - queue.num_running - self._balances.num_of_others(model_key)

    def refused(self, queue: ModelQueue, request: Request) -> Request:
        """Return the held request to refuse: `request`, the newcomer, unless others exceed their share of the queue.
        One whose client has a 200 goes only if there is no other, a continued stream never."""
        assert queue.discipline is not None
        found = [queue.waiting[ticket] for ticket in queue.discipline.before(request.ticket)]
        unanswered = (other for other in found if not other.head_sent)
        return next(unanswered, found[0] if found else request)

    def _count(self, model_key: str, queue: ModelQueue) -> None:
        ready = self._fleet.ready(model_key)
        queue.num_slots, queue.num_instances = sum(instance.max_concurrency for instance in ready), len(ready)
