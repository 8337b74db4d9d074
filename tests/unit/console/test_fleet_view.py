"""The fleet view under late, repeated, reordered or missing facts, and its economies for large fleets."""

import dataclasses
from typing import Any, NamedTuple

import pytest

from glowplug.controllers.operator import Cordon
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import (
    DecisionMade,
    InstanceFailed,
    InstanceReady,
    InstanceStopped,
    ModelDeployed,
    ModelUndeployed,
    NodeBeat,
    NodeLeft,
    RouterLoadReported,
    WeightsFetched,
    WeightsProgressed,
)
from glowplug.fleet.demand import LOAD_STALE_S
from glowplug.fleet.tables import ABSENT_S, NODE_LEASE_S
from glowplug.services.console.fleet_rows import ModelStatus
from glowplug.services.console.fleet_view import (
    CORDONS,
    DECISIONS_SHOWN,
    FORGOTTEN_S,
    STALLED_S,
    Fetches,
    Loads,
    RowTable,
    ShownFleet,
)
from tests import console_story as story
from tests.fleet_builder import a_model, an_instance

NOW = 5_000.0


@pytest.fixture
def view() -> ShownFleet:
    return story.view(NOW)


def take(view: ShownFleet, payload: Any, at: float = NOW) -> None:
    view.take(story.fact(payload, at), at)


def joined(view: ShownFleet, key: str, now_s: float = NOW) -> ModelStatus:
    return next(row.joined for row in view.snapshot(now_s).models if row.value.key == key)


def lost_since(view: ShownFleet, now_s: float) -> dict[str, float]:
    return {row.value.node_id: row.joined.lost_since for row in view.snapshot(now_s).nodes}


def test_an_instance_is_outdated_until_its_model_is_declared_as_before(view: ShownFleet) -> None:
    def outdated() -> bool:
        rows = view.snapshot(NOW).instances
        return next(row.joined.outdated for row in rows if row.value.instance_id == "i-new")

    first = a_model("anew", system_prompt="Be brief.", revision=10)
    other = dataclasses.replace(first, system_prompt="Be long.", revision=11)
    take(view, ModelDeployed(model=first))
    runs = an_instance("i-new", "anew", model_revision=10, engine_digest=first.engine_digest)
    take(view, InstanceReady(instance=runs))
    assert not outdated()
    take(view, ModelDeployed(model=other))
    assert outdated()
    take(view, ModelDeployed(model=dataclasses.replace(first, revision=12)))
    assert not outdated()


def test_weights_are_found_by_their_whole_address_which_is_not_shown(view: ShownFleet) -> None:
    weights = WeightsRef(uri="https://models.example/a.gguf?token=1")
    take(view, ModelDeployed(model=a_model("anew", weights=weights)))
    assert view.digest_of("anew") == weights.digest != view.models["anew"].weights.digest


def test_models_say_what_they_are(view: ShownFleet) -> None:
    states = {row.value.key: (row.joined.temperature, row.joined.state) for row in view.snapshot(NOW).models}
    assert states == {
        "smol-chat": ("hot", "ready"),
        "smol-poet": ("hot", "ready"),
        "big-emulated": ("hot", "ready"),
        "smol-coder": ("cold", "loading"),
        "smol-tutor": ("cold", "cold"),
        "broken": ("cold", "failed"),
    }
    chat, coder = joined(view, "smol-chat"), joined(view, "smol-coder")
    assert (chat.eta_s, chat.num_in_flight, chat.instances) == (0.0, 3, ("i-71c2",))
    start = chat.last_cold_start
    assert start is not None and round(start.ended_at - start.began_at, 3) == 1.734
    assert [phase.name for phase in start.instance.phases] == ["decide", "fetch", "launch", "load", "warmup"]
    assert coder.num_waiting == 7 and coder.eta_s > 0
    failure = joined(view, "broken").failure
    assert failure is not None and "sha256" in failure.reason
    assert joined(view, "big-emulated").emulated and not chat.emulated


def test_an_older_revision_never_wins_and_the_dead_stay_dead(view: ShownFleet) -> None:
    late = story.instance("i-71c2", "smol-chat", "node-1", InstanceState.LOADING, NOW, revision=4)
    take(view, InstanceReady(instance=late))
    assert joined(view, "smol-chat").state == "ready"
    gone = story.instance("i-71c2", "smol-chat", "node-1", InstanceState.STOPPED, NOW, revision=9)
    take(view, InstanceStopped(instance=gone))
    again = story.instance("i-71c2", "smol-chat", "node-1", InstanceState.READY, NOW, revision=8)
    view.restore("instances", {"i-71c2": again}, NOW)
    assert joined(view, "smol-chat").state == "cold"
    old = dataclasses.replace(view.models["smol-chat"], name="older", revision=0)
    take(view, ModelDeployed(model=old))
    assert view.models["smol-chat"].name == "smol-chat"


