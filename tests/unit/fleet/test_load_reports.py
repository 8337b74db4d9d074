"""A router's load in bounded messages, whatever is lost."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events import encode
from glowplug.events.facts import RequestWaiting, RouterLoadReported
from glowplug.fleet.demand import (
    DEMAND_KEPT_S,
    LOAD_STALE_S,
    MAX_ROUTERS,
    MAX_UNDEPLOYED,
    ONLY_CHANGES,
    Demand,
    LoadReporter,
    LoadReports,
    joined,
)
from tests.fleet_builder import an_event

IDLE = ModelLoad(last_active_at=5.0)


def busy(num: int) -> ModelLoad:
    return ModelLoad(num_in_flight=num, last_active_at=9.0, in_flight_by_instance={"i": num})


def test_a_small_fleet_is_told_whole_each_time() -> None:
    reporter = LoadReporter("r", max_models=3)
    loads = {"a": IDLE, "b": busy(1), "c": IDLE}
    for now_s in (0.0, 0.2, 0.4):
        (report,) = reporter.reports(loads, now_s)
        assert report.loads == loads and (report.part, report.num_parts) == (0, 1)


def test_a_large_fleet_tells_what_has_something_to_say_and_the_whole_in_parts() -> None:
    reporter = LoadReporter("r", max_models=4, whole_every_s=2.0)
    loads = {f"m{k}": IDLE for k in range(10)}
    parts = reporter.reports(loads, 0.0)
    assert [(len(p.loads), p.part, p.num_parts) for p in parts] == [(4, 0, 3), (4, 1, 3), (2, 2, 3)]
    (quiet,) = reporter.reports(loads, 0.5)
    assert quiet.loads == {} and quiet.num_parts == ONLY_CHANGES, "silence would be taken for absence"
    (news,) = reporter.reports(loads | {"m3": busy(2)}, 1.0)
    assert set(news.loads) == {"m3"}
    (again,) = reporter.reports(loads | {"m3": busy(2)}, 1.5)
    assert set(again.loads) == {"m3"}, "load is told each time: a lost message is made good by the next"
    assert len(reporter.reports(loads, 2.0)) == 3
    parts = reporter.reports({k: busy(1) for k in loads}, 2.5)
    assert [(len(p.loads), p.part, p.num_parts) for p in parts] == [(n, 0, ONLY_CHANGES) for n in (4, 4, 2)]
    (held,) = reporter.reports({k: ModelLoad(num_waiting=1) if k == "m1" else busy(0) for k in loads}, 3.0)[:1]
    assert len(held.loads) == 4, "each of them has changed"
    (held,) = reporter.reports({k: ModelLoad(num_waiting=1) if k == "m1" else busy(0) for k in loads}, 3.5)
    assert set(held.loads) == {"m1"}


def test_messages_stay_small_with_thousands_of_models() -> None:
    """NATS takes 1 MB by default."""
    key = "x" * 60
    loads = {f"{key}-{k}": ModelLoad(num_in_flight=8, in_flight_by_instance={f"{key}-{k}-abc": 8}) for k in range(5000)}
    reports = LoadReporter("r").reports(loads, 0.0)
    assert max(len(encode(an_event(report))) for report in reports) < 256 * 1024
    assert sum(len(report.loads) for report in reports) == 5000


@given(seed=st.integers(0, 2**32), lose=st.floats(0.0, 0.6))
def test_whoever_listens_knows_all_after_one_whole_that_arrives_whole(seed: int, lose: float) -> None:
    chance = random.Random(seed)
    reporter, reports = LoadReporter("r", max_models=3, whole_every_s=1.0), LoadReports()
    loads: dict[str, ModelLoad] = {}
    for step in range(40):
        key = f"m{chance.randrange(8)}"
        if chance.random() < 0.2:
            loads.pop(key, None)
        else:
            loads[key] = busy(chance.randrange(3))
        for report in reporter.reports(dict(loads), step * 0.3):
            if chance.random() >= lose:
                reports.take(report, step * 0.3)
    known: object = None
    for report in reporter.reports(dict(loads), 1000.0):
        known = reports.take(report, 1000.0)
    assert known == loads and reports.is_fresh(1000.0)


def test_a_view_calls_nothing_idle_before_it_has_heard_a_whole() -> None:
    view = Demand()
    view.apply(RouterLoadReported(router_id="r", loads={"a": busy(1)}, num_parts=ONLY_CHANGES), 1.0)
    assert view.of("a").num_in_flight == 1 and not view.is_fresh(1.0)
    for part in (0, 1):
        view.apply(RouterLoadReported(router_id="r", loads={f"m{part}": IDLE}, part=part, num_parts=2), 2.0)
    assert view.is_fresh(2.0) and view.of("a").num_in_flight == 0, "in no part of the whole: it is gone"
    assert not view.is_fresh(9.0)


def part(number: int, num_parts: int, *keys: str) -> RouterLoadReported:
    return RouterLoadReported(router_id="r", loads=dict.fromkeys(keys, IDLE), part=number, num_parts=num_parts)


@pytest.mark.parametrize(
    ("parts", "known", "is_fresh"),
    [
        ([(0, 2, "a"), (1, 2, "b")], {"a", "b"}, True),
        ([(0, 2, "a")], {"old", "a"}, False),
        ([(1, 2, "b")], {"old", "b"}, False),
        ([(0, 3, "a"), (2, 3, "c")], {"old", "a", "c"}, False),
        ([(0, 3, "a"), (0, 3, "a"), (1, 3, "b"), (2, 3, "c")], {"a", "b", "c"}, True),
        ([(0, 3, "a"), (1, 3, "b"), (1, 3, "b"), (2, 3, "c")], {"old", "a", "b", "c"}, False),
        ([(0, 2, "a"), (0, ONLY_CHANGES, "n"), (1, 2, "b")], {"a", "b"}, True),
        ([(0, 2, "a"), (1, 2, "b"), (1, 2, "late")], {"a", "b", "late"}, True),
        ([(0, 2, "a"), (1, 2, "b"), (2, 3, "late")], {"a", "b", "late"}, True),
        ([(0, 1, "a")], {"a"}, True),
    ],
)
def test_only_a_whole_report_with_every_part_in_its_order_says_what_is_gone(
    parts: list[tuple[int, int, str]], known: set[str], is_fresh: bool
) -> None:
    reports = LoadReports()
    reports.take(part(0, ONLY_CHANGES, "old"), 0.0)
    for one in parts:
        loads = reports.take(part(*one), 1.0)
    assert (loads.keys(), reports.is_fresh(1.0)) == (known, is_fresh)


def test_a_router_counts_for_a_while_after_its_last_report() -> None:
    reports = LoadReports()
    for at, router_id in enumerate(("a", "b")):
        reports.take(RouterLoadReported(router_id=router_id, loads={}), float(at))
    for now_s in (LOAD_STALE_S, LOAD_STALE_S + 1):
        assert reports.is_fresh(now_s), "b has spoken"
    assert not reports.is_fresh(LOAD_STALE_S + 1.5)
    assert reports.expire(LOAD_STALE_S) == [] and reports.expire(LOAD_STALE_S + 1) == ["a"]
    assert reports.loads.keys() == {"b"} and reports.expire(99.0, 98.0) == []


def test_the_load_of_several_routers_is_their_sum_and_the_latest_of_their_times() -> None:
    one = ModelLoad(
        num_waiting=1, num_in_flight=2, last_active_at=8.0, in_flight_by_instance={"i": 1, "j": 1},
        outlook_by_instance={"i": Outlook(peak_ratio=0.5, over_share=0.25)}, num_arrived=10, num_dispatched=20,
        slots_per_instance=4, num_batch_arrived=3,
    )  # fmt: skip
    two = ModelLoad(
        num_waiting=4, num_in_flight=3, last_active_at=9.0, in_flight_by_instance={"j": 3},
        outlook_by_instance={"i": Outlook(peak_ratio=0.25, over_share=0.5)}, num_arrived=30, num_dispatched=50,
        slots_per_instance=2, num_batch_arrived=4,
    )  # fmt: skip
    assert joined([one, two]) == ModelLoad(
        num_waiting=5, num_in_flight=5, last_active_at=9.0, in_flight_by_instance={"i": 1, "j": 4},
        outlook_by_instance={"i": Outlook(peak_ratio=0.75, over_share=0.5)}, num_arrived=40, num_dispatched=70,
        slots_per_instance=4, num_batch_arrived=7,
    )  # fmt: skip
    assert joined([]) == ModelLoad() and joined([one]) is one


def test_a_report_changes_the_models_that_had_requests_or_have_another_load() -> None:
    view = Demand()

    def changed(now_s: float, **loads: ModelLoad) -> dict[str, bool]:
        return view.apply(RouterLoadReported(router_id="r", loads=loads), now_s)

    assert changed(5.0, a=ModelLoad(), b=IDLE, c=ModelLoad(num_waiting=1)) == {"a": False, "b": True, "c": True}
    assert changed(6.0, a=ModelLoad(), b=IDLE, c=ModelLoad(num_waiting=1)) == {"c": True}
    assert changed(7.0, a=ModelLoad(slots_per_instance=1), b=IDLE) == {"a": False, "c": False}
    assert changed(9.0, a=ModelLoad(num_in_flight=1), b=replace(IDLE, last_active_at=6.0)) == {"a": True, "b": True}
    assert view.of("b").last_active_at == 6.0


def test_requests_of_an_adapter_keep_its_base_active_and_are_its_arrivals() -> None:
    view = Demand()
    view.bases = {"x": "m", "y": "m", "z": "other"}

    def told(now_s: float, **loads: ModelLoad) -> list[str]:
        view.apply(RouterLoadReported(router_id="r", loads=loads), now_s, now_s)
        return view.busy_adapters("m")

    counted = ModelLoad(num_arrived=5, num_dispatched=2)
    assert told(1.0, m=ModelLoad(last_active_at=0.5), x=counted, y=counted, z=busy(1)) == []
    assert told(10.0, x=replace(counted, num_in_flight=1, last_active_at=9.0, num_arrived=7), y=counted) == ["x"]
    assert view.of("m").last_active_at == 9.0 and view.of("x").last_active_at == 9.0
    assert (view.arrived_at_adapters("m"), view.arrived_at_adapters("other")) == (2, 0)
    assert told(11.0, x=replace(counted, num_arrived=7), y=replace(counted, num_waiting=1, num_arrived=9)) == ["y"]
    assert view.arrived_at_adapters("m") == 6 and view.of("m").last_active_at == 9.0
    fact = RequestWaiting(
        model_key="x", request_id="q", router_id="r", num_waiting=1, waiting_since=0.0, deadline_at=12.0
    )
    assert view.wait(fact, 11.5, 11.5) and set(view.busy_adapters("m")) == {"x", "y"}
    view.expire(12.0)
    assert set(view.busy_adapters("m")) == {"x", "y"}, "at its deadline it still waits"
    view.expire(12.5)
    assert view.busy_adapters("m") == ["y"] and view.of("x").num_waiting == 0


def test_a_fact_of_waiting_requests_counts_for_a_while_and_a_newer_report_replaces_it() -> None:
    view = Demand()

    def waits(num: int, now_s: float, sent_at: float, router_id: str = "r") -> bool:
        fact = RequestWaiting(
            model_key="m", request_id="q", router_id=router_id, num_waiting=num, waiting_since=0.0, deadline_at=20.0
        )
        return view.wait(fact, now_s, sent_at)

    view.apply(part(0, 1, "m"), 1.0, 1.0)
    assert waits(3, 1.0, 1.0) and view.of("m").num_waiting == 3, "sent with the report, and not before it"
    view.apply(part(0, 1, "m"), 1.0, 1.0)
    assert view.of("m").num_waiting == 0, "sent with the fact"
    assert waits(2, 20.0, 20.0) and not waits(2, 20.5, 20.5), "its deadline has passed"
    view.apply(part(0, 2, "m"), 20.0, 19.0)
    assert view.of("m").num_waiting == 2, "an older report"
    assert waits(4, 16.0, 16.0, "s")
    view.expire(16.0 + LOAD_STALE_S)
    assert view.of("m").num_waiting == 6
    view.expire(16.5 + LOAD_STALE_S)
    assert view.of("m").num_waiting == 2, "s was silent"


def test_a_silent_router_is_forgotten_with_what_it_counted_and_the_others_are_not() -> None:
    view = Demand()

    def told(router_id: str, num: int, now_s: float) -> tuple[int, int]:
        load = ModelLoad(num_arrived=num, num_dispatched=2 * num)
        view.apply(RouterLoadReported(router_id=router_id, loads={"m": load}), now_s, now_s)
        return view.arrived("m", 0.0), view.dispatched("m")

    assert told("a", 5, 0.0) == told("b", 5, 0.0) == (0, 0)
    assert told("b", 6, 30.0) == (1, 2) and not view.expire(DEMAND_KEPT_S) and view.expire(DEMAND_KEPT_S + 1)
    assert told("a", 9, 32.0) == (1, 2), "it begins anew"
    assert told("b", 3, 32.5) == (1, 2) and told("b", 5, 33.0) == (3, 6), "so does b"
    assert told("a", 11, 40.0) == (5, 10)
    assert view.arrived("m", 33.0) == 2 and view.dispatched("other") == 0
    fact = RequestWaiting(
        model_key="m", request_id="q", router_id="a", num_waiting=1, waiting_since=0.0, deadline_at=99.0
    )
    assert not view.wait(fact, 41.0, 39.0)
    assert view.expire(80.0) and view.wait(fact, 81.0, 39.0), "nor is its last report known"


def test_a_model_that_is_forgotten_leaves_no_demand() -> None:
    view = Demand()
    view.bases = {"x": "m", "m": "?"}
    for num in (1, 2):
        loads = {key: replace(busy(1), num_arrived=num) for key in ("x", "m")}
        view.apply(RouterLoadReported(router_id="r", loads=loads), 10.0, 1.0)
    fact = RequestWaiting(
        model_key="m", request_id="q", router_id="r", num_waiting=4, waiting_since=0.0, deadline_at=99.0
    )
    assert view.wait(fact, 10.0, 2.0) and view.arrived_at_adapters("m") == view.arrived("m", 0.0) == 1
    assert view.busy_adapters("?") == ["m"] and view.of("m").num_waiting == 4
    view.forget("m")
    assert (view.arrived_at_adapters("m"), view.arrived("m", 0.0), view.busy_adapters("?")) == (0, 0, [])
    assert (view.of("m").num_waiting, view.of("m").last_active_at, view.busy_adapters("m")) == (0, 0.0, ["x"])
    view.touch("m", 5.0)
    view.touch("m", 4.0)
    assert view.of("m").last_active_at == 5.0


def test_reports_of_more_routers_than_are_kept_cost_nothing_until_others_are_silent() -> None:
    demand, load = Demand(), ModelLoad(num_waiting=1)
    for number in range(MAX_ROUTERS + 2):
        asked = {"request_id": "q", "model_key": "w", "waiting_since": 1.0, "deadline_at": 9.0, "num_waiting": 1}
        assert demand.wait(RequestWaiting(router_id=f"r-{number}", **asked), 1.0, 1.0)
    assert demand.of("w").num_waiting == MAX_ROUTERS
    for number in range(MAX_ROUTERS + 2):
        changed = demand.apply(RouterLoadReported(router_id=f"r-{number}", loads={"m": load}), 2.0)
        assert changed.get("m", False) == (number < MAX_ROUTERS)
    assert demand.of("m").num_waiting == MAX_ROUTERS
    assert demand.expire(2.0 + 2 * DEMAND_KEPT_S)
    assert demand.apply(RouterLoadReported(router_id="r-new", loads={"m": load}), 99.0) == {"m": True}


def test_models_that_are_not_deployed_are_bounded_and_displace_none_that_are() -> None:
    declared = {"m", "z"}
    demand, load = Demand(declared), ModelLoad(num_waiting=1, last_active_at=1.0)
    invented = {f"invented-{number:03}": load for number in range(MAX_UNDEPLOYED + 1)}
    assert demand.apply(RouterLoadReported(router_id="r", loads={**invented, "m": load}), 1.0) == {"m": True}
    assert [demand.of(key).num_waiting for key in ("m", "invented-000", max(invented))] == [1, 1, 0]
    assert demand.of("invented-000").last_active_at == 0.0, "nothing is kept of it beyond the report"
    part = RouterLoadReported(router_id="r", loads={"z": load, "x": load}, num_parts=ONLY_CHANGES)
    assert demand.apply(part, 1.0) == {"z": True}
    declared.clear()
    assert demand.apply(RouterLoadReported(router_id="r", loads={"m": load, "z": load}), 2.0).keys() >= {"m", "z"}
