"""The router: dispatch, hold or reject every arriving request; each request ends exactly once.

Notified of (`handlers`): the life of a request on the data port (RequestArrived, TextRead, FirstToken, HeadDue,
RequestEnded, DispatchFailed, StreamBroken, StreamMoved, MoveFailed), DrainStarted, BusRefuses and Tick; facts about
instances and models, and all routers' load reports. `restore` takes the tables of models, instances and start times.

Asks for: Dispatch, Hold, Reject, Recall and MoveStream of a request (messages.py), and Publish of request.waiting and
request.rejected. The service makes load reports from `loads()`, and its data port reports ended requests.

The first rule that applies answers a request:
 1. Its model is not known: 404. The router is stopping: 503.
 2. An instance is ready with a free slot, and no request waits: dispatch, by the routing policy.
 3. The model is cold and its operator has drained it: 503.
 4. A start of the model has just failed because no tried node could get the weights or no GPU could hold them, and no
    other instance runs or starts: 503 with that reason.
 5. The model is cold, and the bus has stored nothing for `bus_grace_s`, or the model refuses to hold: 503, and no
    start is asked for.
 6. The queue is full, or too long for the model's max_wait_s: 429. Otherwise hold, and publish request.waiting. In a
    full queue of several tenants, refuse one of the tenant with the most of the queue, by its weight.
A stream that lost its instance is dispatched again, or held before all later requests, for at most `continue_within_s`,
and counts as demand once. It is rejected after more than `max_continuations` losses, or when nothing can start. A
stream that would outlast the drain of its instance moves before that drain ends.
A held request leaves when it is dispatched, when its client leaves, when it turns out to be late (429, unless its
client has a 200), when its time is over (503) or when its model is undeployed (404).

Promises: the held requests of one tenant and class go in order of arrival. The fairness policy orders those of several
(policies/fairness, sharing.py), may hold one beside a free slot, and may take back a running one; continued streams go
first. An instance gets no more requests than it runs at once, and fewer while other routers report theirs. A request
that brought down `max_dispatches` engines before its answer began is sent to no other. An older row never replaces a
newer one, and an emptied store takes no instance away before `ABSENT_S` (fleet/tables.py).

Never: wait for the control plane to serve a warm model; start, stop or place anything; read a clock, a socket or the
text of a request.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from math import inf
from typing import Any, Final, get_args

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.port import Handlers
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.balance import Balances, Factory
from glowplug.controllers.router.failures import BusWatch, Failures, coded, suspended
from glowplug.controllers.router.messages import MoveFailed, MoveStream, Recall, StreamMoved
from glowplug.controllers.router.overload import Estimates, Overload, retry_after_s
from glowplug.controllers.router.params import RouterParams
from glowplug.controllers.router.queue import ModelQueue, Request, rejected_fact, waiting_fact
from glowplug.controllers.router.sharing import MakeDiscipline, Sharing
from glowplug.domain.access import Priority
from glowplug.domain.errors import Contended, EngineFailed, GlowplugError, ModelNotFound, NoCapacity
from glowplug.domain.instance import Instance, InstanceState, slots_per_instance
from glowplug.domain.model import Model, OnCold
from glowplug.domain.phrasing import doing
from glowplug.domain.snapshot import ClassLoad, ModelLoad, Outlook
from glowplug.events import Event, facts
from glowplug.fleet.start_times import PRIORS, START_TIMES, Prior, StartTimes
from glowplug.fleet.status import StartEstimates
from glowplug.fleet.tables import FleetTables
from glowplug.policies.registry import choose
from glowplug.policies.worth import patience_s

# Classes of requests in load reports, and batch requests that give way.
#
# A batch request that has waited for `patience_s` (policies/worth.py) counts as a standard one to its end, so that none
# waits for ever. One on an instance with a short drain is taken back at once; its stream goes on later where it
# stopped.

SHORT_S: Final = 2.0  # batch requests leave at once where the drain is no longer than this


def load_of(
    model_key: str,
    queue: ModelQueue,
    fleet: FleetTables,
    in_flight: Mapping[str, int],
    outlooks: Mapping[str, Outlook],
    requests: Mapping[int, Request],
) -> ModelLoad:
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
    most_s = patience_s(model.max_wait_s)
    for request in () if queue.is_standard else queue.waiting.values():
        if request.arrival.priority is Priority.BATCH and request.waited_s + now_s - request.held_at >= most_s:
            request.has_aged = True


def gives_way(instance: Instance, requests: Iterable[Request]) -> list[Recall]:
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


# Moves of streams off a draining instance: make before break.
#
# A stream that should not end in time, before `drain_ends_at` or, while models wait for memory, within `within_s`,
# moves to another READY instance with a free slot once that one has begun. Others run to the deadline and are continued
# like those of a lost engine. An answer should take as long as the model's answers do, or as it has already run, if
# longer.

RETRY_S = 1.0  # least time between two tries to move one stream


def remaining_s(ran_s: float, mean_s: float) -> float:
    return max(ran_s, mean_s)


class Moves:
    """Moves of one router's streams. `most`: instances that may fail to take one stream; `within_s` 0: no moves."""

    def __init__(
        self,
        fleet: FleetTables,
        balances: Balances,
        overload: Overload,
        requests: Mapping[int, Request],
        queues: Mapping[str, ModelQueue],
        *,
        most: int,
        within_s: float,
    ) -> None:
        self._fleet, self._balances, self._overload = fleet, balances, overload
        self._requests, self._queues, self._most, self._within_s = requests, queues, most, within_s
        self._is_on = bool(most and within_s)
        self._ends_at: dict[str, float] = {}  # instance_id -> when its drain ends

    def instance_changed(self, instance: Instance) -> None:
        if self._is_on and instance.state is InstanceState.DRAINING and instance.drain_ends_at:
            self._ends_at[instance.instance_id] = instance.drain_ends_at
        else:
            self._ends_at.pop(instance.instance_id, None)

    def instance_gone(self, instance_id: str) -> None:
        self._ends_at.pop(instance_id, None)

    def begin(self, now_s: float) -> list[Effect]:
        late = {i: at for i, at in self._ends_at.items() if self._balances.in_flight.get(i)}
        if not late:
            return []
        effects: list[Effect] = []
        for request in [r for r in self._requests.values() if r.instance_id in late]:
            if self._stays(request, late[request.instance_id], now_s):
                continue
            first, other = self._fleet.instances.get(request.instance_id), self._balances.choose(request, now_s)
            if first is not None and other is not None:
                request.leaves = first
                why = f"{request.instance_id} drains and ends in {max(0.0, late[request.instance_id] - now_s):.1f} s"
                self._put(request, other, now_s)
                effects.append(MoveStream(request.ticket, other, why))
        return effects

    def _stays(self, request: Request, ends_at: float, now_s: float) -> bool:
        if request.leaves is not None or request.stays or now_s < request.no_move_before:
            return True
        if self._queues[request.model_key].waiting:
            return True  # free slots go to the waiting requests
        if self._overload.is_short:
            ends_at = min(ends_at, now_s + self._within_s)
        mean_s = self._overload.estimates.service_s.get(request.model_key, 0.0)
        return now_s + remaining_s(now_s - request.sent_at, mean_s) <= ends_at

    def _put(self, request: Request, instance: Instance, now_s: float) -> None:
        self._balances.left(request, 0, now_s)
        request.instance_id = instance.instance_id
        self._balances.sent(request, instance, now_s)

    def done(self, request: Request, stimulus: StreamMoved, now_s: float) -> None:
        request.leaves, request.sent_at = None, now_s
        request.go_on_behind(stimulus.num_tokens, now_s)

    def failed(self, request: Request, stimulus: MoveFailed, now_s: float) -> list[Effect]:
        """Count a stream at its first instance again after a failed move, for now or for good; recall it where that
        instance has ended."""
        first, other = request.leaves, request.instance_id
        if first is None:
            return []
        request.leaves, request.no_move_before = None, now_s + RETRY_S
        request.num_moves_failed += stimulus.is_asked
        request.stays = stimulus.is_refused or request.num_moves_failed > self._most
        if stimulus.is_unreachable:
            self._balances.unreachable(other, request.model_key, now_s)
        self._put(request, first, now_s)
        row = self._fleet.instances.get(first.instance_id)
        if row is not None and not row.state.is_dormant:
            return []
        return [Recall(request.ticket, f"{first.instance_id} has ended meanwhile", ended=True)]


