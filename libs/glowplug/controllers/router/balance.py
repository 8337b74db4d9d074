"""Choose the instance for a request: one balancer per model, fed with everything that the router learns.

An instance may be chosen while requests may be sent to it (`status.is_target`) and it is not quarantined.

Routers decide alone and learn of each other's requests half a second late. An engine is full when all routers together
fill it, yet each router may use its fair share, so that a long queue of one cannot starve the others. Between reports
an engine may get more than it runs at once, by at most the others' shares and arrivals; it queues the surplus.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.instance import BEFORE_START, Instance
from glowplug.domain.snapshot import ModelLoad, Outlook, Target
from glowplug.events.facts import RouterLoadReported
from glowplug.fleet.demand import LoadReports, joined
from glowplug.fleet.status import is_target
from glowplug.fleet.tables import FleetTables
from glowplug.policies.prediction.response_length import LengthParams, ResponseLengths
from glowplug.policies.routing.port import Balancer, BalancerParams

# Engines that several models share: a base's engine serves its adapters too (Instance.host_id). Its slots are one
# count, and a free slot goes to the longest waiting request of all its models.

Member = tuple[str, str]  # model_key, instance_id


class Hosts:
    def __init__(self, instances: Mapping[str, Instance], of: Callable[[str], Mapping[str, Instance]]) -> None:
        self._instances, self._of = instances, of
        self.riders: dict[str, dict[str, str]] = {}  # host -> adapter's instance -> its model_key

    def changed(self, instance: Instance) -> None:
        if not instance.state.is_gone:
            self.riders.setdefault(instance.host_id, {})[instance.instance_id] = instance.model_key
            return
        here = self.riders.get(instance.host_id, {})
        here.pop(instance.instance_id, None)
        if not here:
            self.riders.pop(instance.host_id, None)

    def forget(self, known: Container[str]) -> None:
        for host_id, here in list(self.riders.items()):
            for instance_id in [i for i in here if i not in known]:
                del here[instance_id]
            if not here:
                del self.riders[host_id]

    def members(self, instance: Instance) -> list[Member]:
        host = self._instances.get(instance.engine_id)
        riders = self.riders.get(instance.engine_id, {})
        first = [(host.model_key, host.instance_id)] if host is not None else []
        found = [*first, *((key, instance_id) for instance_id, key in riders.items())]
        return found or [(instance.model_key, instance.instance_id)]

    def in_turn(
        self, model_key: str, queues: Mapping[str, ModelQueue], send: Callable[[str], list[Effect]]
    ) -> list[Effect]:
        """Give free slots to waiting requests, the oldest first. `send(model_key)` dispatches one held request, if any
        may go."""
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
    oldest = queue.oldest()
    return oldest.waits_since if oldest is not None else 0.0


def together(counts: Mapping[str, int], members: Iterable[Member]) -> int:
    return sum(counts.get(instance_id, 0) for _, instance_id in members)


# GPU memory that requests take, in GPU-seconds: an instance that fills half of one GPU for a second takes 0.5.
#
# Each moment is shared evenly among this router's requests there (integral of 1/n). A start is charged to the first
# request sent after it that arrived before it began; at most one at each router.

CLOCKS_APART_S = 2.0  # between a router and a node


class _Stay:
    __slots__ = ("at", "instance", "integral_s", "num", "share", "started_at")

    def __init__(self) -> None:
        self.instance: Instance | None = None
        self.num, self.at, self.integral_s = 0, 0.0, 0.0
        self.share, self.started_at = math.nan, 0.0


class Stays:
    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}

    def sent(self, request: Request, instance: Instance, now_s: float) -> None:
        stay = self._stays.get(instance.instance_id)
        if stay is None:
            stay = self._stays[instance.instance_id] = _Stay()
        if stay.num and now_s > stay.at:
            stay.integral_s += (now_s - stay.at) / stay.num
        if stay.instance is not instance:
            self._look(stay, request, instance)
        stay.at, stay.num = now_s, stay.num + 1
        request.stay_from_s = stay.integral_s

    def left(self, request: Request, now_s: float) -> None:
        stay = self._stays[request.instance_id]
        if now_s > stay.at:
            stay.integral_s += (now_s - stay.at) / stay.num
        stay.at, stay.num = now_s, stay.num - 1
        request.gpu_s += (stay.integral_s - request.stay_from_s) * stay.share

    def taken(self, request: Request | None, now_s: float) -> float:
        """Return GPU-seconds taken so far; NaN where the request, or bytes of an instance or of its GPUs, are
        unknown."""
        if request is None:
            return math.nan
        if not request.instance_id:
            return request.gpu_s
        stay = self._stays[request.instance_id]
        since_s = (now_s - stay.at) / stay.num if now_s > stay.at else 0.0
        return request.gpu_s + (stay.integral_s + since_s - request.stay_from_s) * stay.share

    def forget(self, instances: Container[str]) -> None:
        for instance_id in [i for i, stay in self._stays.items() if not stay.num and i not in instances]:
            del self._stays[instance_id]

    def _look(self, stay: _Stay, request: Request, instance: Instance) -> None:
        stay.instance, stay.share = instance, instance.gpu_share
        if instance.ready_at == stay.started_at:
            return
        stay.started_at = instance.ready_at
        phases = (phase.started_at for phase in instance.phases if phase.name not in BEFORE_START)
        began_at = min(phases, default=instance.created_at)
        if instance.ready_at > began_at and request.arrived_at <= began_at + CLOCKS_APART_S:
            request.gpu_s += (instance.ready_at - began_at) * stay.share


Factory = Callable[[BalancerParams], Balancer]
_NO_LOAD = ModelLoad()


class PeerLoads:
    def __init__(self, router_id: str, deployed: Container[str]) -> None:
        self._router_id = router_id
        self._reports = LoadReports(deployed)
        self.loads: dict[str, ModelLoad] = {}  # by model_key, joined
        self._sharers: dict[str, int] = {}

    def take(self, report: RouterLoadReported, now_s: float) -> set[str] | None:
        """Take a router's report. Return the models whose load it changes; None when it is this router's own."""
        if report.router_id == self._router_id:
            return None
        before = dict(self._reports.loads.get(report.router_id, {}))
        after = self._reports.take(report, now_s)
        return self._join({key for key in before.keys() | after.keys() if before.get(key) != after.get(key)})

    def expire(self, now_s: float) -> set[str]:
        """Forget silent routers. Return the models of the others' loads, or none where no router went silent."""
        return self._join(set(self.loads)) if self._reports.expire(now_s) else set()

    def _join(self, model_keys: set[str]) -> set[str]:
        for key in model_keys:
            loads = [loads[key] for loads in self._reports.loads.values() if key in loads]
            if loads:
                self.loads[key] = joined(loads)
                self._sharers[key] = sum(bool(load.num_waiting or load.num_in_flight) for load in loads)
            else:
                del self.loads[key], self._sharers[key]
        return model_keys

    def ahead(self, model_key: str, instance_id: str) -> Outlook | None:
        """Return the other routers' load on an instance, sent and expected; None when they do not look ahead."""
        return self.loads.get(model_key, _NO_LOAD).outlook_by_instance.get(instance_id)

    def num_in_flight(self, model_key: str) -> int:
        return self.loads.get(model_key, _NO_LOAD).num_in_flight

    def seen(self, model_key: str, instance_id: str, own: int, max_concurrency: int) -> int:
        """Count taken slots when this router runs `own` requests: the sum over all routers, but below full while this
        router has less than its share."""
        others = self.loads.get(model_key, _NO_LOAD).in_flight_by_instance.get(instance_id, 0)
        if not others:
            return own
        return self._fair(own, others, self._sharers.get(model_key, 0), max_concurrency)

    def seen_together(self, members: Sequence[Member], own: int, max_concurrency: int) -> int:
        """`seen` of an engine that serves several models: `own` requests of this router, of all `members`."""
        loads = [self.loads.get(key, _NO_LOAD).in_flight_by_instance.get(name, 0) for key, name in members]
        sharers = max((self._sharers.get(key, 0) for key, _ in members), default=0)
        return self._fair(own, sum(loads), sharers, max_concurrency) if any(loads) else own

    @staticmethod
    def _fair(own: int, others: int, num_sharers: int, max_concurrency: int) -> int:
        share = max(1, max_concurrency // (1 + num_sharers))
        return own + others if own >= share else min(own + others, max_concurrency - 1)


class Balances:
    def __init__(
        self,
        factory: Factory,
        params: BalancerParams,
        lengths: LengthParams,
        fleet: FleetTables,
        *,
        router_id: str,
        quarantine_s: float,
    ) -> None:
        self.in_flight: dict[str, int] = {}  # by instance_id: this router's requests
        self.quarantined: dict[str, float] = {}  # by instance_id: until then, an unreachable one is sent nothing
        self.stays = Stays()
        self.hosts = Hosts(fleet.instances, fleet.of)
        example = factory(params)
        self.tracks_tokens, self.reads_prefixes = example.tracks_tokens, example.reads_prefixes
        self._factory, self._params, self._fleet = factory, params, fleet
        self._peers, self._quarantine_s = PeerLoads(router_id, fleet.models), quarantine_s
        self.num_of_others = self._peers.num_in_flight
        self._balancers: dict[str, Balancer] = {}  # by model_key
        self._lengths = defaultdict[str, ResponseLengths](partial(ResponseLengths, lengths))
        self.lengths_of = self._lengths.__getitem__
        self._now_s = 0.0

    def of(self, model_key: str) -> Balancer | None:
        return self._balancers.get(model_key)

    def num_blocks(self) -> dict[str, int]:
        return {key: balancer.num_blocks for key, balancer in self._balancers.items()} if self.reads_prefixes else {}

    # -- instances ----------------------------------------------------------------------------------------------

    def instance_changed(self, instance: Instance, now_s: float) -> None:
        self.quarantined.pop(instance.instance_id, None)
        if instance.host_id:
            self.hosts.changed(instance)
        self._put(instance, now_s)

    def instance_gone(self, instance_id: str, model_key: str) -> None:
        if model_key in self._balancers:
            self._balancers[model_key].gone(instance_id)

    def unreachable(self, instance_id: str, model_key: str, now_s: float) -> None:
        self.quarantined[instance_id] = now_s + self._quarantine_s
        self.instance_gone(instance_id, model_key)

    @contextmanager
    def without(self, instance_id: str, now_s: float) -> Iterator[None]:
        """Send an instance nothing within this context; "": no instance is left out."""
        instance = self._fleet.instances.get(instance_id)
        if instance is None or instance_id in self.quarantined:
            yield
            return
        self.instance_gone(instance_id, instance.model_key)
        yield
        self._put(instance, now_s)

    def pass_time(self, now_s: float) -> None:
        self._now_s = now_s
        for instance_id in [i for i, until in self.quarantined.items() if now_s >= until]:
            del self.quarantined[instance_id]
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                self._put(instance, now_s)

    def forget_unused(self, models: Container[str]) -> None:
        for learned in (self._balancers, self._lengths):
            for key in [k for k in learned if k not in models and not self._fleet.of(k)]:
                del learned[key]
        self.stays.forget(self._fleet.instances)
        self.hosts.forget(self._fleet.instances)

    def _put(self, instance: Instance, now_s: float) -> None:
        instance_id, model_key = instance.instance_id, instance.model_key
        if not is_target(instance):
            self.instance_gone(instance_id, model_key)
            return
        balancer = self._balancers.get(model_key)
        if balancer is None:
            balancer = self._balancers[model_key] = self._factory(self._params_of(model_key))
        target = Target(
            instance_id,
            self.taken(instance),
            instance.max_concurrency,
            self._kv_tokens(instance),
            instance.step_s,
            instance.ready_at,
            instance.num_cached_sequences,
        )
        balancer.put(target, now_s)
        if self.tracks_tokens and (ahead := self._peers.ahead(model_key, instance_id)) is not None:
            balancer.others(instance_id, ahead)

    def _params_of(self, model_key: str) -> BalancerParams:
        model = self._fleet.models.get(model_key)
        return replace(self._params, tpot_slo_s=model.slo.tpot_s) if model is not None else self._params

    def _kv_tokens(self, instance: Instance) -> int:
        if instance.kv_tokens:
            return instance.kv_tokens
        model = self._fleet.models.get(instance.model_key)
        return instance.max_concurrency * (model.context_tokens if model else 1)

    # -- other routers ------------------------------------------------------------------------------------------

    def taken(self, instance: Instance) -> int:
        """Return taken slots of an instance's engine, other routers' and other models' requests included."""
        if self.hosts.riders and len(members := self.hosts.members(instance)) > 1:
            own = together(self.in_flight, members)
            return self._peers.seen_together(members, own, instance.max_concurrency)
        own = self.in_flight.get(instance.instance_id, 0)
        if not self._peers.loads:
            return own
        return self._peers.seen(instance.model_key, instance.instance_id, own, instance.max_concurrency)

    def peer_reported(self, report: RouterLoadReported, now_s: float) -> bool:
        news = self._peers.take(report, now_s)
        self._refill(news or ())
        return news is not None

    def forget_silent(self, now_s: float) -> None:
        self._refill(self._peers.expire(now_s))

    def _refill(self, model_keys: Iterable[str]) -> None:
        for key in model_keys:
            balancer = self._balancers.get(key)
            if balancer is not None:
                for instance_id, instance in self._fleet.of(key).items():
                    balancer.filled(instance_id, self.taken(instance))
                    if self.hosts.riders:
                        self._fill_beside(instance)
                    if self.tracks_tokens:
                        balancer.others(instance_id, self._peers.ahead(key, instance_id))

    # -- requests -----------------------------------------------------------------------------------------------

    def choose(self, request: Request, now_s: float) -> Instance | None:
        if self.quarantined:
            self.pass_time(now_s)
        balancer = self._balancers.get(request.model_key)
        if balancer is None:
            return None
        chosen = balancer.choose(
            request.prompt_tokens, request.expected_tokens, now_s, request.arrival.prefix
        ).instance_id
        return self._fleet.instances[chosen] if chosen else None

    def sent(self, request: Request, instance: Instance, now_s: float) -> None:
        instance_id = instance.instance_id
        self.in_flight[instance_id] = self.in_flight.get(instance_id, 0) + 1
        self.stays.sent(request, instance, now_s)
        balancer = self._balancers[instance.model_key]
        prompt_tokens, expected_tokens = request.prompt_tokens, request.expected_tokens
        balancer.sent(request.ticket, instance_id, prompt_tokens, expected_tokens, now_s, request.arrival.prefix)
        balancer.filled(instance_id, self.taken(instance))
        if self.hosts.riders:
            self._fill_beside(instance)

    def _fill_beside(self, instance: Instance) -> None:
        for model_key, instance_id in self.hosts.members(instance):
            if (other := self._balancers.get(model_key)) is not None:
                other.filled(instance_id, self.taken(instance))

    def expect_of(self, request: Request, text_tokens: int, now_s: float) -> None:
        lengths, balancer = self._lengths.get(request.model_key), self._balancers.get(request.model_key)
        if lengths is None or balancer is None:
            return
        request.expected_tokens = lengths.expect(request.prompt_tokens, request.arrival.max_tokens, text_tokens)
        balancer.expect(request.ticket, request.expected_tokens, now_s)

    def first_token(self, request: Request, now_s: float) -> None:
        balancer = self._balancers.get(request.model_key)
        if balancer is not None:
            balancer.first_token(request.ticket, now_s)

    def left(self, request: Request, response_tokens: int, now_s: float) -> None:
        self.stays.left(request, now_s)
        instance_id = request.instance_id
        left = self.in_flight[instance_id] - 1
        if left:
            self.in_flight[instance_id] = left
        else:
            del self.in_flight[instance_id]
        balancer = self._balancers.get(request.model_key)
        if balancer is not None:
            balancer.ended(request.ticket, response_tokens, now_s, request.cached_tokens)
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                balancer.filled(instance_id, self.taken(instance))
                if self.hosts.riders:
                    self._fill_beside(instance)
        if response_tokens and self.tracks_tokens:
            self._lengths[request.model_key].learn(request.prompt_tokens, response_tokens, request.text_tokens)

    def outlooks(self, model_key: str) -> dict[str, Outlook]:
        """Return the load expected at each ready instance, as of the last tick; empty where no policy looks ahead."""
        balancer = self._balancers.get(model_key)
        if balancer is None or not self.tracks_tokens:
            return {}
        seen = ((i.instance_id, balancer.outlook(i.instance_id, self._now_s)) for i in self._fleet.ready(model_key))
        return {instance_id: outlook for instance_id, outlook in seen if outlook is not None}
