"""The status of a custom resource: what the fleet makes of its spec.

Ready is what tools wait for (kstatus of Argo CD and Flux): a request that comes now is answered, at once or after a
start. So a model scaled to zero is Ready with the reason Cold, unless it refuses requests while it is cold or is meant
to run always. Figures stand in fields and never in messages, so that a status changes when something has happened.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from glowplug.controllers.resources.messages import Kind, Resource, Row
from glowplug.domain.instance import Instance
from glowplug.domain.phrasing import MOST_NAMED
from glowplug.fleet.status import is_ready

ETA_CHANGE: Final = 0.25  # an estimate of the same state is written again when it has changed by this part
HOT: Final = "hot"
_NO_START = frozenset({"cold", "warm", "draining"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition, without its time. `holds`: None where it is not known."""

    holds: bool | None
    reason: str
    message: str


def model_ready(row: Row, state: str) -> Verdict:
    """Whether a request to the model is answered now."""
    if state == "suspended":
        return Verdict(False, "Suspended", "an operator has drained it: glowplug load starts it again")
    if state == HOT:
        return Verdict(True, "Hot", "an instance serves")
    reason = state.capitalize()
    if row.last_failure and state in _NO_START:
        return Verdict(False, "Failed", row.last_failure)
    if row.keeps_one:
        return Verdict(False, reason, "no instance serves yet, and one is meant to")
    if row.refuses_cold:
        return Verdict(False, reason, "no instance serves, and requests are refused until one does (on_cold)")
    return Verdict(True, reason, "no instance serves; a request waits for one to start")


def status_of(
    resource: Resource,
    generation: int,
    accepted: Verdict | None,
    ready: Verdict,
    now_s: float,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The status to be. `generation`: of the spec that the fleet has taken or refused, 0 for none so far; `accepted`:
    None while that is open; `own`: the fields of its kind."""
    old = {one["type"]: one for one in resource.status.get("conditions", ()) if isinstance(one, dict) and "type" in one}
    conditions = []
    for name, verdict in (("Accepted", accepted), ("Ready", ready)):
        if verdict is None:
            conditions += [old[name]] if name in old else []
            continue
        made = {
            "type": name,
            "status": "Unknown" if verdict.holds is None else str(verdict.holds),
            "reason": verdict.reason,
            "message": verdict.message[:32_000],
            "observedGeneration": resource.generation,
        }
        before = old.get(name, {})
        same = before.get("status") == made["status"]
        since = before.get("lastTransitionTime") if same else None
        conditions.append(made | {"lastTransitionTime": since or written(now_s)})
    observed = {"observedGeneration": generation} if generation else {}
    return {**observed, **(own or {}), "conditions": conditions}


def model_fields(
    resource: Resource, row: Row | None, instances: Iterable[Instance], eta_s: float | None
) -> dict[str, Any]:
    """What of a model's status is no condition."""
    living = [one for one in instances if not one.state.is_gone]
    made: dict[str, Any] = {
        "replicas": sum(map(is_ready, living)),
        "selector": f"glowplug.dev/model={resource.key[:63].rstrip('-')}",
    }
    if places := sorted({one.node_id for one in living} - {""}):
        more = len(places) - MOST_NAMED
        made["where"] = ", ".join(places[:MOST_NAMED]) + (f" +{more}" if more > 0 else "")
    if row is not None:
        made |= {"key": row.key, "state": row.state}
        if eta_s is not None and row.state not in (HOT, "suspended"):
            made["eta"] = _eta(eta_s, resource.status, row.state)
    return made


def _eta(eta_s: float, before: Mapping[str, Any], state: str) -> str:
    """The estimate in text, as it was before where it has hardly changed."""
    old = str(before.get("eta", ""))
    try:
        known = float(old.removesuffix("s"))
    except ValueError:
        known = -1.0
    if before.get("state") == state and known >= 0 and abs(known - eta_s) <= ETA_CHANGE * max(known, eta_s):
        return old
    return f"{eta_s:.0f}s" if eta_s >= 10 else f"{eta_s:.1f}s"


def tenant_fields(row: Row | None) -> dict[str, Any]:
    """What of a tenant's status is no condition."""
    return {} if row is None else {"keys": row.num_keys}


def fields_of(
    resource: Resource, row: Row | None, instances: Iterable[Instance], eta_s: float | None
) -> dict[str, Any]:
    """What of a status is no condition."""
    if resource.kind is Kind.TENANT:
        return tenant_fields(row)
    return model_fields(resource, row, instances, eta_s)


def written(at_s: float) -> str:
    """A time as Kubernetes writes it, in whole seconds."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
