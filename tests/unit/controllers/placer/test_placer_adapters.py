"""Which base engine takes an adapter, and which adapter leaves."""

from glowplug.controllers.effects import Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import FetchWeights, StartInstance, StopInstance
from tests.fleet_builder import a_model, a_node, an_instance, instance_event, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, payloads

SLOTS = 2
ABLE = {"abilities": ("emulated:adapters",), "prefetcher_url": "http://p"}
LONG = {"settle_s": 0.0, "node_lease_s": 1e9}
BASE = a_model("m", mib=100)
WEIGHTS = WeightsRef(uri="s3://bucket/a", num_bytes=1 << 20)


def an_adapter(key: str = "a", **fields):
    return a_model(key, mib=1, base="m", weights=WEIGHTS, **fields)


def a_host(name: str = "i-1", gpu_id: str = "node-1/0", **fields):
    given = {"adapter_slots": SLOTS, "adapter_rank": 16, "ready_at": 1.0, "url": "http://h"}
    return an_instance(name, "m", gpu_id=gpu_id, **(given | fields))


def a_rider(name: str, key: str, host: str = "i-1", gpu_id: str = "node-1/0", **fields):
    return an_instance(name, key, mib=0, gpu_id=gpu_id, host_id=host, **({"ready_at": 2.0} | fields))


def placer(*rows, models=(), num_nodes: int = 2, **params):
    nodes = [a_node(f"node-{n}", gpus_mib=(300,), **ABLE) for n in range(1, num_nodes + 1)]
    controller = a_placer(*nodes, models=(BASE, an_adapter(), *models), **(LONG | params))
    for row in rows:
        controller.handle(instance_event(row), 3.0)
    controller.handle(load_report(), 4.0)
    return controller


def test_an_adapter_goes_to_the_host_with_the_fewest_requests_and_takes_no_bytes():
    controller = placer(
        a_host(), a_host("i-2", "node-2/0"), a_rider("r-1", "b", "i-2", "node-2/0"), models=[an_adapter("b")]
    )
    busy = ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1})
    controller.handle(load_report(m=busy, b=ModelLoad(num_in_flight=2, in_flight_by_instance={"r-1": 2})), 5.0)
    before = dict(controller.fleet.capacity.reserved)
    effects = controller.handle(asked(an_adapter()), 5.0)
    (start,), (fetch,) = payloads(effects, StartInstance), payloads(effects, FetchWeights)
    assert (start.target, start.host_id) == ("node-1", "i-1"), "i-2 runs two, for another adapter"
    assert [worker.num_bytes for worker in start.workers] == [0]
    assert (fetch.target, fetch.instance_id) == ("node-1", start.instance_id)
    assert controller.fleet.capacity.reserved == before


def full(*more, **load):
    controller = placer(
        a_host(), a_rider("r-1", "b"), a_rider("r-2", "c"), *more, models=(an_adapter("b"), an_adapter("c"))
    )
    controller.handle(load_report(**load), 9.0)
    return controller


def test_the_idle_adapter_of_least_worth_gives_up_its_slot_and_the_base_stays():
    load = {"b": ModelLoad(last_active_at=8.5), "c": ModelLoad(last_active_at=3.0)}
    controller = full(**load)
    effects = controller.handle(asked(an_adapter()), 9.0)
    (stop,) = payloads(effects, StopInstance)
    assert stop.instance_id == "r-2", "it was asked for longest ago"
    assert payloads(controller.handle(Tick(), 9.5), StopInstance) == [], "one is asked for one"
    gone = a_rider("r-2", "c", state=InstanceState.STOPPED, revision=2)
    assert [one.host_id for one in payloads(controller.handle(instance_event(gone), 9.7), StartInstance)] == ["i-1"]


