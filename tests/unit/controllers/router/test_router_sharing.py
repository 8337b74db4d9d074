"""Several tenants of one model: dispatch order and refusals."""

import random
import re
from typing import Any

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.domain.access import Priority
from glowplug.domain.instance import InstanceState
from tests.router_steps import Run, dispatched, model, warm


def shared(slots: int = 8, **params: Any) -> Run:
    run = Run(model(max_concurrency=slots, max_queue=8, max_wait_s=60.0), **params)
    run.instance(max_concurrency=slots)
    return run


def test_fifo_dispatches_in_order_of_arrival() -> None:
    run = shared(2, fairness="fifo")
    for _ in range(6):
        run.arrive(tenant="flood")
    run.arrive(tenant="light")
    assert dispatched(run.handle(msg.RequestEnded(1, 1.0, 10))) == [(3, "i-1")]


def test_a_flood_leaves_a_slot_free_for_a_tenant_that_came_of_late() -> None:
    run = shared(8, fairness="vtc:most_recalls=0")
    run.arrive(tenant="light")
    for _ in range(10):
        run.arrive(tenant="flood")
    assert run.controller.load("m").num_in_flight == 7, "one of eight slots is kept free"
    assert dispatched(run.arrive(tenant="light")) == [(12, "i-1")]
    assert dispatched(run.handle(msg.RequestEnded(2, 1.0, 10))) == [], "the next one is kept free too"
    assert dispatched(run.handle(msg.RequestEnded(3, 1.0, 10))) == [(8, "i-1")]
    run.handle(msg.RequestEnded(1, 1.0, 10))
    run.handle(msg.RequestEnded(12, 1.0, 10))
    assert dispatched(run.handle(Tick(), 61.0)), "and none a minute after the light one left"


def _life(run: Run, seed: int, tenants: list[str], *, faults: bool = True) -> list[str]:
    """A random life of a router; tenants and classes have a random stream of their own."""
    chance, names = random.Random(seed), random.Random(seed + 1)
    log: list[str] = []
    open_: set[int] = set()
    for _ in range(300):
        done = chance.random()
        ticket = chance.choice(sorted(open_)) if open_ else 0
        after_s = chance.random()
        if done < 0.5 or not open_:
            priority = names.choice(tuple(Priority)) if len(tenants) > 1 else Priority.STANDARD
            run.now_s += after_s
            effects = run.arrive(prompt=10, tenant=names.choice(tenants), priority=priority)
            open_.add(run.ticket)
        elif done < 0.75:
            running = run.controller.requests[ticket].instance_id if ticket in run.controller.requests else ""
            end = msg.RequestEnded(ticket, 1.0, 10) if running else msg.RequestEnded(ticket)
            effects = run.handle(end, after_s)
            open_.discard(ticket)
        elif done < 0.8 and faults:
            effects = run.handle(msg.DispatchFailed(ticket, True, "lost"), after_s)
        elif done < 0.85:
            effects = run.handle(msg.HeadDue(ticket), after_s)
        else:
            effects = run.handle(Tick(), after_s)
        open_ -= {e.ticket for e in effects if isinstance(e, msg.Reject)}
        log += [re.sub(r"tenant|, by_class={.*?}", "", str(effect)) for effect in effects]
    return log


@pytest.mark.parametrize("seed", range(5))
def test_one_tenant_and_fifo_are_decided_as_if_there_were_no_tenants(seed: int) -> None:
    plain = _life(shared(4), seed, [""])
    named = _life(shared(4), seed, ["somebody"])
    assert [effect.replace("='somebody'", "=''") for effect in named] == plain
    plain = _life(shared(4), seed, [""], faults=False)
    fifo = _life(shared(4, fairness="fifo"), seed, ["a", "b", "c"], faults=False)
    assert [re.sub("='[abc]'", "=''", effect) for effect in fifo] == plain


@pytest.mark.parametrize("seed", range(5))
def test_every_request_of_several_tenants_ends_once_and_nothing_is_left(seed: int) -> None:
    run = shared(4)
    _life(run, seed, ["a", "b", "c"])
    for _ in range(300):
        for ticket, request in list(run.controller.requests.items()):
            if request.instance_id:
                run.handle(msg.RequestEnded(ticket, 1.0, 10))
        run.handle(Tick(), 0.5)
        run.instance(max_concurrency=4, revision=100 + int(run.now_s * 4))
    assert not run.controller.requests and not run.controller.queues["m"].waiting
    assert run.controller.queues["m"].discipline is None, "nobody was here for a minute"


def test_a_single_tenant_is_never_given_a_discipline() -> None:
    run = warm()
    for _ in range(4):
        run.arrive(tenant="a")
    assert run.controller.queues["m"].discipline is None


def test_nothing_is_kept_of_adapters_that_are_gone() -> None:
    run = Run(model("m"), model("a", base="m"))
    run.instance("i-1")
    run.instance("i-a", model_key="a", host_id="i-1", url="http://i-1:1")
    run.arrive("a")
    assert run.controller.balances.hosts.riders
    run.instance("i-a", InstanceState.STOPPED, model_key="a", host_id="i-1", revision=2)
    run.handle(Tick())
    assert run.controller.balances.hosts.riders == {}
