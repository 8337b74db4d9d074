"""Standing answers of the scaling policy."""

import random
from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.models import PLACED_S, ModelRecords, Start
from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import PlaceInstance, StopInstance
from glowplug.events.facts import ForecastMade, InstanceReady, InstanceStopped
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import union
from glowplug.policies.scaling.port import ScalingView
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, holds, is_ready

IDLE = ModelLoad(last_active_at=1.0)


def quiet(stands_until: float = 1e9) -> tuple[AutoscalerController, list[float]]:
    """One READY instance of m whose policy's answer stands, and the times of its questions."""
    asked_at: list[float] = []

    def keep(view: ScalingView, state: None) -> tuple[ScaleDecision, None]:
        if view.model.key == "m":
            asked_at.append(view.now_s)
        num_wanted = view.num_running if view.model.key == "m" else 1
        decision = ScaleDecision(model_key=view.model.key, num_wanted=num_wanted, reason="-", stands_until=stands_until)
        return decision, None

    controller = autoscaler(a_model(), scale=keep)
    is_ready(controller, 1.0, an_instance())
    controller.handle(load_report(m=IDLE), 1.0)
    controller.handle(Tick(), 1.5)
    asked_at.clear()
    return controller, asked_at


def ahead(starts_at: float, window_s: float) -> ForecastMade:
    window = Forecast(made_at=1.0, starts_at=starts_at, window_s=window_s, concurrency_mean=1.0, concurrency_peak=1.0)
    return ForecastMade(model_key="m", forecasts=(window,))


@pytest.mark.parametrize(
    "change",
    [
        load_report(m=replace(IDLE, num_dispatched=1)),
        load_report(),
        load_report(m=replace(IDLE, num_in_flight=1)),
        an_event(ahead(0.0, 600.0)),
        an_event(InstanceReady(instance=an_instance(revision=2))),
        operator.Pin("m", pinned=True),
    ],
    ids=["load", "no load any more", "requests", "forecast", "instance", "operator"],
)
def test_what_changes_about_a_model_is_answered_at_the_next_tick(change: Any) -> None:
    controller, asked_at = quiet()
    controller.handle(Tick(), 2.0)
    controller.handle(load_report(m=IDLE), 2.1)  # nothing new
    controller.handle(Tick(), 2.5)
    assert asked_at == []
    controller.handle(change, 2.6)
    controller.handle(Tick(), 3.0)
    assert asked_at[-1] == 3.0


def test_so_is_a_table_that_was_read_a_router_that_fell_silent_and_an_end_that_has_come() -> None:
    controller, asked_at = quiet()
    controller.restore("instances", dict(controller.instances.by_id), 2.0)
    controller.handle(Tick(), 2.5)
    assert asked_at == [2.5]
    controller.handle(Tick(), 60.0)
    assert asked_at == [2.5, 60.0], "its router has been silent"
    controller, asked_at = quiet(stands_until=3.0)
    for now_s in (2.0, 2.5, 3.0):
        controller.handle(Tick(), now_s)
    assert asked_at == [3.0]


def test_no_answer_stands_beyond_a_window_of_the_forecast_nor_while_another_model_lacks_gpus() -> None:
    controller, asked_at = quiet()
    controller.handle(an_event(ahead(1.0, 2.0)), 1.6)
    for now_s in (2.0, 2.5, 3.0, 3.5):
        controller.handle(Tick(), now_s)
    assert asked_at == [2.0, 3.0]
    controller.handle(operator.Deploy(model=a_model("other")), 3.6)  # the placer does not answer
    for now_s in (4.0, 4.5, 5.0):
        controller.handle(Tick(), now_s)
    assert asked_at == [2.0, 3.0, 5.0]


def test_who_lacks_gpus_is_known_as_of_now() -> None:
    records = ModelRecords()
    for name in "abc":
        records.deploy(a_model(name), create=True, now_s=0.0)

    def start(key: str) -> None:
        command = PlaceInstance(instance_id=f"{key}-1", model=a_model(key), reason="", wanted_at=0.0)
        records.start(records.of(key), Start(command, 0.0, None))

    short = []
    for change in (
        lambda: None,
        lambda: start("b"),
        lambda: start("a"),
        lambda: records.started(records.of("a"), "a-1"),
        lambda: records.undeploy(records.of("b")),
    ):
        change()
        short.append("".join(key for key in "abc" if records.is_short_elsewhere(key, PLACED_S)))
    assert short == ["", "ac", "abc", "ac", ""]
    start("c")
    assert [records.is_short_elsewhere("a", at) for at in (PLACED_S / 2, PLACED_S)] == [False, True]


class Agents:
    """An autoscaler under the union, and agents that obey at once."""

    def __init__(self, *, may_stand: bool) -> None:
        self.states, self.heard = dict[tuple[str, float], Any](), list[Effect]()
        self.rows: dict[str, Any] = {}

        def scale(view: ScalingView, state: Any) -> tuple[ScaleDecision, Any]:
            decision, state = self.states[view.model.key, view.now_s] = union.scale(view, state)
            return decision if may_stand else replace(decision, stands_until=0.0), state

        models = [a_model(key, keep_alive_s=10.0, max_instances=4, max_concurrency=2) for key in "ab"]
        self.controller = autoscaler(*models, scale=scale)

    def give(self, stimulus: Any, now_s: float) -> None:
        effects = self.controller.handle(stimulus, now_s)
        self.heard += effects
        for command in [e.payload for e in effects if isinstance(e, Publish)]:
            if isinstance(command, PlaceInstance):
                key = command.model.key
                row = an_instance(command.instance_id, key, created_at=now_s, ready_at=now_s, max_concurrency=2)
                self.rows[row.instance_id] = row
                self.give(an_event(InstanceReady(instance=row)), now_s)
            elif isinstance(command, StopInstance) and command.instance_id in self.rows:
                gone = replace(self.rows.pop(command.instance_id), state=InstanceState.STOPPED, revision=2)
                self.give(an_event(InstanceStopped(instance=gone)), now_s)


@pytest.mark.parametrize("seed", range(8))
def test_the_union_decides_as_if_it_were_asked_at_every_tick(seed: int) -> None:
    chance, num_arrived = random.Random(seed), 0
    standing, asked = agents = Agents(may_stand=True), Agents(may_stand=False)
    load = ModelLoad()
    for tick in range(400):
        now_s = 100.0 + tick / 2
        if tick % 80 < 40 and chance.random() < 0.2:
            num, num_arrived = chance.randrange(4), num_arrived + 1
            load = ModelLoad(num_in_flight=num, num_arrived=num_arrived, last_active_at=now_s)
        elif tick % 80 == 40:
            load = replace(load, num_in_flight=0)
        waits = chance.random() < 0.02
        for one in agents:
            if waits:
                one.give(an_event(holds(since=now_s, deadline_at=now_s + 60)), now_s - 0.2)
            running = dict.fromkeys(
                sorted(i for i, r in one.rows.items() if r.model_key == "a")[:1], load.num_in_flight
            )
            one.give(load_report(a=replace(load, in_flight_by_instance=running)), now_s - 0.1)
            one.give(Tick(), now_s)
    assert len(standing.states) < 0.95 * len(asked.states)
    assert all(state == asked.states[moment] for moment, state in standing.states.items())
    names = [[str(getattr(e, "decision", "")) for e in one.heard] for one in agents]
    assert names[0] == names[1] and any(names[0])
