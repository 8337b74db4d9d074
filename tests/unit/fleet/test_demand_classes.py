"""Demand by request class over several routers, some of an earlier version."""

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
