"""The router: every request that arrives is dispatched, held or rejected, and ends exactly once.

Notified of (`handlers`): a request's life on the data port (RequestArrived, FirstToken, HeadDue, RequestEnded,
ClientLeft, DispatchFailed, StreamBroken, StreamMoved, MoveFailed), DrainStarted, BusRefuses and Tick; facts about
instances and models, and the load reports of all routers. `restore` takes the tables of models, instances and start
times.

Asks for: Dispatch, Hold, Reject, Recall and MoveStream of a request (messages.py), and Publish of request.waiting and
request.rejected. Load reports are made from `loads()`, and request.finished is the data port's.

A request is answered by the first rule that applies:
 1. Its model is not known: 404. The router is stopping: 503.
 2. An instance is ready with a free slot, and nobody waits: dispatch, by the routing policy.
 3. The model is cold and its operator has drained it: 503.
 4. A moment ago the weights could not be had on any node that was tried, or no GPU could hold them, and nothing else
    runs: 503 with that reason.
 5. It is cold, and the bus stores nothing, or the model refuses to hold: 503, and nothing is asked of the fleet.
 6. The queue is full, or so long that the request could not be sent on within the model's max_wait_s: 429. Otherwise
    it is held in order of arrival, and request.waiting is published.
A stream whose instance was lost goes on: it is dispatched again, or held before all that came later, for at most
`continue_within_s`. It is the same demand, counted once. Lost more than `max_continuations` times, or where nothing can
start, it is rejected. One that would outlast the drain of its instance is moved before (moving.py).
A held request leaves by dispatch, by its client leaving, when it turns out that it cannot be sent on in time (429,
unless its client has been answered 200), when its time has run out (503) or with its model (404).

Promises: held requests of a model are dispatched in order of arrival. An instance is sent at most as many requests of
this router as it runs at once, and fewer while other routers report theirs. A request that has brought down
`max_dispatches` engines before its answer began is sent to no other. An older row never replaces a newer one, and an
emptied store takes no instance away before `ABSENT_S` (fleet/tables.py).

Never: waits for the control plane to serve a warm model; starts, stops or places anything itself; reads a clock, a
socket or the text of a request.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, get_args

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.port import Handlers
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.balance import Balances, Factory
from glowplug.controllers.router.failures import BusWatch, Failures, coded, rejection, suspended
from glowplug.controllers.router.moving import Moves
from glowplug.controllers.router.overload import Estimates, Overload, retry_after_s
from glowplug.controllers.router.params import RouterParams
from glowplug.controllers.router.queue import ModelQueue, Request, rejected_fact, waiting_fact
from glowplug.domain.errors import Contended, EngineFailed, GlowplugError, ModelNotFound, NoCapacity
from glowplug.domain.instance import Instance, InstanceState, slots_per_instance
from glowplug.domain.model import Model, OnCold
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event, facts
from glowplug.fleet.status import StartEstimates
from glowplug.fleet.tables import Fleet
from glowplug.policies.registry import choose
from glowplug.policies.start_times import PRIORS, START_TIMES, Prior, StartTimes


class RouterController:
    """Pure: no clock, no socket. One per router process."""

    def __init__(
        self,
        params: RouterParams | None = None,
        balancer: Factory | None = None,
        *,
        priors: Mapping[str, Prior] = PRIORS,
    ) -> None:
        self.params = params = params or RouterParams()
        self.fleet = Fleet()
        self.estimates = Estimates(StartEstimates(params.default_start_s, StartTimes(priors=priors)))
        self.overload = Overload(self.fleet, self.estimates, params.late_ratio)
        self.queues: dict[str, ModelQueue] = {}
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
        self.tracks_tokens = self.balances.tracks_tokens  # whether the policy asks for token counts and first tokens
        self._failures = Failures(params.failure_memory_s)
        self._bus = BusWatch(params.bus_grace_s)
        self._moves = Moves(
            self.fleet,
            self.balances,
            self.overload,
            self.requests,
            self._queue,
            most=params.max_continuations,
            within_s=params.move_within_s,
        )
        self.handlers: Handlers = {
            msg.RequestArrived: self._arrived,
            msg.FirstToken: self._first_token,
            msg.HeadDue: self._head_due,
            msg.RequestEnded: self._ended,
            msg.ClientLeft: self._left,
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
        """Take one stimulus; an event that the router does not read has no effect."""
        handler = self.handlers.get(type(stimulus))
        if handler is None:
            handler = self.handlers.get(type(stimulus.data))
        return handler(stimulus, now_s) if handler is not None else []

    def restore(self, table: str, rows: Mapping[str, Any], now_s: float, *, is_copy: bool = False) -> list[Effect]:
        """Take the whole `models`, `instances` or `start_times` table; other tables are none of the router's.
        `is_copy`: the rows come from a copy that may be old; the first reading of the store drops those it lacks."""
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
            return [rejection(s.ticket, ModelNotFound(f"The model `{s.name}` does not exist."))]
        if self.stopping:
            return [rejection(s.ticket, NoCapacity("This router is stopping.", retry_after_s=1.0))]
        queue = self._queue(model.key)
        queue.last_active_at = now_s
        queue.num_arrived += 1
        request = Request(s.ticket, s.request_id, model.key, now_s, s.traceparent)
        request.prompt_tokens, request.text_tokens = s.prompt_tokens, s.text_tokens
        request.expected_tokens = s.expected_tokens or self.balances.expect(
            model.key, s.prompt_tokens, s.max_tokens, s.text_tokens
        )
        if not queue.waiting:
            instance = self.balances.choose(request, now_s)
            if instance is not None:
                self.requests[s.ticket] = request
                return [self._dispatch(request, instance, queue, now_s)]
        refusal = self._refusal(model, queue, now_s)
        if refusal is not None:
            return self._refuse(request, refusal)
        self.requests[s.ticket] = request
        request.cold = not self.fleet.ready(model.key)
        queue.hold(request)
        return [msg.Hold(s.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]

    def _refusal(self, model: Model, queue: ModelQueue, now_s: float) -> GlowplugError | None:
        """Why a request that cannot run now may not wait either."""
        is_cold = not self.fleet.ready(model.key)
        if is_cold and (known := self._no_start(model, now_s)) is not None:
            return known
        if is_cold and model.on_cold is OnCold.REFUSE:
            retry_s = retry_after_s(self.eta_s(model.key, now_s))
            text = f"The model `{model.name}` is not running and is set to refuse rather than hold (on_cold: refuse)."
            return coded(NoCapacity(text, retry_after_s=retry_s), "model_cold")
        if len(queue.waiting) >= model.max_queue:
            text = f"{len(queue.waiting)} requests already wait for `{model.name}` (max_queue {model.max_queue})."
            return Contended(text, retry_after_s=self.overload.ask_back_s(model, queue, now_s))
        if self.overload.is_late(model, len(queue.waiting), 0.0, now_s):
            return self.overload.error(model, queue, now_s)
        return None

    def _no_start(self, model: Model, now_s: float) -> GlowplugError | None:
        """Why nobody need wait for an instance of a cold model."""
        if model.suspended:
            return suspended(model)
        known = self._failures.refusal(model.key, now_s) or self._bus.refusal(model)
        return known if known is not None and not self.fleet.coming(model.key) else None

    def _refuse(self, request: Request, error: GlowplugError) -> list[Effect]:
        return [rejection(request.ticket, error), rejected_fact(request, error, self.params.router_id)]

    def _dispatch(self, request: Request, instance: Instance, queue: ModelQueue, now_s: float) -> msg.Dispatch:
        request.instance_id, request.sent_at = instance.instance_id, now_s
        self.balances.sent(request, instance, now_s)
        queue.num_running += 1
        if not request.broken_at:
            queue.num_dispatched += 1
            request.cold = request.cold or instance.ready_at > request.arrived_at  # it waited while this one started
        return msg.Dispatch(request.ticket, instance, now_s - request.waits_since, request.cold)

    def _pump(self, model_key: str, now_s: float) -> list[Effect]:
        """Release the oldest held requests into whatever slots are free."""
        effects: list[Effect] = []
        while (queue := self.queues.get(model_key)) and (request := queue.oldest()) is not None:
            instance = self.balances.choose(request, now_s)
            if instance is None:
                break
            queue.waiting.popitem(last=False)
            effects.append(self._dispatch(request, instance, queue, now_s))
        return effects

    def _release(self, request: Request, now_s: float, response_tokens: int = 0) -> None:
        """Take a request out of the counts, wherever it is."""
        queue = self._queue(request.model_key)
        queue.last_active_at = now_s
        if not request.instance_id:
            queue.waiting.pop(request.ticket, None)
            return
        queue.num_running -= 1
        self.balances.left(request, response_tokens, now_s)
        request.instance_id, request.leaves = "", None

    def _first_token(self, s: msg.FirstToken, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is not None and request.instance_id:
            self.balances.first_token(request, now_s)
            return self._pump(request.model_key, now_s)  # who was held until prompts have been read
        return []

    def _head_due(self, s: msg.HeadDue, now_s: float) -> list[Effect]:
        """The last chance to refuse a stream: what is not measured yet is guessed."""
        request = self.requests.get(s.ticket)
        if request is None or request.instance_id:
            return []
        model, queue = self.fleet.models.get(request.model_key), self._queue(request.model_key)
        num_ahead = list(queue.waiting).index(s.ticket)
        waited_s = now_s - request.arrived_at
        if model is not None and self.overload.is_late(model, num_ahead, waited_s, now_s, last_chance=True):
            return self._refuse_late(model, queue, [request], now_s)
        request.head_sent = True
        return []

    def _refuse_late(self, model: Model, queue: ModelQueue, late: list[Request], now_s: float) -> list[Effect]:
        for request in late:
            del self.requests[request.ticket], queue.waiting[request.ticket]
        return [e for one in late for e in self._refuse(one, self.overload.error(model, queue, now_s))]

    def _ended(self, s: msg.RequestEnded, now_s: float) -> list[Effect]:
        request = self.requests.pop(s.ticket, None)
        if request is None:
            return []
        self.estimates.learn_service(request.model_key, s.took_s)
        self._release(request, now_s, s.response_tokens if s.took_s > 0 else 0)
        return self._pump(request.model_key, now_s)

    def _left(self, s: msg.ClientLeft, now_s: float) -> list[Effect]:
        return self._ended(msg.RequestEnded(s.ticket), now_s)

    def _dispatch_failed(self, s: msg.DispatchFailed, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or not request.instance_id:
            return []
        self.balances.unreachable(request.instance_id, request.model_key, now_s)
        self._release(request, now_s)
        if request.broken_at:
            request.num_continued += s.reached
            return self._go_on(request, s.reason, now_s)
        request.num_dispatches += s.reached
        model = self.fleet.models.get(request.model_key)
        if model is None or request.num_dispatches >= self.params.max_dispatches:
            del self.requests[s.ticket]
            return [*self._refuse(request, EngineFailed(s.reason)), *self._pump(request.model_key, now_s)]
        queue = self._queue(request.model_key)
        request.cold = request.cold or not self.fleet.ready(request.model_key)
        queue.hold(request)
        effects = self._pump(request.model_key, now_s)
        if not request.instance_id:
            effects += [msg.Hold(s.ticket, self.eta_s(model.key, now_s)), *self._say_waiting(model, queue, now_s)]
        return effects

    def _stream_broken(self, s: msg.StreamBroken, now_s: float) -> list[Effect]:
        request = self.requests.get(s.ticket)
        if request is None or not request.instance_id:
            return []
        instance_id = request.instance_id
        if s.is_lost and not s.is_reached:
            self.balances.unreachable(instance_id, request.model_key, now_s)
        self._release(request, now_s)
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
        return [*self._moves.failed(request, s, now_s), *self._pump(request.model_key, now_s)]

    def _go_on(self, request: Request, reason: str, now_s: float, *, failed_at: str = "") -> list[Effect]:
        """Another instance takes a stream that has begun, now or once there is one; else it ends. `failed_at`: the
        instance that is asked only where no other has a free slot."""
        key, most = request.model_key, self.params.max_continuations
        model, queue = self.fleet.models.get(key), self._queue(key)
        why = f"the stream was continued {most} times already" if request.num_continued > most else ""
        if model is None:
            why = why or "its model was undeployed"
        else:
            queue.hold(request)
            effects: list[Effect] = []
            if not why:
                with self.balances.without(failed_at, now_s):
                    effects += self._pump(key, now_s)
                effects += self._pump(key, now_s) if failed_at else []
            if request.instance_id:
                return effects
            if not why and not self.fleet.ready(key):
                known = self._no_start(model, now_s)
                if known is None and model.on_cold is OnCold.REFUSE:
                    known = NoCapacity("its model is not running and is set to refuse rather than hold.")
                why = known.message if known is not None else ""
            if not why:
                hold = msg.Hold(request.ticket, self.eta_s(key, now_s))
                return [*effects, hold, *self._say_waiting(model, queue, now_s)]
            del queue.waiting[request.ticket]
        del self.requests[request.ticket]
        return [rejection(request.ticket, EngineFailed(f"{reason}; {why}")), *self._pump(key, now_s)]

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
            return effects + self._pump(instance.model_key, now_s)
        if instance.state is InstanceState.DRAINING:
            return effects or self._moves.begin(now_s)  # who is recalled leaves anyhow; who stays is asked at a tick
        was_dormant = before is not None and before.state.is_dormant
        if instance.state is InstanceState.FAILED and not was_dormant:  # a sleeper that dies is no start that failed
            reason = instance.reason or "the instance failed"
            recalls = self._recall(instance.instance_id, reason) if code == "node_left" else effects
            return [*recalls, *self._start_failed(instance, code, reason, now_s)]
        return effects

    def _learn_start(self, instance: Instance) -> None:
        model = self.fleet.models.get(instance.model_key)
        if model is not None:
            self.estimates.starts.times.learn(instance, model)

    def _stage_failed(self, instance: Instance, code: str) -> list[Effect]:
        """A later stage on a node that has left: what the pipeline runs is lost, as long as it needs that stage."""
        whole = self.fleet.instances.get(instance.part_of)
        if code != "node_left" or whole is None or whole.is_whole:
            return []
        return self._recall(whole.instance_id, instance.reason or "a stage of the instance failed")

    def _recall(self, instance_id: str, reason: str, *, ended: bool = False, moved: bool = False) -> list[Effect]:
        running = [ticket for ticket, r in self.requests.items() if r.instance_id == instance_id]
        return [msg.Recall(ticket, reason, ended, moved) for ticket in running]

    def _start_failed(self, instance: Instance, code: str, message: str, now_s: float) -> list[Effect]:
        """Remember why; when it is the weights, no other node is tried and nothing else can serve, nobody waits for
        nothing."""
        model_key = instance.model_key
        failure = self._failures.remember(instance, code, message, now_s)
        queue = self.queues.get(model_key)
        served = self.fleet.ready(model_key) or self.fleet.coming(model_key)
        if queue is None or served or not failure.is_hopeless:
            return []
        return self._empty(queue, self._failures.error(failure))

    def _model_changed(self, model: Model, now_s: float) -> list[Effect]:
        if not self.fleet.model_table.apply(model, now_s):
            return []
        self._failures.forget(model.key)
        queue = self.queues.get(model.key)
        if queue is not None and model.suspended and not self.fleet.ready(model.key):
            return self._empty(queue, suspended(model))
        return self._pump(model.key, now_s)

    def _model_gone(self, model: Model) -> list[Effect]:
        queue = self.queues.get(model.key)
        if queue is None:
            return []
        return self._empty(queue, ModelNotFound(f"The model `{model.name}` was undeployed."))

    def _empty(self, queue: ModelQueue, error: GlowplugError) -> list[Effect]:
        """Answer everyone who waits with one error."""
        effects: list[Effect] = []
        while queue.waiting:
            ticket, request = queue.waiting.popitem(last=False)
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
        for key in [key for key, queue in self.queues.items() if queue.waiting]:
            queue, model = self.queues[key], self.fleet.models.get(key)
            if model is None:
                continue
            effects += self._pump(key, now_s)
            effects += self._expire(model, queue, now_s)
            if not (self.fleet.ready(key) or self.fleet.coming(key)) and (e := self._bus.overdue(model, now_s)):
                effects += self._empty(queue, e)
            effects += self._refuse_late(model, queue, self.overload.late(model, queue, now_s), now_s)
            effects += self._say_waiting(model, queue, now_s)
        return effects + self._moves.begin(now_s)

    def _expire(self, model: Model, queue: ModelQueue, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for request in list(takewhile(lambda r: r.broken_at or self._is_over(r, model, now_s), queue.waiting.values())):
            if not self._is_over(request, model, now_s):
                continue  # a stream that broke waits from then on, before those that came later
            del queue.waiting[request.ticket], self.requests[request.ticket]
            most_s = self._most_s(request, model)
            failure = self._failures.of(model.key)
            why = f" The last start failed: {failure.message}" if failure is not None else ""
            if request.broken_at:
                text = f"No instance of `{model.name}` could go on with the stream within {most_s:g} s.{why}"
                effects.append(rejection(request.ticket, EngineFailed(text)))
                continue
            text = f"No instance of `{model.name}` could take the request within {most_s:g} s.{why}"
            retry_s = self.overload.ask_back_s(model, queue, now_s)
            effects += self._refuse(request, coded(NoCapacity(text, retry_after_s=retry_s), "wait_timeout"))
        return effects

    def _most_s(self, request: Request, model: Model) -> float:
        """Seconds that it may wait."""
        return self.params.continue_within_s if request.broken_at else model.max_wait_s

    def _is_over(self, request: Request, model: Model, now_s: float) -> bool:
        return now_s - request.waits_since >= self._most_s(request, model)

    def _drain_started(self, _: msg.DrainStarted, now_s: float) -> list[Effect]:
        self.stopping = True
        return []

    def _say_waiting(self, model: Model, queue: ModelQueue, now_s: float) -> list[Effect]:
        oldest = queue.oldest()
        if oldest is None or now_s - queue.published_at < self.params.waiting_every_s:
            return []
        queue.published_at = now_s
        most_s = self._most_s(oldest, model)
        return [waiting_fact(model, oldest, len(queue.waiting), most_s, self.params.router_id)]

    def eta_s(self, model_key: str, now_s: float) -> float:
        """Seconds until the model serves a request that arrives now: 0 when it is hot and has a free slot."""
        return self.overload.eta_s(model_key, self.queues.get(model_key), self.balances.taken, now_s)

    def loads(self) -> dict[str, ModelLoad]:
        """What this router holds and runs, by model_key, for router.load_reported."""
        return {key: self.load(key) for key in self.queues}

    def load(self, model_key: str) -> ModelLoad:
        queue = self.queues.get(model_key)
        if queue is None:
            return ModelLoad()
        mine = self.fleet.of(model_key)
        return ModelLoad(
            num_waiting=len(queue.waiting),
            num_in_flight=queue.num_running,
            last_active_at=queue.last_active_at,
            num_arrived=queue.num_arrived,
            num_dispatched=queue.num_dispatched,
            in_flight_by_instance={i: self.in_flight[i] for i in mine if i in self.in_flight},
            outlook_by_instance=self.balances.outlooks(model_key),
            slots_per_instance=slots_per_instance(mine.values()),
        )

    def _queue(self, model_key: str) -> ModelQueue:
        return self.queues.get(model_key) or self.queues.setdefault(model_key, ModelQueue())
