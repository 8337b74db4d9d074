"""Engines that load weights as they arrive (HydraServe section 5.1)."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import State
from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.domain.instance import EngineFigures, Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.events.commands import JoinStages
from tests.agent_steps import ALL, MODEL, CheckedAgent, make, of, start_of, stop, workers
from tests.fleet_builder import MIB, an_event

T = TypeVar("T")
STREAMS = (*ALL, "stages", "stream")
FAR = Worker(worker_id="i-1.1-0", node_id="node-2", gpu_id="node-2/0", num_bytes=MODEL.memory_bytes)
PHASES = (
    Phase(name=PhaseName.LAUNCH, started_at=10.0, ended_at=10.5),
    Phase(name=PhaseName.LOAD, started_at=11.0, ended_at=14.0),
)
READY = msg.EngineReady(
    "i-1", "http://e:1", PHASES, "k", EngineFigures(kv_tokens=512, num_slots=3, lacks=("x",), step_s=0.02)
)
COMPLETE = msg.WeightsComplete("i-1", "/w")
ARRIVING = msg.WeightsArriving("i-1", "/w")


def streaming(**fields: Any) -> CheckedAgent:
    """i-1 loads while its weights arrive."""
    agent = make(abilities=STREAMS)
    agent.handle(start_of(**fields), 10.0)
    agent.handle(msg.EngineLaunched("i-1"), 10.5)
    agent.handle(ARRIVING, 11.0)
    return agent


def unchecked(**fields: Any) -> CheckedAgent:
    """i-1 loads before its weights are checked."""
    agent = streaming(**fields)
    agent.handle(msg.EnginePrewarmed("i-1") if fields.get("replica") else READY, 14.0)
    return agent


IN_EACH = pytest.mark.parametrize("begun", [streaming, unchecked])


def asked(effects: list[Effect], kind: type[T]) -> T:
    (only,) = of(kind, effects)
    return only


def published(effects: list[Effect]) -> Instance:
    found: Instance = [e.payload.instance for e in of(Publish, effects) if e.payload.TYPE.startswith("instance.")][-1]
    return found


def state(agent: CheckedAgent, instance_id: str = "i-1") -> State:
    return agent.holdings[instance_id].state


def seconds(instance: Instance, name: PhaseName) -> tuple[float, float]:
    return next((p.started_at, p.ended_at) for p in instance.phases if p.name is name)


def loads(effects: list[Effect]) -> list[str]:
    return [effect.path for effect in effects if isinstance(effect, msg.LoadEngine)]


def test_weights_are_watched_as_they_arrive_for_an_engine_that_streams_alone() -> None:
    for abilities, streams in ((STREAMS, True), (ALL, False)):
        awaited = asked(make(abilities=abilities).handle(start_of(), 10.0), msg.AwaitWeights)
        assert awaited.streams is streams


@pytest.mark.parametrize("order", [(msg.EngineLaunched("i-1"), ARRIVING), (ARRIVING, msg.EngineLaunched("i-1"))])
def test_an_engine_loads_once_its_process_is_up_and_its_weights_arrive(order: tuple[Any, Any]) -> None:
    agent = make(abilities=STREAMS)
    agent.handle(start_of(), 10.0)
    assert loads(agent.handle(order[0], 10.5)) == []
    assert loads(agent.handle(order[1], 11.0)) == ["/w"]
    assert state(agent) is State.STREAMING
    assert agent.instance().state is InstanceState.STARTING, "LOADING says that the weights are whole"
    assert agent.handle(ARRIVING, 11.5) == [], "it comes twice"


def test_weights_that_are_whole_before_the_last_layer_is_loaded() -> None:
    agent = streaming()
    effects = agent.handle(COMPLETE, 13.0)
    assert state(agent) is State.LOADING and published(effects).state is InstanceState.LOADING
    assert loads(effects) == [], "it loads already"
    ready = published(agent.handle(READY, 14.0))
    assert ready.state is InstanceState.READY and ready.start_kind == "cold"
    assert seconds(ready, PhaseName.FETCH) == (10.0, 13.0) and seconds(ready, PhaseName.LOAD) == (11.0, 14.0)


def test_an_engine_that_is_loaded_serves_once_its_weights_are_checked() -> None:
    agent = unchecked()
    assert state(agent) is State.UNCHECKED and agent.instance().state is InstanceState.STARTING
    assert agent.handle(READY, 14.5) == [], "it comes twice"
    effects = agent.handle(COMPLETE, 15.0)
    ready = published(effects)
    assert ready.state is InstanceState.READY and ready.url == "http://e:1" and ready.ready_at == 15.0
    assert (ready.kv_tokens, ready.key_id, ready.max_concurrency, ready.lacks) == (512, "k", 3, ("x",))
    assert ready.step_s == 0.02
    assert seconds(ready, PhaseName.FETCH) == (10.0, 15.0) and seconds(ready, PhaseName.LOAD) == (11.0, 14.0)
    assert asked(effects, msg.ReportStart).instance == ready


@IN_EACH
def test_wrong_weights_end_the_engine_that_has_read_of_them(begun: Any) -> None:
    agent = begun()
    effects = agent.handle(msg.WeightsFailed("i-1", "weights_corrupt", "sha256 is other"), 15.0)
    assert published(effects).state is InstanceState.FAILED and published(effects).reason == "sha256 is other"
    assert asked(effects, msg.StopEngine).grace_s == 0
    agent.handle(msg.EngineGone("i-1"), 16.0)
    assert agent.used() == 0


@IN_EACH
def test_weights_that_are_fetched_anew_end_the_engine_and_its_start_begins_again(begun: Any) -> None:
    agent = begun()
    effects = agent.handle(msg.WeightsReplaced("i-1", "its source has changed"), 15.0)
    assert state(agent) is State.RESTARTING and asked(effects, msg.StopEngine).grace_s == 0
    assert "its source has changed" in agent.instance().reason
    assert agent.handle(COMPLETE, 15.5) == [], "the watch of before has ended"
    again = agent.handle(msg.EngineGone("i-1"), 16.0)
    assert asked(again, msg.LaunchEngine) and asked(again, msg.AwaitWeights).streams
    agent.halves("i-1", 17.0)
    assert published(agent.handle(READY, 18.0)).start_kind == "interrupted", "its seconds are no measure"


DROPPED = msg.EngineStartFailed("i-1", "weights_dropped", "the weights that were being loaded were dropped")
REPLACED = msg.WeightsReplaced("i-1", "its source has changed")


@pytest.mark.parametrize("both", [(DROPPED, REPLACED), (REPLACED, DROPPED)])
def test_a_start_whose_weights_were_dropped_begins_again_whoever_sees_it_first(both: tuple[msg.Outcome, ...]) -> None:
    agent = streaming()
    first, second = both
    effects = agent.handle(first, 15.0)
    assert state(agent) is State.RESTARTING and asked(effects, msg.StopEngine).grace_s == 0
    assert published(effects).reason.startswith(
        "its engine starts again, since it has loaded weights that were dropped"
    )
    assert agent.handle(second, 15.5) == []
    again = agent.handle(msg.EngineGone("i-1"), 16.0)
    assert asked(again, msg.LaunchEngine) and asked(again, msg.AwaitWeights).streams
    agent.halves("i-1", 17.0)
    assert published(agent.handle(READY, 18.0)).state is InstanceState.READY


def test_an_engine_that_saw_weights_dropped_begins_again_where_they_came_whole_before_it_said_so() -> None:
    agent = streaming()
    agent.handle(COMPLETE, 15.0)
    agent.handle(DROPPED, 15.1)
    assert state(agent) is State.RESTARTING
    agent.handle(msg.EngineGone("i-1"), 16.0)
    effects = agent.handle(msg.WeightsFailed("i-1", "weights_corrupt", "sha256 is other"), 17.0)
    assert published(effects).reason == "sha256 is other", "what fails for good fails with its own reason"


def test_weights_that_are_fetched_anew_before_anything_was_loaded_change_nothing() -> None:
    agent = make(abilities=STREAMS)
    agent.handle(start_of(), 10.0)
    agent.handle(ARRIVING, 11.0)
    agent.handle(msg.WeightsReplaced("i-1", "its source has changed"), 11.5)
    assert loads(agent.handle(msg.EngineLaunched("i-1"), 12.0)) == []
    assert loads(agent.handle(msg.WeightsArriving("i-1", "/new"), 13.0)) == ["/new"]


@IN_EACH
def test_an_engine_that_dies_while_its_weights_arrive_fails_its_start_of(begun: Any) -> None:
    effects = begun().handle(msg.EngineExited("i-1", "killed"), 15.0)
    assert published(effects).state is InstanceState.FAILED


@IN_EACH
@pytest.mark.parametrize("living", [("i-1",), ()])
def test_a_restart_of_the_agent_begins_the_start_again(begun: Any, living: tuple[str, ...]) -> None:
    agent, effects = begun().restarted(living)
    assert state(agent) is State.RESTARTING and asked(effects, msg.StopEngine)
    again = agent.handle(msg.EngineGone("i-1"), 51.0)
    assert asked(again, msg.LaunchEngine) and asked(again, msg.AwaitWeights)
    assert state(agent) is State.STARTING and agent.holdings["i-1"].start.arriving_path is None  # type: ignore[union-attr]


@IN_EACH
def test_a_stop_and_a_deadline_end_it(begun: Any) -> None:
    agent = begun()
    assert asked(agent.handle(stop(grace_s=0), 15.0), msg.StopEngine)
    late = begun()
    failed = published(late.handle(Tick(), 71.0))
    assert failed.state is InstanceState.FAILED and "not in host memory" in failed.reason


@pytest.mark.parametrize("checked_first", [True, False])
def test_a_replica_is_prewarmed_once_it_is_loaded_and_checked(checked_first: bool) -> None:
    agent = streaming(replica=True)
    outcomes = [COMPLETE, msg.EnginePrewarmed("i-1")]
    for outcome in outcomes if checked_first else reversed(outcomes):
        assert agent.instance().state is not InstanceState.PREWARMED
        agent.handle(outcome, 14.0)
    assert state(agent) is State.PREWARMED


@pytest.mark.parametrize("checked_first", [True, False])
@pytest.mark.parametrize("begun", [streaming, unchecked])
def test_whoever_takes_over_a_replica_on_its_way_waits_for_the_same_weights(begun: Any, checked_first: bool) -> None:
    agent = begun(replica=True)
    was = state(agent)
    agent.handle(start_of("i-2", source="i-1"), 14.5)
    assert state(agent, "i-1") is State.STOPPED and state(agent, "i-2") is was
    if was is State.STREAMING and not checked_first:
        agent.handle(msg.EnginePrewarmed("i-1"), 15.0)
        assert state(agent, "i-2") is State.UNCHECKED
    effects = agent.handle(COMPLETE, 16.0)
    assert asked(effects, msg.ActivateEngine).command.source == "i-1" and state(agent, "i-2") is State.ACTIVATING
    ready = published(agent.handle(msg.EngineReady("i-2", "http://e:1"), 17.0))
    assert ready.instance_id == "i-2" and ready.state is InstanceState.READY


@IN_EACH
def test_a_replica_on_its_way_gives_way(begun: Any) -> None:
    agent = begun(replica=True)
    agent.handle(start_of("i-2", drops=("i-1",)), 15.0)
    assert state(agent) is State.STOPPED and state(agent, "i-2") is State.STARTING


@pytest.mark.parametrize("is_joined", [True, False])
def test_the_first_stage_waits_for_its_weights_and_then_for_the_others(is_joined: bool) -> None:
    agent = unchecked(num_stages=2, workers=(*workers("i-1", 0), FAR))
    join = an_event(JoinStages(target="node-1", instance_id="i-1"))
    if is_joined:
        agent.handle(join, 14.5)
        assert state(agent) is State.UNCHECKED
    effects = agent.handle(COMPLETE, 15.0)
    assert state(agent) is (State.JOINING if is_joined else State.STAGE_LOADED)
    assert agent.instance().url == "http://e:1"
    assert bool(asked(effects if is_joined else agent.handle(join, 16.0), msg.ServeStages))


SMALL = replace(MODEL, kv_bytes=70 * MIB)  # 60 MiB of weights


def shares(agent: CheckedAgent, name: str, *, loaded_first: bool, **fields: Any) -> list[Effect]:
    """The engine shares 60 MiB of weight pages."""
    agent.handle(start_of(name, model=SMALL, **fields), 10.0)
    agent.handle(msg.EngineLaunched(name), 10.5)
    agent.handle(msg.WeightsArriving(name, "/w"), 11.0)
    replica = fields.get("replica")
    seen = msg.EnginePrewarmed if replica else partial(msg.EngineReady, url="http://e")
    loaded = seen(name, figures=EngineFigures(shared_bytes=60 * MIB))
    ends = (loaded, msg.WeightsComplete(name, "/w"))
    return [effect for end in (ends if loaded_first else ends[::-1]) for effect in agent.handle(end, 14.0)]


@pytest.mark.parametrize("replica", [False, True])
@pytest.mark.parametrize("loaded_first", [True, False])
def test_what_an_engine_shares_counts_whichever_end_its_start_reaches_first(loaded_first: bool, replica: bool) -> None:
    agent = make(abilities=(*STREAMS, "share"), mib=300)
    for name in ("i-1", "i-2"):
        shares(agent, name, loaded_first=loaded_first, replica=replica)
    assert agent.shared() == {60: ("i-1", "i-2")}


def test_one_that_counted_on_sharing_and_does_not_fails_once_its_weights_are_checked() -> None:
    agent = make(abilities=(*STREAMS, "share"), mib=210)
    shares(agent, "i-1", loaded_first=True)
    agent.handle(start_of("i-2", model=SMALL), 20.0)
    agent.handle(msg.EngineLaunched("i-2"), 20.5)
    agent.handle(msg.WeightsArriving("i-2", "/w"), 21.0)
    agent.handle(msg.EngineReady("i-2", "http://e"), 22.0)
    effects = agent.handle(msg.WeightsComplete("i-2", "/w"), 23.0)
    assert published(effects).state is InstanceState.FAILED
    assert "reads 0" in published(effects).reason
