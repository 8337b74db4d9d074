"""Starts that only batch requests wait for."""

from dataclasses import replace

from glowplug.controllers.effects import Tick
from glowplug.events.commands import PlaceInstance
from tests.fleet_builder import a_model, an_event
from tests.unit.controllers.autoscaler.rig import autoscaler, holds, published


def wait(num: int, since: float = 1.0, **by_class: int):
    return an_event(replace(holds(num, since=since), by_class=by_class))


def test_a_start_is_batchs_until_a_standard_request_waits_too():
    controller = autoscaler(a_model("m", max_concurrency=8, max_instances=4))
    (asked,) = published(controller.handle(wait(3, batch=3), 1.0), PlaceInstance)
    assert asked.is_batch
    (again,) = published(controller.handle(wait(4, batch=3), 1.5), PlaceInstance)
    assert again.instance_id == asked.instance_id and not again.is_batch
    assert published(controller.handle(Tick(), 1.6), PlaceInstance) == []


def test_only_as_many_starts_as_standard_requests_need_are_standard():
    controller = autoscaler(a_model("m", max_concurrency=2, max_instances=4))
    starts = published(controller.handle(wait(8, batch=5), 1.0), PlaceInstance)
    assert [start.is_batch for start in starts] == [False, False, True, True]


def test_a_late_start_for_batch_is_no_lack_of_memory_elsewhere():
    controller = autoscaler(a_model("m"), a_model("other"))
    for waits, is_short in ((wait(1, batch=1), False), (wait(1), True)):
        controller.handle(waits, 1.0)
        assert controller._models.is_short_elsewhere("other", 9.0) is is_short
