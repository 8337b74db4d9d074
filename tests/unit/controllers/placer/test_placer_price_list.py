"""The price list of a GPU."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.domain.errors import NotFound
from glowplug.domain.hardware import CachedWeights, SharedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.facts import ForecastMade, InstanceReady, NodeBeat
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer

NAMES = ("busy", "idle", "copied", "rare")
CACHED = CachedWeights(digest=a_model().weights.digest, num_bytes=1)
GRANTS = [("i-busy", 100), ("i-idle", 100), ("i-copied", 60), ("i-rare", 60)]


def a_full_gpu(**params):
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


def test_weights_that_several_read_in_the_same_pages_are_held_by_each_and_said_to_be_shared():
    node = a_node(gpus_mib=(400,), grants={0: [("i-copied", 2), ("i-busy", 102), ("i-idle", 100)]}, cached=(CACHED,))
    shared = SharedWeights(key="k", num_bytes=92 << 20, holders=("i-copied", "i-busy"))
    alone = SharedWeights(key="l", num_bytes=90 << 20, holders=("i-idle",))
    node = replace(node, gpus=(replace(node.gpus[0], shared=(shared, alone)),))
    controller = a_placer(node, models=[a_model(name, mib=100) for name in NAMES])
    rows = [an_instance(f"i-{name}", name, mib=mib, ready_at=1.0) for name, mib in (("busy", 194), ("idle", 100))]
    rows.append(an_instance("i-copied", "copied", InstanceState.PREWARMED, mib=94, replica=True))
    for row in rows:
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    holders = controller.price_list.of("node-1/0", 60.0).holders
    assert {one.instance_id: (one.num_bytes >> 20, one.shared_bytes >> 20) for one in holders} == {
        "i-copied": (94, 92), "i-busy": (194, 92), "i-idle": (100, 0)
    }  # fmt: skip
    for one in holders:
        assert one.worth == pytest.approx(one.saves_s / one.num_bytes, rel=0.01)


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


def test_a_replica_is_asked_for_behind_as_many_requests_as_the_engine_runs():
    """Of 8 declared slots memory allows 2, so four requests need the replica too."""
    asked = {}
    for slots in (8, 2):
        grants = [("i-run", 100), ("i-copy", 60)]
        node = a_node(gpus_mib=(400,), grants={0: grants}, cached=(CACHED,))
        controller = a_placer(node, models=[a_model("busy", mib=100)])
        rows = [
            an_instance("i-run", "busy", mib=100, ready_at=1.0, max_concurrency=slots),
            an_instance("i-copy", "busy", InstanceState.PREWARMED, mib=60, replica=True),
        ]
        for row in rows:
            controller.handle(an_event(InstanceReady(instance=row)), 2.0)
        expected = Forecast(made_at=2.0, window_s=300.0, concurrency_mean=4.0, concurrency_peak=4.0)
        controller.handle(an_event(ForecastMade(model_key="busy", forecasts=(expected,))), 2.0)
        found = controller.price_list.of("node-1/0", 2.0).holders
        asked[slots] = next(one.asked for one in found if one.instance_id == "i-copy")
    assert asked[8] < asked[2] and asked[2] > 0.01


@pytest.mark.parametrize("evict", ["union", "swapserve", "lru"])
def test_of_those_that_may_leave_the_lowest_priority_goes_first_whatever_the_others_save(evict):
    node = a_node(gpus_mib=(400,), grants={0: [("i-high", 100), ("i-low", 100)]}, cached=(CACHED,))
    models = [a_model("busy", mib=100, priority=1), a_model("idle", mib=100)]
    controller = a_placer(node, models=models, evict=evict, victims="least_worth")
    for name, key in (("i-high", "busy"), ("i-low", "idle")):
        row = an_instance(name, key, mib=100, ready_at=1.0)
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    loads = {"busy": ModelLoad(last_active_at=3.0), "idle": ModelLoad(last_active_at=59.0)}
    controller.handle(load_report(**loads), 60.0)
    found = {one.instance_id: one for one in controller.price_list.of("node-1/0", 60.0).holders}
    assert (found["i-low"].order, found["i-high"].order) == (1, 2)
    assert found["i-low"].worth > found["i-high"].worth


def test_who_leaves_anyhow_has_no_place_in_the_order_and_says_why():
    grants = [("i-asleep", 60), ("i-drains", 100), ("i-idle", 100)]
    node = a_node(gpus_mib=(400,), grants={0: grants}, cached=(CACHED,))
    controller = a_placer(node, models=[a_model(name, mib=100) for name in NAMES], victims="least_worth")
    rows = [
        an_instance("i-asleep", "copied", InstanceState.SWAPPED_OUT, mib=60),
        an_instance("i-drains", "busy", InstanceState.DRAINING, mib=100, ready_at=1.0),
        an_instance("i-idle", "idle", mib=100, ready_at=1.0),
    ]
    for row in rows:
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    controller.handle(load_report(), 60.0)
    found = {
        one.instance_id: (one.state, one.order, one.why) for one in controller.price_list.of("node-1/0", 60.0).holders
    }
    assert found == {
        "i-asleep": ("swapped_out", 0, "it is asleep, and gives way to whatever starts"),
        "i-drains": ("draining", 0, "it drains"),
        "i-idle": ("ready", 1, ""),
    }


def test_a_gpu_of_no_node_is_not_found():
    with pytest.raises(NotFound, match="no GPU 'node-9/0'"):
        a_full_gpu().price_list.of("node-9/0", 60.0)
    assert a_placer(a_node()).price_list.of("node-1/0", 1.0).holders == ()