class Refusals:
    """Reasons why a request that cannot run now may not wait. `eta_s`: seconds until a model serves a new request."""

    def __init__(
        self,
        fleet: FleetTables,
        failures: Failures,
        bus: BusWatch,
        overload: Overload,
        eta_s: Callable[[str, float], float],
    ) -> None:
        self._fleet, self._failures, self._bus, self._overload, self._eta_s = fleet, failures, bus, overload, eta_s

    def of(self, model: Model, queue: ModelQueue, num_ahead: int, now_s: float) -> GlowplugError | None:
        """Return the error for a request that can neither run now nor wait behind `num_ahead` others; None when it may
        wait."""
        is_cold = not self._fleet.ready(model.key)
        if is_cold and (known := self.no_start(model, now_s)) is not None:
            return known
        if is_cold and model.on_cold is OnCold.REFUSE:
            retry_s = retry_after_s(self._eta_s(model.key, now_s))
            text = f"The model `{model.name}` is not running and is set to refuse rather than hold (on_cold: refuse)."
            return coded(NoCapacity(text, retry_after_s=retry_s), "model_cold")
        if len(queue.waiting) >= model.max_queue:
            waits = doing(len(queue.waiting), "request", "already waits")
            text = f"{waits} for `{model.name}` (max_queue {model.max_queue})."
            return Contended(text, retry_after_s=self._overload.ask_back_s(model, queue, now_s))
        if self._overload.is_late(model, num_ahead, 0.0, now_s):
            return self._overload.error(model, queue, now_s)
        return None

    def no_start(self, model: Model, now_s: float) -> GlowplugError | None:
        base = self._fleet.models.get(model.base) if model.base else None
        if model.suspended or (base is not None and base.suspended):
            return suspended(model if model.suspended or base is None else base)
        known = self._failures.refusal(model.key, now_s) or self._bus.refusal(model, now_s)
        if base is not None and not self._fleet.ready(base.key) and not self._fleet.coming(base.key):
            known = known or self._failures.refusal(base.key, now_s)
        return known if known is not None and not self._fleet.coming(model.key) else None

    def expired(
        self, model: Model, queue: ModelQueue, continue_within_s: float, now_s: float
    ) -> Iterator[tuple[Request, GlowplugError]]:
        bounds = model.max_wait_s, continue_within_s, now_s
        for request in list(takewhile(lambda r: r.is_back or r.is_over(*bounds), queue.waiting.values())):
            if not request.is_over(*bounds):
                continue  # its time runs from the break of its stream
            queue.remove(request.ticket)
            most_s = request.most_s(model.max_wait_s, continue_within_s)
            failure = self._failures.of(model.key)
            why = f" The last start failed: {failure.message}" if failure is not None else ""
            if request.broken_at:
                text = f"No instance of `{model.name}` could go on with the stream within {most_s:g} s.{why}"
                yield request, EngineFailed(text)
                continue
            text = f"No instance of `{model.name}` could take the request within {most_s:g} s.{why}"
            retry_s = self._overload.ask_back_s(model, queue, now_s)
            yield request, coded(NoCapacity(text, retry_after_s=retry_s), "wait_timeout")


