"""A router's load in bounded messages, whatever is lost."""

import random

from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.snapshot import ModelLoad
from glowplug.events import encode
from glowplug.events.facts import RouterLoadReported
from glowplug.fleet.demand import ONLY_CHANGES, Demand, LoadReporter, LoadReports
from tests.fleet_builder import an_event

IDLE = ModelLoad(last_active_at=5.0)


def busy(num: int) -> ModelLoad:
    return ModelLoad(num_in_flight=num, last_active_at=9.0, in_flight_by_instance={"i": num})


def test_a_small_fleet_is_told_whole_each_time() -> None:
    reporter = LoadReporter("r", max_models=3)
    loads = {"a": IDLE, "b": busy(1)}
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
    assert [len(p.loads) for p in reporter.reports({k: busy(1) for k in loads}, 2.5)] == [4, 4, 2]


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
