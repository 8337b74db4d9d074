"""Request classes in load reports, and batch requests that give way."""

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.domain.access import Priority
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ClassLoad
from tests.router_steps import Run, dispatched, model


def a_run(max_wait_s: float = 100.0) -> Run:
    return Run(model(max_concurrency=8, max_wait_s=max_wait_s), late_ratio=0)


def test_standard_requests_are_reported_without_classes() -> None:
    run = a_run()
    run.arrive(tenant="a")
    assert run.controller.load("m").by_class == {}


def test_classes_are_reported_waiting_and_running() -> None:
    run = a_run()
    run.arrive(tenant="a", priority=Priority.BATCH)
    run.arrive(tenant="b", priority=Priority.INTERACTIVE)
    load = run.controller.load("m")
    assert load.by_class == {"batch": ClassLoad(num_waiting=1), "interactive": ClassLoad(num_waiting=1)}
    assert load.num_urgent_waiting == 1
    run.instance(max_concurrency=8)
    load = run.controller.load("m")
    assert load.of_class(Priority.BATCH).in_flight_by_instance == {"i-1": 1} and load.urgent_on("i-1") == 1


def test_a_batch_request_that_has_waited_for_half_of_its_time_counts_as_standard_until_it_ends() -> None:
    run = a_run()
    run.arrive(tenant="a", priority=Priority.BATCH)
    run.handle(Tick(), 49.0)
    assert run.controller.load("m").num_urgent_waiting == 0
    run.handle(Tick(), 2.0)
    assert run.controller.load("m").num_urgent_waiting == 1
    run.instance(max_concurrency=8)
    assert run.controller.load("m").urgent_on("i-1") == 1


def test_batch_requests_leave_an_instance_at_once_whose_drain_is_short() -> None:
    run = a_run()
    run.arrive(tenant="a", priority=Priority.BATCH)
    run.arrive(tenant="b")
    run.instance(max_concurrency=8)
    drain = {"state": InstanceState.DRAINING, "max_concurrency": 8}
    for revision, grace_s, gone in ((5, 300.0, []), (6, 0.5, [1])):
        now_s = run.now_s
        effects = run.instance(**drain, revision=revision, changed_at=now_s, drain_ends_at=now_s + grace_s)
        assert [e.ticket for e in effects if isinstance(e, msg.Recall)] == gone
    run.handle(msg.StreamBroken(1, "others wait for the memory", 5, is_lost=False))
    assert run.controller.requests[1].num_continued == 0, "it may give way any number of times"
    assert dispatched(run.instance("i-2", max_concurrency=8)) == [(1, "i-2")]