def test_the_last_slot_taken_is_freed_at_once_where_cold_adapters_come_often():
    controller = placer(
        a_host(adapter_slots=4), a_rider("r-1", "b"), a_rider("r-2", "c"), models=[an_adapter(key) for key in "bcd"]
    )
    load = {"b": ModelLoad(last_active_at=9.95), "c": ModelLoad(last_active_at=3.0)}
    controller.handle(load_report(**load), 9.0)
    first = controller.handle(asked(an_adapter()), 9.0)
    assert payloads(first, StartInstance) and payloads(first, StopInstance) == [], "a slot is left"
    controller.handle(load_report(**load), 10.0)
    last = controller.handle(asked(an_adapter("d"), "i-d"), 10.0)
    assert payloads(last, StartInstance)
    assert [one.instance_id for one in payloads(last, StopInstance)] == ["r-2"], "its loss costs the least"
    assert payloads(controller.handle(Tick(), 10.5), StopInstance) == []


def test_the_last_slot_is_not_freed_for_an_adapter_that_nobody_expects_or_by_one_that_is_worth_more():
    for adapter_slots, num_bytes in ((3, 1 << 20), (4, 1 << 40)):
        heavy = {key: an_adapter(key, weights_bytes=num_bytes) for key in "bc"}
        models = [*heavy.values(), an_adapter("d")]
        riders = (a_rider("r-1", "b"), a_rider("r-2", "c"))
        controller = placer(a_host(adapter_slots=adapter_slots), *riders, models=models)
        load = {key: ModelLoad(last_active_at=9.0) for key in "bc"}
        for now_s, key in ((9.0, "a"), (300.0, "d"))[: adapter_slots - 2]:
            controller.handle(load_report(**load), now_s)
            effects = controller.handle(asked(an_adapter(key), f"i-{key}"), now_s)
            assert payloads(effects, StopInstance) == []


def test_a_busy_adapter_leaves_only_after_the_fair_wait():
    busy = {key: ModelLoad(num_in_flight=1, in_flight_by_instance={i: 1}) for key, i in (("b", "r-1"), ("c", "r-2"))}
    controller = full(**busy)
    assert payloads(controller.handle(asked(an_adapter()), 9.0), StopInstance) == []
    controller.handle(load_report(**busy), 14.0)
    stops = payloads(controller.handle(asked(an_adapter()), 14.0) + controller.handle(Tick(), 14.5), StopInstance)
    assert [one.instance_id for one in stops] == ["r-1"]


def test_a_base_without_slots_or_of_a_smaller_rank_is_restarted_once_idle():
    for host, rank in ((a_host(adapter_slots=0), 0), (a_host(adapter_rank=8), 16)):
        controller = placer(host)
        controller.handle(load_report(m=ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1})), 9.0)
        adapter = an_adapter(adapter_rank=rank)
        assert payloads(controller.handle(asked(adapter), 9.0), StopInstance) == [], "it is busy"
        controller.handle(load_report(), 10.0)
        assert [one.instance_id for one in payloads(controller.handle(Tick(), 10.0), StopInstance)] == ["i-1"]


def test_slots_are_never_promised_twice_and_a_dead_host_frees_its_placements():
    controller = placer(a_host(), models=[an_adapter(key) for key in "bcd"])
    started = [payloads(controller.handle(asked(an_adapter(key), f"i-{key}"), 9.0), StartInstance) for key in "bcd"]
    assert [len(one) for one in started] == [1, 1, 0]
    controller.handle(instance_event(a_host(state=InstanceState.FAILED, revision=3)), 9.5)
    effects = controller.handle(Tick(), 9.6)
    assert sorted(one.instance_id for one in payloads(effects, StopInstance)) == ["i-b", "i-c"]
    assert all(placement.sent is None for placement in controller.placements.values())


def test_no_adapter_is_a_victim_for_memory_and_its_requests_keep_its_host():
    controller = placer(a_host(mib=250), a_rider("r-1", "a"), num_nodes=1)
    grants = a_node("node-1", gpus_mib=(300,), grants={0: [("i-1", 250)]}, revision=9, **ABLE)
    controller.restore("nodes", {"node-1": grants}, 9.0)
    controller.handle(load_report(a=ModelLoad(num_in_flight=1, in_flight_by_instance={"r-1": 1})), 9.0)
    assert payloads(controller.handle(asked(a_model("big", mib=200)), 9.1), StopInstance) == []
    controller.handle(load_report(a=ModelLoad()), 9.5)
    assert [one.instance_id for one in payloads(controller.handle(Tick(), 9.6), StopInstance)] == ["i-1"]
