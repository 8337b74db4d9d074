"""The router and its balancers, their token learning and load reports."""

from collections import deque
from typing import Any

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.balance import PeerLoads
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Temperature
from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events import facts
from glowplug.fleet.demand import LOAD_STALE_S
from glowplug.policies.routing.port import BalancerParams
from tests.fleet_builder import a_model, an_event, an_instance, instance_event, load_report
from tests.router_steps import Run, dispatched


class Ahead(Run):
    def __init__(self, policy: str = "preserve_load_aware", **fields: Any) -> None:
        balancer = BalancerParams(tpot_s=1.0, hold_overloaded=True)
        super().__init__(a_model(**({"max_concurrency": 256} | fields)), policy=policy, balancer=balancer)
        self.revision = 1

    def instance(self, *given: Any, **fields: Any) -> list[Any]:
        """Each state is newer than the last."""
        self.revision += 1
        return super().instance(
            *given, **({"max_concurrency": 256, "kv_tokens": 1000, "revision": self.revision} | fields)
        )

    def ask(self, prompt: int = 10, expected: int = 10, most: int = 0) -> list[Any]:
        return self.arrive("m", prompt, expected, most)


def went(effects: list[Any]) -> list[str]:
    return [instance_id for _, instance_id in dispatched(effects)]


@pytest.mark.parametrize("over", [{"replica": True}, {"part_of": "i-0"}])
def test_replicas_and_later_stages_are_no_targets(over: dict[str, Any]) -> None:
    """WarmServe section 5, HydraServe section 4."""
    run = Ahead()
    run.instance(**over)
    assert isinstance(run.ask()[0], msg.Hold)
    assert run.controller.fleet.temperature("m") is Temperature.COLD


def test_a_replica_makes_a_model_warm_and_no_start_of_its_own() -> None:
    run = Ahead()
    run.instance(state=InstanceState.STARTING, replica=True)
    assert not run.controller.fleet.coming("m")
    run.instance(state=InstanceState.PREWARMED, replica=True)
    assert run.controller.fleet.temperature("m") is Temperature.WARM


def test_a_replica_that_fails_turns_nobody_away() -> None:
    run = Ahead()
    run.ask()
    effects = run.instance(state=InstanceState.FAILED, replica=True, code="no_space")
    assert not [e for e in effects if isinstance(e, msg.Reject)]
    assert isinstance(run.ask()[0], msg.Hold)


def test_a_load_report_says_what_is_ahead() -> None:
    """PreServe section 4.3.2."""
    run = Ahead()
    run.instance("i-1")
    run.instance("i-2")
    run.ask(800, 150)
    run.handle(msg.FirstToken(1))
    load = run.controller.loads()["m"]
    busy, calm = load.outlook_by_instance["i-1"], load.outlook_by_instance["i-2"]
    assert (busy.queued_tokens, busy.current_tokens) == (0, 150) and busy.peak_ratio == pytest.approx(0.899)
    assert (calm.queued_tokens, calm.current_tokens, calm.peak_ratio) == (0, 0, 0)
    run.handle(Tick(), 50.0)
    assert run.controller.loads()["m"].outlook_by_instance["i-1"].current_tokens == 100


def test_a_policy_that_only_counts_reports_nothing_ahead() -> None:
    run = Ahead("least_loaded")
    run.instance()
    run.ask()
    assert run.controller.loads()["m"].outlook_by_instance == {}
    assert not run.controller.tracks_tokens


def test_the_overloaded_hold_and_go_on_in_order() -> None:
    """PreServe section 4.3.3."""
    run = Ahead(max_queue=2)
    run.instance()
    assert went(run.ask(900, 300))
    [held] = [e for e in run.ask() if isinstance(e, msg.Hold)]
    assert held.eta_s > 0, "free slots are no room"
    assert isinstance(run.ask()[0], msg.Hold)
    [refused] = [e for e in run.ask() if isinstance(e, msg.Reject)]
    assert (refused.error.status, refused.error.code) == (429, "queue_full")
    assert went(run.handle(msg.RequestEnded(1, 5.0, 50))) == ["i-1", "i-1"]


