"""What the router answers while the bus stores nothing."""

from glowplug.controllers.effects import Tick
from glowplug.controllers.router.messages import BusRefuses, Dispatch, Hold, Reject
from glowplug.domain.instance import InstanceState
from glowplug.events import facts
from tests.unit.controllers.router.test_router import (
    Run,
    dispatched,
    event,
    instance,
    model,
    published,
    ready,
    rejected,
)

FULL = "the bus answers and stores no events (a full disk does this)"


def test_while_the_bus_stores_nothing_cold_requests_are_refused_at_once_with_the_reason() -> None:
    run = Run()
    run.handle(BusRefuses(FULL))
    effects = run.arrive()
    assert rejected(effects) == [(1, 503, "control_plane_unavailable")]
    [reject] = [e for e in effects if isinstance(e, Reject)]
    assert FULL in reject.message and reject.retry_after_s > 0
    run.handle(BusRefuses(""))
    assert isinstance(run.arrive()[0], Hold)


def test_while_the_bus_stores_nothing_warm_requests_and_those_of_a_start_under_way_go_on() -> None:
    run = Run(model(), model("other"))
    run.handle(ready(instance()))
    run.handle(event(facts.InstanceStarting(instance=instance("i-2", InstanceState.STARTING, model_key="other"))))
    run.handle(BusRefuses(FULL))
    assert isinstance(run.arrive()[0], Dispatch)
    assert isinstance(run.arrive("other")[0], Hold)
    assert not rejected(run.handle(Tick(), 8.0)), "the instance may come yet"
    assert dispatched(run.handle(ready(instance("i-2", model_key="other", revision=2)))) == [(2, "i-2")]


def test_who_was_held_already_waits_a_little_for_the_bus_and_is_told_then() -> None:
    run = Run(bus_grace_s=5.0)
    run.arrive()
    run.handle(BusRefuses(FULL), 1.0)
    assert not rejected(run.handle(Tick(), 4.9))
    assert rejected(run.handle(Tick(), 0.2)) == [(1, 503, "control_plane_unavailable")]


def test_a_bus_that_stores_again_in_time_costs_nobody_an_answer() -> None:
    run = Run(bus_grace_s=5.0)
    run.arrive()
    run.handle(BusRefuses(FULL), 1.0)
    run.handle(BusRefuses(""), 4.0)
    effects = run.handle(Tick(), 2.0)
    assert not rejected(effects) and published(effects, facts.RequestWaiting)
