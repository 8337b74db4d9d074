"""The union's learned plan outlives its autoscaler."""

import math
from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED, LearnedRow
from glowplug.controllers.effects import Effect, Remove, Save, Tick
from glowplug.events.facts import ModelUndeployed
from glowplug.policies.scaling import union
from glowplug.policies.scaling.port import learning
from glowplug.policies.scaling.union import UnionState
from tests.fleet_builder import a_model, an_event, an_instance
from tests.unit.controllers.autoscaler.rig import autoscaler, is_ready

ROW = LearnedRow(key="m", format="union/1", revision=4, figures={"m": 0.3, "raised_at": 50.0, "start_s": 12.0})


class Learner:
    """The union's policy, its plans off by `m`; `seen` is its last given state."""

    def __init__(self) -> None:
        self.m, self.seen = 0.0, UnionState()

    def policy(self) -> Any:
        @learning(UnionState)
        def scale(view: Any, state: UnionState | None = None) -> Any:
            self.seen = state or UnionState()
            decision, after = union.scale(view, state)
            return decision, replace(after, plan=replace(after.plan, m=self.m or after.plan.m))

        return scale


def started_with(*rows: LearnedRow, now_s: float = 100.0, models: Any = None) -> tuple[AutoscalerController, Learner]:
    """An autoscaler that has just read this store."""
    learner = Learner()
    controller = AutoscalerController(learner.policy(), "union", 8)
    controller.restore("models", models or {"m": a_model("m")}, now_s)
    controller.restore(SCALING_LEARNED, {row.key: row for row in rows}, now_s)
    controller.handle(Tick(), now_s)
    return controller, learner


def saved(effects: list[Effect]) -> list[LearnedRow]:
    return [e.value for e in effects if isinstance(e, Save) and e.table == SCALING_LEARNED]


def test_what_a_plan_has_learned_is_saved_once_and_again_when_it_changes() -> None:
    learner = Learner()
    controller = autoscaler(a_model("m"), scale=learner.policy(), policy="union")
    assert saved(is_ready(controller, 1.0, an_instance("i-1"))) == []
    learner.m = 0.2
    (first,) = saved(controller.handle(Tick(), 2.0))
    assert (first.key, first.format, first.revision, first.figures["m"]) == ("m", "union/1", 1, 0.2)
    assert saved(controller.handle(Tick(), 3.0)) == []
    learner.m = 0.4
    (second,) = saved(is_ready(controller, 4.0, an_instance("i-1", revision=3)))
    assert (second.revision, second.figures["m"]) == (2, 0.4)


def test_an_autoscaler_that_starts_goes_on_from_the_store() -> None:
    controller, learner = started_with(ROW)
    assert learner.seen.figures() == ROW.figures
    learner.m = 0.5
    is_ready(controller, 101.0, an_instance("i-1"))
    (after,) = saved(controller.restore(SCALING_LEARNED, {"m": ROW}, 102.0))
    assert (after.revision, after.figures["m"]) == (5, 0.5), "a row that was read too early is written again"


def test_a_standby_follows_the_rows_and_gives_them_to_an_emptied_store() -> None:
    standby, _ = started_with(ROW)
    later = replace(ROW, revision=9, figures={"m": -0.2})
    standby.restore(SCALING_LEARNED, {"m": later}, 110.0)
    learner = Learner()
    leader = AutoscalerController(learner.policy(), "union", 9)
    leader.inherit(standby, 120.0)
    leader.restore("models", {"m": a_model("m")}, 120.0)
    assert saved(leader.restore(SCALING_LEARNED, {}, 120.0)) == [later]
    leader.handle(Tick(), 121.0)
    assert learner.seen.plan.m == -0.2


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, format="union/2"),
        replace(ROW, format="preserve/1"),
        replace(ROW, figures={"m": math.nan}),
        replace(ROW, figures={"m": math.inf}),
        replace(ROW, figures={"m": 40.0}),
        replace(ROW, figures={"start_s": -1.0}),
        replace(ROW, figures={"start_s": 1e9}),
        replace(ROW, figures={"another": 0.1}),
    ],
    ids=str,
)
def test_a_row_that_is_none_of_the_policys_is_left_out_until_it_has_learned_itself(row: LearnedRow) -> None:
    controller, learner = started_with(row)
    assert learner.seen == UnionState()
    assert controller.restore(SCALING_LEARNED, {"m": row}, 102.0) == []
    learner.m = 0.1
    (after,) = saved(is_ready(controller, 103.0, an_instance("i-1")))
    assert after.figures["m"] == 0.1
    assert saved(controller.restore(SCALING_LEARNED, {"m": row}, 104.0)) == [after]


def test_what_was_learned_at_a_time_to_come_counts_from_now() -> None:
    _, learner = started_with(replace(ROW, figures={"m": 0.3, "raised_at": 1e12}))
    assert learner.seen.plan.raised_at == 100.0


def test_the_row_of_a_model_that_is_undeployed_is_removed_until_it_has_left_the_table() -> None:
    controller, _ = started_with(ROW)
    controller.handle(operator.Undeploy("m"), 102.0)
    for now_s in (103.0, 104.0):
        controller.restore("models", {}, now_s)
        assert controller.restore(SCALING_LEARNED, {"m": ROW}, now_s) == [Remove(SCALING_LEARNED, "m")]
    assert controller.restore(SCALING_LEARNED, {}, 105.0) == []
    assert controller.restore(SCALING_LEARNED, {"m": ROW}, 106.0) == []


def test_a_model_that_is_deployed_again_keeps_its_row() -> None:
    controller, _ = started_with(ROW)
    controller.handle(operator.Undeploy("m"), 102.0)
    controller.handle(operator.Deploy(model=a_model("m")), 103.0)
    assert not [e for e in controller.restore(SCALING_LEARNED, {"m": ROW}, 104.0) if isinstance(e, Remove)]


def test_the_standby_that_leads_next_removes_what_the_leader_did_not() -> None:
    standby, _ = started_with(ROW)
    standby.handle(an_event(ModelUndeployed(model_key="m"), occurred_at=102.0), 102.0)
    leader = AutoscalerController(Learner().policy(), "union", 9)
    leader.inherit(standby, 103.0)
    assert leader.restore(SCALING_LEARNED, {"m": ROW}, 103.0) == [Remove(SCALING_LEARNED, "m")]


@pytest.mark.parametrize("others", [{}, {"a": a_model("a")}], ids=["alone", "beside another"])
def test_a_model_that_cannot_be_read_at_the_start_keeps_its_row(others: dict[str, Any]) -> None:
    learner = Learner()
    controller = AutoscalerController(learner.policy(), "union", 8)
    controller.restore("models", others, 100.0)
    assert controller.restore(SCALING_LEARNED, {"m": ROW}, 100.0) == []
    controller.restore("models", {**others, "m": a_model("m")}, 110.0)
    controller.restore(SCALING_LEARNED, {"m": ROW}, 110.0)
    controller.handle(Tick(), 110.5)
    assert learner.seen.figures() == ROW.figures


def test_an_emptied_store_gets_its_rows_again() -> None:
    controller, _ = started_with(ROW)
    controller.restore("models", {}, 110.0)
    assert controller.restore(SCALING_LEARNED, {}, 110.0) == [Save(SCALING_LEARNED, "m", ROW)]
