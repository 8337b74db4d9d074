"""Two routers at one engine: together they fill it once, and neither keeps the other waiting for ever."""

from collections import deque

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router.balance import Peers
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import Dispatch, RequestArrived, RequestEnded
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import InstanceReady, ModelDeployed, RouterLoadReported
from glowplug.fleet.demand import LOAD_STALE_S
from tests.fleet_builder import a_model, an_event, an_instance, load_report

STEP_S, REPORT_S, SERVICE_S = 0.05, 0.2, 0.5


class Pair:
    """Routers in virtual time with one engine that takes `room` at once; reports every REPORT_S, late by that much."""

    def __init__(self, room: int, num: int = 2) -> None:
        self.now, self.room, self.tickets = 0.0, room, 0
        self.routers = [RouterController(RouterParams(router_id=f"router-{k}")) for k in range(num)]
        self.running: deque[tuple[float, int, int]] = deque()  # ends at, router, ticket
        self.served = [0] * num
        self.most = 0
        model = a_model(max_queue=1000, max_wait_s=1e9)
        instance = an_instance(max_concurrency=room, url="http://engine")
        for router in self.routers:
            router.handle(an_event(ModelDeployed(model=model)), 0.0)
            router.handle(an_event(InstanceReady(instance=instance)), 0.0)

    def do(self, k: int, stimulus: object) -> None:
        for effect in self.routers[k].handle(stimulus, self.now):
            if isinstance(effect, Dispatch):
                self.running.append((self.now + SERVICE_S, k, effect.ticket))

    def arrive(self, k: int) -> None:
        self.tickets += 1
        self.do(k, RequestArrived(self.tickets, "m", f"r-{self.tickets}"))

    def step(self) -> None:
        self.now = round(self.now + STEP_S, 6)
        while self.running and self.running[0][0] <= self.now:
            _, k, ticket = self.running.popleft()
            self.served[k] += 1
            self.do(k, RequestEnded(ticket, SERVICE_S))
        if round(self.now / STEP_S) % round(REPORT_S / STEP_S) == 0:
            told = [RouterLoadReported(router_id=r.params.router_id, loads=r.loads()) for r in self.routers]
            for k in range(len(self.routers)):
                for report in told:
                    self.do(k, an_event(report))
                self.do(k, Tick())


@pytest.mark.parametrize("num", [2, 3])
def test_a_backlog_everywhere_fills_the_engine_once_and_is_shared(num: int) -> None:
    pair = Pair(room=12, num=num)
    for k in range(num):
        for _ in range(400):
            pair.arrive(k)
    for _ in range(40):
        pair.step()  # who came first gives way to the others' shares
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
    peers = Peers("router-1")
    full = ModelLoad(num_in_flight=4, in_flight_by_instance={"i-1": 4})
    assert peers.take(load_report("router-2", m=full).data, 0.0)
    assert not peers.take(load_report("router-1", m=full).data, 0.0), "our own"
    assert peers.seen("m", "i-1", 2, 4) == 6
    assert peers.seen("m", "i-1", 1, 4) == 3, "our share of two is not used up: it is not full to us"
    peers.expire(LOAD_STALE_S)
    assert peers.seen("m", "i-1", 2, 4) == 6
    peers.expire(LOAD_STALE_S + 0.1)
    assert peers.seen("m", "i-1", 2, 4) == 2