def test_a_true_length_wins_over_what_earlier_answers_tell() -> None:
    run = Ahead()
    run.instance(kv_tokens=100_000)
    for _ in range(20):
        run.ask(10, 0)
        run.handle(msg.FirstToken(run.ticket))
        run.handle(msg.RequestEnded(run.ticket, 1.0, 40))
    run.ask(10, 0)
    assert run.controller.requests[run.ticket].expected_tokens == 40
    run.ask(10, 0, most=16)
    assert run.controller.requests[run.ticket].expected_tokens == 16
    run.ask(10, 700, most=16)
    assert run.controller.requests[run.ticket].expected_tokens == 700


def ahead(run: Ahead) -> int:
    return run.controller.loads()["m"].outlook_by_instance["i-1"].current_tokens


def test_a_text_is_needed_first_where_a_request_has_a_choice_or_waits() -> None:
    run = Ahead(max_concurrency=1)
    assert run.controller.chooses("m")  # none runs: held, and several may start
    run.instance(max_concurrency=1)
    assert not run.controller.chooses("m")
    run.ask()
    run.ask()  # waits: the one slot is taken
    assert run.controller.chooses("m")
    run.handle(msg.RequestEnded(1))
    assert not run.controller.chooses("m")
    run.instance("i-2")
    assert run.controller.chooses("m")


def test_a_text_read_later_changes_what_is_ahead_of_its_instance() -> None:
    run = Ahead()
    run.instance()
    run.ask(expected=0, most=300)
    assert ahead(run) == 200  # of a model without answers yet
    run.handle(msg.TextRead(1, 40, teaches=True))
    assert ahead(run) == 40
    run.handle(msg.TextRead(1, 900, teaches=True))
    assert ahead(run) == 300  # the client bounds it
    run.handle(msg.TextRead(2, 40, teaches=True))  # no longer here
    assert ahead(run) == 300


@pytest.mark.parametrize("teaches", [True, False])
def test_an_answer_is_held_against_its_text_only_where_that_was_read_whatever_the_answer_was(teaches: bool) -> None:
    run = Ahead()
    run.instance()
    run.ask(expected=0)
    run.handle(msg.TextRead(1, 40, teaches=teaches))
    run.handle(msg.RequestEnded(1, took_s=60.0, response_tokens=60), 60.0)
    expected = run.controller.balances.lengths_of("m").expect(10, 0, text_tokens=40)
    assert expected > 40 if teaches else expected == 40


def test_answers_that_broke_off_teach_nothing() -> None:
    run = Ahead()
    run.instance(kv_tokens=100_000)
    default = run.controller.balances.lengths_of("m").expect(10, 0)
    for _ in range(20):
        run.ask(10, 0)
        run.handle(msg.RequestEnded(run.ticket, 0.0, 3))
    assert run.controller.balances.lengths_of("m").expect(10, 0) == default


def test_one_that_cannot_be_reached_is_no_target_until_its_time_is_over() -> None:
    run = Ahead()
    run.instance("i-1")
    run.instance("i-2")
    assert went(run.ask()) == ["i-1"]
    assert went(run.handle(msg.DispatchFailed(1, False, "refused"))) == ["i-2"]
    for _ in range(3):
        assert went(run.ask()) == ["i-2"]
    run.now_s += 1.1
    assert went(run.ask()) == ["i-1"]


def test_nothing_is_kept_of_a_model_that_is_no_more() -> None:
    run = Ahead()
    run.instance()
    run.ask(10, 0)
    run.handle(msg.RequestEnded(1, 1.0, 5))
    assert run.controller.balances.of("m") is not None
    run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    run.instance(state=InstanceState.STOPPED)
    run.handle(Tick())
    balances = run.controller.balances
    assert balances.of("m") is None and not balances.in_flight and not balances._lengths


def test_another_routers_tokens_turn_a_request_elsewhere() -> None:
    run = Ahead()
    run.instance("i-1")
    run.instance("i-2")
    ahead = {"i-1": Outlook(peak_ratio=0.5, over_share=0.0, queued_tokens=400, current_tokens=50)}
    load = ModelLoad(num_in_flight=2, in_flight_by_instance={"i-1": 2}, outlook_by_instance=ahead)
    run.handle(an_event(facts.RouterLoadReported(router_id="router-2", loads={"m": load})))
    assert went(run.ask()) == ["i-2"] and went(run.ask()) == ["i-2"]
    run.handle(Tick(), 10.0)  # silent for longer than a router is
    assert went(run.ask()) == ["i-1"]


