"""The operator's controller: a pure state machine that compares custom resources with the fleet.

    handle(stimulus, now_s) -> [Effect, ...]

Listed, Seen and Gone come from the API server's list and watch; Looked and Lost from the fleet's REST, every few
seconds; Answered follows each Declare and Withdraw. Effects are level-triggered: those lost with a killed process are
decided again.

- A resource gets our finalizer before the fleet hears of it, and loses it when the fleet has neither its row nor, for a
  model, a living instance.
- A row belongs to a resource by its `source`; other rows (files, REST, other resources) are never touched, and a
  resource that names one is not accepted (Conflict).
- A spec is declared once per generation, and again when its row is gone. A refused one is tried again later, since its
  missing parts may appear (weights, an adapter's base).
- A status is written when it differs, and never from a view of the fleet older than our own call to it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from glowplug.controllers import backoff
from glowplug.controllers.resources import messages as msg
from glowplug.controllers.resources.messages import DeclaredRow, Notice, OperatorView, Resource, ResourceKind
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.phrasing import MOST_NAMED
from glowplug.fleet.status import is_ready

# News of models as events of Kubernetes, without refused requests: there may be thousands. Events are named after
# decisions and instances, so that a restarted operator announces nothing twice: the API server knows the name.

FRESH_S: Final = 300.0  # older events are no news after a restart
MOST: Final = 20  # newest, per model
_LEAVES: Final = frozenset({"drain", "sleep", "stop", "undeploy", "unload"})  # ways to end an instance's service
_PLACED: Final = {"waits": "Waiting", "failed": "Failed"}


def news(view: OperatorView) -> Mapping[str, tuple[Notice, ...]]:
    """Return notices by model key, oldest first."""
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
    """Omit scaling's starts: the placement that follows tells of them."""
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


# The status of a custom resource. Ready is the condition tools wait for (kstatus of Argo CD and Flux): a request now is
# answered, at once or after a start. So a model scaled to zero is Ready with the reason Cold, unless it refuses
# requests while cold or should always run. Figures are in fields, never messages, so that a status changes only with an
# event.

ETA_CHANGE: Final = 0.25  # relative change worth a write
HOT: Final = "hot"
_NO_START = frozenset({"cold", "warm", "draining"})


@dataclass(frozen=True, slots=True)
class Verdict:
    holds: bool | None
    reason: str
    message: str


def model_ready(row: DeclaredRow, state: str) -> Verdict:
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
    """`generation`: of the spec last taken or refused, 0: none; `accepted`: None while open; `own`: the fields of its
    kind."""
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
    resource: Resource, row: DeclaredRow | None, instances: Iterable[Instance], eta_s: float | None
) -> dict[str, Any]:
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
    """Keep the former text where the estimate has hardly changed."""
    old = str(before.get("eta", ""))
    try:
        known = float(old.removesuffix("s"))
    except ValueError:
        known = -1.0
    if before.get("state") == state and known >= 0 and abs(known - eta_s) <= ETA_CHANGE * max(known, eta_s):
        return old
    return f"{eta_s:.0f}s" if eta_s >= 10 else f"{eta_s:.1f}s"


def tenant_fields(row: DeclaredRow | None) -> dict[str, Any]:
    return {} if row is None else {"keys": row.num_keys}


def fields_of(
    resource: Resource, row: DeclaredRow | None, instances: Iterable[Instance], eta_s: float | None
) -> dict[str, Any]:
    if resource.kind is ResourceKind.TENANT:
        return tenant_fields(row)
    return model_fields(resource, row, instances, eta_s)


def written(at_s: float) -> str:
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Effect = Any
RETRY_S: Final = 2.0  # after a failed call, doubling
REFUSED_S: Final = 15.0
MOST_S: Final = 120.0
LOST_S: Final = 15.0  # silence of an unreachable fleet
WRITTEN: Final = ("observedGeneration", "conditions")  # status fields of every kind
TAKEN: Final = Verdict(True, "Deployed", "the fleet has taken it")


@dataclass(slots=True)
class Progress:
    """`generation`: of the spec last taken or refused; 0: unknown."""

    generation: int = 0
    refusal: Verdict | None = None
    error: str = ""
    num_failures: int = 0
    not_before: float = 0.0
    called_at: float = 0.0
    announced: set[str] = field(default_factory=set)


