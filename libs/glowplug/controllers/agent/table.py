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

from glowplug.controllers.agent import messages as msg
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
_BEGIN = (msg.LaunchEngine, msg.AwaitWeights)
_LOAD = (msg.LoadEngine, msg.ActivateEngine)
_FAIL = (msg.StopEngine, msg.ReportStart)

# stimulus, states -> action, states that may follow, effects that it may ask for
_ROWS: tuple[tuple[type, _Source, str, tuple[State | str | None, ...], tuple[type, ...]], ...] = (
    (
        StartInstance,
        [NONE],
        "start",
        (S.LAUNCHING, S.LAUNCHED, S.FETCHED, S.ACTIVATING, S.STOPPED, S.FAILED),
        (*_BEGIN, msg.ActivateEngine, msg.ReportStart),
    ),
    (msg.EngineLaunched, [S.LAUNCHING], "launched", (S.LAUNCHED,), ()),
    (msg.EngineLaunched, [S.FETCHED], "launched", (S.LOADING, S.ACTIVATING), _LOAD),
    (msg.WeightsComplete, [S.LAUNCHING], "fetched", (S.FETCHED,), ()),
    (msg.WeightsComplete, [S.LAUNCHED], "fetched", (S.LOADING, S.ACTIVATING), _LOAD),
    (msg.WeightsFailed, COMING, "start_failed", (S.FAILING,), _FAIL),
    (msg.EngineStartFailed, COMING, "start_failed", (S.FAILING,), _FAIL),
    (
        msg.EngineReady,
        [S.LOADING],
        "ready",
        (STAYS, S.READY, S.STAGE_LOADED, S.JOINING),
        (msg.ReportStart, msg.ServeStages),
    ),
    (msg.EngineReady, [S.JOINING, S.ACTIVATING], "ready", (S.READY,), (msg.ReportStart,)),
    (msg.EnginePrewarmed, [S.LOADING], "prewarmed", (STAYS, S.PREWARMED), ()),
    (JoinStages, [*STARTING, S.RESTARTING, S.LOADING], "join", (STAYS,), ()),
    (JoinStages, [S.STAGE_LOADED], "join", (S.JOINING,), (msg.ServeStages,)),
    (ConsolidateInstance, [S.READY], "consolidate", (STAYS,), (msg.ConsolidateEngine, msg.AbandonConsolidation)),
    (msg.EngineConsolidated, [S.READY, S.DRAINING], "consolidated", (STAYS,), ()),
    (msg.ConsolidationFailed, [S.READY, S.DRAINING], "not_consolidated", (STAYS,), ()),
    (StopInstance, COMING, "stop", (STAYS, S.STOPPING, S.DROPPING), (msg.StopEngine,)),
    (StopInstance, [S.RESTARTING], "stop", (STAYS, S.STOPPING, S.DROPPING), ()),
    (
        StopInstance,
        [S.READY, S.DRAINING],
        "stop",
        (S.DRAINING, S.FALLING_ASLEEP, S.STOPPING),
        (msg.SleepEngine, msg.StopEngine),
    ),
    (StopInstance, [S.FALLING_ASLEEP], "stop", (STAYS, S.STOPPING), (msg.StopEngine,)),
    (StopInstance, DORMANT, "stop", (STAYS, S.DROPPING), (msg.StopEngine,)),
    (ResumeInstance, [S.DRAINING], "resume", (STAYS, S.READY), (msg.LimitKv,)),
    (
        msg.InFlight,
        [S.DRAINING],
        "counted",
        (STAYS, S.FALLING_ASLEEP, S.STOPPING),
        (msg.SleepEngine, msg.StopEngine, msg.LimitKv),
    ),
    (msg.EngineAsleep, [S.FALLING_ASLEEP], "asleep", (S.PREWARMED, S.SWAPPED_OUT), ()),
    (msg.EngineGone, [S.FALLING_ASLEEP], "gone", (S.STOPPING, S.STOPPED), ()),
    (msg.EngineGone, [S.RESTARTING], "gone", (STAYS, S.LAUNCHING), _BEGIN),
    (msg.EngineGone, [S.STOPPING], "gone", (STAYS, S.STOPPED), ()),
    (msg.EngineGone, [S.DROPPING], "gone", (STAYS, S.STOPPED), ()),
    (msg.EngineGone, [S.FAILING], "gone", (STAYS, S.FAILED), ()),
    (msg.EngineGone, [S.LOSING], "gone", (STAYS, S.LOST), ()),
    (msg.EngineExited, _LIVE, "exited", (S.FAILING,), _FAIL),
    (msg.EngineOverLimit, _LIVE, "exited", (S.FAILING,), _FAIL),
    (msg.HealthSeen, [S.READY, S.DRAINING], "health", (STAYS, S.FAILING), (msg.StopEngine,)),
    (msg.HealthSeen, [S.FALLING_ASLEEP, *DORMANT], "health", (STAYS, S.FAILING), (msg.StopEngine,)),
    (msg.GivesWay, [*STARTING, S.LOADING, S.PREWARMED], "give_way", (S.DROPPING,), (msg.StopEngine,)),
    (msg.GivesWay, [S.RESTARTING], "give_way", (S.DROPPING,), ()),
    (msg.TakenOver, [*STARTING, S.LOADING, *DORMANT], "taken_over", (S.STOPPED,), ()),
    (msg.RunsElsewhere, _LIVE, "lose", (S.LOSING,), (msg.StopEngine,)),
    (msg.RunsElsewhere, [S.RESTARTING, S.STOPPING, S.DROPPING, S.FAILING], "lose", (S.LOSING,), ()),
    (msg.RunsElsewhere, [S.STOPPED, S.FAILED], "lose", (S.LOST,), ()),
    (msg.Recalled, COMING, "recall", (S.RESTARTING, S.FAILING), _FAIL),
    (msg.Recalled, [S.RESTARTING], "recall", (STAYS, S.FAILING), _FAIL),
    (
        msg.Recalled,
        [S.READY, S.DRAINING],
        "recall",
        (STAYS, S.FAILING),
        (msg.ConsolidateEngine, msg.AbandonConsolidation, msg.StopEngine),
    ),
    (msg.Recalled, [S.FALLING_ASLEEP], "recall", (S.DRAINING, S.FAILING), (msg.StopEngine,)),
    (msg.Recalled, [S.PREWARMED], "recall", (STAYS, S.DROPPING, S.FAILING), (msg.StopEngine,)),
    (msg.Recalled, [S.SWAPPED_OUT], "recall", (STAYS, S.DROPPING), (msg.StopEngine,)),
    (msg.Recalled, [S.STOPPING], "recall", (STAYS, S.FAILING), (msg.StopEngine,)),
    (msg.Recalled, ENDING - {S.STOPPING}, "recall", (STAYS,), (msg.StopEngine,)),
    (msg.Recalled, [S.STOPPED], "recall", (STAYS, S.DROPPING), (msg.StopEngine,)),
    (msg.Recalled, [S.FAILED], "recall", (STAYS, S.FAILING), (msg.StopEngine,)),
    (msg.Recalled, [S.LOST], "recall", (STAYS, S.LOSING), (msg.StopEngine,)),
    (Tick, COMING, "tick_start", (STAYS, S.FAILING), _FAIL),
    (Tick, [S.READY], "tick_ready", (STAYS,), (msg.CheckHealth, msg.AbandonConsolidation)),
    (
        Tick,
        [S.DRAINING],
        "tick_drain",
        (STAYS, S.FALLING_ASLEEP, S.STOPPING),
        (msg.CheckHealth, msg.AbandonConsolidation, msg.CountInFlight, msg.SleepEngine, msg.StopEngine),
    ),
    (Tick, [S.FALLING_ASLEEP], "tick_sleep", (STAYS, S.STOPPING), (msg.StopEngine,)),
    (Tick, [S.RESTARTING, *ENDING], "tick_stop", (STAYS,), (msg.StopEngine,)),
    (Tick, OVER, "tick_over", (STAYS, NONE), (msg.ForgetEngine,)),
    *(
        row
        for asked in (msg.StopAsked, msg.NodeStopping)
        for row in (
            (asked, COMING, "drain", (S.STOPPING, S.DROPPING), (msg.StopEngine,)),
            (asked, [S.RESTARTING], "drain", (S.STOPPING, S.DROPPING), ()),
            (asked, [S.READY, S.DRAINING], "drain", (S.DRAINING, S.STOPPING), (msg.StopEngine,)),
            (asked, [S.FALLING_ASLEEP], "drain", (S.STOPPING,), (msg.StopEngine,)),
            (asked, DORMANT, "drain", (S.DROPPING,), (msg.StopEngine,)),
        )
    ),
)

