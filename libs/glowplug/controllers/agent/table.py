"""The lifecycle of one instance on its node, as data: what each stimulus does in each state.

A pair of TABLE is a Transition (which action runs, which states may follow, which effects it may ask for) or Ignored
(the stimulus may come late or twice there, and changes nothing). A pair that is missing is a bug of whoever sent the
stimulus: InvalidTransition names it, and nothing has changed. `wrong` holds what was done against the table.
Consolidation runs beside READY and DRAINING and has a small table of its own. docs/instance-states.md is drawn from
this file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from glowplug.controllers.agent.messages import (
    AbandonConsolidation,
    ActivateEngine,
    AwaitWeights,
    CheckHealth,
    ConsolidateEngine,
    ConsolidationFailed,
    CountInFlight,
    EngineAsleep,
    EngineConsolidated,
    EngineExited,
    EngineGone,
    EngineLaunched,
    EngineOverLimit,
    EnginePrewarmed,
    EngineReady,
    EngineStartFailed,
    ForgetEngine,
    GivesWay,
    HealthSeen,
    InFlight,
    LaunchEngine,
    LimitKv,
    LoadEngine,
    NodeStopping,
    Recalled,
    ReportStart,
    RunsElsewhere,
    ServeStages,
    SleepEngine,
    StopAsked,
    StopEngine,
    TakenOver,
    WeightsComplete,
    WeightsFailed,
)
from glowplug.controllers.agent.record import COMING, DORMANT, ENDING, OVER, STARTING, ConsolidationState, State
from glowplug.controllers.effects import Tick
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance

NONE = None  # before its start, and once it is forgotten
S, C = State, ConsolidationState


class InvalidTransition(RuntimeError):
    """A stimulus that makes no sense in the state that an instance is in."""

    def __init__(self, instance_id: str, state: State | None, stimulus: type) -> None:
        super().__init__(f"{instance_id} is {state or 'not known'}, and {stimulus.__name__} makes no sense there")
        self.instance_id, self.state, self.stimulus = instance_id, state, stimulus


@dataclass(frozen=True, slots=True)
class Transition:
    """`does` names the action (AgentController.actions); it leaves the record in one of `to`, having asked for no
    engine effects but those of `asks`."""

    does: str
    to: frozenset[State | None]
    asks: frozenset[type] = frozenset()


@dataclass(frozen=True, slots=True)
class Ignored:
    """The stimulus changes nothing, and `why` it may come all the same."""

    why: str


class Move(NamedTuple):
    """What one stimulus has done to one record."""

    instance_id: str
    before: State | None
    stimulus: type
    after: State | None
    asked: tuple[type, ...]
    consolidated_before: ConsolidationState | None = None
    consolidated_after: ConsolidationState | None = None
    is_taken_over: bool = False  # its process was launched under another id


Key = tuple[State | None, type]
_Source = Iterable[State | None]
STAYS = "stays"  # in a row below: whatever state it was in, it may still be in
_LIVE = COMING | {S.READY, S.DRAINING, S.FALLING_ASLEEP} | DORMANT
_ENDED = ENDING | OVER
_BEGIN = (LaunchEngine, AwaitWeights)
_LOAD = (LoadEngine, ActivateEngine)
_FAIL = (StopEngine, ReportStart)

# stimulus, states -> action, states that may follow, effects that it may ask for
_ROWS: tuple[tuple[type, _Source, str, tuple[State | str | None, ...], tuple[type, ...]], ...] = (
    (
        StartInstance,
        [NONE],
        "start",
        (S.LAUNCHING, S.LAUNCHED, S.FETCHED, S.ACTIVATING, S.STOPPED, S.FAILED),
        (*_BEGIN, ActivateEngine, ReportStart),
    ),
    (EngineLaunched, [S.LAUNCHING], "launched", (S.LAUNCHED,), ()),
    (EngineLaunched, [S.FETCHED], "launched", (S.LOADING, S.ACTIVATING), _LOAD),
    (WeightsComplete, [S.LAUNCHING], "fetched", (S.FETCHED,), ()),
    (WeightsComplete, [S.LAUNCHED], "fetched", (S.LOADING, S.ACTIVATING), _LOAD),
    (WeightsFailed, COMING, "start_failed", (S.FAILING,), _FAIL),
    (EngineStartFailed, COMING, "start_failed", (S.FAILING,), _FAIL),
    (EngineReady, [S.LOADING], "ready", (STAYS, S.READY, S.STAGE_LOADED, S.JOINING), (ReportStart, ServeStages)),
    (EngineReady, [S.JOINING, S.ACTIVATING], "ready", (S.READY,), (ReportStart,)),
    (EnginePrewarmed, [S.LOADING], "prewarmed", (STAYS, S.PREWARMED), ()),
    (JoinStages, [*STARTING, S.RESTARTING, S.LOADING], "join", (STAYS,), ()),
    (JoinStages, [S.STAGE_LOADED], "join", (S.JOINING,), (ServeStages,)),
    (ConsolidateInstance, [S.READY], "consolidate", (STAYS,), (ConsolidateEngine, AbandonConsolidation)),
    (EngineConsolidated, [S.READY, S.DRAINING], "consolidated", (STAYS,), ()),
    (ConsolidationFailed, [S.READY, S.DRAINING], "not_consolidated", (STAYS,), ()),
    (StopInstance, COMING, "stop", (STAYS, S.STOPPING, S.DROPPING), (StopEngine,)),
    (StopInstance, [S.RESTARTING], "stop", (STAYS, S.STOPPING, S.DROPPING), ()),
    (
        StopInstance,
        [S.READY, S.DRAINING],
        "stop",
        (S.DRAINING, S.FALLING_ASLEEP, S.STOPPING),
        (SleepEngine, StopEngine),
    ),
    (StopInstance, [S.FALLING_ASLEEP], "stop", (STAYS, S.STOPPING), (StopEngine,)),
    (StopInstance, DORMANT, "stop", (STAYS, S.DROPPING), (StopEngine,)),
    (ResumeInstance, [S.DRAINING], "resume", (STAYS, S.READY), (LimitKv,)),
    (InFlight, [S.DRAINING], "counted", (STAYS, S.FALLING_ASLEEP, S.STOPPING), (SleepEngine, StopEngine, LimitKv)),
    (EngineAsleep, [S.FALLING_ASLEEP], "asleep", (S.PREWARMED, S.SWAPPED_OUT), ()),
    (EngineGone, [S.FALLING_ASLEEP], "gone", (S.STOPPING, S.STOPPED), ()),
    (EngineGone, [S.RESTARTING], "gone", (STAYS, S.LAUNCHING), _BEGIN),
    (EngineGone, [S.STOPPING], "gone", (STAYS, S.STOPPED), ()),
    (EngineGone, [S.DROPPING], "gone", (STAYS, S.STOPPED), ()),
    (EngineGone, [S.FAILING], "gone", (STAYS, S.FAILED), ()),
    (EngineGone, [S.LOSING], "gone", (STAYS, S.LOST), ()),
    (EngineExited, _LIVE, "exited", (S.FAILING,), _FAIL),
    (EngineOverLimit, _LIVE, "exited", (S.FAILING,), _FAIL),
    (HealthSeen, [S.READY, S.DRAINING], "health", (STAYS, S.FAILING), (StopEngine,)),
    (HealthSeen, [S.FALLING_ASLEEP, *DORMANT], "health", (STAYS, S.FAILING), (StopEngine,)),
    (GivesWay, [*STARTING, S.LOADING, S.PREWARMED], "give_way", (S.DROPPING,), (StopEngine,)),
    (GivesWay, [S.RESTARTING], "give_way", (S.DROPPING,), ()),
    (TakenOver, [*STARTING, S.LOADING, *DORMANT], "taken_over", (S.STOPPED,), ()),
    (RunsElsewhere, _LIVE, "lose", (S.LOSING,), (StopEngine,)),
    (RunsElsewhere, [S.RESTARTING, S.STOPPING, S.DROPPING, S.FAILING], "lose", (S.LOSING,), ()),
    (RunsElsewhere, [S.STOPPED, S.FAILED], "lose", (S.LOST,), ()),
    (Recalled, COMING, "recall", (S.RESTARTING, S.FAILING), _FAIL),
    (Recalled, [S.RESTARTING], "recall", (STAYS, S.FAILING), _FAIL),
    (
        Recalled,
        [S.READY, S.DRAINING],
        "recall",
        (STAYS, S.FAILING),
        (ConsolidateEngine, AbandonConsolidation, StopEngine),
    ),
    (Recalled, [S.FALLING_ASLEEP], "recall", (S.DRAINING, S.FAILING), (StopEngine,)),
    (Recalled, [S.PREWARMED], "recall", (STAYS, S.DROPPING, S.FAILING), (StopEngine,)),
    (Recalled, [S.SWAPPED_OUT], "recall", (STAYS, S.DROPPING), (StopEngine,)),
    (Recalled, [S.STOPPING], "recall", (STAYS, S.FAILING), (StopEngine,)),
    (Recalled, ENDING - {S.STOPPING}, "recall", (STAYS,), (StopEngine,)),
    (Recalled, [S.STOPPED], "recall", (STAYS, S.DROPPING), (StopEngine,)),
    (Recalled, [S.FAILED], "recall", (STAYS, S.FAILING), (StopEngine,)),
    (Recalled, [S.LOST], "recall", (STAYS, S.LOSING), (StopEngine,)),
    (Tick, COMING, "tick_start", (STAYS, S.FAILING), _FAIL),
    (Tick, [S.READY], "tick_ready", (STAYS,), (CheckHealth, AbandonConsolidation)),
    (
        Tick,
        [S.DRAINING],
        "tick_drain",
        (STAYS, S.FALLING_ASLEEP, S.STOPPING),
        (CheckHealth, AbandonConsolidation, CountInFlight, SleepEngine, StopEngine),
    ),
    (Tick, [S.FALLING_ASLEEP], "tick_sleep", (STAYS, S.STOPPING), (StopEngine,)),
    (Tick, [S.RESTARTING, *ENDING], "tick_stop", (STAYS,), (StopEngine,)),
    (Tick, OVER, "tick_over", (STAYS, NONE), (ForgetEngine,)),
    *(
        row
        for asked in (StopAsked, NodeStopping)
        for row in (
            (asked, COMING, "drain", (S.STOPPING, S.DROPPING), (StopEngine,)),
            (asked, [S.RESTARTING], "drain", (S.STOPPING, S.DROPPING), ()),
            (asked, [S.READY, S.DRAINING], "drain", (S.DRAINING, S.STOPPING), (StopEngine,)),
            (asked, [S.FALLING_ASLEEP], "drain", (S.STOPPING,), (StopEngine,)),
            (asked, DORMANT, "drain", (S.DROPPING,), (StopEngine,)),
        )
    ),
)

_STARTED = (EngineLaunched, WeightsComplete)
_START_ENDED = (WeightsFailed, EngineStartFailed, EngineReady, EnginePrewarmed)
_IGNORED: tuple[tuple[Iterable[type], _Source, str], ...] = (
    ([StartInstance], State, "a start that is known already"),
    ([StopInstance, StopAsked, NodeStopping], _ENDED, "it ends already"),
    ([EngineExited, EngineOverLimit, HealthSeen], [S.RESTARTING, *_ENDED], "its process is to end"),
    ([InFlight], [S.READY, S.FALLING_ASLEEP, *DORMANT, S.RESTARTING, *_ENDED], "the drain is over or was taken back"),
    (_STARTED, COMING - STARTING, "it comes twice"),
    ([EngineLaunched], [S.LAUNCHED], "it comes twice"),
    ([WeightsComplete], [S.FETCHED], "it comes twice"),
    ([EngineReady], [S.STAGE_LOADED, S.READY], "it comes twice"),
    ([EnginePrewarmed], [S.PREWARMED], "it comes twice"),
    ([*_STARTED, *_START_ENDED], [S.RESTARTING, *_ENDED], "the start was given up meanwhile"),
    ([EngineAsleep], [S.READY, S.DRAINING], "the agent that asked for it has restarted"),
    ([EngineAsleep], [*DORMANT, *_ENDED], "it comes twice, or the engine was stopped meanwhile"),
    (
        [EngineConsolidated, ConsolidationFailed],
        [S.FALLING_ASLEEP, *DORMANT, *_ENDED],
        "it was asked for twice, or the engine was stopped meanwhile",
    ),
    ([EngineGone], _LIVE - {S.FALLING_ASLEEP} | OVER, "a stop that was asked for twice ends twice"),
    ([JoinStages], [S.JOINING, S.ACTIVATING, S.READY, S.DRAINING], "it has been joined, or is no pipeline"),
    ([JoinStages], [S.FALLING_ASLEEP, *DORMANT, *_ENDED], "it no longer starts"),
    ([ConsolidateInstance], {*State} - {S.READY}, "only a READY stage becomes whole"),
    ([ResumeInstance], {*State} - {S.DRAINING}, "there is no drain to take back"),
    ([RunsElsewhere], [S.LOSING, S.LOST], "that is known"),
    ([Tick], DORMANT, "nothing is waited for"),
)

AWAITS: Mapping[State, tuple[type, ...]] = {
    S.LAUNCHING: _BEGIN,
    S.LOADING: (LoadEngine,),
    S.JOINING: (ServeStages,),
    S.ACTIVATING: (ActivateEngine,),
    S.FALLING_ASLEEP: (SleepEngine,),
    **dict.fromkeys((S.RESTARTING, *sorted(ENDING)), (StopEngine,)),
}  # the effects whose outcome a state waits for: whoever enters it has asked for them

CONSOLIDATION: Mapping[
    tuple[ConsolidationState | None, type], tuple[frozenset[ConsolidationState | None], type | None]
] = {
    (NONE, ConsolidateInstance): (frozenset({NONE, C.RUNNING}), ConsolidateEngine),
    (C.RUNNING, EngineConsolidated): (frozenset({NONE}), None),
    (C.RUNNING, ConsolidationFailed): (frozenset({NONE}), None),
    (C.RUNNING, Tick): (frozenset({C.RUNNING, C.ABANDONED}), AbandonConsolidation),
    (C.RUNNING, Recalled): (frozenset({C.RUNNING}), ConsolidateEngine),
    (C.ABANDONED, ConsolidateInstance): (frozenset({C.ABANDONED}), AbandonConsolidation),
    (C.ABANDONED, EngineConsolidated): (frozenset({NONE}), None),
    (C.ABANDONED, ConsolidationFailed): (frozenset({NONE}), None),
    (C.ABANDONED, Recalled): (frozenset({C.ABANDONED}), AbandonConsolidation),
}  # consolidation, stimulus -> what may follow, and the effect that it may ask for; its end goes with the record's


def _table() -> dict[Key, Transition | Ignored]:
    table: dict[Key, Transition | Ignored] = {}
    for stimulus, states, does, to, asks in _ROWS:
        for state in states:
            after = frozenset(state if one == STAYS else one for one in to)
            _add(table, (state, stimulus), Transition(does, after, frozenset(asks)))  # type: ignore[arg-type]
    for stimuli, states, why in _IGNORED:
        for key in ((state, stimulus) for state in states for stimulus in stimuli):
            _add(table, key, Ignored(why))
    return table


def _add(table: dict[Key, Transition | Ignored], key: Key, row: Transition | Ignored) -> None:
    assert key not in table, f"{key} stands twice in the table"
    table[key] = row


TABLE: Mapping[Key, Transition | Ignored] = _table()
STIMULI: tuple[type, ...] = tuple(dict.fromkeys(stimulus for _, stimulus in TABLE))


def wrong(move: Move) -> Iterator[str]:
    """What of a move the tables do not allow."""
    row = TABLE.get((move.before, move.stimulus))
    name = f"{move.instance_id}: {move.before} -{move.stimulus.__name__}-> {move.after}"
    if not isinstance(row, Transition):
        yield f"{name} is not in the table"
        return
    if move.after not in row.to:
        yield f"{name}: the table allows {sorted(str(state) for state in row.to)}"
    if unknown := set(move.asked) - row.asks:
        yield f"{name} asks for {sorted(effect.__name__ for effect in unknown)}"
    awaited = AWAITS.get(move.after, ()) if move.after is not None and move.after is not move.before else ()
    is_asked = move.is_taken_over or awaited == AWAITS.get(move.before or S.STOPPED, ())
    is_asked = is_asked or (move.before is S.FALLING_ASLEEP and move.stimulus is EngineGone)  # it tried to stop it
    if not is_asked and not set(awaited) <= set(move.asked):
        yield f"{name} waits for the outcome of {[effect.__name__ for effect in awaited]}, which was not asked for"
    yield from _wrong_consolidation(move, name)


def _wrong_consolidation(move: Move, name: str) -> Iterator[str]:
    before, after = move.consolidated_before, move.consolidated_after
    to, asks = CONSOLIDATION.get((before, move.stimulus), (frozenset({before}), None))
    if after not in to and not (after is None and move.after not in (S.READY, S.DRAINING)):
        yield f"{name}: its consolidation goes from {before} to {after}"
    if after is not before and after is not None and asks not in move.asked:
        yield f"{name}: its consolidation is {after}, which was not asked for"