class ResourcesController:
    """State: resources by uid, the progress of each, and the last view of the fleet."""

    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.view: OperatorView | None = None
        self._progress: dict[str, Progress] = {}
        self._keys: dict[tuple[ResourceKind, str], list[str]] = {}  # (kind, source) -> its rows
        self._news: Mapping[str, tuple[msg.Notice, ...]] = {}
        self._lost_since: float | None = None
        self._lost_why = ""
        self._handlers: Mapping[type[Any], Callable[[Any, float], list[Effect]]] = {
            msg.Listed: self._on_listed,
            msg.Seen: self._on_seen,
            msg.Gone: self._on_gone,
            msg.Looked: self._on_looked,
            msg.Lost: self._on_lost,
            msg.Answered: self._on_answered,
            msg.NotDone: self._on_not_done,
        }

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        return self._handlers[type(stimulus)](stimulus, now_s)

    def _on_listed(self, listed: msg.Listed, now_s: float) -> list[Effect]:
        there = {one.uid for one in listed.resources}
        for uid in [uid for uid, one in self.resources.items() if one.kind is listed.kind and uid not in there]:
            self._forget(uid)
        for one in listed.resources:
            self._keep(one)
        return [effect for one in listed.resources for effect in self._act(one, now_s)]

    def _on_seen(self, seen: msg.Seen, now_s: float) -> list[Effect]:
        known = self.resources.get(seen.resource.uid)
        if known is not None and 0 < seen.resource.version < known.version:
            return []  # a watch lags behind the answers to our own writes
        self._keep(seen.resource)
        return self._act(seen.resource, now_s)

    def _keep(self, resource: Resource) -> None:
        known, self.resources[resource.uid] = self.resources.get(resource.uid), resource
        progress = self._progress.setdefault(resource.uid, _known_progress(resource))
        as_known = (resource.generation, resource.is_leaving)
        if known is not None and as_known != (known.generation, known.is_leaving):
            progress.num_failures, progress.not_before, progress.refusal = 0, 0.0, None

    def _on_gone(self, gone: msg.Gone, now_s: float) -> list[Effect]:
        self._forget(gone.uid)
        return []

    def _forget(self, uid: str) -> None:
        self.resources.pop(uid, None)
        self._progress.pop(uid, None)

    def _on_looked(self, looked: msg.Looked, now_s: float) -> list[Effect]:
        self.view, self._lost_since = looked.view, None
        self._keys = {}
        for kind, rows in looked.view.rows.items():
            for row in rows.values():
                self._keys.setdefault((kind, row.source), []).append(row.key)
        self._news = news(looked.view)
        return self._act_on_all(now_s)

    def _on_lost(self, lost: msg.Lost, now_s: float) -> list[Effect]:
        self._lost_since = now_s if self._lost_since is None else self._lost_since
        self._lost_why = self._lost_why if now_s > self._lost_since else lost.why
        return self._act_on_all(now_s) if self._is_lost(now_s) else []

    def _on_not_done(self, stimulus: msg.NotDone, now_s: float) -> list[Effect]:
        """Let a notice be announced again; all else is decided anew at the next look."""
        effect = stimulus.effect
        if isinstance(effect, msg.Announce) and (progress := self._progress.get(effect.resource.uid)) is not None:
            progress.announced.discard(effect.notice.name)
        return []

    def _is_lost(self, now_s: float) -> bool:
        return self._lost_since is not None and now_s - self._lost_since >= LOST_S

    def _act_on_all(self, now_s: float) -> list[Effect]:
        return [effect for one in list(self.resources.values()) for effect in self._act(one, now_s)]

    def _on_answered(self, answer: msg.Answered, now_s: float) -> list[Effect]:
        progress, resource = self._progress.get(answer.uid), self.resources.get(answer.uid)
        if progress is None or resource is None:
            return []
        progress.called_at = now_s
        is_done, is_refused = (
            not answer.message,
            HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        progress.error, progress.refusal = ("" if is_done or is_refused else answer.message), None
        progress.num_failures = 0 if is_done else progress.num_failures + 1
        if is_refused:
            is_conflict = answer.status == HTTPStatus.CONFLICT
            progress.refusal = Verdict(False, "Conflict" if is_conflict else "Invalid", answer.message)
        first_s = REFUSED_S if is_refused else RETRY_S
        progress.not_before = 0.0 if is_done else now_s + backoff.backoff_s(progress.num_failures, first_s, MOST_S)
        if is_done or is_refused:
            progress.generation = answer.generation
        return self._act(resource, now_s)

    # one resource

    def _act(self, resource: Resource, now_s: float) -> list[Effect]:
        progress, view = self._progress[resource.uid], self.view
        if resource.is_leaving and not resource.is_held:
            return []
        if self._is_lost(now_s):
            silent = Verdict(None, "FleetUnreachable", self._lost_why)
            own = {name: value for name, value in resource.status.items() if name not in WRITTEN}
            status = status_of(resource, resource.status.get(WRITTEN[0], 0), None, silent, now_s, own)
            return [msg.WriteStatus(resource, status)] if status != resource.status else []
        if view is None:
            return []
        if resource.is_leaving:
            return self._leave(resource, progress, view, now_s)
        if not resource.is_held:
            return [msg.AddFinalizer(resource)]
        row = view.rows[resource.kind].get(resource.key)
        if row is not None and row.source != resource.source:
            who = row.source or "api"
            foreign = Verdict(
                False, "Conflict", f"{resource.key} is there and was declared by {who}: nothing is adopted"
            )
            progress.generation = 0  # declared once the other one is gone
            return self._status(resource, resource.generation, foreign, foreign, now_s, None)
        effects: list[Effect] = []
        if now_s >= progress.not_before:
            others = [key for key in self._keys.get((resource.kind, resource.source), ()) if key != resource.key]
            effects += [msg.Withdraw(resource, key) for key in others]
            is_lost = row is None and view.taken_at > progress.called_at
            if progress.generation != resource.generation or is_lost or progress.refusal is not None:
                return [*effects, msg.Declare(resource)]
        return [
            *effects,
            *self._described(resource, progress, row, view, now_s),
            *self._announced(resource, row, now_s),
        ]

    def _described(
        self, resource: Resource, progress: Progress, row: DeclaredRow | None, view: OperatorView, now_s: float
    ) -> list[Effect]:
        if progress.refusal is not None:
            accepted: Verdict | None = progress.refusal
        else:
            accepted = TAKEN if progress.generation == resource.generation else None
        if progress.error and row is None:
            ready = Verdict(None, "FleetUnreachable", progress.error)
        elif row is None:
            if progress.refusal is None and view.taken_at <= progress.called_at:
                return []  # the next look shows its row
            ready = progress.refusal or Verdict(False, "Pending", "the fleet has not taken it yet")
        else:
            ready = TAKEN if resource.kind is ResourceKind.TENANT else model_ready(row, row.state)
        return self._status(resource, progress.generation, accepted, ready, now_s, row)

    def _leave(self, resource: Resource, progress: Progress, view: OperatorView, now_s: float) -> list[Effect]:
        """Withdraw its rows, wait until they and its instances are gone, and release it."""
        mine = self._keys.get((resource.kind, resource.source), [])
        living = [one for one in view.instances.get(resource.key, ()) if not one.state.is_gone]
        is_another = resource.key in view.rows[resource.kind] and resource.key not in mine
        if mine:
            if now_s >= progress.not_before and view.taken_at > progress.called_at:
                return [msg.Withdraw(resource, key) for key in mine]
            text = progress.refusal.message if progress.refusal else progress.error or "its instances drain"
            reason = "InUse" if progress.refusal else "Leaving"
        elif resource.kind is ResourceKind.MODEL and living and not is_another:
            reason, text = "Leaving", "its instances drain"
        elif view.taken_at <= progress.called_at:
            return []
        else:
            return [msg.RemoveFinalizer(resource)]
        row = view.rows[resource.kind].get(resource.key) if mine else None
        generation = resource.status.get("observedGeneration", 0)
        return self._status(resource, generation, None, Verdict(False, reason, text), now_s, row)

    def _status(
        self,
        resource: Resource,
        generation: int,
        accepted: Verdict | None,
        ready: Verdict,
        now_s: float,
        row: DeclaredRow | None,
    ) -> list[Effect]:
        view = self.view
        instances = view.instances.get(resource.key, ()) if view and (row or resource.is_leaving) else ()
        own = fields_of(resource, row, instances, view.etas.get(resource.key) if view else None)
        status = status_of(resource, generation, accepted, ready, now_s, own)
        return [msg.WriteStatus(resource, status)] if status != resource.status else []

    def _announced(self, resource: Resource, row: DeclaredRow | None, now_s: float) -> list[Effect]:
        if row is None or resource.kind is not ResourceKind.MODEL:
            return []
        progress, fresh = self._progress[resource.uid], self._news.get(resource.key, ())
        new = [notice for notice in fresh if notice.name not in progress.announced]
        progress.announced = {notice.name for notice in fresh}
        return [msg.Announce(resource, notice) for notice in new]


def _known_progress(resource: Resource) -> Progress:
    conditions = resource.status.get("conditions", ())
    is_taken = any(one.get("type") == "Accepted" and one.get("status") == "True" for one in conditions)
    generation = resource.status.get("observedGeneration", 0)
    return Progress(generation=generation if is_taken else 0)
