"""What happened to models, as events of Kubernetes: starts, evictions and failures with their reason. Requests that
are refused are none: there may be thousands.

Names of events come from the ids of decisions and instances, so that an operator that starts anew announces nothing
twice: the API server knows the name.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from glowplug.controllers.resources.messages import FleetView, Notice
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import InstanceState
from glowplug.fleet.status import is_ready

FRESH_S: Final = 300.0  # what is older is no news to an operator that starts
MOST: Final = 20  # notices of one model, the newest
_LEAVES: Final = frozenset({"drain", "sleep", "stop", "undeploy", "unload"})  # what scaling does with an instance
_PLACED: Final = {"waits": "Waiting", "failed": "Failed"}  # what came of a placement -> reason


def news(view: FleetView) -> Mapping[str, tuple[Notice, ...]]:
    """Model key -> its notices, the oldest first."""
    found: dict[str, list[Notice]] = defaultdict(list)
    since_s = view.taken_at - FRESH_S
    models = {row.instance_id: key for key, rows in view.instances.items() for row in rows}
    for decision in view.decisions:
        if decision.made_at >= since_s:
            for key, notice in _of_decision(decision, models):
                found[key].append(notice)
    for key, rows in view.instances.items():
        for row in rows:
            if is_ready(row) and row.ready_at >= since_s:
                took_s = max(0.0, row.ready_at - row.created_at)
                note = f"{row.instance_id} serves on {row.node_id}, {took_s:.1f} s after its start"
                note += f" ({row.start_kind})" if row.start_kind else ""
                name = f"{row.instance_id}-ready"
                found[key].append(Notice(name=name, reason="Started", note=note, at_s=row.ready_at))
            elif row.state is InstanceState.FAILED and row.changed_at >= since_s:
                note = f"{row.instance_id} on {row.node_id}: {row.reason or 'no reason given'}"
                name = f"{row.instance_id}-failed"
                found[key].append(Notice(name=name, reason="Failed", note=note, at_s=row.changed_at, is_warning=True))
    return {key: tuple(sorted(notices, key=lambda one: (one.at_s, one.name))[-MOST:]) for key, notices in found.items()}


def _of_decision(decision: DecisionRecord, models: Mapping[str, str]) -> Iterator[tuple[str, Notice]]:
    """(model key, notice) of each model that the decision is news for. Scaling that starts an instance is told by the
    placement that follows."""
    at_s, note = decision.made_at, decision.reason
    if decision.kind == "evict":
        for victim in decision.chosen.split(", "):
            if victim in models:
                name = f"{decision.decision_id}-{victim}"
                yield models[victim], Notice(name=name, reason="Evicted", note=f"{victim}: {note}", at_s=at_s)
    elif decision.kind == "scale" and decision.chosen in _LEAVES:
        yield decision.model_key, Notice(name=decision.decision_id, reason="Draining", note=note, at_s=at_s)
    elif decision.kind == "place" and decision.model_key:
        reason = _PLACED.get(decision.chosen, "Starting")
        is_warning = reason != "Starting"
        notice = Notice(name=decision.decision_id, reason=reason, note=note, at_s=at_s, is_warning=is_warning)
        yield decision.model_key, notice
