"""GPU-seconds of requests."""

import math
from dataclasses import replace

from glowplug.controllers.router.balance import Stays
from glowplug.controllers.router.messages import RequestArrived
from glowplug.controllers.router.queue import Request
from glowplug.domain.instance import Instance, Phase, PhaseName, Worker
from tests.fleet_builder import an_instance


def half_of_a_gpu(**fields: object) -> Instance:
    worker = Worker(worker_id="w", node_id="node-1", gpu_id="node-1/0", num_bytes=50, gpu_bytes=100)
    return replace(an_instance("i-1", "m"), **({"workers": (worker,)} | fields))  # type: ignore[arg-type]


def sent(stays: Stays, instance: Instance, at: float, arrived_at: float | None = None) -> Request:
    request = Request(1, RequestArrived(1, "m", "r"), "m", at if arrived_at is None else arrived_at)
    stays.sent(request, instance, at)
    request.instance_id = instance.instance_id
    return request


def left(stays: Stays, request: Request, at: float) -> float:
    taken = stays.taken(request, at)
    stays.left(request, at)
    assert math.isclose(request.gpu_s, taken)
    return taken


def test_each_moment_is_shared_by_the_requests_that_are_there() -> None:
    """Alone for 2 s, one of two for 4 s: 2 + 2 s of half a GPU; the other 2 s of these and 1 s alone."""
    stays, instance = Stays(), half_of_a_gpu()
    first = sent(stays, instance, 100.0)
    second = sent(stays, instance, 102.0)
    assert left(stays, first, 106.0) == 2.0
    assert left(stays, second, 107.0) == 1.5
    assert left(stays, sent(stays, instance, 200.0), 201.0) == 0.5


def test_memory_of_several_gpus_adds_up_and_an_unknown_figure_makes_all_unknown() -> None:
    two = half_of_a_gpu(workers=2 * half_of_a_gpu().workers)
    stays = Stays()
    assert left(stays, sent(stays, two, 0.0), 3.0) == 3.0
    blind = half_of_a_gpu(workers=(replace(two.workers[0], gpu_bytes=0), two.workers[1]))
    request = sent(stays, blind, 4.0)
    assert math.isnan(stays.taken(request, 5.0))
    assert math.isnan(Stays().taken(None, 1.0))


def test_a_start_is_charged_once_to_the_request_that_it_was_for() -> None:
    phases = (
        Phase(name=PhaseName.DECIDE, started_at=90.0, ended_at=95.0),
        Phase(name=PhaseName.LAUNCH, started_at=95.0, ended_at=105.0),
    )
    stays, instance = Stays(), half_of_a_gpu(ready_at=105.0, created_at=1.0, phases=phases)
    assert left(stays, sent(stays, instance, 105.0, arrived_at=90.0), 106.0) == 5.5
    assert left(stays, sent(stays, instance, 106.0, arrived_at=91.0), 107.0) == 0.5
    woken = replace(instance, ready_at=305.0, phases=(replace(phases[1], started_at=303.0, ended_at=305.0),))
    assert left(stays, sent(stays, woken, 305.0, arrived_at=302.0), 305.0) == 1.0


def test_a_request_that_came_during_a_start_or_after_it_is_not_charged_for_it() -> None:
    stays, started = Stays(), half_of_a_gpu(ready_at=105.0, created_at=95.0)
    assert left(stays, sent(stays, started, 105.0, arrived_at=100.0), 106.0) == 0.5


def test_a_request_that_goes_on_elsewhere_keeps_what_it_has_taken() -> None:
    stays, instance = Stays(), half_of_a_gpu()
    request = sent(stays, instance, 0.0)
    stays.left(request, 4.0)
    request.instance_id = ""
    assert stays.taken(request, 10.0) == 2.0
    other = replace(instance, instance_id="i-2")
    stays.sent(request, other, 10.0)
    request.instance_id = "i-2"
    assert stays.taken(request, 12.0) == 3.0


def test_a_clock_that_goes_back_takes_nothing() -> None:
    stays, instance = Stays(), half_of_a_gpu()
    assert left(stays, sent(stays, instance, 100.0), 98.0) == 0.0