def test_a_start_after_a_failure_clears_it(view: ShownFleet) -> None:
    ready = story.instance("i-new", "broken", "node-3", InstanceState.READY, NOW)
    take(view, InstanceReady(instance=ready))
    assert joined(view, "broken").failure is None
    failed = story.instance("i-x", "broken", "node-3", InstanceState.FAILED, NOW + 5, reason="killed")
    take(view, InstanceFailed(instance=failed), NOW + 5)
    failure = joined(view, "broken").failure
    assert failure is not None and failure.reason == "killed"
    stopped = story.instance("i-new", "broken", "node-3", InstanceState.STOPPED, NOW + 9, revision=7)
    take(view, InstanceStopped(instance=stopped), NOW + 9)
    assert joined(view, "broken").state == "cold"


def test_a_silent_node_is_lost_and_comes_back(view: ShownFleet) -> None:
    assert not any(lost_since(view, NOW).values())
    later = NOW + NODE_LEASE_S + 1
    assert [*lost_since(view, later).values()] == [NOW, NOW, NOW]
    for event in story.beats(later, revision=2):
        view.take(event, later)
    assert not any(lost_since(view, later).values())
    take(view, NodeLeft(node_id="node-2", reason="stopped"), later)
    assert [*lost_since(view, later).values()] == [0, later, 0]


def test_a_node_whose_row_the_store_lost_stays_while_it_beats_and_no_longer(view: ShownFleet) -> None:
    later = NOW + ABSENT_S
    for event in story.beats(later, revision=2)[:2]:
        view.take(event, later)
    view.restore("nodes", {"node-1": story.node("node-1", NOW, ())}, later + 1)
    assert lost_since(view, later + 1) == {"node-1": 0, "node-2": 0}, "node-3 has been silent for too long"


def test_a_console_that_receives_nothing_does_not_call_nodes_lost(view: ShownFleet) -> None:
    for name in ("bus", "store"):
        view.source(name, False, NOW + 1)
    assert not any(lost_since(view, NOW + 600).values())
    assert view.snapshot(NOW + 600).sources["bus"].stale_since == NOW + 1


def test_values_are_sent_as_they_are_and_without_secrets(view: ShownFleet) -> None:
    beats = {event.data.node.node_id: event.data.node for event in story.beats(NOW + 1, revision=2)}
    for node in beats.values():
        take(view, NodeBeat(node=node), NOW + 1)
    assert {row.value.node_id: row.value for row in view.snapshot(NOW + 1).nodes} == beats, "also the latest heartbeat"
    assert {row.value.instance_id: row.value for row in view.snapshot(NOW).instances} == view.instances
    weights = WeightsRef(uri="https://user:pass@models.example/a.gguf?X-Amz-Signature=abc")
    secret = story.model("chat", "chat", 10, weights=weights, system_prompt="Be terse.")
    take(view, ModelDeployed(model=secret))
    [shown] = (row.value for row in view.snapshot(NOW).models if row.value.key == "chat")
    assert (shown.weights.uri, shown.system_prompt) == ("https://models.example/a.gguf", "9 characters")
    assert dataclasses.replace(shown, weights=weights, system_prompt="Be terse.") == secret


def test_loads_of_several_routers_add_up_and_expire(view: ShownFleet) -> None:
    take(view, RouterLoadReported(router_id="router-2", loads={"smol-coder": ModelLoad(num_waiting=2)}), NOW + 1)
    assert joined(view, "smol-coder", NOW + 1).num_waiting == 9
    assert joined(view, "smol-coder", NOW + LOAD_STALE_S + 0.5).num_waiting == 2
    assert joined(view, "smol-coder", NOW + LOAD_STALE_S + 2).num_waiting == 0


def test_rows_the_store_lost_leave_after_a_grace_time(view: ShownFleet) -> None:
    view.restore("models", {}, NOW)
    assert len(view.models) == 6
    for after_s in (0.0, ABSENT_S, ABSENT_S + 1):
        assert len(view.models) == 6
        view.restore("models", {"smol-chat": view.models["smol-chat"]}, NOW + after_s)
    assert list(view.models) == ["smol-chat"]
    take(view, ModelUndeployed(model_key="smol-chat"))
    assert view.models == {}


