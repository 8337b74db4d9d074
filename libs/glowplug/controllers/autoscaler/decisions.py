"""Records of the autoscaler's decisions and their figures."""

from collections.abc import Mapping

from glowplug.controllers.effects import Record
from glowplug.controllers.naming import Ids
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.envelope import Event
from glowplug.policies.decisions import ScaleDecision


def figures(load: ModelLoad, mine: Mapping[str, Instance], instance_id: str = "") -> dict[str, float | int | str]:
    running = [i for i in mine.values() if i.serves and not i.state.is_gone]
    known: dict[str, float | int | str] = {
        "waiting": load.num_waiting,
        "in_flight": load.num_in_flight,
        "running": len(running),
    }
    if instance_id:
        known["in_flight_here"] = load.in_flight_by_instance.get(instance_id, 0)
    return known


class Decisions:
    def __init__(self, ids: Ids, policy: str) -> None:
        self._ids, self._policy = ids, policy

    def record(
        self,
        decision: ScaleDecision,
        instance_id: str,
        chosen: str,
        now_s: float,
        *,
        policy: str = "",
        cause: Event | None = None,
    ) -> Record:
        """`chosen`: the instance's fate ("start", "drain" ...); `cause`: the request."""
        made = DecisionRecord(
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
        return Record(made, cause)


def _sentence(decision: ScaleDecision, chosen: str) -> str:
    """As in '<model> gets an instance: 1 request waits, ...'."""
    done = _DONE.get(chosen)
    return f"{done.format(decision.model_key)}: {decision.reason}" if done else decision.reason


_DRAINS = "an instance of {} drains"
_DONE: Mapping[str, str] = {  # an operator's action has a whole sentence as its reason
    "start": "{} gets an instance",
    "resume": "an instance of {} that was draining serves on",
    "cancel": "a start of {} is called off",
    "drain": _DRAINS,
    "unload": _DRAINS,
    "sleep": _DRAINS,
    "undeploy": _DRAINS,
    "stop": _DRAINS,
    "consolidate_down": "a pipeline of {} becomes one instance",
    "consolidate_up": "a pipeline of {} becomes an instance of each stage",
    "unconsolidated": "a pipeline of {} serves on as it is",
}
