"""The price list of a GPU: who lies there, how probably each is asked for, what it saves, who goes next."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.domain.errors import NotFound
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.facts import ForecastMade, InstanceReady, NodeBeat
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer

NAMES = ("busy", "idle", "copied", "rare")
CACHED = CachedWeights(digest="d", num_bytes=1, model_keys=NAMES)
GRANTS = [("i-busy", 100), ("i-idle", 100), ("i-copied", 60), ("i-rare", 60)]


def a_full_gpu(**params):
    """Two instances, of which one is at work, and two copies, of which one was used long ago."""
    node = a_node(gpus_mib=(400,), grants={0: GRANTS}, cached=(CACHED,))
    models = [a_model(name, mib=100) for name in NAMES]
    controller = a_placer(node, models=models, evict="union", victims="least_worth", **params)
    rows = [an_instance(f"i-{name}", name, mib=100, ready_at=1.0) for name in ("busy", "idle")]
    dormant = InstanceState.PREWARMED
    rows += [an_instance(f"i-{name}", name, dormant, mib=60, replica=True) for name in ("copied", "rare")]
    for row in rows:
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    controller.handle(an_event(NodeBeat(node=replace(node, revision=2))), 60.0)
    busy = ModelLoad(num_in_flight=2, in_flight_by_instance={"i-busy": 2}, last_active_at=60.0)
    loads = {"busy": busy, "idle": ModelLoad(last_active_at=30.0), "copied": ModelLoad(last_active_at=50.0)}
    controller.handle(load_report(**loads), 60.0)
    controller.handle(Tick(), 60.0)
    return controller


def test_each_holder_has_its_probability_its_seconds_and_its_worth_a_byte():
    found = a_full_gpu().price_list.of("node-1/0", 60.0)
    by_id = {one.instance_id: one for one in found.holders}
    assert (found.total_bytes >> 20, found.free_bytes >> 20) == (400, 80)
    assert {name: (one.model, one.rung, one.num_bytes >> 20) for name, one in by_id.items()} == {
        "i-busy": ("busy", "ready", 100),
        "i-idle": ("idle", "ready", 100),
        "i-copied": ("copied", "prewarmed", 60),
        "i-rare": ("rare", "prewarmed", 60),
    }
    assert by_id["i-busy"].asked == 1.0, "it is asked for now"
    for one in found.holders:
        assert one.saves_s == pytest.approx(one.asked * one.climb_s, abs=1e-3)
        assert one.worth == pytest.approx(one.saves_s / one.num_bytes, rel=0.01)
    assert by_id["i-copied"].asked > by_id["i-rare"].asked, "used 10 s ago, and never since 58 s"
    assert by_id["i-idle"].climb_s > 2.0, "the emulated engine's start from host memory, by its prior"


def test_copies_go_first_the_least_worth_before_the_others_then_who_may_leave():
    found = a_full_gpu().price_list.of("node-1/0", 60.0)
    assert [(one.instance_id, one.order, one.why) for one in found.holders] == [
        ("i-copied", 1, ""),
        ("i-rare", 2, ""),
        ("i-idle", 3, ""),
        ("i-busy", 0, "it has 2 requests in flight"),
    ]
    weighed = a_full_gpu(prewarm="union")
    weighed.handle(Tick(), 63.0)
    order = [one.instance_id for one in weighed.price_list.of("node-1/0", 63.0).holders]
    assert order[:2] == ["i-rare", "i-copied"], "once they are weighed"


def test_a_forecast_raises_what_it_names():
    controller = a_full_gpu()
    before = {one.instance_id: one.asked for one in controller.price_list.of("node-1/0", 60.0).holders}
    expected = Forecast(
        made_at=60.0, starts_at=60.0, window_s=300.0, concurrency_mean=1.0, concurrency_peak=4.0, num_requests=60.0
    )
    controller.handle(an_event(ForecastMade(model_key="rare", forecasts=(expected,))), 60.0)
    after = {one.instance_id: one.asked for one in controller.price_list.of("node-1/0", 60.0).holders}
    assert after["i-rare"] > 0.99 > before["i-rare"]
    assert {**after, "i-rare": 0} == {**before, "i-rare": 0}


def test_a_copy_behind_an_instance_is_asked_for_by_the_slots_that_its_engine_has():
    """A peak of six beside 8 declared slots asks for no second; where the engine has 2 it does."""
    ahead = Forecast(made_at=60.0, starts_at=60.0, window_s=300.0, concurrency_mean=4.0, concurrency_peak=6.0)
    asked = []
    for slots in (8, 2):
        controller = a_full_gpu()
        serves = an_instance("i-serves", "copied", mib=100, ready_at=1.0, max_concurrency=slots)
        controller.handle(an_event(InstanceReady(instance=serves)), 60.0)
        controller.handle(an_event(ForecastMade(model_key="copied", forecasts=(ahead,))), 60.0)
        found = {one.instance_id: one.asked for one in controller.price_list.of("node-1/0", 60.5).holders}
        asked.append(found["i-copied"])
    assert asked[0] < 0.1 < asked[1]


def test_a_gpu_of_no_node_is_not_found():
    with pytest.raises(NotFound, match="no GPU 'node-9/0'"):
        a_full_gpu().price_list.of("node-9/0", 60.0)
    assert a_placer(a_node()).price_list.of("node-1/0", 1.0).holders == ()