_STARTED = (msg.EngineLaunched, msg.WeightsComplete)
_START_ENDED = (msg.WeightsFailed, msg.EngineStartFailed, msg.EngineReady, msg.EnginePrewarmed)
_IGNORED: tuple[tuple[Iterable[type], _Source, str], ...] = (
    ([StartInstance], State, "a start that is known already"),
    ([StopInstance, msg.StopAsked, msg.NodeStopping], _ENDED, "it ends already"),
    ([msg.EngineExited, msg.EngineOverLimit, msg.HealthSeen], [S.RESTARTING, *_ENDED], "its process is to end"),
    (
        [msg.InFlight],
        [S.READY, S.FALLING_ASLEEP, *DORMANT, S.RESTARTING, *_ENDED],
        "the drain is over or was taken back",
    ),
    (_STARTED, COMING - STARTING, "it comes twice"),
    ([msg.EngineLaunched], [S.LAUNCHED], "it comes twice"),
    ([msg.WeightsComplete], [S.FETCHED], "it comes twice"),
    ([msg.EngineReady], [S.STAGE_LOADED, S.READY], "it comes twice"),
    ([msg.EnginePrewarmed], [S.PREWARMED], "it comes twice"),
    ([*_STARTED, *_START_ENDED], [S.RESTARTING, *_ENDED], "the start was given up meanwhile"),
    ([msg.EngineAsleep], [S.READY, S.DRAINING], "the agent that asked for it has restarted"),
    ([msg.EngineAsleep], [*DORMANT, *_ENDED], "it comes twice, or the engine was stopped meanwhile"),
    (
        [msg.EngineConsolidated, msg.ConsolidationFailed],
        [S.FALLING_ASLEEP, *DORMANT, *_ENDED],
        "it was asked for twice, or the engine was stopped meanwhile",
    ),
    ([msg.EngineGone], _LIVE - {S.FALLING_ASLEEP} | OVER, "a stop that was asked for twice ends twice"),
    ([JoinStages], [S.JOINING, S.ACTIVATING, S.READY, S.DRAINING], "it has been joined, or is no pipeline"),
    ([JoinStages], [S.FALLING_ASLEEP, *DORMANT, *_ENDED], "it no longer starts"),
    ([ConsolidateInstance], {*State} - {S.READY}, "only a READY stage becomes whole"),
    ([ResumeInstance], {*State} - {S.DRAINING}, "there is no drain to take back"),
    ([msg.RunsElsewhere], [S.LOSING, S.LOST], "that is known"),
    ([Tick], DORMANT, "nothing is waited for"),
)

