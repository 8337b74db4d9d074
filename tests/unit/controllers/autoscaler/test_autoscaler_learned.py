"""The union's learned plan outlives its autoscaler."""

import math
from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED, LearnedRow
from glowplug.controllers.effects import Effect, Remove, Save, Tick
from glowplug.events.facts import ModelUndeployed
from glowplug.policies.scaling import union
from glowplug.policies.scaling.port import learning
from glowplug.policies.scaling.union import UnionState
from tests.fleet_builder import a_model, an_event, an_instance
from tests.unit.controllers.autoscaler.rig import is_ready

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


def test_an_autoscaler_that_starts_goes_on_from_the_store() -> None:
    controller, learner = started_with(ROW)
    assert learner.seen.figures() == ROW.figures
    learner.m = 0.5
    is_ready(controller, 101.0, an_instance("i-1"))
    (after,) = saved(controller.restore(SCALING_LEARNED, {"m": ROW}, 102.0))
    assert (after.revision, after.figures["m"]) == (5, 0.5), "a row that was read too early is written again"


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


def test_the_standby_that_leads_next_removes_what_the_leader_did_not() -> None:
    standby, _ = started_with(ROW)
    standby.handle(an_event(ModelUndeployed(model_key="m", revision=10**6)), 102.0)
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
