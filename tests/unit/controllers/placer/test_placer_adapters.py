"""Which base engine takes an adapter, and which adapter leaves."""

from glowplug.controllers.effects import Tick
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
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


def test_no_adapter_is_a_victim_for_memory_and_its_requests_keep_its_host():
    controller = placer(a_host(mib=250), a_rider("r-1", "a"), num_nodes=1)
    grants = a_node("node-1", gpus_mib=(300,), grants={0: [("i-1", 250)]}, revision=9, **ABLE)
    controller.restore("nodes", {"node-1": grants}, 9.0)
    controller.handle(load_report(a=ModelLoad(num_in_flight=1, in_flight_by_instance={"r-1": 1})), 9.0)
    assert payloads(controller.handle(asked(a_model("big", mib=200)), 9.1), StopInstance) == []
    controller.handle(load_report(a=ModelLoad()), 9.5)
    assert [one.instance_id for one in payloads(controller.handle(Tick(), 9.6), StopInstance)] == ["i-1"]
