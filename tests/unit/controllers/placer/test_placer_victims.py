"""Who leaves for a placement and when (policies/eviction/turns.py)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import StopInstance
from glowplug.events.facts import ForecastMade, InstanceReady, NodeBeat
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, beat, payloads


def placer(node, turns) -> PlacerController:
    controller = a_placer(node, turns=turns)
    controller.handle(Tick(), 2.0)
    return controller


def waits(num_dispatched=0, num_waiting=5):
    return ModelLoad(num_waiting=num_waiting, num_dispatched=num_dispatched)


def full_of(model_key):
    mib = 200
    controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", mib)]}, revision=5), "balanced")
    row = an_instance("i-1", model_key, mib=mib, created_at=1.0, ready_at=9.4)
    controller.handle(an_event(InstanceReady(instance=row)), 9.4)
    beat(controller, 9.5, a_node(gpus_mib=(200,), grants={0: [("i-1", mib)]}, revision=6))
    return controller


def serving(node, *instances, loads=None, **params) -> PlacerController:
    controller = a_placer(node, **params)
    for instance in instances:
        controller.handle(an_event(InstanceReady(instance=instance)), 1.0)
    controller.handle(an_event(NodeBeat(node=replace(node, revision=2))), 9.9)
    controller.handle(load_report(**(loads or {})), 9.9)
    controller.handle(Tick(), 9.9)
    return controller


def sent(effects, cls):
    return [payload.instance_id for payload in payloads(effects, cls)]


def test_section_3_5_of_two_gpus_the_one_whose_engine_has_the_shorter_queue_gives_way():
    """SwapServeLLM; LRU asks only for the oldest access."""
    node = a_node(gpus_mib=(200, 200), grants={0: [("i-1", 200)], 1: [("i-2", 200)]})
    queue, use = "shortest_queue", "oldest_use"
    for victims, queues, gone in (
        (queue, (3, 1), "i-2"),
        (queue, (1, 3), "i-1"),
        (queue, (2, 2), "i-1"),
        (use, (3, 1), "i-1"),
    ):
        rows = (
            an_instance("i-1", "a", mib=200, ready_at=1.0),
            an_instance("i-2", "c", mib=200, ready_at=2.0, gpu_id="node-1/1"),
        )
        controller = serving(node, *rows, victims=victims)
        loads = {
            key: ModelLoad(num_waiting=waits, num_in_flight=1, in_flight_by_instance={row.instance_id: 1})
            for key, waits, row in zip(("a", "c"), queues, rows, strict=True)
        }
        controller.handle(load_report(**loads), 9.9)
        stopped = sent(controller.handle(asked(a_model("b", mib=150), "i-b"), 10.0), StopInstance)
        for half_s in range(21, 41):
            for heard in (
                load_report(b=ModelLoad(num_waiting=9), **loads),
                an_event(NodeBeat(node=replace(node, revision=half_s))),
                Tick(),
            ):
                stopped += sent(controller.handle(heard, half_s / 2), StopInstance)
        assert stopped[:1] == [gone], queues


def test_where_the_least_worth_leaves_an_engine_that_takes_long_to_come_back_stays():
    """The union's rule only."""
    node = a_node(gpus_mib=(200, 200, 200), grants={0: [("i-1", 200)], 1: [("i-1", 200)], 2: [("i-2", 200)]})
    wide, small = an_instance("i-1", "a", mib=200, ready_at=1.0), an_instance("i-2", "c", mib=200, gpu_id="node-1/2")
    both = (*wide.workers, replace(wide.workers[0], worker_id="i-1-1", gpu_id="node-1/1", rank=1))
    models = [a_model("a", mib=400_000), a_model("c", mib=100), a_model("b", mib=150)]
    for victims, gone in (("least_worth", "i-2"), ("shortest_queue", "i-1"), ("oldest_use", "i-1")):
        rows = (replace(wide, workers=both), replace(small, ready_at=1.5))
        controller = serving(node, *rows, victims=victims, models=models)
        assert sent(controller.handle(asked(a_model("b", mib=150), "i-b"), 10.0), StopInstance) == [gone], victims


