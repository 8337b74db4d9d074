"""What makes a large fleet cheap: rows made when touched, loads that name what they changed, fetches with a rate."""

import msgspec

from glowplug.controllers.placer.controller import Cordon
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import DecisionMade, NodeBeat, RouterLoadReported, WeightsFetched, WeightsProgressed
from glowplug.fleet.demand import LOAD_STALE_S
from services.console.fleet_view import CORDONS, FORGOTTEN_S, STALLED_S, Fetches, FleetView, Loads, RowTable
from tests import console_story as story

NOW = 5_000.0


class Row(msgspec.Struct, frozen=True):
    key: str
    value: int


def test_a_row_is_made_once_however_often_it_was_touched_and_told_only_when_other() -> None:
    values, made = {"a": 1, "b": 2}, []

    def make(key: str, _: float) -> Row | None:
        made.append(key)
        return Row(key, values[key]) if key in values else None

    table = RowTable(make)
    table.touch(["a", "b", "a"])
    table.touch(["a"])
    table.refresh(NOW)
    assert sorted(made) == ["a", "b"] and table.take_changed() == {"a", "b"}
    table.touch(["a"])
    table.refresh(NOW)
    assert table.take_changed() == set(), "touched, but as it was"
    del values["a"]
    table.touch(["a", "never-was"])
    table.refresh(NOW)
    assert table.take_changed() == {"a"} and set(table.rows) == {"b"}


def test_loads_name_what_changed_and_forget_silent_routers() -> None:
    loads = Loads()
    loads.put(report("router-1", ModelLoad(num_in_flight=2, in_flight_by_instance={"i-1": 2})), NOW)
    loads.put(report("router-2", ModelLoad(num_waiting=1, num_in_flight=1, in_flight_by_instance={"i-1": 1})), NOW)
    assert loads.refresh(NOW) == ({"m"}, {"i-1"})
    assert (loads.model("m").num_in_flight, loads.model("m").num_waiting, loads.instance("i-1")) == (3, 1, 3)
    assert loads.refresh(NOW) == (set(), set())
    later = ModelLoad(num_in_flight=2, last_active_at=NOW + 1, in_flight_by_instance={"i-1": 2})
    loads.put(report("router-1", later), NOW + 1)
    assert loads.refresh(NOW + 1) == (set(), set()), "when it was last active is not shown"
    assert loads.refresh(NOW + LOAD_STALE_S + 0.5) == ({"m"}, {"i-1"})
    assert (loads.model("m").num_waiting, loads.instance("i-1")) == (0, 2)


def report(router_id: str, load: ModelLoad) -> RouterLoadReported:
    return RouterLoadReported(router_id=router_id, loads={"m": load})


def progressed(done: int, digest: str = "d") -> WeightsProgressed:
    return WeightsProgressed(node_id="node-1", model_key="m", digest=digest, num_bytes_done=done, num_bytes=1000)


def test_a_fetch_has_a_rate_stalls_and_is_forgotten() -> None:
    fetches = Fetches()
    fetches.progress(progressed(100), NOW)
    assert fetches.rows("node-1")[0].bytes_per_s == 0, "one report is no rate"
    fetches.progress(progressed(300), NOW + 1)
    fetches.progress(progressed(300 + 400), NOW + 2)
    assert fetches.rows("node-1")[0].bytes_per_s == 300, "the mean of 200 and 400"
    assert fetches.refresh(NOW + 2 + STALLED_S / 2) == set()
    assert fetches.refresh(NOW + 2 + STALLED_S) == {"node-1"}
    assert fetches.rows("node-1")[0].bytes_per_s == 0
    fetches.progress(progressed(50), NOW + 6)
    assert fetches.rows("node-1")[0].num_bytes_done == 50, "begun again"
    assert fetches.refresh(NOW + 6 + FORGOTTEN_S) == {"node-1"}
    assert fetches.rows("node-1") == ()


def test_a_fetch_that_ended_is_gone_at_once() -> None:
    fetches = Fetches()
    fetches.progress(progressed(1, "a"), NOW)
    fetches.progress(progressed(1, "b"), NOW)
    end = WeightsFetched(node_id="node-1", model_key="m", digest="a", num_bytes=1000, seconds=1.0, source="http")
    fetches.end(end)
    fetches.end(end)
    assert [row.digest for row in fetches.rows("node-1")] == ["b"]


def told() -> FleetView:
    view = FleetView()
    for name in ("bus", "store"):
        view.source(name, True, NOW)
    for event in story.fleet_events(NOW):
        view.take(event, NOW)
    view.refresh(NOW)
    for table in (view.model_rows, view.instance_rows, view.node_rows):
        table.take_changed()
    return view


def changed(view: FleetView, now_s: float) -> tuple[set[str], set[str], set[str]]:
    view.refresh(now_s)
    return view.model_rows.take_changed(), view.instance_rows.take_changed(), view.node_rows.take_changed()


def test_a_beat_that_says_nothing_new_changes_nothing() -> None:
    view = told()
    for number, event in enumerate(story.beats(NOW + 1, revision=2)):
        view.take(story.fact(NodeBeat(node=event.data.node), NOW + 1, number), NOW + 1)
    models, instances, nodes = changed(view, NOW + 1)
    assert (models, instances, nodes) == ({"smol-coder"}, set(), set()), "only what is left of the start under way"


def test_a_load_report_changes_the_models_and_instances_it_is_about() -> None:
    view = told()
    loads = {"smol-chat": ModelLoad(num_in_flight=1, in_flight_by_instance={"i-71c2": 1})}
    view.take(story.fact(RouterLoadReported(router_id="router-1", loads=loads), NOW), NOW)
    models, instances, nodes = changed(view, NOW)
    assert (models, instances, nodes) == ({"smol-chat", "smol-poet", "smol-coder"}, {"i-71c2", "i-0a9e"}, set())


def test_a_drained_node_shows_by_the_decision_before_its_row_is_read() -> None:
    view = told()
    drain = story.decisions(NOW)[0]
    fields = {f: getattr(drain, f) for f in drain.__dataclass_fields__}
    decided = type(drain)(**fields | {"decision_id": "d-x", "kind": "drain", "node_id": "node-1", "chosen": "drain"})
    view.take(story.fact(DecisionMade(decision=decided), NOW, 99), NOW)
    assert changed(view, NOW)[2] == {"node-1"}
    assert view.node_rows.rows["node-1"].cordoned and view.node_rows.rows["node-1"].draining
    view.restore(CORDONS, {"node-1": Cordon("node-1", True)}, NOW)
    assert changed(view, NOW)[2] == set()
    view.restore(CORDONS, {}, NOW)
    assert changed(view, NOW)[2] == {"node-1"} and not view.node_rows.rows["node-1"].cordoned
