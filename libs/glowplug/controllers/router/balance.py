"""Which instance a request goes to: one balancer per model, told of whatever the router learns.

An instance may be chosen while it is ready, has an address, serves (no replica, no later stage of a pipeline) and could
be reached a moment ago.
"""

from collections.abc import Callable, Container
from dataclasses import replace

from glowplug.controllers.router.fleet import Fleet, is_target
from glowplug.controllers.router.peers import Peers
from glowplug.controllers.router.queue import Quarantine, Request
from glowplug.domain.instance import Instance
from glowplug.domain.snapshot import Outlook, Target
from glowplug.events.facts import RouterLoadReported
from glowplug.policies.prediction.response_length import LengthParams, ResponseLengths
from glowplug.policies.routing.port import Balancer, BalancerParams

Factory = Callable[[BalancerParams], Balancer]


class Balances:
    """The balancers, what they balance over, and the expected lengths they are asked with."""

    def __init__(
        self, factory: Factory, params: BalancerParams, lengths: LengthParams, fleet: Fleet, peers: Peers, hold_s: float
    ) -> None:
        self.in_flight: dict[str, int] = {}  # by instance_id, ours
        self.quarantine = Quarantine(hold_s)
        self.tracks_tokens = factory(params).tracks_tokens
        self._factory, self._params, self._length_params = factory, params, lengths
        self._fleet, self._peers = fleet, peers
        self._balancers: dict[str, Balancer] = {}  # by model_key
        self._lengths: dict[str, ResponseLengths] = {}
        self._now_s = 0.0

    def of(self, model_key: str) -> Balancer | None:
        return self._balancers.get(model_key)

    # -- instances ----------------------------------------------------------------------------------------------

    def instance_changed(self, instance: Instance, now_s: float) -> None:
        """Its row is another; whatever was held against it is forgotten."""
        self.quarantine.free(instance.instance_id)
        self._put(instance.instance_id, instance.model_key, now_s)

    def instance_gone(self, instance_id: str, model_key: str) -> None:
        if model_key in self._balancers:
            self._balancers[model_key].gone(instance_id)

    def unreachable(self, instance_id: str, model_key: str, now_s: float) -> None:
        """Leave it alone for a while."""
        self.quarantine.add(instance_id, now_s)
        self.instance_gone(instance_id, model_key)

    def pass_time(self, now_s: float) -> None:
        """Let those go that have been left alone long enough."""
        self._now_s = now_s
        for instance_id in self.quarantine.expire(now_s):
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                self._put(instance_id, instance.model_key, now_s)

    def forget_unused(self, models: Container[str]) -> None:
        """Drop what was learned of models that are neither among `models` nor have an instance left."""
        for learned in (self._balancers, self._lengths):
            for key in [k for k in learned if k not in models and k not in self._fleet.by_model]:
                del learned[key]

    def _put(self, instance_id: str, model_key: str, now_s: float) -> None:
        instance = self._fleet.instances.get(instance_id)
        if instance is None or not is_target(instance) or self.quarantine.holds(instance_id, now_s):
            self.instance_gone(instance_id, model_key)
            return
        balancer = self._balancers.get(model_key)
        if balancer is None:
            balancer = self._balancers[model_key] = self._factory(self._params_of(model_key))
        balancer.put(
            Target(instance_id, self.taken(instance), instance.max_concurrency, self._kv_tokens(instance)), now_s
        )

    def _params_of(self, model_key: str) -> BalancerParams:
        model = self._fleet.models.get(model_key)
        return replace(self._params, tpot_slo_s=model.slo.tpot_s) if model is not None else self._params

    def _kv_tokens(self, instance: Instance) -> int:
        """What its cache holds; where that is not told, the longest context of everybody it runs at once."""
        if instance.kv_tokens:
            return instance.kv_tokens
        model = self._fleet.models.get(instance.model_key)
        return instance.max_concurrency * (model.context_tokens if model else 1)

    # -- other routers ------------------------------------------------------------------------------------------

    def taken(self, instance: Instance) -> int:
        """How full it is, with what other routers run there."""
        own = self.in_flight.get(instance.instance_id, 0)
        return self._peers.seen(instance.model_key, instance.instance_id, own, instance.max_concurrency)

    def heard(self, report: RouterLoadReported, now_s: float) -> bool:
        """Another router's load. False when it is our own."""
        if not self._peers.take(report, now_s):
            return False
        self._refill()
        return True

    def silent(self, now_s: float) -> None:
        """Forget routers that have gone silent."""
        if self._peers.expire(now_s):
            self._refill()

    def _refill(self) -> None:
        for key in self._peers.touched:
            balancer = self._balancers.get(key)
            if balancer is not None:
                for instance_id, instance in self._fleet.by_model.get(key, {}).items():
                    balancer.filled(instance_id, self.taken(instance))
                    if self.tracks_tokens:
                        balancer.others(instance_id, self._peers.ahead(instance_id))

    # -- requests -----------------------------------------------------------------------------------------------

    def expect(self, model_key: str, prompt_tokens: int, max_tokens: int) -> int:
        """Response tokens to expect; 0 where nobody wants to know."""
        if not self.tracks_tokens:
            return 0
        lengths = self._lengths.get(model_key)
        if lengths is None:
            lengths = self._lengths[model_key] = ResponseLengths(self._length_params)
        return lengths.expect(prompt_tokens, max_tokens)

    def choose(self, request: Request, now_s: float) -> Instance | None:
        """Where it should go now."""
        if self.quarantine.until:
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
            self._lengths[request.model_key].learn(request.prompt_tokens, response_tokens)

    def outlooks(self, model_key: str) -> dict[str, Outlook]:
        """What is ahead of each instance that may be chosen, as of when time passed last; empty from a policy that
        does not look ahead."""
        balancer = self._balancers.get(model_key)
        if balancer is None or not self.tracks_tokens:
            return {}
        mine = self._fleet.by_model.get(model_key, {})
        seen = ((i, balancer.outlook(i, self._now_s)) for i in mine if is_target(mine[i]))
        return {i: outlook for i, outlook in seen if outlook is not None}
