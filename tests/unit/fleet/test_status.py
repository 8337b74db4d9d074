"""A model's status and targets: router, autoscaler, console and CLI agree."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from glowplug.cli.views import model_row as cli_row
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.router.controller import RouterController
from glowplug.domain.errors import Conflict
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Rung, Temperature, WeightsRef
from glowplug.fleet.start_times import StartKind
from glowplug.fleet.status import (
    ModelState,
    StartEstimates,
    check_nowhere_else,
    is_as_near,
    is_target,
    lacks_one_asleep,
    rung_of,
)
from glowplug.policies.registry import choose
from glowplug.services.autoscaler.main import ModelCollector
from glowplug.services.autoscaler.main import model_row as rest_row
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.services.console.fleet_view import ShownFleet
from tests.fleet_builder import a_model, an_instance

S, T, M = InstanceState, Temperature, ModelState
SERVING, LATER_STAGE, REPLICA = {}, {"part_of": "first", "num_stages": 2}, {"replica": True}
KINDS = {"serving": SERVING, "first stage": {"num_stages": 2}, "later stage": LATER_STAGE, "replica": REPLICA}

# An instance that serves (whole, or a pipeline's first stage); the others only make a model warm.
OF_SERVING = {
    S.STARTING: (T.COLD, M.STARTING),
    S.LOADING: (T.COLD, M.LOADING),
    S.READY: (T.HOT, M.READY),
    S.DRAINING: (T.COLD, M.DRAINING),
    S.STOPPED: (T.COLD, M.COLD),
    S.SWAPPED_OUT: (T.WARM, M.ASLEEP),
    S.PREWARMED: (T.WARM, M.PREWARMED),
}
SUMMARY = {
    M.READY: "hot",
    M.LOADING: "starting",
    M.STARTING: "starting",
    M.DRAINING: "draining",
    M.PREWARMED: "warm",
    M.ASLEEP: "warm",
}
BEST_FIRST = (M.READY, M.LOADING, M.STARTING, M.DRAINING, M.PREWARMED, M.ASLEEP, M.COLD)
CASES = [(kind, state) for kind in KINDS for state in S if state is not S.FAILED]  # failures are below


def row_of(kind: str, state: InstanceState, instance_id: str = "i-1") -> Instance:
    return an_instance(instance_id, state=state, url="http://e:1", **KINDS[kind])


def expected(kind: str, state: InstanceState) -> tuple[Temperature, ModelState]:
    if kind in ("serving", "first stage") or state.is_dormant:
        return OF_SERVING[state]
    return T.COLD, M.COLD


def answers(rows: Mapping[str, Instance]) -> dict[str, object]:
    model = a_model()
    router, view = RouterController(), ShownFleet()
    autoscaler = AutoscalerController(choose("scaling", "reactive"), "reactive", 1)
    for reader in (router, view, autoscaler):
        reader.restore("models", {"m": model}, 0.0)
        reader.restore("instances", dict(rows), 0.0)
    registry = CollectorRegistry()
    registry.register(ModelCollector(lambda: autoscaler))
    [counted] = [t for t in T if registry.get_sample_value("glowplug_models", {"temperature": t.value})]
    [seen] = (row.joined for row in view.snapshot(0.0).models)
    shown = rest_row(autoscaler, ModelWatch(Path(), 1.0), model)
    return {
        "router": router.fleet.temperature("m"),
        "autoscaler's metrics": counted,
        "console": T(seen.temperature),
        "console's state": M(seen.state),
        "autoscaler's REST": shown["state"],
        "glowplug models": cli_row(shown)[2],
        "router's targets": {i.instance_id for i in router.fleet.ready("m")},
        "console's ready ones": seen.num_ready,
    }


def test_what_people_are_shown_is_a_rung_or_the_state_itself() -> None:
    assert {state.value: state.word for state in S if state.word != state} == {"swapped_out": "asleep"}
    assert S.SWAPPED_OUT.word == M.ASLEEP and S.PREWARMED.word == M.PREWARMED
    asleep = row_of("serving", S.SWAPPED_OUT)
    with pytest.raises(Conflict, match="i-1 is asleep on "):
        check_nowhere_else(Rung.ASLEEP, "elsewhere", [asleep])


def check(rows: Mapping[str, Instance], temperature: Temperature, state: ModelState) -> None:
    targets = {key for key, row in rows.items() if row.state is S.READY and not (row.replica or row.part_of)}
    assert answers(rows) == {
        "router": temperature,
        "autoscaler's metrics": temperature,
        "console": temperature,
        "console's state": state,
        "autoscaler's REST": SUMMARY.get(state, "cold"),
        "glowplug models": state.value,
        "router's targets": targets,
        "console's ready ones": len(targets),
    }


def test_without_an_instance_a_model_is_cold() -> None:
    check({}, T.COLD, M.COLD)


@pytest.mark.parametrize(("kind", "state"), CASES)
def test_one_instance_is_the_same_to_everybody(kind: str, state: InstanceState) -> None:
    check({"i-1": row_of(kind, state)}, *expected(kind, state))


@pytest.mark.parametrize("first", CASES)
def test_of_two_instances_the_better_one_counts(first: tuple[str, InstanceState]) -> None:
    for second in CASES[CASES.index(first) + 1 :]:
        (one_warmth, one), (other_warmth, other) = expected(*first), expected(*second)
        warmth = min(one_warmth, other_warmth, key=[T.HOT, T.WARM, T.COLD].index)
        rows = {"i-1": row_of(*first), "i-2": row_of(*second, "i-2")}
        check(rows, warmth, min(one, other, key=BEST_FIRST.index))


def test_requests_are_sent_to_ready_instances_that_have_an_address() -> None:
    assert is_target(row_of("first stage", S.READY))
    assert not is_target(an_instance(state=S.READY, url=""))
    assert [i for i in itertools.starmap(row_of, CASES) if is_target(i)] == [
        row_of(kind, S.READY) for kind in ("serving", "first stage")
    ]


def test_a_model_that_failed_says_so_until_something_is_there_or_waits() -> None:
    view = ShownFleet()
    view.restore("models", {"m": a_model()}, 0.0)
    view.restore("instances", {"i-1": an_instance(state=S.FAILED, reason="no weights")}, 0.0)
    assert view.snapshot(0.0).models[0].joined.state == M.FAILED
    view.restore("instances", {"i-2": row_of("replica", S.PREWARMED, "i-2")}, 0.0)
    assert view.snapshot(0.0).models[0].joined.state == M.PREWARMED


def test_the_time_to_ready_counts_from_the_first_instance_that_will_serve() -> None:
    estimates, model = StartEstimates(default_s=5.0), a_model(engine="nobody knows it")
    coming = an_instance(state=S.LOADING, created_at=10.0, predicted_s=4.0)
    later = an_instance("i-2", state=S.LOADING, created_at=0.0, predicted_s=4.0, **LATER_STAGE)
    assert estimates.left_s(model, [], 11.0) == 5.0 == estimates.left_s(model, [later], 11.0)
    assert estimates.left_s(model, [coming, later], 11.0) == 3.0
    assert estimates.left_s(model, [coming], 20.0) == estimates.overdue_s
    assert estimates.left_s(model, [coming, replace(coming, predicted_s=1.0)], 10.0) == 1.0
    assert estimates.left_s(model, [replace(coming, predicted_s=0.0)], 12.0) == 3.0, "by the default"
    assert estimates.left_s(model, [coming, row_of("serving", S.READY)], 11.0) == 0.0


@pytest.mark.parametrize(
    ("kind", "state", "rung", "is_near"),
    [
        ("serving", S.READY, Rung.READY, (True, True, True, True)),
        ("serving", S.LOADING, Rung.READY, (True, True, True, True)),
        ("serving", S.DRAINING, Rung.READY, (False,) * 4),
        ("serving", S.STOPPED, None, (False,) * 4),
        ("serving", S.FAILED, None, (False,) * 4),
        ("serving", S.SWAPPED_OUT, Rung.ASLEEP, (True, True, False, False)),
        ("replica", S.SWAPPED_OUT, Rung.ASLEEP, (True, True, False, False)),
        ("serving", S.PREWARMED, Rung.PREWARMED, (True, True, True, False)),
        ("replica", S.PREWARMED, Rung.PREWARMED, (True, True, True, False)),
        ("replica", S.LOADING, Rung.PREWARMED, (False,) * 4),
        ("later stage", S.READY, Rung.READY, (False,) * 4),
    ],
)
def test_a_copy_is_as_near_as_its_rung_unless_it_leaves_or_is_not_there_yet(
    kind: str, state: InstanceState, rung: Rung | None, is_near: tuple[bool, ...]
) -> None:
    row = row_of(kind, state)
    rungs = (Rung.HOST, Rung.ASLEEP, Rung.PREWARMED, Rung.READY)
    assert (rung_of(row), tuple(is_as_near(row, to) for to in rungs)) == (rung, is_near)


def test_a_copy_is_refused_only_where_all_that_are_as_near_are_elsewhere() -> None:
    here, there = row_of("serving", S.READY), row_of("serving", S.SWAPPED_OUT, "i-2")
    there = replace(there, workers=tuple(replace(w, node_id="node-2") for w in there.workers))
    check_nowhere_else(Rung.ASLEEP, "node-1", [there, here])
    check_nowhere_else(Rung.ASLEEP, "", [there])
    check_nowhere_else(Rung.PREWARMED, "node-1", [there])
    check_nowhere_else(Rung.ASLEEP, "node-1", [])
    with pytest.raises(Conflict):
        check_nowhere_else(Rung.ASLEEP, "node-1", [there])


def test_a_sleeping_copy_is_lacking_where_one_is_kept_and_none_sleeps() -> None:
    model = a_model(asleep=True)
    asleep, ready = row_of("serving", S.SWAPPED_OUT), row_of("serving", S.READY, "i-2")
    assert lacks_one_asleep(model, []) and lacks_one_asleep(model, [ready])
    assert not lacks_one_asleep(model, [asleep, ready])
    assert not lacks_one_asleep(replace(model, suspended=True), []) and not lacks_one_asleep(a_model(), [])


def test_a_start_is_told_by_the_best_copy_and_without_one_like_the_last_start_from_nothing() -> None:
    estimates, model = StartEstimates(), a_model(mib=10_000)
    prewarmed, asleep = row_of("replica", S.PREWARMED), row_of("serving", S.SWAPPED_OUT)

    def is_by(kind: StartKind, *rows: Instance) -> bool:
        return estimates.whole_s(model, rows) == estimates.times.predict(model, kind).whole_s

    assert is_by(StartKind.GROWTH, asleep, prewarmed) and is_by(StartKind.WAKE, asleep)
    assert is_by(StartKind.COLD) and not is_by(StartKind.CACHED) and not is_by(StartKind.WAKE)
    ready = an_instance(start_kind="disk", created_at=1.0, ready_at=9.0)
    estimates.times.learn(ready, model)
    estimates.times.learn(replace(ready, instance_id="i-2", start_kind="wake", ready_at=10.0), model)
    assert is_by(StartKind.DISK) and not is_by(StartKind.COLD)
    without = a_model(mib=10_000, weights=WeightsRef(uri=""))
    fresh = StartEstimates()
    assert fresh.whole_s(without, ()) == fresh.times.predict(without, StartKind.CACHED).whole_s
    assert estimates.whole_s(None, ()) == estimates.left_s(None, [], 0.0) == 5.0