class RouterController:
    def __init__(
        self,
        params: RouterParams | None = None,
        balancer: Factory | None = None,
        fairness: MakeDiscipline | None = None,
        *,
        priors: Mapping[str, Prior] = PRIORS,
    ) -> None:
        self.params = params = params or RouterParams()
        self.fleet = FleetTables()
        self.estimates = Estimates(StartEstimates(params.default_start_s, StartTimes(priors=priors)))
        self.overload = Overload(self.fleet, self.estimates, params.late_ratio)
        self.queues: dict[str, ModelQueue] = defaultdict(ModelQueue)
        self.requests: dict[int, Request] = {}
        self.stopping = False
        self.balances = Balances(
            balancer or choose("routing", params.policy),
            params.balancer,
            params.lengths,
            self.fleet,
            router_id=params.router_id,
            quarantine_s=params.quarantine_s,
        )
        self.in_flight = self.balances.in_flight  # by instance_id
        self.tracks_tokens, self.reads_prefixes = self.balances.tracks_tokens, self.balances.reads_prefixes
        make = fairness or choose("fairness", params.fairness)
        self._sharing = Sharing(make, self.fleet, self.balances, self.requests)
        self._failures = Failures(params.failure_memory_s)
        self._bus = BusWatch(params.bus_grace_s)
        self._refusals = Refusals(self.fleet, self._failures, self._bus, self.overload, self.eta_s)
        self._moves = Moves(
            self.fleet,
            self.balances,
            self.overload,
            self.requests,
            self.queues,
            most=params.max_continuations,
            within_s=params.move_within_s,
        )
        self.handlers: Handlers = {
            msg.RequestArrived: self._arrived,
            msg.TextRead: self._text_read,
            msg.FirstToken: self._first_token,
            msg.HeadDue: self._head_due,
            msg.RequestEnded: self._ended,
            msg.DispatchFailed: self._dispatch_failed,
            msg.StreamBroken: self._stream_broken,
            msg.StreamMoved: self._stream_moved,
            msg.MoveFailed: self._move_failed,
            msg.DrainStarted: self._drain_started,
            msg.BusRefuses: self._bus.changed,
            Tick: self._tick,
            **dict.fromkeys(get_args(facts.InstanceChange), self._instance_reported),
            facts.ModelDeployed: self._model_deployed,
            facts.ModelUndeployed: self._model_undeployed,
            facts.RouterLoadReported: self._load_reported,
        }

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        handler = self.handlers.get(type(stimulus))
        if handler is None:
            handler = self.handlers.get(type(stimulus.data))
        return handler(stimulus, now_s) if handler is not None else []

    def restore(self, table: str, rows: Mapping[str, Any], now_s: float, *, is_copy: bool = False) -> list[Effect]:
        """Take a whole table; ignore unknown ones. `is_copy`: the rows may be old; the first reading of the store drops
        those it lacks."""
        effects: list[Effect] = []
        if table == START_TIMES:
            self.estimates.starts.times.restore(rows)
        elif table == "models":
            for model in rows.values():
                effects += self._model_changed(model, now_s)
            for model in self.fleet.model_table.drop_absent(rows, now_s):
                effects += self._model_gone(model)
            if is_copy:
                self.fleet.model_table.doubt()
        elif table == "instances":
            for instance in self.fleet.instance_table.drop_absent(rows, now_s):
                self.balances.instance_gone(instance.instance_id, instance.model_key)
                self._moves.instance_gone(instance.instance_id)
            for instance in rows.values():
                effects += self._instance_changed(instance, "", now_s)
            if is_copy:
                self.fleet.instance_table.doubt()
        return effects

    # -- requests -----------------------------------------------------------------------------------------------

    def _arrived(self, s: msg.RequestArrived, now_s: float) -> list[Effect]:
        model = self.fleet.lookup(s.name)
        if model is None:
            return [msg.Reject(s.ticket, ModelNotFound(f"The model `{s.name}` does not exist."))]
        if self.stopping:
            return [msg.Reject(s.ticket, NoCapacity("This router is stopping.", retry_after_s=1.0))]
        queue = self.queues[model.key]
        queue.arrived(s.priority, now_s)
        expected_tokens = s.expected_tokens
        if not expected_tokens and self.tracks_tokens:
            lengths = self.balances.lengths_of(model.key)
            expected_tokens = lengths.expect(s.prompt_tokens, s.max_tokens, s.text_tokens)
        request = Request(s.ticket, s, model.key, now_s, s.prompt_tokens, expected_tokens, s.text_tokens)
        if queue.discipline is None and (queue.tenant != s.tenant or queue.priority is not s.priority):
            self._sharing.meet(model.key, queue, request, now_s)
        if queue.discipline is not None and not self._sharing.goes_at_once(request, queue, now_s):
            return self._arrived_beside(request, model, queue, now_s)
        if not queue.waiting:
            instance = self.balances.choose(request, now_s)
            if instance is not None:
                self.requests[s.ticket] = request
                return [self._dispatch(request, instance, queue, now_s)]
        refusal = self._refusals.of(model, queue, len(queue.waiting), now_s)
        if refusal is not None:
            return self._refuse(request, refusal)
        self.requests[s.ticket] = request
        request.cold = not self.fleet.ready(model.key)
        queue.hold(request, now_s)
        return [msg.Hold(s.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]

    def _arrived_beside(self, request: Request, model: Model, queue: ModelQueue, now_s: float) -> list[Effect]:
        self.requests[request.ticket] = request
        queue.hold(request, now_s)
        effects = self._pump(model.key, now_s)
        if request.instance_id:
            return effects
        request.cold = not self.fleet.ready(model.key)
        num_ahead = queue.num_ahead(request.ticket, now_s)
        is_full = len(queue.waiting) > model.max_queue
        refused = self._sharing.refused(queue, request) if is_full else request
        queue.remove(request.ticket)
        refusal = self._refusals.of(model, queue, num_ahead, now_s)
        refused = refused if isinstance(refusal, Contended) else request
        if refusal is None or refused is not request:
            queue.hold(request, now_s)
        if refusal is not None:
            queue.remove(refused.ticket)
            del self.requests[refused.ticket]
            effects += self._refuse(refused, refusal)
        if request.ticket in queue.waiting:
            effects += [msg.Hold(request.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]
        return effects

    def chooses(self, model_key: str) -> bool:
        """Return whether a new request's text may decide its instance: the model has several ready instances, or
        requests wait. Texts for a single instance stay unknown: each conversation may be read once more at a second
        one."""
        return len(self.fleet.ready(model_key)) != 1 or bool(self.queues[model_key].waiting)

    def _text_read(self, s: msg.TextRead, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is not None and request.instance_id and not request.broken_at:
            self.balances.expect_of(request, s.text_tokens, now_s)
            if s.teaches:
                request.text_tokens = s.text_tokens
        return []

    def _refuse(self, request: Request, error: GlowplugError) -> list[Effect]:
        return [msg.Reject(request.ticket, error), rejected_fact(request, error, self.params.router_id)]

    def _dispatch(self, request: Request, instance: Instance, queue: ModelQueue, now_s: float) -> msg.Dispatch:
        request.instance_id, request.sent_at, held_s = instance.instance_id, now_s, 0.0
        if request.held_at:
            held_s = now_s - request.waits_since
            request.waited_s, request.held_at = request.waited_s + now_s - request.held_at, 0.0
        request.is_read, request.gave_way_at = False, 0.0
        self.balances.sent(request, instance, now_s)
        queue.num_running += 1
        if queue.discipline is not None:
            queue.discipline.sent(request.claim, now_s)
        if not request.broken_at:
            queue.num_dispatched += 1
            request.cold = request.cold or instance.ready_at > request.arrived_at  # it waited for this start
        return msg.Dispatch(request.ticket, instance, held_s, request.cold)

    def _pump(self, model_key: str, now_s: float, most: float = inf) -> list[Effect]:
        """Dispatch held requests to free slots, the oldest first, of all models on the same engines."""
        if self.balances.hosts.riders and most > 1:
            return self.balances.hosts.in_turn(model_key, self.queues, lambda key: self._pump(key, now_s, most=1))
        effects: list[Effect] = []
        while len(effects) < most and (queue := self.queues.get(model_key)):
            shared = queue.discipline is not None
            if not queue.waiting and (queue.discipline is None or not queue.discipline.may_recall):
                return effects
            request = self._sharing.next(model_key, queue, now_s) if shared else queue.oldest()
            instance = self.balances.choose(request, now_s) if request is not None else None
            if request is None or instance is None:
                return effects + self._sharing.recalls(model_key, queue, now_s) if shared else effects
            del queue.waiting[request.ticket]  # _dispatch takes it out of the discipline
            effects.append(self._dispatch(request, instance, queue, now_s))
        return effects

    def _release(
        self, request: Request, now_s: float, response_tokens: int = 0, *, comes_back: bool = False
    ) -> ModelQueue:
        """Take a request out of its queue, or off its instance; returns the queue."""
        queue = self.queues[request.model_key]
        queue.active(request.arrival.priority, now_s)
        if not request.instance_id:
            queue.remove(request.ticket)
            return queue
        queue.num_running -= 1
        if queue.discipline is not None:
            queue.discipline.left(request.ticket, response_tokens, now_s, comes_back=comes_back)
        self.balances.left(request, response_tokens, now_s)
        request.instance_id, request.leaves = "", None
        return queue

    def _first_token(self, s: msg.FirstToken, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is not None and request.instance_id:
            request.is_read, queue = True, self.queues[request.model_key]
            self.balances.first_token(request, now_s)
            if queue.discipline is not None:
                queue.discipline.read(s.ticket, now_s)
            if queue.waiting or queue.discipline is not None or self.balances.hosts.riders:
                return self._pump(request.model_key, now_s)  # requests held until prompts have been read
        return []

    def _head_due(self, s: msg.HeadDue, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or request.instance_id:
            return []
        model, queue = self.fleet.models.get(request.model_key), self.queues[request.model_key]
        num_ahead = queue.num_ahead(s.ticket, now_s)
        waited_s = now_s - request.arrived_at
        if model is not None and self.overload.is_late(model, num_ahead, waited_s, now_s, last_chance=True):
            return self._refuse_late(model, queue, [request], now_s)
        request.head_sent = True
        return []

    def _refuse_late(self, model: Model, queue: ModelQueue, late: list[Request], now_s: float) -> list[Effect]:
        for request in late:
            del self.requests[request.ticket]
            queue.remove(request.ticket)
        return [e for one in late for e in self._refuse(one, self.overload.error(model, queue, now_s))]

    def _ended(self, s: msg.RequestEnded, now_s: float) -> list[Effect]:
        request = self.requests.pop(s.ticket, None)
        if request is None:
            return []
        request.cached_tokens = s.cached_tokens
        self.estimates.learn_service(request.model_key, s.took_s)
        queue = self._release(request, now_s, s.response_tokens if s.took_s > 0 else 0)
        if queue.waiting or queue.discipline is not None or self.balances.hosts.riders:
            return self._pump(request.model_key, now_s)
        return []

    def _dispatch_failed(self, s: msg.DispatchFailed, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or not request.instance_id:
            return []
        if request.gives_way:
            return self._gave_way(request, None, now_s)
        self.balances.unreachable(request.instance_id, request.model_key, now_s)
        self._release(request, now_s, comes_back=True)
        if request.broken_at:
            request.num_continued += s.reached
            return self._go_on(request, s.reason, now_s)
        request.num_dispatches += s.reached
        model = self.fleet.models.get(request.model_key)
        if model is None or request.num_dispatches >= self.params.max_dispatches:
            del self.requests[s.ticket]
            return [*self._refuse(request, EngineFailed(s.reason)), *self._pump(request.model_key, now_s)]
        queue = self.queues[request.model_key]
        request.cold = request.cold or not self.fleet.ready(request.model_key)
        queue.hold(request, now_s)
        effects = self._pump(request.model_key, now_s)
        if not request.instance_id:
            effects += [msg.Hold(s.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]
        return effects

    def _stream_broken(self, s: msg.StreamBroken, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or not request.instance_id:
            return []
        if request.gives_way and not s.is_lost:
            return self._gave_way(request, s.num_tokens, now_s)
        request.gives_way = False
        instance_id = request.instance_id
        if s.is_lost and not s.is_reached:
            self.balances.unreachable(instance_id, request.model_key, now_s)
        self._release(request, now_s, comes_back=True)
        request.num_continued += s.is_lost
        request.go_on_behind(s.num_tokens, now_s)
        return self._go_on(request, s.reason, now_s, failed_at=instance_id if s.is_reached else "")

    def _stream_moved(self, s: msg.StreamMoved, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is not None and request.instance_id:
            self._moves.done(request, s, now_s)
        return []

    def _move_failed(self, s: msg.MoveFailed, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or not request.instance_id:
            return []
        if request.gives_way:
            self._sharing.stays(self.queues[request.model_key], request)
            return self._pump(request.model_key, now_s)
        return [*self._moves.failed(request, s, now_s), *self._pump(request.model_key, now_s)]

    def _gave_way(self, request: Request, num_tokens: int | None, now_s: float) -> list[Effect]:
        model, queue = self.fleet.models.get(request.model_key), self.queues[request.model_key]
        self._release(request, now_s, comes_back=True)
        self._sharing.gave_way(request, num_tokens, now_s)
        if model is None:
            return self._go_on(request, "the request gave way to another one", now_s)
        queue.hold(request, now_s)
        effects = self._pump(model.key, now_s)
        if not request.instance_id:
            effects += [msg.Hold(request.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]
        return effects

    def _go_on(self, request: Request, reason: str, now_s: float, *, failed_at: str = "") -> list[Effect]:
        """Continue a begun stream at another instance, now or once one is ready, or reject it. `failed_at`: an instance
        asked only where no other has a free slot."""
        key, most = request.model_key, self.params.max_continuations
        model, queue = self.fleet.models.get(key), self.queues[key]
        why = f"the stream was continued {most} times already" if request.num_continued > most else ""
        if model is None:
            why = why or "its model was undeployed"
        else:
            queue.hold(request, now_s)
            effects: list[Effect] = []
            if not why:
                with self.balances.without(failed_at, now_s):
                    effects += self._pump(key, now_s)
                effects += self._pump(key, now_s) if failed_at else []
            if request.instance_id:
                return effects
            if not why and not self.fleet.ready(key):
                known = self._refusals.no_start(model, now_s)
                if known is None and model.on_cold is OnCold.REFUSE:
                    known = NoCapacity("its model is not running and is set to refuse rather than hold.")
                why = known.message if known is not None else ""
            if not why:
                hold = msg.Hold(request.ticket, self.eta_s(key, now_s))
                return [*effects, hold, *self._say_waiting(model, queue, now_s)]
            queue.remove(request.ticket)
        del self.requests[request.ticket]
        return [msg.Reject(request.ticket, EngineFailed(f"{reason}; {why}")), *self._pump(key, now_s)]

    # -- the fleet ----------------------------------------------------------------------------------------------

    def _instance_reported(self, event: Event, now_s: float) -> list[Effect]:
        code = event.data.code if isinstance(event.data, facts.InstanceFailed) else ""
        return self._instance_changed(event.data.instance, code, now_s)

    def _model_deployed(self, event: Event, now_s: float) -> list[Effect]:
        return self._model_changed(event.data.model, now_s)

    def _model_undeployed(self, event: Event, _: float) -> list[Effect]:
        model = self.fleet.models.get(event.data.model_key)
        if model is None:
            return []
        self.fleet.model_table.forget(model.key)
        return self._model_gone(model)

    def _load_reported(self, event: Event, now_s: float) -> list[Effect]:
        if not self.balances.peer_reported(event.data, now_s):
            return []
        held = [key for key, queue in self.queues.items() if queue.waiting]
        return [effect for key in held for effect in self._pump(key, now_s)]

    def _instance_changed(self, instance: Instance, code: str, now_s: float) -> list[Effect]:
        before = self.fleet.instances.get(instance.instance_id)
        if not self.fleet.instance_table.apply(instance, now_s):
            return []
        self.balances.instance_changed(instance, now_s)
        self._moves.instance_changed(instance)
        effects: list[Effect] = []
        if before is not None and before.url and instance.url and before.url != instance.url:
            effects = self._recall(instance.instance_id, "the instance has another address", moved=True)
        if instance.state.is_dormant:
            return self._recall(instance.instance_id, instance.reason or "the engine was put to sleep", ended=True)
        if not instance.serves:
            return self._stage_failed(instance, code)
        if instance.state is InstanceState.READY:
            if before is None or before.state is not InstanceState.READY:
                self._learn_start(instance)
            self._failures.forget(instance.model_key)
            self._sharing.look(instance.model_key, self.queues[instance.model_key], now_s)
            return effects + self._pump(instance.model_key, now_s)
        if instance.state is InstanceState.DRAINING:
            if effects:
                return effects  # recalled streams leave anyhow; a tick asks the others
            return [*self._moves.begin(now_s), *gives_way(instance, self.requests.values())]
        was_dormant = before is not None and before.state.is_dormant
        if instance.state is InstanceState.FAILED and not was_dormant:  # else a sleeping engine died
            reason = instance.reason or "the instance failed"
            recalls = self._recall(instance.instance_id, reason) if code == "node_left" else effects
            return [*recalls, *self._start_failed(instance, code, reason, now_s)]
        return effects

    def _learn_start(self, instance: Instance) -> None:
        model = self.fleet.models.get(instance.model_key)
        if model is not None:
            self.estimates.starts.times.learn(instance, model)

    def _stage_failed(self, instance: Instance, code: str) -> list[Effect]:
        whole = self.fleet.instances.get(instance.part_of)
        if code != "node_left" or whole is None or whole.is_whole:
            return []
        return self._recall(whole.instance_id, instance.reason or "a stage of the instance failed")

    def _recall(self, instance_id: str, reason: str, *, ended: bool = False, moved: bool = False) -> list[Effect]:
        running = [ticket for ticket, r in self.requests.items() if r.instance_id == instance_id]
        return [msg.Recall(ticket, reason, ended, moved) for ticket in running]

    def _start_failed(self, instance: Instance, code: str, message: str, now_s: float) -> list[Effect]:
        model_key = instance.model_key
        failure = self._failures.remember(instance, code, message, now_s)
        served = self.fleet.ready(model_key) or self.fleet.coming(model_key)
        return [] if served or not failure.is_hopeless else self._empty_cold(model_key, self._failures.error(failure))

    def _model_changed(self, model: Model, now_s: float) -> list[Effect]:
        if not self.fleet.model_table.apply(model, now_s):
            return []
        self._failures.forget(model.key)
        effects = self._empty_cold(model.key, suspended(model)) if model.suspended else []
        return effects + self._pump(model.key, now_s)

    def _empty_cold(self, model_key: str, error: GlowplugError) -> list[Effect]:
        keys = [model_key, *(one.key for one in self.fleet.models.values() if one.base == model_key)]
        cold = [key for key in keys if key in self.queues and not self.fleet.ready(key)]
        return [effect for key in cold for effect in self._empty(self.queues[key], error)]

    def _model_gone(self, model: Model) -> list[Effect]:
        queue = self.queues.get(model.key)
        if queue is None:
            return []
        return self._empty(queue, ModelNotFound(f"The model `{model.name}` was undeployed."))

    def _empty(self, queue: ModelQueue, error: GlowplugError) -> list[Effect]:
        effects: list[Effect] = []
        for ticket, request in list(queue.waiting.items()):
            queue.remove(ticket)
            del self.requests[ticket]
            effects += self._refuse(request, error)
        return effects

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self, _: Tick, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        self.balances.pass_time(now_s)
        self.balances.forget_silent(now_s)
        for key in [k for k, q in self.queues.items() if k not in self.fleet.models and not q.num_running]:
            del self.queues[key]
            self.estimates.forget(key)
            self.overload.forget(key)
            self._failures.forget(key)
        self.balances.forget_unused(self.fleet.models.keys() | self.queues.keys())
        self.overload.look(self.queues.items(), now_s)
        for key, queue in self.queues.items():
            if queue.discipline is not None:
                self._sharing.look(key, queue, now_s)
        for key in [key for key, queue in self.queues.items() if queue.waiting]:
            queue, model = self.queues[key], self.fleet.models.get(key)
            if model is None:
                continue
            effects += self._pump(key, now_s)
            age(queue, model, now_s)
            effects += self._expire(model, queue, now_s)
            if not (self.fleet.ready(key) or self.fleet.coming(key)) and (e := self._bus.refusal(model, now_s)):
                effects += self._empty(queue, e)
            effects += self._refuse_late(model, queue, self.overload.late(model, queue, now_s), now_s)
            effects += self._say_waiting(model, queue, now_s)
        return effects + self._moves.begin(now_s)

    def _expire(self, model: Model, queue: ModelQueue, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for request, error in self._refusals.expired(model, queue, self.params.continue_within_s, now_s):
            del self.requests[request.ticket]
            is_stream = bool(request.broken_at)
            effects += [msg.Reject(request.ticket, error)] if is_stream else self._refuse(request, error)
        return effects

    def _drain_started(self, _: msg.DrainStarted, now_s: float) -> list[Effect]:
        self.stopping = True
        return []

    def _say_waiting(self, model: Model, queue: ModelQueue, now_s: float) -> list[Effect]:
        oldest = queue.oldest()
        if oldest is None or now_s - queue.published_at < self.params.waiting_every_s:
            return []
        queue.published_at = now_s
        most_s = oldest.most_s(model.max_wait_s, self.params.continue_within_s)
        by_class = num_by_class(queue)
        return [waiting_fact(model, oldest, len(queue.waiting), by_class, most_s, self.params.router_id)]

    def eta_s(self, model_key: str, now_s: float) -> float:
        return self.overload.eta_s(model_key, self.queues.get(model_key), self.balances.taken, now_s)

    def loads(self) -> dict[str, ModelLoad]:
        return {key: self.load(key) for key in self.queues}

    def load(self, model_key: str) -> ModelLoad:
        queue = self.queues.get(model_key)
        if queue is None:
            return ModelLoad()
        outlooks = self.balances.outlooks(model_key)
        return load_of(model_key, queue, self.fleet, self.in_flight, outlooks, self.requests)