def test_where_nobody_may_leave_the_nodes_unused_for_longest_the_others_are_looked_at():
    """65 nodes, with a pinned instance on each except the last."""
    nodes = [a_node(f"n-{at:02}", gpus_mib=(200,), grants={0: [(f"i-{at}", 150)]}, revision=5) for at in range(65)]
    models = [a_model("pinned", mib=150, pinned=True, max_instances=99), a_model("a", mib=150), a_model("b", mib=150)]
    controller = a_placer(*nodes, models=models, evict="union", victims="least_worth")
    for at, node in enumerate(nodes):
        key, ready_at = ("a", 3.0) if at == 64 else ("pinned", 2.0)
        row = an_instance(f"i-{at}", key, gpu_id=f"{node.node_id}/0", mib=150, created_at=1.0, ready_at=ready_at)
        controller.handle(an_event(InstanceReady(instance=row)), 3.0)
    beat(controller, 10.0, *[replace(node, revision=6) for node in nodes])
    controller.handle(load_report(), 10.0)
    assert sent(controller.handle(asked(models[2]), 10.0), StopInstance) == ["i-64"]


def test_for_a_policy_that_wants_gpus_for_itself_everybody_on_them_leaves():
    """WarmServe Fig. 5: a dedicated worker never shares its GPU."""
    node = a_node(gpus_mib=(200,), grants={0: [("i-1", 40), ("i-2", 40)]})
    rows = [an_instance(instance_id, instance_id, mib=40, ready_at=1.0) for instance_id in ("i-1", "i-2")]
    for busy in ({}, {"i-2": ModelLoad(num_in_flight=1, in_flight_by_instance={"i-2": 1})}):
        controller = serving(node, *rows, loads=busy, place="warmserve")
        stopped = sent(controller.handle(asked(a_model("b", mib=100), "i-b"), 10.0), StopInstance)
        assert sorted(stopped) == ([] if busy else ["i-1", "i-2"])


def test_a_copy_that_waits_for_free_memory_keeps_no_count_of_what_others_were_given():
    controller = full_of("busy")
    command = replace(asked(a_model("kept", mib=150), "i-kept").data, waits=True)
    for step in range(600):
        now_s = 10.0 + step
        beat(controller, now_s, a_node(gpus_mib=(200,), grants={0: [("i-1", 200)]}, revision=10 + step))
        controller.handle(an_event(command, issuer="autoscaler-1", epoch=1), now_s)
        controller.handle(load_report(busy=waits(10 * step)), now_s)
        controller.handle(Tick(), now_s)
    given = controller._placing._shares.given
    assert "kept" not in given and given["busy"] <= 10, "but for what came since the last look"


@pytest.mark.parametrize(("num_ahead", "gone"), [(0.5, []), (40.0, ["i-1"])])
def test_a_start_that_nobody_waits_for_takes_memory_only_where_it_saves_more(num_ahead, gone):
    """Both are planned, and would otherwise take the memory from each other in turns."""
    node = a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]})
    models = [a_model("a", mib=150, max_concurrency=4), a_model("b", mib=150, max_concurrency=4)]
    idle = an_instance("i-1", "a", mib=150, created_at=1.0, ready_at=1.5)
    for is_awaited in (False, True):
        controller = serving(node, idle, victims="least_worth", models=models)
        for key, num in (("a", 4.0), ("b", num_ahead)):
            ahead = Forecast(
                made_at=9.0, starts_at=9.0, window_s=300.0, concurrency_mean=num, concurrency_peak=num, source="test"
            )
            controller.handle(an_event(ForecastMade(model_key=key, forecasts=(ahead,))), 9.0)
        stopped = sent(controller.handle(asked(models[1], "i-b", is_awaited=is_awaited), 10.0), StopInstance)
        assert stopped == (["i-1"] if is_awaited else gone)
