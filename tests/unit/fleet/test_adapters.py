"""Adapters of a base: which there are, the slots of its engines, and its load with theirs."""

import pytest

from glowplug.domain.snapshot import ClassLoad, ModelLoad, Outlook
from glowplug.fleet.adapters import AdapterIndex, slots_for, with_adapters
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import InstanceTable
from tests.fleet_builder import a_model, an_instance, load_report


@pytest.mark.parametrize(
    ("ranks", "slots"),
    [
        ((), (0, 0)),
        ((0,), (4, 16)),
        ((64, 8, 0, 0), (4, 64)),
        ((9,) * 5, (8, 16)),
        ((512,) * 9, (8, 512)),
        ((513,), (4, 513)),
    ],
)
def test_an_engine_has_slots_for_its_adapters_and_a_few_more_of_their_largest_rank(
    ranks: tuple[int, ...], slots: tuple[int, int]
) -> None:
    assert slots_for({f"a{n}": a_model(base="m", adapter_rank=rank) for n, rank in enumerate(ranks)}) == slots


def test_an_adapter_is_of_the_base_that_it_named_last() -> None:
    index = AdapterIndex()
    one, other, moved = a_model("a", base="m"), a_model("b", base="m"), a_model("a", base="n")
    for model in (a_model("m"), one, other):
        index.put(model)
    assert (index.of("m"), index.bases) == ({"a": one, "b": other}, {"a": "m", "b": "m"})
    index.put(moved)
    assert (index.of("m"), index.of("n")) == ({"b": other}, {"a": moved})
    index.restore({"m": a_model("m"), "b": a_model("b"), "c": a_model("c", base="n")})
    assert index.bases == {"c": "n"} and index.of("m") == {} and list(index.of("n")) == ["c"]
    index.drop("c")
    index.drop("c")
    assert index.bases == index.of("n") == {}


def test_the_load_of_a_base_is_its_own_and_that_of_its_adapters_at_their_hosts() -> None:
    loads, rows = Demand(), InstanceTable()
    loads.bases = {"a": "m", "b": "m"}
    for instance_id, host in (("x-1", "h-1"), ("x-2", "h-1"), ("x-3", "h-2")):
        rows.apply(an_instance(instance_id, "a", host_id=host), 0.0)
    one = Outlook(peak_ratio=0.25, over_share=0.5)
    own = ModelLoad(num_waiting=1, num_in_flight=2, in_flight_by_instance={"h-1": 2}, num_arrived=5)
    adapter = ModelLoad(
        num_in_flight=7, in_flight_by_instance={"x-1": 1, "x-2": 2, "x-3": 3, "unknown": 1}, slots_per_instance=4,
        outlook_by_instance={"x-1": one, "x-2": one, "x-3": one}, num_arrived=7,
        by_class={"batch": ClassLoad(in_flight_by_instance={"x-1": 1, "x-2": 1})},
    )  # fmt: skip
    held = ModelLoad(num_waiting=3, slots_per_instance=4, outlook_by_instance={"x-3": one})
    loads.apply(load_report(m=own, a=adapter, b=held).data, 1.0)
    load = with_adapters("m", loads, rows)
    assert (load.num_waiting, load.num_in_flight, load.num_arrived, load.slots_per_instance) == (4, 9, 5, 0)
    assert load.in_flight_by_instance == {"h-1": 5, "h-2": 3, "unknown": 1}
    assert load.outlook_by_instance == {"h-1": one.joined(one), "h-2": one}
    assert load.by_class["batch"].in_flight_by_instance == {"h-1": 2}
    loads.apply(load_report(m=own, a=ModelLoad(num_in_flight=1, num_arrived=9), b=ModelLoad()).data, 2.0)
    assert with_adapters("m", loads, rows).num_arrived == 5 + 2, "and what came since the first report"