def test_the_peak_is_held_against_the_cache_that_the_engine_says_it_has() -> None:
    """PreServe's M of smol-chat is 6,144 tokens, not max_concurrency * context_tokens = 8,192."""
    run = Ahead(max_concurrency=4, context_tokens=2048)
    run.instance(max_concurrency=3, kv_tokens=6144)
    run.ask(prompt=3072, expected=1)
    load = run.controller.load("m")
    assert load.outlook_by_instance["i-1"].peak_ratio == pytest.approx(3072 / 6144, rel=0.01)
    assert load.slots_per_instance == 3


# Two routers at one engine fill it once, and neither starves the other.

STEP_S, REPORT_S, SERVICE_S = 0.05, 0.2, 0.5


class Pair:
    """Routers in virtual time at one engine that takes `room` requests; reports every REPORT_S, delayed by as much."""

    def __init__(self, room: int, num: int = 2) -> None:
        self.now, self.room, self.tickets = 0.0, room, 0
        self.routers = [RouterController(RouterParams(router_id=f"router-{k}")) for k in range(num)]
        self.running: deque[tuple[float, int, int]] = deque()  # ends at, router, ticket
        self.served = [0] * num
        self.most = 0
        model = a_model(max_queue=1000, max_wait_s=1e9)
        instance = an_instance(max_concurrency=room, url="http://engine")
        for router in self.routers:
            router.handle(an_event(facts.ModelDeployed(model=model)), 0.0)
            router.handle(instance_event(instance), 0.0)

    def do(self, k: int, stimulus: object) -> None:
        for effect in self.routers[k].handle(stimulus, self.now):
            if isinstance(effect, msg.Dispatch):
                self.running.append((self.now + SERVICE_S, k, effect.ticket))

    def arrive(self, k: int) -> None:
        self.tickets += 1
        self.do(k, msg.RequestArrived(self.tickets, "m", f"r-{self.tickets}"))

    def step(self) -> None:
        self.now = round(self.now + STEP_S, 6)
        while self.running and self.running[0][0] <= self.now:
            _, k, ticket = self.running.popleft()
            self.served[k] += 1
            self.do(k, msg.RequestEnded(ticket, SERVICE_S))
        if round(self.now / STEP_S) % round(REPORT_S / STEP_S) == 0:
            reports = [facts.RouterLoadReported(router_id=r.params.router_id, loads=r.loads()) for r in self.routers]
            for k in range(len(self.routers)):
                for report in reports:
                    self.do(k, an_event(report))
                self.do(k, Tick())


@pytest.mark.parametrize("num", [2, 3])
def test_a_backlog_everywhere_fills_the_engine_once_and_is_shared(num: int) -> None:
    pair = Pair(room=12, num=num)
    for k in range(num):
        for _ in range(400):
            pair.arrive(k)
    for _ in range(40):
        pair.step()  # the first to come yields to the others' shares
    most = 0
    for _ in range(100):
        pair.step()
        most = max(most, len(pair.running))
    assert most <= 12, "together they run what it takes at once"
    assert min(pair.served) > 0.5 * max(pair.served), pair.served


def test_a_router_alone_with_load_has_the_whole_engine() -> None:
    pair = Pair(room=8)
    for _ in range(100):
        pair.arrive(0)
    for _ in range(20):
        pair.step()
    assert len(pair.running) == 8


def test_one_request_of_a_quiet_router_is_not_kept_waiting_by_anothers_backlog() -> None:
    pair = Pair(room=8)
    for _ in range(500):
        pair.arrive(0)
    for _ in range(20):
        pair.step()
    pair.arrive(1)
    for _ in range(round(2 * (REPORT_S + SERVICE_S) / STEP_S)):
        pair.step()
    assert pair.served[1] == 1


def test_what_a_silent_router_ran_counts_no_more() -> None:
    peers = PeerLoads("router-1", {"m"})
    full = ModelLoad(num_in_flight=4, in_flight_by_instance={"i-1": 4})
    assert peers.take(load_report("router-2", m=full).data, 0.0)
    assert not peers.take(load_report("router-1", m=full).data, 0.0), "our own"
    assert peers.seen("m", "i-1", 2, 4) == 6
    assert peers.seen("m", "i-1", 1, 4) == 3, "our share of two is not used up: it is not full to us"
    peers.expire(LOAD_STALE_S)
    assert peers.seen("m", "i-1", 2, 4) == 6
    peers.expire(LOAD_STALE_S + 0.1)
    assert peers.seen("m", "i-1", 2, 4) == 2
