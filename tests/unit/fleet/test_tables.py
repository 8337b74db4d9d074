"""Tables: late, doubled and lost facts change nothing in the end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.errors import ModelNotFound
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Temperature
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RequestWaiting, RouterLoadReported
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import (
    ABSENT_S,
    MAX_UNSTORED,
    NEVER,
    NODE_LEASE_S,
    NUM_TOMBSTONES,
    FleetTables,
    InstanceTable,
    ModelTable,
    NodeTable,
    find_model,
)
from tests.fleet_builder import a_model, a_node, an_instance


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(list(InstanceState)), st.booleans())))
def test_the_living_are_those_of_all_that_are_not_gone(history):
    view = InstanceTable()
    for revision, (number, state, is_dropped) in enumerate(history):
        view.apply(an_instance(f"i-{number}", state=state, revision=revision), 0.0)
        if is_dropped:
            view.forget(f"i-{number}")
        assert view.living("m") == {i: row for i, row in view.of("m").items() if not row.state.is_gone}


def test_a_row_missing_from_the_table_is_dropped_only_after_a_while():
    view = InstanceTable()
    view.apply(an_instance(), 0.0)
    view.restore({}, 60.0)
    assert "i-1" in view.by_id, "a store that was down may come back empty"
    view.restore({}, 70.0)
    assert "i-1" in view.by_id
    view.restore({}, 76.0)
    assert view.by_id == {} and view.of("m") == {} and view.model_keys == []


def test_a_row_that_stays_behind_is_right_in_the_end():
    """A node was given up while neither bus nor store took it: its instance's failure went unheard."""
    view, row = InstanceTable(), an_instance(revision=3)
    view.restore({"i-1": row}, 0.0)
    view.apply(an_instance(state=InstanceState.FAILED, revision=4), 1.0)
    assert view.restore({"i-1": row}, 2.0) == []
    assert view.restore({"i-1": row}, 16.0) == []
    assert view.restore({"i-1": row}, 18.0) == [row]
    assert view.by_id["i-1"] == row and view.of("m") == {"i-1": row}


def test_restore_reports_only_what_changed():
    view = InstanceTable()
    assert view.restore({"i-1": an_instance()}, 0.0) == [an_instance()]
    assert view.restore({"i-1": an_instance()}, 1.0) == []


def test_a_repetition_is_no_news_and_two_writers_may_count_to_the_same_revision():
    table, row = InstanceTable(), an_instance(revision=3)
    assert table.apply(row, 0.0)
    assert not table.apply(row, 1.0) and not table.apply(an_instance(revision=3), 1.0)
    given_up = an_instance(state=InstanceState.FAILED, revision=3)
    assert table.apply(given_up, 2.0) and table.by_id == {"i-1": given_up}
    assert table.restore({"i-1": row}, 3.0) == [row], "the store has what was written last"
    assert not table.apply(an_instance(revision=2), 4.0)


def test_what_speaks_of_a_missing_row_keeps_it():
    table = InstanceTable()
    table.apply(an_instance(), 0.0)
    table.restore({}, 1.0)
    table.apply(an_instance(), ABSENT_S)
    table.restore({}, 1.0 + ABSENT_S + 1)
    assert "i-1" in table.by_id
    table.restore({}, 2 * ABSENT_S + 1)
    assert table.by_id == {}


def test_what_is_gone_does_not_come_back_after_its_row_has_left():
    gone = an_instance(state=InstanceState.STOPPED, revision=5)
    shown, routed = InstanceTable(), InstanceTable(keeps_gone=False)
    for table in (shown, routed):
        table.apply(an_instance(revision=4), 0.0)
        assert table.apply(gone, 0.0) and table.living("m") == {}
    assert (shown.of("m"), routed.of("m")) == ({"i-1": gone}, {})
    for now_s in (0.0, ABSENT_S + 1):
        shown.restore({}, now_s)
    for table in (shown, routed):
        assert not table.apply(gone, 99.0) and not table.apply(an_instance(revision=4), 99.0)
        assert table.by_id == {}
        assert table.apply(an_instance(revision=6), 99.0)
    for number in range(NUM_TOMBSTONES + 9):
        routed.apply(an_instance(f"x-{number}", state=InstanceState.STOPPED), 99.0)
    assert len(routed._tombstones) == NUM_TOMBSTONES