def test_decisions_are_bounded_and_newest_first(view: ShownFleet) -> None:
    known = story.decisions(NOW)
    view.decisions.restore(known)
    assert [row.value.decision_id for row in view.snapshot(NOW).decisions] == [f"d-{i}" for i in (5, 4, 3, 2, 1, 0)]
    for i in range(3 * DECISIONS_SHOWN):
        take(view, DecisionMade(decision=dataclasses.replace(known[0], decision_id=f"e-{i}")))
    decisions = view.snapshot(NOW).decisions
    assert len(decisions) == DECISIONS_SHOWN and decisions[0].value.decision_id == f"e-{3 * DECISIONS_SHOWN - 1}"


class Row(NamedTuple):
    key: str
    value: int


def test_a_row_is_made_once_however_often_it_was_touched_and_reported_only_when_other() -> None:
    values, made = {"a": 1, "b": 2}, []

    def make(key: str, _: float) -> Row | None:
        made.append(key)
        return Row(key, values[key]) if key in values else None

    table = RowTable(make)
    table.touch(["a", "b", "a"])
    table.touch(["a"])
    table.refresh(NOW)
    assert sorted(made) == ["a", "b"] and table.take_changed() == {"a": None, "b": None}
    table.touch(["a"])
    table.refresh(NOW)
    assert table.take_changed() == {}, "touched, but as it was"
    del values["a"]
    table.touch(["a", "never-was"])
    table.refresh(NOW)
    assert table.take_changed() == {"a": Row("a", 1)} and set(table.rows) == {"b"}


def test_loads_name_what_changed_and_forget_silent_routers() -> None:
    loads = Loads({"m"})
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
    assert fetches.to("node-1")[0].bytes_per_s == 0, "one report is no rate"
    fetches.progress(progressed(300), NOW + 1)
    fetches.progress(progressed(300 + 400), NOW + 2)
    assert fetches.to("node-1")[0].bytes_per_s == 300, "the mean of 200 and 400"
    assert fetches.refresh(NOW + 2 + STALLED_S / 2) == set()
    assert fetches.refresh(NOW + 2 + STALLED_S) == {"node-1"}
    assert fetches.to("node-1")[0].bytes_per_s == 0
    fetches.progress(progressed(50), NOW + 6)
    assert fetches.to("node-1")[0].report.num_bytes_done == 50, "begun again"
    assert fetches.refresh(NOW + 6 + FORGOTTEN_S) == {"node-1"}
    assert fetches.to("node-1") == ()


def test_a_fetch_that_ended_is_gone_at_once() -> None:
    fetches = Fetches()
    fetches.progress(progressed(1, "a"), NOW)
    fetches.progress(progressed(1, "b"), NOW)
    end = WeightsFetched(node_id="node-1", model_key="m", digest="a", num_bytes=1000, seconds=1.0, source="http")
    fetches.end(end)
    fetches.end(end)
    assert [fetch.report.digest for fetch in fetches.to("node-1")] == ["b"]


@pytest.fixture
def drawn(view: ShownFleet) -> ShownFleet:
    changed(view, NOW)
    return view


def changed(view: ShownFleet, now_s: float) -> tuple[set[str], set[str], set[str]]:
    view.refresh(now_s)
    models, instances, nodes = view.model_rows, view.instance_rows, view.node_rows
    return set(models.take_changed()), set(instances.take_changed()), set(nodes.take_changed())


def test_a_beat_that_says_nothing_new_changes_nothing(drawn: ShownFleet) -> None:
    for event in story.beats(NOW + 1, revision=2):
        drawn.take(event, NOW + 1)
    models, instances, nodes = changed(drawn, NOW + 1)
    assert (models, instances, nodes) == ({"smol-coder"}, set(), set()), "only what is left of the start under way"


def test_a_load_report_changes_the_models_and_instances_it_is_about(drawn: ShownFleet) -> None:
    loads = {"smol-chat": ModelLoad(num_in_flight=1, in_flight_by_instance={"i-71c2": 1})}
    take(drawn, RouterLoadReported(router_id="router-1", loads=loads))
    models, instances, nodes = changed(drawn, NOW)
    assert (models, instances, nodes) == ({"smol-chat", "smol-poet", "smol-coder"}, {"i-71c2", "i-0a9e"}, set())


def test_a_drained_node_shows_by_the_decision_before_its_row_is_read(drawn: ShownFleet) -> None:
    take(drawn, DecisionMade(decision=story.a_decision(99, "drain", node_id="node-1", chosen="drain")))
    assert changed(drawn, NOW)[2] == {"node-1"}
    assert drawn.node_rows.rows["node-1"].joined.cordoned
    drawn.restore(CORDONS, {"node-1": Cordon("node-1", True)}, NOW)
    assert changed(drawn, NOW)[2] == set()
    drawn.restore(CORDONS, {}, NOW)
    assert changed(drawn, NOW)[2] == {"node-1"} and not drawn.node_rows.rows["node-1"].joined.cordoned
