"""Demand by request class over several routers, some of an earlier version."""

from dataclasses import replace

from glowplug.domain.snapshot import ClassLoad, ModelLoad
from glowplug.events.facts import RequestWaiting
from glowplug.fleet.demand import Demand, joined
from tests.fleet_builder import load_report


def batch(num_waiting: int, alone_s: float = 0.0, **running: int) -> dict[str, ClassLoad]:
    return {"batch": ClassLoad(num_waiting=num_waiting, alone_s=alone_s, in_flight_by_instance=running)}


def test_a_router_that_reports_no_classes_has_standard_requests_alone():
    old = ModelLoad(num_waiting=2, last_active_at=90.0, num_in_flight=1, in_flight_by_instance={"i": 1})
    new = ModelLoad(
        num_waiting=3,
        last_active_at=100.0,
        num_in_flight=2,
        in_flight_by_instance={"i": 2},
        by_class=batch(3, 80.0, i=2),
    )
    load = joined([old, new])
    assert (load.num_urgent_waiting, load.num_urgent_in_flight, load.urgent_on("i")) == (2, 1, 1)
    assert load.by_class["batch"].alone_s == 10.0, "the old router's request came 10 s before the last one"


def test_a_fact_of_waiting_requests_says_their_classes():
    demand = Demand()
    demand.apply(load_report(m=ModelLoad(num_waiting=1, by_class=batch(1))).data, 1.0, 1.0)
    fact = RequestWaiting(
        model_key="m", request_id="r", router_id="router-1", num_waiting=3, waiting_since=1.0, deadline_at=60.0,
        by_class={"batch": 2},
    )  # fmt: skip
    demand.wait(fact, 1.5, 1.5)
    load = demand.of("m")
    assert (load.num_waiting, load.num_urgent_waiting) == (3, 1)
    demand.wait(replace(fact, by_class={"interactive": 1}), 1.6, 1.6)
    assert {name: one.num_waiting for name, one in demand.of("m").by_class.items()} == {"batch": 0, "interactive": 1}
    reported = ModelLoad(num_waiting=3, by_class=batch(1, 2.0, i=1))
    demand.apply(load_report(m=reported).data, 2.0, 1.0)
    assert demand.of("m") == reported, "as many as it says, and more of them"


def test_classes_are_summed_over_routers_and_alone_since_the_last_of_others_anywhere():
    one = ModelLoad(last_active_at=100.0, by_class=batch(1, 30.0, i=1, j=2) | {"interactive": ClassLoad(num_waiting=1)})
    two = ModelLoad(last_active_at=90.0, by_class=batch(2, 10.0, j=3))
    found = joined([one, two]).by_class
    assert found["batch"] == ClassLoad(num_waiting=3, in_flight_by_instance={"i": 1, "j": 5}, alone_s=20.0)
    assert (found["interactive"].num_waiting, found["interactive"].alone_s) == (1, 0.0)


def test_requests_that_wait_at_a_router_that_has_not_told_of_the_model_count_too():
    demand = Demand()
    fact = RequestWaiting(
        model_key="m", request_id="r", router_id="a", num_waiting=3, waiting_since=1.0, deadline_at=60.0
    )
    demand.apply(load_report("a", other=ModelLoad(num_waiting=9)).data, 1.0, 1.0)
    demand.apply(load_report("b", m=ModelLoad(num_waiting=1)).data, 1.0, 1.0)
    demand.apply(load_report("c", other=ModelLoad()).data, 1.0, 1.0)
    for router_id in ("a", "d"):
        demand.wait(replace(fact, router_id=router_id), 1.5, 1.5)
    assert demand.of("m").num_waiting == 3 + 1 + 3 and demand.of("other").num_waiting == 9