def test_a_copy_is_believed_until_the_first_reading_and_what_facts_say_longer():
    models, instances = ModelTable(), InstanceTable()
    for key in ("a", "b", "c"):
        models.apply(a_model(key), 0.0)
        instances.apply(an_instance(key, key), 0.0)
    for table in (models, instances):
        table.doubt()
    instances.apply(an_instance("b", "b", revision=2), 1.0)
    models.apply(a_model("b", revision=2), 1.0)
    assert [m.key for m in models.drop_absent({"c": a_model("c")}, 2.0)] == ["a"]
    assert [i.instance_id for i in instances.drop_absent({"c": an_instance("c", "c")}, 2.0)] == ["a"]


def test_models_are_found_by_name_before_alias_and_survive_an_emptied_store():
    table = ModelTable()
    for name, aliases in (("b", ("x", "a")), ("A", ("x",)), ("c", ())):
        table.apply(a_model(name, aliases=aliases), 0.0)
    for name, key in {"a": "a", "A": "a", "b": "b", "c": "c", "x": "a"}.items():
        assert table.lookup(name) is find_model(table.by_id, name) is table.by_id[key]
    assert table.lookup("y") is None
    with pytest.raises(ModelNotFound, match="no model 'y' is deployed"):
        find_model(table.by_id, "y")
    for now_s in (0.0, 100.0):
        assert table.drop_absent({}, now_s) == []
    rest = {"b": table.by_id["b"]}
    assert table.drop_absent(rest, 200.0) == []
    assert {model.key for model in table.drop_absent(rest, 200.0 + ABSENT_S + 1)} == {"a", "c"}
    assert table.lookup("x") == table.by_id["b"] == table.lookup("a"), "its aliases are free again"
    assert table.forget("b") and not table.forget("b") and table.lookup("b") is None


def test_a_node_lives_while_its_revision_moves_whatever_its_clock_says():
    view = NodeTable()
    view.apply(a_node(revision=1, heartbeat_at=-1e9), 0.0)
    assert view.expire(NODE_LEASE_S) == [] and view.is_alive("node-1", NODE_LEASE_S)
    assert not view.apply(a_node(revision=1, heartbeat_at=1e9), 7.5), "a repeated row is no sign of life"
    assert not view.is_alive("node-1", 8.5) and [n.node_id for n in view.expire(8.5)] == ["node-1"]
    assert view.by_id == {} and view.moved_at("node-1") == NEVER
    assert view.apply(a_node(revision=1), 9.0) and view.apply(a_node(revision=2), 10.0)
    assert view.moved_at("node-1") == 10.0 and view.expire(18.0) == []


def test_the_time_without_a_row_counts_from_the_first_reading_that_missed_it():
    table = InstanceTable()
    table.apply(an_instance(), 0.0)
    for now_s, is_kept in ((1.0, True), (1.0 + ABSENT_S, True), (1.5 + ABSENT_S, False)):
        table.restore({}, now_s)
        assert ("i-1" in table.by_id) is is_kept
    table.apply(an_instance(), 20.0)
    table.restore({}, 21.0)
    table.restore({"i-1": an_instance()}, 22.0)
    table.restore({}, 22.5 + ABSENT_S)
    assert "i-1" in table.by_id, "a reading in between had it"


def test_a_model_that_the_store_has_in_an_older_revision_stays():
    table = ModelTable()
    table.apply(a_model(revision=2), 0.0)
    for now_s in (1.0, 2.0 + ABSENT_S, 99.0):
        assert table.drop_absent({"m": a_model()}, now_s) == []
    assert table.by_id == {"m": a_model(revision=2)}


def test_of_a_fleet_only_the_living_are_kept_and_shown():
    tables = FleetTables()
    rows: dict[InstanceState, dict[str, Any]] = {
        InstanceState.READY: {"url": "http://e:1"},
        InstanceState.LOADING: {},
        InstanceState.STARTING: {"replica": True},
        InstanceState.PREWARMED: {},
        InstanceState.STOPPED: {},
    }
    for state, fields in rows.items():
        tables.instance_table.apply(an_instance(state.value, state=state, **fields), 0.0)
    assert tables.of("m").keys() == tables.instances.keys() == {state.value for state in rows} - {"stopped"}
    assert [row.instance_id for row in tables.ready("m")] == ["ready"]
    assert [row.instance_id for row in tables.coming("m")] == ["loading"]
    assert (tables.temperature("m"), tables.temperature("n")) == (Temperature.HOT, Temperature.COLD)


