"""What a scaling policy gets to see of one model, and the record of what it decided."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from glowplug.controllers.autoscaler.forecasts import ForecastBook
from glowplug.controllers.autoscaler.params import Pending
from glowplug.controllers.naming import Ids
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot, ModelLoad
from glowplug.events.envelope import Event
from glowplug.policies.decisions import ScaleDecision

READY, DRAINING = InstanceState.READY, InstanceState.DRAINING
_PLACED_S = 1.0  # a placer that has room says so in milliseconds


def without_gone(load: ModelLoad, mine: Mapping[str, Instance], unloaded: Collection[str]) -> ModelLoad:
    """What a router last said it runs on an instance that is gone, asleep or sent away is no demand."""
    gone = [
        i
        for i in load.in_flight_by_instance
        if i in unloaded or (i in mine and (mine[i].state.is_gone or mine[i].state.is_dormant))
    ]
    leaving = sum(load.in_flight_by_instance[i] for i in gone)
    return replace(load, num_in_flight=max(0, load.num_in_flight - leaving)) if leaving else load


def as_told(mine: Mapping[str, Instance], told: Mapping[str, InstanceState]) -> Mapping[str, Instance]:
    """The rows with what was told a moment ago done (READY: to come back, DRAINING: to go): a policy that has chosen
    does not choose again before its word is heard."""
    changes = {READY: DRAINING, DRAINING: READY}
    heard = {i: told[i] for i in told if i in mine and changes.get(mine[i].state) is told[i]}
    return {**mine, **{i: replace(mine[i], state=state) for i, state in heard.items()}} if heard else mine


def gpus_without_room(asked: Iterable[Pending], models: Mapping[str, Model], model_key: str, now_s: float) -> int:
    """GPUs of the largest instance of another model that has no place, though the placer has been asked for a while."""
    waiting = (one.model_key for one in asked if now_s - one.wanted_at >= _PLACED_S)
    return max((models[key].num_gpus for key in waiting if key != model_key and key in models), default=0)


def snapshot_of(
    model: Model,
    load: ModelLoad,
    mine: Mapping[str, Instance],
    forecasts: ForecastBook,
    *,
    num_pending: int,
    gpus_without_room: int,
    now_s: float,
    lead_s: float,
) -> FleetSnapshot:
    """All there is of one model; of the others only how many GPUs they want and do not find."""
    now, after = forecasts.at(model.key, now_s + lead_s)
    return FleetSnapshot(
        now_s=now_s,
        models={model.key: model},
        nodes={},
        instances=mine,
        loads={model.key: load},
        forecasts={model.key: now} if now else {},
        next_forecasts={model.key: after} if after else {},
        num_pending={model.key: num_pending},
        gpus_without_room=gpus_without_room,
    )


def figures(load: ModelLoad, mine: Mapping[str, Instance], instance_id: str = "") -> dict[str, float | int | str]:
    """What was known of the load when somebody else than a policy decided."""
    running = [i for i in mine.values() if i.serves and not i.state.is_gone]
    known: dict[str, float | int | str] = {
        "waiting": load.num_waiting,
        "in_flight": load.num_in_flight,
        "running": len(running),
    }
    if instance_id:
        known["in_flight_here"] = load.in_flight_by_instance.get(instance_id, 0)
    return known


class Records:
    """Writes up decisions; `policy` is who makes them unless said otherwise."""

    def __init__(self, ids: Ids, policy: str) -> None:
        self._ids, self._policy = ids, policy

    def of(
        self,
        decision: ScaleDecision,
        instance_id: str,
        chosen: str,
        now_s: float,
        cause: Event | None = None,
        policy: str = "",
    ) -> DecisionRecord:
        """`chosen`: what becomes of the instance ("start", "drain" ...); `cause`: the request that waits for it."""
        return DecisionRecord(
            decision_id=self._ids.next("d-s"),
            kind="scale",
            policy=policy or self._policy,
            service="autoscaler",
            reason=_sentence(decision, chosen),
            made_at=now_s,
            model_key=decision.model_key,
            instance_id=instance_id,
            request_id=cause.data.request_id if cause else "",
            chosen=chosen,
            inputs=decision.inputs,
            cause_id=cause.event_id if cause else "",
            traceparent=cause.traceparent if cause else "",
        )


def _sentence(decision: ScaleDecision, chosen: str) -> str:
    """What is done, and why: '<model> gets an instance: 1 request waits, ...'."""
    done = _DONE.get(chosen)
    return f"{done.format(decision.model_key)}: {decision.reason}" if done else decision.reason


_DRAINS = "an instance of {} drains"
_DONE: Mapping[str, str] = {  # by what was chosen; what an operator does to a model itself is a sentence of its own
    "start": "{} gets an instance",
    "resume": "an instance of {} that was draining serves on",
    "cancel": "a start of {} is called off",
    "drain": _DRAINS,
    "unload": _DRAINS,
    "undeploy": _DRAINS,
    "stop": _DRAINS,
    "consolidate_down": "a pipeline of {} becomes one instance",
    "consolidate_up": "a pipeline of {} becomes an instance of each stage",
    "unconsolidated": "a pipeline of {} serves on as it is",
}
