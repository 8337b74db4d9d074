"""The lifecycle of one instance on its node, as data: the effect of each stimulus in each state.

An entry of TABLE is a Transition (action, next states, allowed effects) or Ignored (late or repeated). A missing entry
is a bug of the sender: InvalidTransition, with nothing changed. Consolidation runs beside READY and DRAINING, with its
own table. docs/instance_states.py prints it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from glowplug.controllers.agent import adapters, drains, lifecycle, stages, starts
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import COMING, DORMANT, ENDED, FETCHING, ConsolidationState, Holding, State
from glowplug.controllers.agent.transaction import Action, Ignored, Step, Table, Transaction, Transition
from glowplug.controllers.effects import Tick
from glowplug.domain.errors import WeightsDropped
from glowplug.domain.instance import EngineFigures
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance

# Engines that load weights while they arrive (HydraServe section 5.1: fetch and load overlap). Weights are checked only
# once all are fetched, so a start is READY (a replica PREWARMED) after its load and its fetch, in either order. Wrong
# weights end the engine; refetched ones restart it, whether engine or agent learns of them first.


def on_arriving(transaction: Transaction, holding: Holding, report: msg.WeightsArriving) -> None:
    assert holding.start is not None
    if holding.start.weights_path is None:
        start = replace(holding.start, arriving_path=report.path)
        lifecycle.advance(transaction, replace(holding, start=start))


def on_engine_ready(transaction: Transaction, holding: Holding, report: msg.EngineReady) -> None:
    instance = holding.instance
    if instance.replica:
        return
    holding = _loaded(holding, report.figures)
    if holding.is_first_stage:  # all stages together report their slots
        report = replace(report, figures=replace(report.figures, num_slots=0))
    transaction.publish(
        holding.enter(State.UNCHECKED),
        **lifecycle.reported(instance, report),
        phases=(*instance.phases, *report.phases),
        reason="its engine is loaded, and its weights are not checked yet",
    )


def on_prewarmed(transaction: Transaction, holding: Holding, report: msg.EnginePrewarmed) -> None:
    if holding.instance.replica or holding.engine_id:
        why = "its weights are on the GPU, and not checked yet"
        loaded = _loaded(holding, report.figures)
        transaction.publish(loaded.enter(State.UNCHECKED), reason=why)


def _loaded(holding: Holding, figures: EngineFigures) -> Holding:
    """Shared bytes count once the weights are checked (sharing.py)."""
    assert holding.start is not None
    return replace(holding, start=replace(holding.start, figures=figures))


def on_weights(transaction: Transaction, holding: Holding, report: msg.WeightsComplete) -> None:
    assert holding.start is not None
    name, instance, figures = holding.instance.instance_id, holding.instance, holding.start.figures
    holding = lifecycle.with_weights(transaction, holding, report)
    if holding.engine_id:
        holding = lifecycle.activate(transaction, holding)
        transaction.publish(holding, reason="its weights are in host memory")
    elif holding.state is State.STREAMING:
        why = "its weights are in host memory, and its engine has taken those that came before the last"
        transaction.publish(holding.enter(State.LOADING), reason=why)
    elif instance.replica:
        drains.on_prewarmed(transaction, holding, msg.EnginePrewarmed(name, figures))
    else:
        again = msg.EngineReady(name, instance.url, key_id=instance.key_id, figures=figures)
        stages.on_ready(transaction, holding, again)


def on_replaced(transaction: Transaction, holding: Holding, report: msg.WeightsReplaced) -> None:
    assert holding.start is not None
    if holding.state is State.STARTING:
        transaction.keep(replace(holding, start=replace(holding.start, arriving_path=None)))
        return
    _begin_again(transaction, holding, report.reason)


def on_start_failed(transaction: Transaction, holding: Holding, report: msg.EngineStartFailed) -> None:
    """Fail a start, or restart it if the engine learned of dropped weights before its agent."""
    if report.code == WeightsDropped.code:
        _begin_again(transaction, holding, report.reason)
    else:
        lifecycle.on_start_failed(transaction, holding, report)


def _begin_again(transaction: Transaction, holding: Holding, why: str) -> None:
    reason = f"its engine starts again, since it has loaded weights that were dropped: {why}"
    holding = transaction.publish(holding.enter(State.RESTARTING), url="", reason=reason)
    lifecycle.stop(transaction, holding, 0.0, State.RESTARTING)


NONE = None  # before the start, or forgotten
S, C = State, ConsolidationState
STAYS = "stays"  # in a row below: the state may stay
_SERVING = (S.READY, S.DRAINING)
_BEGUN = COMING | {S.RESTARTING}
_LIVE = COMING | DORMANT | {*_SERVING, S.FALLING_ASLEEP}
_ENDING = ENDED | {S.STOPPING}
_MAY_READ = frozenset({S.STREAMING, S.LOADING})  # weights may be dropped during the load
_BEGIN = (msg.LaunchEngine, msg.AwaitWeights)
_LOAD = (msg.LoadEngine, msg.ActivateEngine)
_STOP = (msg.StopEngine,)
_READY = (*_STOP, msg.ReportStart)
_ENDS = (*_STOP, msg.UnloadAdapter)
_END_DRAIN = (msg.SleepEngine, msg.StopEngine, msg.ReportDrain)
_DRAINED = (msg.StopEngine, msg.ReportDrain)
_CONSOLIDATED = (msg.ReportConsolidation,)
_CONSOLIDATE = (msg.ConsolidateEngine, msg.AbandonConsolidation, msg.FinishStages, *_CONSOLIDATED)
_TICK_SERVING = (msg.CheckHealth, msg.AbandonConsolidation, *_CONSOLIDATED)
_GROWN = (*_BEGIN, msg.ActivateEngine, msg.ReportStart)

_States = Iterable[State | None]
_Row = tuple[type | tuple[type, ...], _States, Action, tuple[State | str | None, ...], tuple[type, ...]]

# stimuli, states -> action, next states, allowed effects
_ROWS: tuple[_Row, ...] = (
    (StartInstance, [NONE], starts.on_start, (*FETCHING, S.ACTIVATING, S.STOPPED, S.FAILED), _GROWN),
    (msg.EngineLaunched, [S.STARTING], lifecycle.on_launched, (STAYS, S.STREAMING, S.LOADING, S.ACTIVATING), _LOAD),
    (msg.WeightsArriving, [S.STARTING], on_arriving, (STAYS, S.STREAMING), (msg.LoadEngine,)),
    (msg.WeightsReplaced, [S.STARTING], on_replaced, (STAYS,), ()),
    (msg.WeightsReplaced, [S.STREAMING, S.UNCHECKED], on_replaced, (S.RESTARTING,), _STOP),
    (msg.WeightsComplete, [S.STARTING], lifecycle.on_weights, (STAYS, S.LOADING, S.ACTIVATING), _LOAD),
    (msg.WeightsComplete, [S.STREAMING], on_weights, (S.LOADING, S.ACTIVATING), (msg.ActivateEngine,)),
    (
        msg.WeightsComplete,
        [S.UNCHECKED],
        on_weights,
        (S.READY, S.PREWARMED, S.ACTIVATING, S.STAGE_LOADED, S.JOINING, S.FAILED),
        (msg.ActivateEngine, msg.ServeStages, *_READY),
    ),
    (msg.EngineReady, [S.STREAMING], on_engine_ready, (STAYS, S.UNCHECKED), ()),
    (msg.EnginePrewarmed, [S.STREAMING], on_prewarmed, (STAYS, S.UNCHECKED), ()),
    (msg.WeightsFailed, COMING, lifecycle.on_start_failed, (S.FAILED,), _STOP),
    (msg.EngineStartFailed, COMING - _MAY_READ, lifecycle.on_start_failed, (S.FAILED,), _STOP),
    (msg.EngineStartFailed, _MAY_READ, on_start_failed, (S.FAILED, S.RESTARTING), _STOP),
    (
        msg.EngineReady,
        [S.LOADING],
        stages.on_ready,
        (STAYS, S.READY, S.STAGE_LOADED, S.JOINING, S.FAILED),
        (*_READY, msg.ServeStages),
    ),
    (msg.EngineReady, [S.JOINING, S.ACTIVATING], stages.on_ready, (S.READY, S.FAILED), _READY),
    (msg.EnginePrewarmed, [S.LOADING], drains.on_prewarmed, (STAYS, S.PREWARMED, S.FAILED), _STOP),
    (JoinStages, [*FETCHING, S.RESTARTING, S.LOADING], stages.on_join, (STAYS,), ()),
    (JoinStages, [S.STAGE_LOADED], stages.on_join, (S.JOINING,), (msg.ServeStages,)),
    (ConsolidateInstance, [S.READY], stages.on_consolidate, (STAYS,), _CONSOLIDATE),
    (msg.EngineConsolidated, _SERVING, stages.on_consolidated, (STAYS,), (msg.FinishStages, *_CONSOLIDATED)),
    (msg.StagesFinished, _SERVING, stages.on_stages_finished, (STAYS,), ()),
    (msg.ConsolidationFailed, _SERVING, stages.on_not_consolidated, (STAYS, S.FAILED), (*_CONSOLIDATED, *_STOP)),
    (StopInstance, [NONE], starts.on_early_stop, (STAYS,), ()),
    (StopInstance, _BEGUN, drains.on_stop, (STAYS, S.STOPPING, S.STOPPED), _STOP),
    (StopInstance, _SERVING, drains.on_stop, (S.DRAINING, S.FALLING_ASLEEP, S.STOPPING), _END_DRAIN),
    (StopInstance, [S.FALLING_ASLEEP], drains.on_stop, (STAYS, S.STOPPING), _STOP),
    (StopInstance, DORMANT, drains.on_stop, (STAYS, S.STOPPED), _STOP),
    ((msg.StopAsked, msg.NodeStopping), _BEGUN, drains.on_stop_asked, (S.STOPPING, S.STOPPED), _STOP),
    ((msg.StopAsked, msg.NodeStopping), _SERVING, drains.on_stop_asked, (S.DRAINING, S.STOPPING), _DRAINED),
    (msg.HostLeaves, _BEGUN, drains.on_host_leaves, (S.STOPPING, S.FAILED), _STOP),
    (msg.HostLeaves, _SERVING, drains.on_host_leaves, (S.DRAINING, S.STOPPING, S.FAILED), _DRAINED),
    ((msg.StopAsked, msg.NodeStopping), [S.FALLING_ASLEEP], drains.on_stop_asked, (S.STOPPING,), _STOP),
    ((msg.StopAsked, msg.NodeStopping), DORMANT, drains.on_stop_asked, (S.STOPPED,), _STOP),
    (ResumeInstance, [S.DRAINING], drains.on_resume, (STAYS, S.READY), (msg.LimitKv,)),
    (
        msg.InFlight,
        [S.DRAINING],
        drains.on_in_flight,
        (STAYS, S.FALLING_ASLEEP, S.STOPPING),
        (*_END_DRAIN, msg.LimitKv),
    ),
    (msg.EngineAsleep, [S.FALLING_ASLEEP], drains.on_asleep, (S.PREWARMED, S.SWAPPED_OUT, S.STOPPING), _DRAINED),
    (msg.EngineBusy, [S.FALLING_ASLEEP], drains.on_busy, (STAYS, S.DRAINING), _END_DRAIN),
    (msg.SleepFailed, [S.FALLING_ASLEEP], drains.on_sleep_failed, (S.STOPPING,), _DRAINED),
    (msg.EngineGone, [S.RESTARTING], lifecycle.on_gone, (STAYS, S.STARTING), _BEGIN),
    (msg.EngineGone, [S.STOPPING], lifecycle.on_gone, (STAYS, S.STOPPED), ()),
    (msg.EngineGone, ENDED, lifecycle.on_gone, (STAYS,), ()),
    ((msg.EngineExited, msg.EngineOverLimit), _LIVE, lifecycle.on_exited, (S.FAILED,), _STOP),
    (msg.HealthSeen, _LIVE - COMING, lifecycle.on_health, (STAYS, S.FAILED), _STOP),
    (msg.GivesWay, [*FETCHING, S.RESTARTING, S.LOADING, *DORMANT], lifecycle.on_give_way, (S.STOPPED,), _STOP),
    (msg.TakenOver, [*FETCHING, S.LOADING, *DORMANT], starts.on_taken_over, (S.STOPPED,), ()),
    (msg.RunsElsewhere, {*State} - {S.LOST}, lifecycle.on_lost, (S.LOST,), _STOP),
    (msg.Recalled, _BEGUN, starts.on_recalled, (S.RESTARTING, S.FAILED), _STOP),
    (msg.Recalled, _SERVING, starts.on_recalled, (STAYS, S.FAILED), (*_CONSOLIDATE, *_STOP)),
    (msg.Recalled, [S.FALLING_ASLEEP], starts.on_recalled, (STAYS, S.FAILED), (msg.SleepEngine, *_STOP)),
    (msg.Recalled, DORMANT, starts.on_recalled, (STAYS, S.STOPPED, S.FAILED), _STOP),
    (msg.Recalled, [S.STOPPING], starts.on_recalled, (STAYS, S.FAILED), _STOP),
    (msg.Recalled, ENDED, starts.on_recalled, (STAYS,), _STOP),
    (Tick, COMING, lifecycle.on_start_tick, (STAYS, S.FAILED), _STOP),
    (Tick, [S.READY], drains.on_ready_tick, (STAYS,), _TICK_SERVING),
    (
        Tick,
        [S.DRAINING],
        drains.on_drain_tick,
        (STAYS, S.FALLING_ASLEEP, S.STOPPING),
        (*_TICK_SERVING, msg.CountInFlight, *_END_DRAIN),
    ),
    (Tick, [S.FALLING_ASLEEP], drains.on_sleep_tick, (STAYS, S.STOPPING), _DRAINED),
    (Tick, [S.RESTARTING, S.STOPPING], lifecycle.on_stop_tick, (STAYS,), _STOP),
    (Tick, ENDED, lifecycle.on_end_tick, (STAYS, NONE), (msg.StopEngine, msg.ForgetEngine)),
)

_ARRIVAL = (msg.WeightsArriving, msg.WeightsReplaced)
_STARTED = (msg.EngineLaunched, msg.WeightsComplete, *_ARRIVAL)
_START_ENDED = (msg.WeightsFailed, msg.EngineStartFailed, msg.EngineReady, msg.EnginePrewarmed)
_SLEEP_ENDED = (msg.EngineAsleep, msg.EngineBusy, msg.SleepFailed)
_IGNORED: tuple[tuple[Iterable[type], _States, str], ...] = (
    ([StartInstance], State, "a start that is known already"),
    ([JoinStages, ConsolidateInstance, ResumeInstance], [NONE], "its start has not come, or it is forgotten"),
    ([StopInstance, msg.StopAsked, msg.NodeStopping], _ENDING, "it ends already"),
    ([msg.EngineExited, msg.EngineOverLimit, msg.HealthSeen], {S.RESTARTING, *_ENDING}, "its process should end"),
    ([msg.InFlight], {*State} - COMING - {S.DRAINING}, "the drain is over or was taken back"),
    ([msg.EngineLaunched, msg.WeightsArriving], COMING - {S.STARTING}, "it comes twice"),
    ([msg.WeightsComplete], COMING - FETCHING, "it comes twice"),
    ([msg.WeightsReplaced], COMING - FETCHING, "they were whole and checked before"),
    ([msg.EngineReady], [S.UNCHECKED, S.STAGE_LOADED, S.READY], "it comes twice"),
    ([msg.EnginePrewarmed], [S.UNCHECKED, S.PREWARMED], "it comes twice"),
    ([*_STARTED, *_START_ENDED], {S.RESTARTING, *_ENDING}, "the start was given up meanwhile"),
    (_SLEEP_ENDED, _SERVING, "the agent that asked for it has restarted"),
    (_SLEEP_ENDED, DORMANT | _ENDING, "it comes twice, or the engine was stopped meanwhile"),
    (
        [msg.EngineConsolidated, msg.ConsolidationFailed, msg.StagesFinished],
        {S.FALLING_ASLEEP} | DORMANT | _ENDING,
        "it was asked for twice, or the engine was stopped meanwhile",
    ),
    ([msg.EngineGone], _LIVE, "a stop that was asked for twice ends twice"),
    ([JoinStages], [S.JOINING, S.ACTIVATING, *_SERVING], "it has been joined, or is no pipeline"),
    ([JoinStages], {S.FALLING_ASLEEP} | DORMANT | _ENDING, "it no longer starts"),
    ([ConsolidateInstance], {*State} - {S.READY}, "only a READY stage becomes whole"),
    ([ResumeInstance], {*State} - {S.DRAINING}, "there is no drain to take back"),
    ([msg.RunsElsewhere], [S.LOST], "that is known"),
    ([Tick], DORMANT, "nothing is waited for"),
)

AWAITS: Mapping[str, tuple[type, ...]] = {
    S.STARTING: _BEGIN,
    S.STREAMING: (msg.LoadEngine, msg.AwaitWeights),
    S.UNCHECKED: (msg.AwaitWeights,),
    S.LOADING: (msg.LoadEngine,),
    S.JOINING: (msg.ServeStages,),
    S.ACTIVATING: (msg.ActivateEngine,),
    S.FALLING_ASLEEP: (msg.SleepEngine,),
    "stop": (msg.StopEngine,),
    C.RUNNING: (msg.ConsolidateEngine,),
    C.ABANDONED: (msg.AbandonConsolidation,),
    C.FINISHING: (msg.FinishStages,),
}  # effects awaited in a state, asked for by the move into it

_OVER = frozenset({NONE})
_WHOLE = frozenset({NONE, C.FINISHING})
CONSOLIDATION: Mapping[tuple[ConsolidationState | None, type], frozenset[ConsolidationState | None]] = {
    (NONE, ConsolidateInstance): frozenset({NONE, C.RUNNING}),
    (C.RUNNING, msg.EngineConsolidated): _WHOLE,
    (C.RUNNING, msg.ConsolidationFailed): _OVER,
    (C.RUNNING, Tick): frozenset({C.RUNNING, C.ABANDONED}),
    (C.ABANDONED, msg.EngineConsolidated): _WHOLE,
    (C.ABANDONED, msg.ConsolidationFailed): _OVER,
    (C.FINISHING, msg.StagesFinished): _OVER,
}  # (consolidation, stimulus) -> next; else unchanged, or ended with the record


def _table() -> Table:
    table: dict[tuple[State | None, type], Transition | Ignored] = {}

    def add(key: tuple[State | None, type], row: Transition | Ignored) -> None:
        assert key not in table, f"{key} stands twice in the table"
        table[key] = row

    for stimuli, states, does, to, asks in _ROWS:
        for stimulus in stimuli if isinstance(stimuli, tuple) else (stimuli,):
            for state in states:
                after = frozenset(state if one == STAYS else one for one in to)
                add((state, stimulus), Transition(does, after, adapters.also(asks)))  # type: ignore[arg-type]
    for ignored, states, why in _IGNORED:
        for key in ((state, stimulus) for state in states for stimulus in ignored):
            add(key, Ignored(why))
    return table


TABLE: Table = _table()
STIMULI: tuple[type, ...] = tuple(dict.fromkeys(stimulus for _, stimulus in TABLE))


def wrong(step: Step) -> Iterator[str]:
    before, after = (holding.state if holding is not None else None for holding in (step.before, step.after))
    row = TABLE.get((before, step.stimulus))
    name = f"{step.instance_id}: {before} -{step.stimulus.__name__}-> {after}"
    if not isinstance(row, Transition):
        yield f"{name} is not in the table"
        return
    if after not in row.to:
        yield f"{name}: the table allows {sorted(str(state) for state in row.to)}"
    if unknown := set(step.asked) - row.asks:
        yield f"{name} asks for {sorted(effect.__name__ for effect in unknown)}"
    asked = {*step.asked, *(_ENDS if step.stimulus is msg.EngineGone else ())}  # a failed stop is repeated later
    is_taken_over = before is None and step.after is not None and bool(step.after.engine_id)
    if not is_taken_over and (missing := _awaited(step.after) - _awaited(step.before) - asked):
        yield f"{name} waits for the outcome of {sorted(e.__name__ for e in missing)}, which was not asked for"
    was, is_now = _consolidation(step.before), _consolidation(step.after)
    if is_now not in CONSOLIDATION.get((was, step.stimulus), {was}) and not (is_now is None and after not in _SERVING):
        yield f"{name}: its consolidation goes from {was} to {is_now}"


def _awaited(holding: Holding | None) -> set[type]:
    if holding is None:
        return set()
    waits = (holding.state, "stop" if holding.stop is not None else "", _consolidation(holding) or "")
    awaited = {effect for wait in waits for effect in AWAITS.get(wait, ())}
    return adapters.instead(awaited) if holding.instance.host_id else awaited


def _consolidation(holding: Holding | None) -> ConsolidationState | None:
    return holding.consolidation.state if holding is not None and holding.consolidation is not None else None