def test_demand_is_summed_over_routers_and_a_future_clock_is_bounded():
    view = Demand()
    one = ModelLoad(num_waiting=1, num_in_flight=2, last_active_at=1e12, in_flight_by_instance={"i": 2})
    two = ModelLoad(num_in_flight=1, in_flight_by_instance={"i": 1})
    view.apply(RouterLoadReported(router_id="a", loads={"m": one}), 10.0)
    view.apply(RouterLoadReported(router_id="b", loads={"m": two}), 10.0)
    load = view.of("m")
    assert (load.num_waiting, load.num_in_flight, load.in_flight_by_instance) == (1, 3, {"i": 3})
    assert load.last_active_at == 10.0
    assert view.is_fresh(12.0) and not view.is_fresh(13.5)
    view.expire(50.0)
    assert view.of("m").num_in_flight == 0


def test_arrivals_of_late_are_counted_over_routers_and_a_router_that_begins_anew_takes_none_back():
    view = Demand()

    def told(router_id, num, now_s):
        view.apply(RouterLoadReported(router_id=router_id, loads={"m": ModelLoad(num_arrived=num)}), now_s)

    told("r-1", 50, 1.0)
    assert view.arrived("m", 0.0) == 0, "what was before it spoke is not of late"
    told("r-1", 53, 2.0)
    told("r-2", 7, 2.0)
    told("r-2", 8, 3.0)
    assert (view.arrived("m", 1.5), view.arrived("m", 2.5), view.arrived("other", 0.0)) == (4, 1, 0)
    told("r-1", 2, 4.0)
    assert view.arrived("m", 1.5) == 4
    told("r-1", 3, 13.5)
    assert view.arrived("m", 0.0) == 1, "longer ago than is kept"


def test_what_waits_is_known_by_the_newest_word_of_each_router():
    view = Demand()

    def waits(num, sent_at, router_id="a"):
        fact = RequestWaiting(
            model_key="m", request_id="r", router_id=router_id, num_waiting=num, waiting_since=0.0, deadline_at=60.0
        )
        return view.wait(fact, sent_at, sent_at)

    def reports(sent_at, *, part=0, num_parts=1, **loads):
        report = RouterLoadReported(router_id="a", loads=loads, part=part, num_parts=num_parts)
        view.apply(report, sent_at, sent_at)
        return view.of("m").num_waiting

    assert waits(3, 1.0) and waits(2, 1.0, "b")
    assert view.of("m").num_waiting == 5, "nobody has reported yet"
    assert reports(2.0, m=ModelLoad(num_waiting=1)) == 3, "its report has replaced what a said, and not what b said"
    assert not waits(9, 1.5) and view.of("m").num_waiting == 3
    assert waits(4, 2.5) and view.of("m").num_waiting == 6
    assert reports(3.0, part=0, num_parts=2, other=ModelLoad()) == 6, "a part that does not name the model"
    assert reports(3.1, num_parts=0) == 3, "a report of changes names every model that holds something"
    view.expire(5.0)
    assert view.of("m").num_waiting == 1, "b has been silent"


def test_invented_instances_are_bounded_and_displace_none_that_the_store_has():
    table, stored = InstanceTable(), {name: an_instance(name) for name in ("i-1", "i-2")}
    table.restore(stored, 0.0)
    for number in range(MAX_UNSTORED + 1):
        assert table.apply(an_instance(f"invented-{number}"), 1.0) == (number < MAX_UNSTORED)
    assert table.apply(an_instance("i-1", state=InstanceState.DRAINING, revision=2), 1.0), "a known one is news"
    stored["i-3"] = an_instance("i-3")
    assert not table.apply(stored["i-3"], 1.5)
    assert table.restore(stored, 2.0) == [stored["i-3"]]
    table.restore(stored, 2.0 + ABSENT_S)
    table.restore(stored, 3.0 + ABSENT_S)
    assert table.by_id.keys() == stored.keys() and table.apply(an_instance("i-4"), 20.0)


def test_invented_nodes_are_bounded_and_displace_none_that_the_store_has():
    table, mine = NodeTable(), {"node-1": a_node("node-1", revision=1)}
    for number in range(MAX_UNSTORED + 1):
        assert table.apply(a_node(f"invented-{number}", revision=1), 0.0) == (number < MAX_UNSTORED)
    assert not table.apply(mine["node-1"], 0.0)
    table.unstored.read(mine)
    assert table.apply(mine["node-1"], 1.0) and len(table.unstored.lacked) == MAX_UNSTORED
    table.expire(NODE_LEASE_S + 0.5)
    assert set(table.by_id) == {"node-1"} and table.apply(a_node("node-2", revision=1), 9.0)
