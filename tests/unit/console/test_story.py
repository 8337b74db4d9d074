"""The life of a request and of a start, from recorded events."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Spell, SpellName
from glowplug.events import Event
from glowplug.events.facts import (
    STAYS,
    DecisionMade,
    InstanceFailed,
    InstanceReady,
    InstanceStopped,
    InstanceSwappedOut,
    StreamMove,
    WeightsFetched,
    WeightsFetchFailed,
    WeightsPartFetched,
)
from glowplug.services.console.decisions import DecisionLog
from glowplug.services.console.stories import Stories
from glowplug.services.console.story import Span, tree
from glowplug.services.console.trace_api import Waterfall, waterfall
from tests import console_story as fleet

AT, SEED = 1000.0, 3
MOVE: dict[str, Any] = {"at": AT + 0.2, "until": AT + 0.5, "reason": "engine_lost", "message": "killed"}


class Kept:
    def __init__(self, *events: Event, num_kept: int = 100) -> None:
        self.decisions = DecisionLog()
        self.stories = Stories(num_kept, self.decisions, {"m": fleet.model("m", "the model", 10)})
        self.take(*events)

    def take(self, *events: Event) -> None:
        for event in events:
            self.decisions.take(event)
            self.stories.take(event)

    def rows(self, trace_id: str = fleet.trace_id(SEED)) -> dict[str, Span]:
        told = self.stories.get(trace_id)
        assert told is not None
        rows = self.stories.rows(told)
        assert len({row.span_id for row in rows}) == len(rows)
        return {row.name: row for row in rows}

    def drawn(self, trace_id: str = fleet.trace_id(SEED)) -> Waterfall:
        told = self.stories.get(trace_id)
        assert told is not None
        summary = self.stories.summary(told)
        assert summary is not None
        return waterfall(summary, self.stories.rows(told))


def asked(**changes: Any) -> list[Event]:
    given = {"dispatched_s": 0.1, "ttft_s": 0.15, **changes}
    return [fleet.told(fleet.finished("r", "m", AT, 1.0, **given), AT + 1.0, SEED)]


def started(**changes: Any) -> Instance:
    phases = (Phase(name=PhaseName.LOAD, started_at=AT + 1, ended_at=AT + 2),)
    given = {"phases": phases, "start_kind": "cold", "ready_at": AT + 2, **changes}
    return replace(fleet.instance("i-1", "m", "node-1", InstanceState.READY, AT), **given)


# requests


def test_a_cold_start_is_one_tree_in_order_of_time() -> None:
    rows = Kept(*fleet.cold_trace(SEED, AT, "m", "r")).drawn().rows
    assert [(row.depth, row.name) for row in rows] == [
        (0, "router.request"),
        (1, "router.hold"),
        (1, "autoscaler.scale"),
        (2, "placer.place"),
        (3, "agent.await_decision"),
        (3, "agent.start"),
        (4, "agent.await_weights"),
        (4, "engine.launch"),
        (4, "engine.load"),
        (4, "engine.warmup"),
        (3, "weights.fetch"),
        (1, "engine.generate"),
    ]


def test_phases_and_offsets_of_a_cold_start() -> None:
    drawn = Kept(*fleet.cold_trace(SEED, AT, "m", "r")).drawn()
    assert [phase.name for phase in drawn.phases] == ["decide", "fetch", "launch", "load", "warmup"]
    assert drawn.services[0] == "glowplug-router" and drawn.request_ids == ("r",)
    assert drawn.duration_s == pytest.approx(2.61) and drawn.rows[0].offset_s == 0.0
    fetch = drawn.phases[1]
    assert fetch.duration_s == pytest.approx(0.61) and fetch.predicted_s == pytest.approx(0.671)
    assert sum(stage.own_s for stage in drawn.stages) == pytest.approx(2.61)


def test_the_engine_was_given_the_id_of_its_row_and_the_client_is_above_the_request() -> None:
    rows = Kept(*asked(parent_span="c" * 16, dropped_tools=("mcp", "web_search"))).rows()
    assert rows["engine.generate"].span_id == fleet.traceparent(SEED)[36:52]
    assert rows["engine.generate"].parent_id == rows["router.request"].span_id
    assert rows["router.request"].parent_id == "c" * 16
    about = rows["router.request"].attributes
    assert (about["gen_ai.request.model"], about["gen_ai.operation.name"]) == ("the model", "chat")
    assert about["glowplug.dropped_tools"] == "mcp, web_search"
    (first,) = rows["engine.generate"].marks
    assert (first.name, first.at) == ("first token", AT + 0.15)


def test_the_same_events_give_the_same_ids() -> None:
    events = fleet.cold_trace(SEED, AT, "m", "r")
    assert Kept(*events).rows() == Kept(*events, *events).rows() == Kept(events[-1], *events[:-1]).rows()


def test_a_failed_request_has_its_error_and_one_that_waited_in_vain_no_engine() -> None:
    rows = Kept(*asked(status=502, error_code="engine_failed")).rows()
    assert {row.error for row in rows.values()} == {"engine_failed"}
    rows = Kept(*asked(dispatched_s=0.0, ttft_s=0.0, held=True, status=503, error_code="no_capacity")).rows()
    assert set(rows) == {"router.request", "router.hold"} and rows["router.hold"].error == "no_capacity"
    assert not Kept(*asked(status=499, error_code="client_left")).rows()["router.request"].error


def test_moves_of_a_stream_are_rows_and_what_cannot_leave_has_a_mark() -> None:
    moves = (
        StreamMove(**MOVE, num_tokens=4, from_instance="i-1", to_instance="i-2"),
        StreamMove(**{**MOVE, "reason": "drained", "outcome": "the engine closed"}, from_instance="i-2"),
        StreamMove(**{**MOVE, "outcome": STAYS, "message": "several answers were asked for"}),
    )
    told = Kept(*asked(moves=moves)).stories.get(fleet.trace_id(SEED))
    assert told is not None
    rows = Kept(*asked(moves=moves)).stories.rows(told)
    went, stayed = (row for row in rows if row.name == "router.continue")
    assert (went.started_at, went.ended_at) == (AT + 0.2, AT + 0.5)
    assert went.attributes["glowplug.tokens_before"] == 4 and went.attributes["glowplug.instance_id"] == "i-2"
    assert stayed.attributes["glowplug.continue_outcome"] == "it stayed: the engine closed"
    (mark,) = next(row for row in rows if row.name == "router.request").marks
    assert (mark.name, mark.attributes["glowplug.reason"]) == ("stays", "several answers were asked for")


def test_a_report_of_an_older_router_is_drawn_by_what_it_tells() -> None:
    rows = Kept(*asked(dispatched_s=0.0, queue_s=0.1, operation="")).rows()
    assert rows["engine.generate"].started_at == AT + 0.1


def test_an_unsampled_request_has_its_story_too() -> None:
    theirs = fleet.traceparent(SEED).removesuffix("01") + "00"
    event = fleet.fact(fleet.finished("r", "m", AT, 1.0, dispatched_s=0.1, parent_span=theirs[36:52]), AT, 1, theirs)
    other = fleet.fact(fleet.finished("q", "m", AT, 1.0, dispatched_s=0.1, parent_span=theirs[36:52]), AT, 2, theirs)
    kept = Kept(event, other)
    found = kept.stories.of_request("r")
    assert found is not None and not found.is_sampled
    assert len({row.span_id for row in kept.stories.rows(found)}) == 4, "its client's span is none of its own"
    untraced = Kept(fleet.fact(fleet.finished("r", "m", AT, 1.0), AT, 1))
    assert untraced.stories.of_request("r") is not None


# starts and what comes after them


def test_a_start_that_no_request_caused_has_a_trace_of_its_own_with_its_end() -> None:
    asleep = Spell(name=SpellName.SLEEP, started_at=AT + 6, ended_at=AT + 7, predicted_s=0.9, reason="idle")
    drained = replace(asleep, name=SpellName.DRAIN, started_at=AT + 5, ended_at=AT + 6)
    ended = started(spells=(drained, asleep), revision=9, state=InstanceState.SWAPPED_OUT)
    kept = Kept(fleet.fact(InstanceReady(instance=started()), AT), fleet.fact(InstanceSwappedOut(instance=ended), AT))
    (summary,) = kept.stories.newest()
    rows = kept.rows(summary.trace_id)
    assert set(rows) == {"agent.start", "engine.load", "agent.drain", "engine.sleep"}
    assert rows["engine.sleep"].attributes["glowplug.predicted_seconds"] == 0.9
    assert rows["engine.sleep"].service == "glowplug-engine" and summary.name == "agent.start" and summary.is_cold


def test_a_start_that_failed_says_why_and_one_under_way_is_not_told() -> None:
    coming = started(state=InstanceState.LOADING, start_kind="", ready_at=0.0)
    assert not list(Kept(fleet.fact(InstanceReady(instance=coming), AT)).stories.newest())
    failed = replace(coming, state=InstanceState.FAILED, reason="no memory", changed_at=AT + 3)
    kept = Kept(fleet.fact(InstanceFailed(instance=failed), AT))
    (summary,) = kept.stories.newest()
    row = kept.rows(summary.trace_id)["agent.start"]
    assert (row.error, row.ended_at, summary.num_errors) == ("no memory", AT + 3, 1)


@pytest.mark.parametrize(("kind", "does"), [("wake", "wake"), ("growth", "wake"), ("cold", "load")])
def test_a_wake_is_called_so(kind: str, does: str) -> None:
    kept = Kept(fleet.fact(InstanceReady(instance=started(start_kind=kind)), AT))
    assert f"engine.{does}" in kept.rows(next(kept.stories.newest()).trace_id)


def test_a_victims_drain_lies_below_the_decision_that_took_its_place() -> None:
    evict = fleet.a_decision(
        7, "evict", made_at=AT + 3, instance_id="i-2", chosen="i-1", traceparent=fleet.traceparent(SEED)
    )
    spell = Spell(
        name=SpellName.DRAIN, started_at=AT + 3, ended_at=AT + 4, reason="i-2", traceparent=fleet.traceparent(SEED)
    )
    gone = started(spells=(spell,), state=InstanceState.STOPPED, revision=9)
    kept = Kept(
        fleet.fact(InstanceReady(instance=started()), AT),
        fleet.told(DecisionMade(decision=evict), AT + 3, SEED),
        fleet.told(InstanceStopped(instance=gone), AT + 4, SEED),
    )
    rows = kept.rows()
    assert set(rows) == {"placer.evict", "agent.drain"}, "its start is another story"
    assert rows["agent.drain"].parent_id == rows["placer.evict"].span_id


def test_a_consolidation_has_its_waits_below_it_and_its_failure() -> None:
    phases = (
        Phase(name=PhaseName.FETCH, started_at=AT + 3, ended_at=AT + 4),
        Phase(name=PhaseName.LOAD, started_at=AT + 4, ended_at=AT + 5),
    )
    spell = Spell(name=SpellName.CONSOLIDATE, started_at=AT + 3, ended_at=AT + 5, phases=phases, error="no memory")
    staged = started(spells=(spell,), num_stages=2, part_of="i-0", revision=9)
    kept = Kept(fleet.fact(InstanceReady(instance=staged), AT))
    rows = kept.rows(next(kept.stories.newest()).trace_id)
    whole = rows["agent.consolidate"]
    assert whole.error == "no memory" and whole.attributes["glowplug.pipeline"] == "i-0"
    for name, service in (("agent.await_rest", "glowplug-agent"), ("engine.consolidate", "glowplug-engine")):
        assert rows[name].parent_id == whole.span_id and rows[name].service == service and not rows[name].phase


def test_the_stages_of_a_pipeline_and_their_fetches_lie_below_its_placement_and_stay_so() -> None:
    """Once it is whole its row no longer says that it was a stage."""
    about = {"model_key": "m", "traceparent": fleet.traceparent(SEED)}
    place = fleet.a_decision(7, "place", made_at=AT, instance_id="i-1", **about)
    first = started(num_stages=2, decision_id="d-7")
    later = replace(first, instance_id="i-1.1", part_of="i-1")
    part = WeightsPartFetched(
        node_id="node-2", model_key="m", digest="d", instance_id="i-1.1", num_bytes=9, seconds=0.5, source="http"
    )
    kept = Kept(
        fleet.told(DecisionMade(decision=place), AT, SEED),
        fleet.told(part, AT + 1, SEED),
        *(fleet.told(InstanceReady(instance=one), AT + 2, SEED) for one in (later, first)),
    )
    before = kept.rows()
    whole = fleet.a_decision(8, "scale", service="autoscaler", made_at=AT + 3, instance_id="i-1", chosen="whole")
    kept.decisions.restore([whole])  # the store's row lacks the trace of its event
    kept.take(fleet.told(DecisionMade(decision=whole), AT + 3, SEED))
    spell = Spell(name=SpellName.CONSOLIDATE, started_at=AT + 3, ended_at=AT + 5, traceparent=fleet.traceparent(SEED))
    kept.take(fleet.told(InstanceReady(instance=replace(first, num_stages=1, spells=(spell,), revision=9)), AT, SEED))
    rows = kept.rows()
    assert rows["agent.consolidate"].parent_id == rows["autoscaler.scale"].span_id
    assert {rows[name].parent_id for name in ("weights.fetch", "agent.start")} == {rows["placer.place"].span_id}
    assert rows["agent.start"] == before["agent.start"]
    assert rows["agent.start"].attributes["glowplug.pipeline"] == "i-1"
    drained = replace(spell, name=SpellName.DRAIN, started_at=AT + 5, reason="i-1 serves alone")
    left = replace(later, state=InstanceState.STOPPED, spells=(drained,), revision=9)
    kept.take(fleet.told(InstanceStopped(instance=left), AT + 5, SEED))
    assert kept.rows()["agent.drain"].parent_id == rows["agent.consolidate"].span_id
    found = kept.decisions.get("d-8")
    assert found is not None and found.traceparent == fleet.traceparent(SEED), "the trace's list of decisions has it"


@pytest.mark.parametrize(("node_id", "names"), [("node-1", "i-1"), ("node-2", None)])
def test_a_fetch_of_whole_weights_names_the_start_on_its_node(node_id: str, names: str | None) -> None:
    came = WeightsFetched(node_id=node_id, model_key="m", digest="d", num_bytes=9, seconds=0.5, source="http")
    place = DecisionMade(decision=fleet.a_decision(7, "place", made_at=AT, instance_id="i-1", model_key="m"))
    told = (place, InstanceReady(instance=started(decision_id="d-7")), came)
    kept = Kept(*(fleet.told(data, AT + 2, SEED) for data in told))
    assert kept.rows()["weights.fetch"].attributes.get("glowplug.instance_id") == names


def test_a_fetch_is_told_unless_the_weights_were_there() -> None:
    about: dict[str, Any] = {"node_id": "node-1", "model_key": "m", "digest": "d", "seconds": 2.0, "source": "http"}
    came = fleet.told(WeightsPartFetched(**about, num_bytes=9, num_retries=2, instance_id="i-1"), AT + 2, SEED)
    failed = fleet.told(WeightsFetchFailed(**about, code="gone", message="no such file"), AT + 2, SEED + 1)
    hit = fleet.told(WeightsFetched(**{**about, "source": "cache"}, num_bytes=9), AT + 2, SEED + 2)
    kept = Kept(came, failed, hit)
    row = kept.rows()["weights.fetch"]
    assert (row.started_at, row.ended_at, row.attributes["glowplug.retries"]) == (AT, AT + 2, 2)
    assert kept.rows(fleet.trace_id(SEED + 1))["weights.fetch"].error == "gone: no such file"
    assert kept.stories.get(fleet.trace_id(SEED + 2)) is None


# what is kept


def test_a_story_grows_and_its_summary_with_it() -> None:
    *decided, request = fleet.cold_trace(SEED, AT, "m", "r")
    kept = Kept(*decided)
    before = next(kept.stories.newest())
    assert before.name == "autoscaler.scale" and before.request_ids == ()
    kept.take(request)
    (after,) = kept.stories.newest()
    assert (after.name, after.request_ids, after.num_spans) == ("router.request", ("r",), 12)
    assert after.revision > before.revision and after.model == "m" and after.is_cold
    assert kept.stories.take_changed() == [after] and kept.stories.take_changed() == []


def test_many_warm_requests_displace_the_oldest_of_them_and_no_start() -> None:
    kept = Kept(*fleet.cold_trace(SEED, AT, "m", "r"), num_kept=5)
    for seed in range(20, 28):
        kept.take(*fleet.warm_trace(seed, AT + seed, "m", f"r-{seed}"))
    assert [line.request_ids for line in kept.stories.newest()] == [
        *((f"r-{seed}",) for seed in range(27, 22, -1)),
        ("r",),
    ]
    assert (len(kept.stories), kept.stories.num_evicted) == (6, 3)
    assert kept.stories.of_request("r-20") is None


def test_one_endless_trace_is_bounded() -> None:
    kept = Kept()
    for number in range(400):
        kept.take(fleet.told(fleet.finished(f"r-{number}", "m", AT + number, 1.0), AT + number, SEED))
    told = kept.stories.get(fleet.trace_id(SEED))
    assert told is not None and len(told.requests) == 256
    assert len(kept.drawn().request_ids) == 8


def row(own: int, parent: int, number: int) -> Span:
    return Span(
        span_id=f"{own:016x}", parent_id=f"{parent:016x}" if parent else "", name=f"s{own}", service="s", process="p",
        started_at=10.0 + number, ended_at=20.0 + number,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 35)), min_size=1, max_size=40, unique_by=lambda p: p[0]))
def test_every_row_is_drawn_exactly_once(parents: list[tuple[int, int]]) -> None:
    sorted_out = [(own, parent if parent < own else 0) for own, parent in parents]  # derived ids make no rings
    drawn = list(tree(row(own, parent, number) for number, (own, parent) in enumerate(sorted_out)))
    assert sorted(one.span_id for one, _, _ in drawn) == sorted(f"{own:016x}" for own, _ in sorted_out)
    depth_of = {one.span_id: depth for one, depth, _ in drawn}
    assert all(depth == depth_of.get(one.parent_id, -1) + 1 for one, depth, _ in drawn)
    assert sum(num_children for _, _, num_children in drawn) == sum(depth > 0 for _, depth, _ in drawn)


def test_a_child_that_starts_before_its_parent_still_lies_under_it() -> None:
    assert [(one.name, depth) for one, depth, _ in tree([row(2, 1, 0), row(1, 0, 1)])] == [("s1", 0), ("s2", 1)]
