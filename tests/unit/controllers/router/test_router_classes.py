"""Request classes in load reports, and batch requests that give way."""

from glowplug.domain.access import Priority
from glowplug.domain.snapshot import ClassLoad
from tests.router_steps import Run, model


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
