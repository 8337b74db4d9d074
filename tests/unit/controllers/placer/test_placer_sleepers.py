"""A start waits where its engine sleeps, no longer than the wake is expected to save."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.facts import InstanceReady, InstanceSwappedOut
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, payloads

CAN = ("emulated:prewarm", "emulated:swap")
A, B = (a_model(name, mib=300, weights_bytes=100 * MIB, kv_bytes=200 * MIB) for name in "ab")
BUSY = load_report(a=ModelLoad(num_in_flight=1, in_flight_by_instance={"x": 1}, last_active_at=9.0))
IDLE = load_report(a=ModelLoad(last_active_at=9.0))


def placer(*, spare=True, holder=A, patience=1.0):
    """B sleeps on node-1 beside a serving A; node-2 is free or has an idle C. A start of B takes 2.56 s there, a wake
    0.06 s.
    """
    here = a_node(abilities=CAN, gpus_mib=(300,), grants={0: [("x", 300)]})
    there = a_node("node-2", abilities=CAN, gpus_mib=(300,), grants={} if spare else {0: [("z", 300)]})
    given = {"sleeper_patience": patience, "evict_becomes": "swapped_out", "settle_s": 0.0, "node_lease_s": 900.0}
    models = (holder, B, a_model("c", mib=300))
    controller = a_placer(here, there, place="union", evict="swapserve", models=models, **given)
    asleep = an_instance("y", "b", InstanceState.SWAPPED_OUT, mib=300)
    controller.handle(an_event(InstanceSwappedOut(instance=asleep)), 1.0)
    rows = [an_instance("x", "a", mib=300, ready_at=1.0)]
    if not spare:
        idle = an_instance("z", "c", mib=300, ready_at=1.0)
        at = tuple(replace(w, node_id="node-2", gpu_id="node-2/0") for w in idle.workers)
        rows.append(replace(idle, workers=at))
    for row in rows:
        controller.handle(an_event(InstanceReady(instance=row)), 1.0)
    return controller


@pytest.mark.parametrize("spare", [True, False], ids=["other memory is free", "others would leave elsewhere"])
def test_it_waits_for_who_is_at_work_where_its_engine_sleeps(spare):
    controller = placer(spare=spare)
    controller.handle(BUSY, 9.0)
    effects = controller.handle(asked(B, "b-2"), 9.0)
    assert not payloads(effects, StartInstance) and not payloads(effects, StopInstance)
    (stop,) = payloads(controller.handle(IDLE, 9.3), StopInstance)
    assert (stop.instance_id, stop.becomes) == ("x", "swapped_out"), "the load says so, and no tick is waited for"


@pytest.mark.parametrize("spare", [True, False])
def test_it_waits_no_longer_than_the_wake_would_save(spare):
    controller = placer(spare=spare)
    controller.handle(BUSY, 9.0)
    controller.handle(asked(B, "b-2"), 9.0)
    assert not controller.handle(Tick(), 11.3)
    effects = controller.handle(Tick(), 11.7)
    assert [s.target for s in payloads(effects, StartInstance)] == ["node-2"] * spare
    assert [s.instance_id for s in payloads(effects, StopInstance)] == ["z"] * (not spare)


@pytest.mark.parametrize(("max_wait_s", "waits_until"), [(3.5, 9.9), (2.0, 9.0)])
def test_it_waits_no_longer_than_its_requests_may(max_wait_s, waits_until):
    controller = placer()
    controller.handle(BUSY, 9.0)
    early = controller.handle(asked(replace(B, max_wait_s=max_wait_s), "b-2", wanted_at=9.0), 9.0)
    early += controller.handle(Tick(), max(9.0, waits_until - 0.1))
    late = controller.handle(Tick(), waits_until + 0.1)
    starts = [[s.target for s in payloads(effects, StartInstance)] for effects in (early, late)]
    assert starts == ([[], ["node-2"]] if waits_until > 9.0 else [["node-2"], []])


@pytest.mark.parametrize(
    "given", [{"patience": 0.0}, {"holder": replace(A, pinned=True)}, {"holder": replace(A, priority=9)}]
)
def test_it_does_not_wait_for_who_will_not_leave(given):
    controller = placer(**given)
    controller.handle(BUSY, 9.0)
    (start,) = payloads(controller.handle(asked(B, "b-2"), 9.0), StartInstance)
    assert (start.target, start.source) == ("node-2", "")


def test_a_start_that_is_quicker_elsewhere_is_made_there_at_once():
    controller = placer()
    controller.fleet.network._left["a", "swapped_out"] = (30.0,)
    controller.handle(IDLE, 9.0)
    (start,) = payloads(controller.handle(asked(B, "b-2"), 9.0), StartInstance)
    assert (start.target, start.source) == ("node-2", "")


def test_a_stop_carries_what_the_quickest_of_the_last_took():
    controller = placer()
    controller.fleet.network._left["a", "swapped_out"] = (0.4, 0.03)
    controller.handle(IDLE, 9.0)
    (stop,) = payloads(controller.handle(asked(B, "b-2"), 9.0), StopInstance)
    assert stop.predicted_s == 0.03


def test_bytes_that_a_row_shows_free_are_used_at_once():
    """The row may be read before its beat, which then brings no news."""
    controller = placer()
    controller.handle(IDLE, 9.0)
    assert payloads(controller.handle(asked(B, "b-2"), 9.0), StopInstance)
    asleep = an_instance("x", "a", InstanceState.SWAPPED_OUT, mib=300, revision=3)
    controller.handle(an_event(InstanceSwappedOut(instance=asleep)), 9.1)
    free = a_node(abilities=CAN, gpus_mib=(300,), revision=9)
    (start,) = payloads(controller.restore("nodes", {"node-1": free}, 9.2), StartInstance)
    assert (start.target, start.source) == ("node-1", "y")
