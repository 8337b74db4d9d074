"""Request classes: victims for batch, and batch as victim (docs/adr/0025)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Record, Tick
from glowplug.domain.snapshot import ClassLoad, ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.facts import InstanceReady
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, beat, payloads

FULL = a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=5)
BATCH = ModelLoad(
    num_waiting=3, last_active_at=20.0, by_class={"batch": ClassLoad(num_waiting=3, alone_s=20.0)}
)  # waits for model b


def holder(load: ModelLoad, now_s: float = 20.0, **params):
    """A placer of one full GPU, whose READY instance i-1 of model a has this load."""
    models = [a_model("a", mib=150), a_model("b", mib=150)]
    controller = a_placer(FULL, models=models, **params)
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1", "a", mib=150, ready_at=2.0))), 2.0)
    while_s = now_s
    beat(controller, while_s, replace(FULL, revision=6))
    controller.handle(Tick(), while_s)
    beat(controller, while_s, replace(FULL, revision=7))
    controller.handle(load_report(a=load, b=BATCH), while_s)
    return controller


def batch_of(model_key: str, now_s: float):
    event = asked(a_model(model_key, mib=150, max_wait_s=1000.0), wanted_at=now_s)
    return replace(event, data=replace(event.data, is_batch=True))


def running(num: int, num_batch: int = 0) -> ModelLoad:
    of_class = {"batch": ClassLoad(in_flight_by_instance={"i-1": num_batch})} if num_batch else {}
    return ModelLoad(num_in_flight=num, in_flight_by_instance={"i-1": num}, last_active_at=20.0, by_class=of_class)


@pytest.mark.parametrize("idle_s", [0.0, 60.0])
def test_nothing_that_may_be_needed_soon_leaves_for_batch_and_why_says_so_once(idle_s):
    controller = holder(ModelLoad(last_active_at=20.0), now_s=20.0 + idle_s)
    effects = controller.handle(batch_of("b", 20.0 + idle_s), 20.0 + idle_s)
    assert not payloads(effects, StopInstance) and not payloads(effects, StartInstance)
    (why,) = [e.decision for e in effects if isinstance(e, Record)]
    assert why.chosen == "waits" and why.reason.startswith(
        "batch requests wait for b: nothing may leave for them until"
    )
    assert "i-1" in why.reason
    assert not [e for e in controller.handle(Tick(), 21.0 + idle_s) if isinstance(e, Record)]


def test_what_nobody_has_missed_for_long_leaves_for_batch():
    controller = holder(ModelLoad(last_active_at=20.0), now_s=2000.0)
    assert [s.instance_id for s in payloads(controller.handle(batch_of("b", 2000.0), 2000.0), StopInstance)] == ["i-1"]


def test_a_standard_request_has_the_same_instance_leave():
    controller = holder(ModelLoad(last_active_at=20.0))
    controller.handle(batch_of("b", 20.0), 20.0)
    stops = payloads(controller.handle(asked(a_model("b", mib=150)), 20.1), StopInstance)
    assert [s.instance_id for s in stops] == ["i-1"], "the start that batch waited for is asked for anew"


@pytest.mark.parametrize(("load", "goes"), [(running(3, 3), True), (running(3, 2), False), (running(3), False)])
def test_what_runs_batch_alone_leaves_at_once_for_others(load, goes):
    controller = holder(load)
    stops = payloads(controller.handle(asked(a_model("b", mib=150)), 20.0), StopInstance)
    assert [s.grace_s for s in stops] == ([0.5] if goes else [])


def test_batch_does_not_make_batch_leave():
    controller = holder(running(3, 3))
    assert not payloads(controller.handle(batch_of("b", 20.0), 20.0), StopInstance)
