"""Each request ends once, in order, never beyond an instance's capacity."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.snapshot import Target
from glowplug.policies.registry import choose, installed
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.tracked import Tracker
from tests.fleet_builder import a_model, an_instance, instance_event

STATES = [state for state in InstanceState if not state.is_dormant]
KEYS, INSTANCES = ("a", "b"), ("a-1", "a-2", "b-1", "b-2")


class Router(RuleBasedStateMachine):
    """Keeps its own account and checks the controller against it."""

    policy = "least_loaded"
    balancer = BalancerParams()

    def __init__(self) -> None:
        super().__init__()
        params = RouterParams(
            quarantine_s=0.5, policy=self.policy, balancer=self.balancer, continue_within_s=4.0, move_within_s=5.0
        )
        self.controller = RouterController(params)
        self.leaving: dict[int, str] = {}  # ticket -> the instance that still answers it
        self.asked: dict[int, msg.RequestArrived] = {}
        self.begun: set[int] = set()  # first token told since it was sent
        self.now_s, self.ticket, self.revision = 1000.0, 0, 10
        self.held: dict[str, list[int]] = {key: [] for key in KEYS}  # oldest first
        self.running: dict[int, str] = {}
        self.model_of: dict[int, str] = {}
        self.ended: set[int] = set()
        self.state: dict[str, Instance] = {}
        models = {key: a_model(key, max_queue=6, max_wait_s=5.0) for key in KEYS}
        self.controller.restore("models", models, self.now_s)

    def tell(self, stimulus: Any) -> None:
        self.check(self.controller.handle(stimulus, self.now_s))

    def check(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, msg.Dispatch):
                self.check_dispatch(effect)
            elif isinstance(effect, msg.Reject):
                self.end(effect.ticket)
            elif isinstance(effect, msg.Hold):
                key = self.model_of[effect.ticket]
                if effect.ticket not in self.held[key]:
                    self.held[key] = sorted([*self.held[key], effect.ticket])
            elif isinstance(effect, msg.MoveStream):
                self.check_move(effect)

    def check_move(self, effect: msg.MoveStream) -> None:
        """It leaves a draining instance for a slot that nobody waits for."""
        ticket, known = effect.ticket, self.state[effect.instance.instance_id]
        first = self.state[self.running[ticket]]
        assert ticket not in self.leaving and first.state is InstanceState.DRAINING
        assert known.state is InstanceState.READY and known.model_key == self.model_of[ticket]
        assert sum(1 for i in self.running.values() if i == known.instance_id) < known.max_concurrency
        assert not self.held[known.model_key]
        self.leaving[ticket] = first.instance_id
        self.running[ticket] = known.instance_id
        self.begun.discard(ticket)

    def check_dispatch(self, effect: msg.Dispatch) -> None:
        ticket, key = effect.ticket, self.model_of[effect.ticket]
        known = self.state[effect.instance.instance_id]
        assert ticket not in self.ended and ticket not in self.running
        assert known.state is InstanceState.READY and known.model_key == key
        taken = sum(1 for i in self.running.values() if i == known.instance_id)
        assert taken < known.max_concurrency, "more than the instance takes"
        waiting = self.held[key]
        assert not waiting or waiting[0] == ticket or ticket < waiting[0], "somebody was overtaken"
        if ticket in waiting:
            waiting.remove(ticket)
        self.running[ticket] = known.instance_id
        self.begun.discard(ticket)

    def end(self, ticket: int) -> None:
        assert ticket not in self.ended, "ended twice"
        self.ended.add(ticket)
        self.leaving.pop(ticket, None)
        self.running.pop(ticket, None)
        waiting = self.held[self.model_of[ticket]]
        if ticket in waiting:
            waiting.remove(ticket)

    @rule(key=st.sampled_from(KEYS), prompt=st.integers(0, 80), most=st.integers(0, 40), expected=st.integers(0, 40))
    def arrive(self, key: str, prompt: int, most: int, expected: int) -> None:
        self.ticket += 1
        self.model_of[self.ticket] = key
        asked = msg.RequestArrived(self.ticket, key, f"r-{self.ticket}", "", prompt, most, expected)
        self.asked[self.ticket] = asked
        self.tell(asked)
        assert self.ticket in self.ended or self.ticket in self.running or self.ticket in self.held[key]

    @rule(
        instance_id=st.sampled_from(INSTANCES),
        state=st.sampled_from(STATES),
        room=st.integers(1, 3),
        kv_tokens=st.sampled_from([0, 50, 500]),
        stale=st.booleans(),
        left_s=st.sampled_from([0.0, 0.5, 60.0]),
    )
    def instance_changes(
        self, instance_id: str, state: InstanceState, room: int, kv_tokens: int, stale: bool, left_s: float
    ) -> None:
        """Old revisions change nothing."""
        self.revision += 1
        revision = 1 if stale and instance_id in self.state else self.revision
        given: dict[str, Any] = {"url": "http://x:1", "max_concurrency": room, "kv_tokens": kv_tokens}
        given["drain_ends_at"] = self.now_s + left_s if state is InstanceState.DRAINING else 0.0
        made = an_instance(instance_id, instance_id[0], state, revision=revision, **given)
        if made.revision == self.revision:
            self.state[instance_id] = made
        self.tell(instance_event(made))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.begun.add(ticket)
        self.tell(msg.FirstToken(ticket))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), refused=st.booleans(), unreachable=st.booleans(), moves=st.booleans())
    def moves(self, data: st.DataObject, refused: bool, unreachable: bool, moves: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.leaving)))
        first = self.leaving.pop(ticket)
        if moves:
            self.tell(msg.StreamMoved(ticket))
            return
        self.running[ticket] = first
        self.tell(msg.MoveFailed(ticket, refused, not refused, unreachable))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), response=st.integers(0, 60))
    def finish(self, data: st.DataObject, response: int) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.end(ticket)
        self.tell(msg.RequestEnded(ticket, 1.0, response))

    @precondition(lambda self: self.model_of)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        alive = sorted(set(self.model_of) - self.ended)
        if alive:
            ticket = data.draw(st.sampled_from(alive))
            self.end(ticket)
            self.tell(msg.RequestEnded(ticket))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reached=st.booleans())
    def engine_fails(self, data: st.DataObject, reached: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        if ticket in self.leaving:
            return  # its outcome is that of the move
        del self.running[ticket]
        key = self.model_of[ticket]
        self.held[key] = sorted([*self.held[key], ticket])
        self.tell(msg.DispatchFailed(ticket, reached, "died"))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), is_lost=st.booleans())
    def stream_breaks(self, data: st.DataObject, is_lost: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.begun)))
        if ticket not in self.leaving and self.running.pop(ticket, None) is not None:
            key = self.model_of[ticket]
            self.held[key] = sorted([*self.held[key], ticket])
            arrived = {key: load.num_arrived for key, load in self.controller.loads().items()}
            self.begun.discard(ticket)
            self.tell(msg.StreamBroken(ticket, "died", 0, is_lost))
            assert arrived == {key: load.num_arrived for key, load in self.controller.loads().items()}

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())
        for tickets in self.held.values():
            assert all(self.controller.requests[t].waits_since > self.now_s - 5.0 for t in tickets)

    @rule(data=st.data())
    def the_store_is_read(self, data: st.DataObject) -> None:
        rows = {i: made for i, made in self.state.items() if not made.state.is_gone}
        self.check(self.controller.restore("instances", rows, self.now_s))

    @invariant()
    def counts_agree(self) -> None:
        loads = self.controller.loads()
        for key in KEYS:
            load = loads.get(key)
            if load is not None:
                mine = [t for t in self.running if self.model_of[t] == key]
                assert load.num_waiting == len(self.held[key])
                assert load.num_in_flight == len(mine)
        for instance_id, count in self.controller.in_flight.items():
            assert count == sum(1 for i in self.running.values() if i == instance_id) > 0
        self.tokens_agree()

    def tokens_agree(self) -> None:
        for key in KEYS:
            balancer = self.controller.balances.of(key)
            if not isinstance(balancer, Tracker):
                continue
            assert balancer.requests.keys() == {t for t in self.running if self.model_of[t] == key}
            for instance_id, here in balancer.instances.items():
                mine = [t for t, i in self.running.items() if i == instance_id]
                assert len(here.look) == len(mine)
                assert here.queued_tokens == sum(self.asked[t].prompt_tokens for t in mine if t not in self.begun)
                assert mine or here.look.tokens_left == 0

    def teardown(self) -> None:
        for seconds in (0.0, 6.0):
            self.now_s += seconds
            self.tell(Tick())
            while self.running:
                ticket = min(self.running)
                self.end(ticket)
                self.tell(msg.RequestEnded(ticket))
        assert self.ended == set(self.model_of) and not self.controller.requests
        self.tokens_agree()


class HoldsOverloaded(Router):
    policy = "preserve_load_aware"
    balancer = BalancerParams(hold_overloaded=True, num_refreshed=1)


def check(machine: type[Router]) -> None:
    run_state_machine_as_test(machine, settings=settings())


@pytest.mark.parametrize("policy", installed("routing"))
def test_no_request_is_lost_or_ends_twice(policy: str) -> None:
    check(type(policy, (Router,), {"policy": policy}))


def test_no_request_is_lost_where_the_overloaded_take_none() -> None:
    check(HoldsOverloaded)


@pytest.mark.parametrize("policy", installed("routing"))
@pytest.mark.parametrize("counts", [(0, 0), (2, 0), (0, 2), (2, 2), (1, 2)])
def test_no_policy_chooses_an_instance_that_is_full_or_gone(policy: str, counts: tuple[int, int]) -> None:
    balancer = choose("routing", policy)(BalancerParams())
    for n, count in enumerate((*counts, 0)):
        balancer.put(Target(f"i-{n}", count, 2, 100), 0.0)
    balancer.gone("i-2")
    chosen = balancer.choose(10, 10, 1.0).instance_id
    assert (chosen == "") == all(c >= 2 for c in counts)
    assert not chosen or counts[int(chosen[2:])] < 2
