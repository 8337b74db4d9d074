"""Prewarming in the placer (WarmServe sections 4 and 5)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Record, Tick
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from glowplug.domain.snapshot import Forecast
from glowplug.events.commands import StartInstance
from glowplug.events.facts import (
    ForecastMade,
    InstancePrewarmed,
    InstanceReady,
    InstanceStopped,
    NodeBeat,
)
from glowplug.fleet.forecasts import Ahead
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import a_placer, asked, finished, told
from tests.unit.controllers.placer.rig import payloads as sent

CAN = ("emulated:prewarm", "emulated:swap")
MODEL = a_model("a", mib=300, weights_bytes=100 * MIB, kv_bytes=200 * MIB)


def placer(*nodes, models=(MODEL,), placement="warmserve", prewarming="warmserve", eviction="lru", **params):
    """Without priors: unseen times are bytes over the rates."""
    given = {"place": placement, "evict": eviction, "prewarm": prewarming, "models": models, "priors": {}}
    return a_placer(*nodes, settle_s=0.0, node_lease_s=900.0, **given, **params)


def forecast(controller, now_s, *, mean=4.0, peak=4.0, model="a"):
    ahead = Forecast(
        made_at=now_s, starts_at=now_s, window_s=300.0, concurrency_mean=mean, concurrency_peak=peak, source="test"
    )
    controller.handle(an_event(ForecastMade(model_key=model, forecasts=(ahead,))), now_s)
    return controller.handle(Tick(), now_s + 0.5)


def records(effects):
    return [e.decision for e in effects if isinstance(e, Record)]


def prewarmed(start, now_s, controller):
    row = an_instance(start.instance_id, start.model.key, InstanceState.PREWARMED, replica=True, revision=3)
    row = replace(row, workers=start.workers)
    controller.handle(an_event(InstancePrewarmed(instance=row)), now_s)
    return row


def test_a_forecast_that_is_over_leaves_nothing_behind():
    controller = placer(a_node(abilities=CAN))
    forecast(controller, 1.0)
    forecasts = controller.fleet.forecasts
    assert forecasts._ahead.keys() == {"a"}
    controller.handle(Tick(), 900.0)
    assert forecasts._ahead == {} and not forecasts


def test_a_forecast_that_comes_late_does_not_replace_a_newer_one():
    controller = placer(a_node(abilities=CAN))
    forecast(controller, 1.0)
    forecasts = controller.fleet.forecasts
    (known,) = forecasts._ahead["a"].windows
    late = replace(known, made_at=known.made_at - 300.0, concurrency_peak=8.0)
    controller.handle(an_event(ForecastMade(model_key="a", forecasts=(late,), horizon_s=9.0)), 2.0)
    assert forecasts._ahead["a"] == Ahead((known,), 0.0)


def test_a_forecast_of_a_clock_that_was_ahead_is_replaced():
    controller = placer(a_node(abilities=CAN))
    forecast(controller, 1.0)
    forecasts = controller.fleet.forecasts
    (known,) = forecasts._ahead["a"].windows
    for made_at in (3601.0, 2.0):
        made = (replace(known, made_at=made_at),)
        controller.handle(an_event(ForecastMade(model_key="a", forecasts=made)), 2.0)
        assert forecasts._ahead["a"].windows == made


def test_t_c_is_what_a_start_measured():
    controller = placer(a_node(abilities=CAN))
    phases = (Phase(name=PhaseName.LOAD, started_at=0.0, ended_at=7.0),)
    row = an_instance("i-1", "a", phases=phases, created_at=0.1, ready_at=7.1)
    controller.handle(an_event(InstanceReady(instance=row)), 0.5)
    controller.handle(an_event(InstanceStopped(instance=replace(row, state=InstanceState.STOPPED, revision=2))), 0.6)
    (decided,) = records(forecast(controller, 1.0))
    assert decided.inputs["load_s"] == 7.0


def test_a_replica_taken_before_its_agent_spoke_leaves_no_promise_behind():
    controller = placer(a_node(abilities=CAN))
    (replica,) = sent(forecast(controller, 1.0), StartInstance)
    (start,) = sent(controller.handle(asked(MODEL, "x"), 2.0), StartInstance)
    assert start.source == replica.instance_id
    ready = an_instance("x", "a", mib=300)
    controller.handle(an_event(InstanceReady(instance=ready)), 3.0)
    held = a_node(abilities=CAN, revision=2, grants={0: [("x", 300)]})
    controller.handle(an_event(NodeBeat(node=held)), 3.1)
    later = [e for n in range(7, 24) for e in controller.handle(Tick(), n / 2)]
    assert replica.instance_id not in {s.instance_id for s in sent(later, StartInstance)}
    assert controller.fleet.capacity.taken == {} and controller.fleet.promised == set()


def test_a_copy_its_taker_did_not_use_is_there_again():
    controller = placer(a_node(abilities=CAN, gpus_mib=(600,)))
    (replica,) = sent(forecast(controller, 1.0), StartInstance)
    row = prewarmed(replica, 2.0, controller)
    controller.handle(asked(MODEL, "x"), 3.0)
    controller.handle(an_event(InstanceReady(instance=an_instance("x", "a", mib=300))), 3.5)
    assert controller.fleet.capacity.dormant == {"node-1": [row]}


def test_a_replica_heard_of_after_it_was_taken_stays_taken():
    controller = placer(a_node(abilities=CAN))
    (replica,) = sent(forecast(controller, 1.0), StartInstance)
    controller.handle(asked(MODEL, "x"), 2.0)
    prewarmed(replica, 2.1, controller)
    assert controller.fleet.capacity.dormant == {} and controller.fleet.capacity.taken == {replica.instance_id: "x"}


def test_with_first_layers_a_replica_is_ordered_by_its_profile_and_a_start_from_it_takes_all_bytes():
    """Section 4, erratum E7: T_c is 100 MiB at 100 MiB/s, the quickest prefill half of that: 17 of 32 layers."""
    controller = placer(a_node(abilities=CAN), prewarming="warmserve:first_layers=true", pcie_bytes_per_s=100.0 * MIB)
    assert controller.reads_ends
    controller.handle(an_event(InstanceReady(instance=an_instance("i-0", "a", gpu_id="node-2/0"))), 1.0)
    for ttft_s in (1.5, 2.5):
        controller.handle(told(finished("a", instance_id="i-0", ttft_s=ttft_s)), 1.0)
    controller.handle(
        an_event(InstanceStopped(instance=an_instance("i-0", "a", InstanceState.STOPPED, revision=2))), 1.1
    )
    (start,) = sent(forecast(controller, 1.2), StartInstance)
    assert [w.num_bytes for w in start.workers] == [-(-100 * MIB * 17 // 32)]
    assert controller.fleet.capacity.reserved == {"node-1/0": start.workers[0].num_bytes}
    prewarmed(start, 2.0, controller)
    (grown,) = sent(controller.handle(asked(MODEL, "x"), 3.0), StartInstance)
    assert grown.source == start.instance_id and [w.num_bytes for w in grown.workers] == [300 * MIB]


def test_the_quickest_growth_of_a_replica_is_kept_and_that_of_a_sleeper_is_not():
    controller = placer(a_node(abilities=CAN))
    for n, (kind, took_s) in enumerate((("growth", 0.4), ("growth", 0.3), ("growth", 0.6), ("wake", 0.1))):
        load = Phase(name=PhaseName.LOAD, started_at=1.0, ended_at=1.0 + took_s)
        row = an_instance(
            f"i-{n}", "a", source="r", start_kind=kind, phases=(load,), created_at=1.0, ready_at=1.0 + took_s
        )
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    assert controller.fleet.network.times.growths_s == {"a": pytest.approx(0.3)}