AWAITS: Mapping[State, tuple[type, ...]] = {
    S.LAUNCHING: _BEGIN,
    S.LOADING: (msg.LoadEngine,),
    S.JOINING: (msg.ServeStages,),
    S.ACTIVATING: (msg.ActivateEngine,),
    S.FALLING_ASLEEP: (msg.SleepEngine,),
    **dict.fromkeys((S.RESTARTING, *sorted(ENDING)), (msg.StopEngine,)),
}  # the effects whose outcome a state waits for: whoever enters it has asked for them

CONSOLIDATION: Mapping[
    tuple[ConsolidationState | None, type], tuple[frozenset[ConsolidationState | None], type | None]
] = {
    (NONE, ConsolidateInstance): (frozenset({NONE, C.RUNNING}), msg.ConsolidateEngine),
    (C.RUNNING, msg.EngineConsolidated): (frozenset({NONE}), None),
    (C.RUNNING, msg.ConsolidationFailed): (frozenset({NONE}), None),
    (C.RUNNING, Tick): (frozenset({C.RUNNING, C.ABANDONED}), msg.AbandonConsolidation),
    (C.RUNNING, msg.Recalled): (frozenset({C.RUNNING}), msg.ConsolidateEngine),
    (C.ABANDONED, ConsolidateInstance): (frozenset({C.ABANDONED}), msg.AbandonConsolidation),
    (C.ABANDONED, msg.EngineConsolidated): (frozenset({NONE}), None),
    (C.ABANDONED, msg.ConsolidationFailed): (frozenset({NONE}), None),
    (C.ABANDONED, msg.Recalled): (frozenset({C.ABANDONED}), msg.AbandonConsolidation),
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
    is_asked = is_asked or (move.before is S.FALLING_ASLEEP and move.stimulus is msg.EngineGone)  # it tried to stop it
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
