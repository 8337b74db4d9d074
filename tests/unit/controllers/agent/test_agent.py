"""Hand-made contradictions fire each invariant of the agent's controller."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import Consolidation, Drain, Holding, Pipeline, StartProgress, State, Stop
from glowplug.controllers.agent.table import TABLE, wrong
from glowplug.controllers.agent.transaction import InvalidTransition, Step, Transition
from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.domain.reading import Misread, laid_over
from glowplug.events.commands import ConsolidateInstance, StopInstance
from glowplug.events.facts import InstanceFailed
from glowplug.memory.ledger import ByteLedger
from tests.agent_steps import NODE, PARAMS, CheckedAgent, make
from tests.control import Recorded
from tests.fleet_builder import MIB

S = State
START, DRAIN, STOP = StartProgress(deadline_at=1.0), Drain(deadline_at=1.0, quiet_until=0.0), Stop(1.0)
RUNS = Consolidation(deadline_at=1.0)


def a_ready() -> Holding:
    return make().ready().holdings["i-1"]


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("is ready without shares", {"shares": {}}),
        ("is ready and has start", {"start": START}),
        ("is ready and has drain", {"drain": DRAIN}),
        ("is ready and has stop", {"stop": STOP}),
        ("is ready and has snapshot_bytes", {"snapshot_bytes": 1}),
        ("is ready and has engine_id", {"engine_id": "i-0"}),
        ("is draining without drain", {"state": State.DRAINING}),
        ("is stopping without stop", {"state": State.STOPPING}),
        ("is loading without start", {"state": State.LOADING}),
        ("is stopped and has shares", {"state": State.STOPPED}),
        ("is stopped and has consolidation", {"state": State.STOPPED, "consolidation": RUNS}),
        ("is draining and the fleet sees it ready", {"state": State.DRAINING, "drain": DRAIN}),
        ("has 1 stages and pipeline=Pipeline", {"pipeline": Pipeline()}),
        ("(whole: True) consolidates: running", {"consolidation": RUNS}),
        ("consolidates: True, and the fleet sees False", {"consolidation": RUNS}),
        ("and does not load", {"state": State.STARTING, "start": replace(START, is_launched=True, weights_path="/w")}),
        ("is stopped and has engine_id", {"state": State.STOPPED, "engine_id": "i-0"}),
        ("is failed and has shares", {"state": State.FAILED}),
        ("falls asleep to become nothing", {"state": State.FALLING_ASLEEP, "drain": DRAIN}),
        ("(replica: False) holds", {"shares": {f"{NODE}/0": {GrantOwner.PREWARM: 1}}}),
        ("holds less than nothing", {"shares": {f"{NODE}/0": {GrantOwner.KV: -1}}}),
    ],
)
def test_a_record_that_contradicts_itself_is_found(said: str, changes: dict[str, Any]) -> None:
    holding = a_ready()
    assert not list(holding.faults())
    assert any(said in fault for fault in replace(holding, **changes).faults())


def expect_broken(agent: CheckedAgent, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        agent.handle(Tick(), 30.0)
    assert agent.violations() == (), "it is said once"


def test_bytes_that_no_record_names_are_found() -> None:
    agent = make().ready()
    agent.ledger.exchange((), "nobody", {f"{NODE}/0": {GrantOwner.KV: 7}})
    expect_broken(agent, "nobody has 7 bytes of node-1/0 for kv, its record 0")


def test_bytes_that_the_ledger_does_not_hold_are_found() -> None:
    agent = make().ready()
    agent.ledger.release("i-1")
    expect_broken(agent, "i-1 has 0 bytes of node-1/0 for weights, its record 104857600")


def test_a_gpu_that_holds_more_than_it_has_is_found() -> None:
    agent = make().ready()
    assert isinstance(agent.ledger, ByteLedger)
    (gpu,) = agent.ledger.gpus
    agent.ledger._gpus = {gpu.gpu_id: replace(gpu, total_bytes=5)}
    expect_broken(agent, "node-1/0 holds 104857600 of 5 bytes")


def test_a_process_of_two_owners_is_found() -> None:
    agent = make().ready()
    holding = agent.holdings["i-1"]
    other = replace(holding.instance, instance_id="i-2", state=InstanceState.DRAINING)
    agent.holdings["i-2"] = replace(holding, state=State.STOPPING, instance=other, stop=STOP, engine_id="i-1")
    expect_broken(agent, "the process of i-1 belongs to i-1 and i-2")


def test_a_record_under_another_id_is_found() -> None:
    agent = make().ready()
    agent.holdings["i-2"] = replace(agent.holdings["i-1"], state=State.STOPPED)
    expect_broken(agent, "the record of i-1 stands under i-2")


def test_host_memory_promised_twice_is_found() -> None:
    agent = make(abilities=("prewarm", "swap"), params=replace(PARAMS, swap_host_bytes=150 << 20)).ready()
    agent.drained("swapped_out")
    agent.holdings["i-1"] = replace(agent.holdings["i-1"], snapshot_bytes=200 << 20)
    expect_broken(agent, "209715200 bytes of host memory are promised to engines asleep, of 157286400")


@pytest.mark.parametrize(
    ("said", "before", "stimulus", "after", "asked"),
    [
        ("is not in the table", S.READY, msg.EngineLaunched, S.READY, ()),
        ("is not in the table", S.READY, msg.EngineGone, S.STOPPED, ()),
        ("the table allows", S.STARTING, msg.EngineLaunched, S.READY, ()),
        ("asks for ['StopEngine']", S.STARTING, msg.EngineLaunched, S.STARTING, (msg.StopEngine,)),
        ("waits for the outcome of ['LoadEngine']", S.STARTING, msg.EngineLaunched, S.LOADING, ()),
        ("waits for the outcome of ['StopEngine']", S.READY, msg.EngineExited, {"state": S.FAILED, "stop": STOP}, ()),
        ("waits for the outcome of ['AwaitWeights', 'LaunchEngine']", S.RESTARTING, msg.EngineGone, S.STARTING, ()),
        ("waits for the outcome of ['SleepEngine']", S.READY, StopInstance, S.FALLING_ASLEEP, ()),
        ("its consolidation goes from running to None", {"consolidation": RUNS}, Tick, S.READY, ()),
        ("waits for the outcome of ['ConsolidateEngine']", S.READY, ConsolidateInstance, {"consolidation": RUNS}, ()),
    ],
)
def test_a_move_that_the_table_does_not_allow_is_found(
    said: str, before: State | dict[str, Any], stimulus: type, after: State | dict[str, Any], asked: tuple[type, ...]
) -> None:
    ends = [replace(a_ready(), **(end if isinstance(end, dict) else {"state": end})) for end in (before, after)]
    step = Step("i-1", ends[0], stimulus, ends[1], asked)
    assert any(said in fault for fault in wrong(step)), list(wrong(step))


def test_a_stimulus_that_makes_no_sense_is_refused_by_name_and_changes_nothing() -> None:
    agent = make().ready()
    before = dict(agent.holdings), agent.ledger.gpus
    with pytest.raises(InvalidTransition, match="i-1 is ready, and EnginePrewarmed makes no sense there") as refused:
        agent.handle(msg.EnginePrewarmed("i-1"), 20.0)
    error = refused.value
    assert (error.instance_id, error.state, error.stimulus) == ("i-1", State.READY, msg.EnginePrewarmed)
    assert (agent.holdings, agent.ledger.gpus) == before


def test_every_effect_and_every_stimulus_of_the_table_is_listed() -> None:
    rows = [row for row in TABLE.values() if isinstance(row, Transition)]
    assert {effect for row in rows for effect in row.asks} | {msg.Remember} == set(msg.EFFECTS)
    own = {msg.GivesWay, msg.TakenOver, msg.RunsElsewhere, msg.HostLeaves}
    assert {stimulus for _, stimulus in TABLE} - own | {msg.Surroundings} == set(make().handlers)


def test_a_remembered_record_that_contradicts_itself_is_failed_and_its_process_stopped() -> None:
    memory = make().ready().memory()
    odd = replace(memory, holdings=tuple(replace(h, state=State.LOADING) for h in memory.holdings))
    agent = make(msgspec.json.decode(msgspec.json.encode(odd), type=msg.AgentMemory))
    effects = Recorded(agent, 50.0).give(msg.Recalled(frozenset({"i-1"})))
    failed = effects.one(InstanceFailed)
    assert failed.code == "engine_failed"
    assert "contradicts itself: i-1 is loading without start" in failed.instance.reason
    assert effects.one(msg.StopEngine) == msg.StopEngine("i-1", 0.0)
    assert not agent.ledger.holders


def test_shares_that_an_earlier_agent_did_not_write_are_granted_by_the_workers() -> None:
    memory = make().ready().memory()
    old = replace(memory, holdings=tuple(replace(holding, shares={}) for holding in memory.holdings))
    (gpu,) = make(old).ledger.gpus
    assert [(grant.holder, grant.owner, grant.num_bytes) for grant in gpu.grants] == [
        ("i-1", GrantOwner.WEIGHTS, 100 * MIB)
    ]


def test_a_memory_with_a_drain_is_read_as_it_was_written() -> None:
    agent = make(abilities=("prewarm", "swap")).ready()
    (written, *_) = agent.drained("prewarmed")
    assert isinstance(written, msg.Remember)
    assert msgspec.json.decode(msgspec.json.encode(written.memory), type=msg.AgentMemory) == written.memory


def test_an_unknown_way_to_reserve_is_refused() -> None:
    with pytest.raises(Misread, match="reservation: 'guess' is not one of '', paper, literal_code"):
        laid_over(PARAMS, {"reservation": "guess"})
