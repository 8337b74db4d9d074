"""Client-requested keep-alive in the autoscaler."""

import pytest

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import PlaceInstance, StopInstance
from glowplug.events.facts import InstanceStarting, InstanceStopped, ModelKeepAliveAsked
from glowplug.policies.scaling import union
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, is_ready, published, waiting


def asks(controller: AutoscalerController, keep_alive_s: float, now_s: float) -> None:
    """A request that asked for it has ended."""
    fact = ModelKeepAliveAsked(model_key="m", keep_alive_s=keep_alive_s)
    assert controller.handle(an_event(fact), now_s) == []


def stopped(controller: AutoscalerController, now_s: float) -> list[str]:
    controller.handle(load_report(m=ModelLoad()), now_s)
    return [command.instance_id for command in published(controller.handle(Tick(), now_s), StopInstance)]


@pytest.mark.parametrize("scale", [None, union.scale])
@pytest.mark.parametrize(
    ("asked_s", "before_s", "after_s"), [(100.0, 105.0, 112.0), (2.0, 11.0, 12.5), (0.0, 10.0, 10.5)]
)
def test_a_clients_keep_alive_goes_before_the_models_own(scale, asked_s, before_s, after_s):
    chosen = {} if scale is None else {"scale": scale, "policy": "union"}
    controller = autoscaler(a_model(keep_alive_s=30.0), **chosen)
    is_ready(controller, 1.0, an_instance(ready_at=1.0, created_at=0.5))
    runs = ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1}, last_active_at=10.0)
    controller.handle(load_report(m=runs), 10.0)
    assert published(controller.handle(Tick(), 10.0), StopInstance) == [], "a request runs"
    asks(controller, asked_s, 10.0)
    assert published(controller.handle(Tick(), 10.0), StopInstance) == []
    if asked_s:
        assert stopped(controller, before_s) == []
    assert stopped(controller, after_s) == ["i-1"]


def test_the_next_request_that_says_otherwise_is_done_and_for_ever_is_for_ever():
    controller = autoscaler(a_model(keep_alive_s=30.0))
    is_ready(controller, 1.0, an_instance(ready_at=1.0))
    controller.handle(load_report(m=ModelLoad(num_in_flight=1)), 2.0)
    asks(controller, -1.0, 2.0)
    assert stopped(controller, 9000.0) == []
    asks(controller, 5.0, 9000.0)
    assert stopped(controller, 9001.0) == ["i-1"]


def test_it_is_over_with_the_last_instance_and_nothing_where_there_is_none():
    controller = autoscaler(a_model(keep_alive_s=30.0))
    is_ready(controller, 1.0, an_instance(ready_at=1.0))
    controller.handle(load_report(m=ModelLoad(num_in_flight=1)), 2.0)
    asks(controller, 0.0, 2.0)
    assert stopped(controller, 3.0) == ["i-1"]
    gone = an_instance(ready_at=1.0, state=InstanceState.STOPPED, revision=9)
    controller.handle(an_event(InstanceStopped(instance=gone)), 4.0)
    asks(controller, 0.0, 5.0)
    assert stopped(controller, 5.0) == []
    (command,) = published(controller.handle(waiting(since=6.0), 6.0), PlaceInstance)
    starting = an_instance(command.instance_id, state=InstanceState.STARTING)
    controller.handle(an_event(InstanceStarting(instance=starting)), 6.1)
    is_ready(controller, 7.0, an_instance(command.instance_id, ready_at=7.0, created_at=6.0, revision=5))
    assert stopped(controller, 20.0) == [] and stopped(controller, 38.0) == [command.instance_id]


def test_a_pinned_model_stays_whatever_clients_ask():
    controller = autoscaler(a_model(keep_alive_s=30.0, pinned=True))
    is_ready(controller, 1.0, an_instance(ready_at=1.0))
    controller.handle(load_report(m=ModelLoad(num_in_flight=1)), 2.0)
    asks(controller, 0.0, 2.0)
    assert stopped(controller, 100.0) == []


def test_a_model_that_is_not_deployed_is_kept_by_nobody():
    controller = autoscaler()
    asks(controller, 0.0, 1.0)
    assert controller.models == {}
