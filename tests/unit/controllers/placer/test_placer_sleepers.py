"""A start waits where its engine sleeps, no longer than the wake is expected to save."""

from dataclasses import replace

from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.facts import InstanceReady, InstanceSwappedOut
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, payloads

CAN = ("emulated:prewarm", "emulated:swap")
A, B = (a_model(name, mib=300, weights_bytes=100 * MIB, kv_bytes=200 * MIB) for name in "ab")
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
