"""Which instance a request goes to: one balancer per model, which is notified of whatever the router learns.

An instance may be chosen while requests may be sent to it (`status.is_target`) and it could be reached a moment ago.

Each router decides alone and knows of the others half a second late. Two rules keep them apart: an engine is full when
all of them together fill it, and each may have its fair share of it all the same, so that a router with a long queue
cannot keep the others waiting for ever. Between two reports an engine may be sent more than it takes at once, by at
most what the others' shares and their arrivals come to; it queues them itself.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from glowplug.controllers.router.queue import Request
from glowplug.domain.instance import Instance
from glowplug.domain.snapshot import ModelLoad, Outlook, Target
from glowplug.events.facts import RouterLoadReported
from glowplug.fleet.demand import LoadReports, joined
from glowplug.fleet.status import is_target
from glowplug.fleet.tables import Fleet
from glowplug.policies.prediction.response_length import LengthParams, ResponseLengths
from glowplug.policies.routing.port import Balancer, BalancerParams

Factory = Callable[[BalancerParams], Balancer]
_NO_LOAD = ModelLoad()


class Peers:
    """What the other routers run at the same engines, as they reported last. `router_id` is ours: our own reports come
    back to us and are passed over."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._reports = LoadReports()
        self._loads: dict[str, ModelLoad] = {}  # model_key -> of all others, in one
        self._sharers: dict[str, int] = {}  # model_key -> others with requests for it, held or running

    def take(self, report: RouterLoadReported, now_s: float) -> set[str] | None:
        """The models of which it says something new; None when it is our own."""
        if report.router_id == self._router_id:
            return None
        before = dict(self._reports.loads.get(report.router_id, {}))
        after = self._reports.take(report, now_s)
        return self._join({key for key in before.keys() | after.keys() if before.get(key) != after.get(key)})

    def expire(self, now_s: float) -> set[str]:
        """Forget routers that have gone silent: they are taken to run nothing. The models that others spoke of, when
        there was one."""
        return self._join(set(self._loads)) if self._reports.expire(now_s) else set()

    def _join(self, model_keys: set[str]) -> set[str]:
        for key in model_keys:
            loads = [loads[key] for loads in self._reports.loads.values() if key in loads]
            if loads:
                self._loads[key] = joined(loads)
                self._sharers[key] = sum(bool(load.num_waiting or load.num_in_flight) for load in loads)
            else:
                del self._loads[key], self._sharers[key]
        return model_keys

    def ahead(self, model_key: str, instance_id: str) -> Outlook | None:
        """What the others have sent there and expect of it; None when nobody looks ahead."""
        return self._loads.get(model_key, _NO_LOAD).outlook_by_instance.get(instance_id)

    def seen(self, model_key: str, instance_id: str, own: int, max_concurrency: int) -> int:
        """How full that instance is to us, who run `own` requests there: the sum, but below full while we have not
        had our share."""
        others = self._loads.get(model_key, _NO_LOAD).in_flight_by_instance.get(instance_id, 0)
        if not others:
            return own
        share = max(1, max_concurrency // (1 + self._sharers.get(model_key, 0)))
        return own + others if own >= share else min(own + others, max_concurrency - 1)


class Balances:
    """The balancers, what they balance over, and the expected lengths they are asked with."""

    def __init__(
        self,
        factory: Factory,
        params: BalancerParams,
        lengths: LengthParams,
        fleet: Fleet,
        *,
        router_id: str,
        quarantine_s: float,
    ) -> None:
        self.in_flight: dict[str, int] = {}  # by instance_id, ours
        self.quarantined: dict[str, float] = {}  # by instance_id, until when those are left alone that were not reached
        self.tracks_tokens = factory(params).tracks_tokens
        self._factory, self._params, self._length_params = factory, params, lengths
        self._fleet, self._peers, self._quarantine_s = fleet, Peers(router_id), quarantine_s
        self._balancers: dict[str, Balancer] = {}  # by model_key
        self._lengths: dict[str, ResponseLengths] = {}
        self._now_s = 0.0

    def of(self, model_key: str) -> Balancer | None:
        return self._balancers.get(model_key)

    # -- instances ----------------------------------------------------------------------------------------------

    def instance_changed(self, instance: Instance, now_s: float) -> None:
        """Its row is another; whatever was held against it is forgotten."""
        self.quarantined.pop(instance.instance_id, None)
        self._put(instance, now_s)

    def instance_gone(self, instance_id: str, model_key: str) -> None:
        if model_key in self._balancers:
            self._balancers[model_key].gone(instance_id)

    def unreachable(self, instance_id: str, model_key: str, now_s: float) -> None:
        """Leave it alone for a while."""
        self.quarantined[instance_id] = now_s + self._quarantine_s
        self.instance_gone(instance_id, model_key)

    @contextmanager
    def without(self, instance_id: str, now_s: float) -> Iterator[None]:
        """Nothing is sent there meanwhile; "": it changes nothing."""
        instance = self._fleet.instances.get(instance_id)
        if instance is None or instance_id in self.quarantined:
            yield
            return
        self.instance_gone(instance_id, instance.model_key)
        yield
        self._put(instance, now_s)

    def pass_time(self, now_s: float) -> None:
        """Let those go that have been left alone long enough."""
        self._now_s = now_s
        for instance_id in [i for i, until in self.quarantined.items() if now_s >= until]:
            del self.quarantined[instance_id]
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                self._put(instance, now_s)

    def forget_unused(self, models: Container[str]) -> None:
        """Drop what was learned of models that are neither among `models` nor have an instance left."""
        for learned in (self._balancers, self._lengths):
            for key in [k for k in learned if k not in models and not self._fleet.of(k)]:
                del learned[key]

    def _put(self, instance: Instance, now_s: float) -> None:
        instance_id, model_key = instance.instance_id, instance.model_key
        if not is_target(instance):
            self.instance_gone(instance_id, model_key)
            return
        balancer = self._balancers.get(model_key)
        if balancer is None:
            balancer = self._balancers[model_key] = self._factory(self._params_of(model_key))
        num_taken, kv_tokens = self.taken(instance), self._kv_tokens(instance)
        target = Target(instance_id, num_taken, instance.max_concurrency, kv_tokens, instance.step_s)
        balancer.put(target, now_s)
        if self.tracks_tokens and (ahead := self._peers.ahead(model_key, instance_id)) is not None:
            balancer.others(instance_id, ahead)

    def _params_of(self, model_key: str) -> BalancerParams:
        model = self._fleet.models.get(model_key)
        return replace(self._params, tpot_slo_s=model.slo.tpot_s) if model is not None else self._params

    def _kv_tokens(self, instance: Instance) -> int:
        """What its cache holds; where that is not known, the longest context of every request it runs at once."""
        if instance.kv_tokens:
            return instance.kv_tokens
        model = self._fleet.models.get(instance.model_key)
        return instance.max_concurrency * (model.context_tokens if model else 1)

    # -- other routers ------------------------------------------------------------------------------------------

    def taken(self, instance: Instance) -> int:
        """How full it is, with what other routers run there."""
        own = self.in_flight.get(instance.instance_id, 0)
        return self._peers.seen(instance.model_key, instance.instance_id, own, instance.max_concurrency)

    def peer_reported(self, report: RouterLoadReported, now_s: float) -> bool:
        """A router's load. False when it is our own."""
        news = self._peers.take(report, now_s)
        self._refill(news or ())
        return news is not None

    def forget_silent(self, now_s: float) -> None:
        """Forget routers that have gone silent."""
        self._refill(self._peers.expire(now_s))

    def _refill(self, model_keys: Iterable[str]) -> None:
        for key in model_keys:
            balancer = self._balancers.get(key)
            if balancer is not None:
                for instance_id, instance in self._fleet.of(key).items():
                    balancer.filled(instance_id, self.taken(instance))
                    if self.tracks_tokens:
                        balancer.others(instance_id, self._peers.ahead(key, instance_id))

    # -- requests -----------------------------------------------------------------------------------------------

    def expect(self, model_key: str, prompt_tokens: int, max_tokens: int, text_tokens: int = 0) -> int:
        """Response tokens to expect; 0 where no policy asks. `text_tokens`: as ResponseLengths.expect has it."""
        if not self.tracks_tokens:
            return 0
        lengths = self._lengths.get(model_key)
        if lengths is None:
            lengths = self._lengths[model_key] = ResponseLengths(self._length_params)
        return lengths.expect(prompt_tokens, max_tokens, text_tokens)

    def choose(self, request: Request, now_s: float) -> Instance | None:
        """Where it should go now."""
        if self.quarantined:
            self.pass_time(now_s)
        balancer = self._balancers.get(request.model_key)
        if balancer is None:
            return None
        chosen = balancer.choose(request.prompt_tokens, request.expected_tokens, now_s).instance_id
        return self._fleet.instances[chosen] if chosen else None

    def sent(self, request: Request, instance: Instance, now_s: float) -> None:
        """It goes there."""
        instance_id = instance.instance_id
        self.in_flight[instance_id] = self.in_flight.get(instance_id, 0) + 1
        balancer = self._balancers[instance.model_key]
        balancer.sent(request.ticket, instance_id, request.prompt_tokens, request.expected_tokens, now_s)
        balancer.filled(instance_id, self.taken(instance))

    def first_token(self, request: Request, now_s: float) -> None:
        balancer = self._balancers.get(request.model_key)
        if balancer is not None:
            balancer.first_token(request.ticket, now_s)

    def left(self, request: Request, response_tokens: int, now_s: float) -> None:
        """It is at `request.instance_id` no more; `response_tokens` of a whole answer, else 0."""
        instance_id = request.instance_id
        left = self.in_flight[instance_id] - 1
        if left:
            self.in_flight[instance_id] = left
        else:
            del self.in_flight[instance_id]
        balancer = self._balancers.get(request.model_key)
        if balancer is not None:
            balancer.ended(request.ticket, response_tokens, now_s)
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                balancer.filled(instance_id, self.taken(instance))
        if response_tokens and request.model_key in self._lengths:
            lengths = self._lengths[request.model_key]
            lengths.learn(request.prompt_tokens, response_tokens, request.text_tokens)

    def outlooks(self, model_key: str) -> dict[str, Outlook]:
        """What is ahead of each instance that may be chosen, as of when time passed last; empty from a policy that
        does not look ahead."""
        balancer = self._balancers.get(model_key)
        if balancer is None or not self.tracks_tokens:
            return {}
        seen = ((i.instance_id, balancer.outlook(i.instance_id, self._now_s)) for i in self._fleet.ready(model_key))
        return {instance_id: outlook for instance_id, outlook in seen if outlook is not None}
