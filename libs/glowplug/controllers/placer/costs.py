"""Estimate the cost of an operator's verb now: seconds, bytes, source of the figures, and leaving instances.

An estimate: it uses the policies, ledgers and learned seconds of a placement, and changes nothing. It leaves out the
unknown time of a leaving instance's running requests; `num_in_flight` counts them.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from glowplug.controllers.placer.fleet import LEAVE_S, Fleet
from glowplug.controllers.placer.host_memory import HostMemory
from glowplug.controllers.placer.placing import Placing, Preview
from glowplug.domain.errors import BadRequest, NotFound
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.domain.phrasing import counted
from glowplug.fleet.start_times import Scope, StartKind
from glowplug.fleet.status import NEAR, check_nowhere_else, is_coming, is_ready, rung_of
from glowplug.policies.placement.links import disk_rate, found_at, gpu_kind_of

Verb = Literal["load", "wake", "unload", "sleep", "drain", "pin", "unpin"]
VERBS: Final[tuple[Verb, ...]] = ("load", "wake", "unload", "sleep", "drain", "pin", "unpin")
_LEAVES: Final = {Rung.ASLEEP: "swapped_out", Rung.PREWARMED: "prewarmed"}
_FETCHES: Final = frozenset({StartKind.COLD, StartKind.DISK})
MOST_HELD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    instance_id: str
    model_key: str
    state: str
    num_bytes: int
    becomes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one verb. `gpu_bytes`: held on GPUs while it is carried out; `kept_gpu_bytes`: still held afterwards;
    `freed_gpu_bytes`, `fetch_bytes` (into host memory) and `freed_host_bytes` likewise. Seconds run from the
    command.
    """

    model: str
    verb: str
    rung: str  # the verb's target; of `unload`, the one that copies leave ("": all)
    seconds: float = 0.0
    kind: str = ""  # kind of the start: cold, disk, cached, wake, growth or join
    phases: dict[str, float] = field(default_factory=dict)
    source: str = "nothing to do"
    scope: str = ""  # of the figures: model, size, engine, prior, or disk (the node's own)
    num_measured: int = 0  # starts, or drains, behind the median
    is_emulated: bool = False
    node_id: str = ""
    gpu_ids: tuple[str, ...] = ()
    gpu_bytes: int = 0
    kept_gpu_bytes: int = 0
    freed_gpu_bytes: int = 0
    fetch_bytes: int = 0
    freed_host_bytes: int = 0
    num_in_flight: int = 0
    leaving: tuple[Leaving, ...] = ()
    is_possible_now: bool = True  # False: it would wait or is impossible
    reason: str = ""


class Costs:
    def __init__(self, fleet: Fleet, placing: Placing, host_memory: HostMemory) -> None:
        self.fleet, self._placing, self._host = fleet, placing, host_memory

    def of(self, model_key: str, verb: Verb, now_s: float, *, rung: Rung | None = None, node_id: str = "") -> Cost:
        """Return the cost of a verb. Raises ModelNotFound, BadRequest for a senseless verb or rung, and for one node
        NotFound, and Conflict where a copy is as near on another."""
        model = self._host.model(model_key)
        blank = Cost(model=model.name, verb=verb, rung="", is_emulated=model.engine == "emulated")
        match verb:
            case "load" | "wake" | "pin":
                to = Rung.READY if verb == "wake" else rung or Rung.READY
                return self._up(replace(blank, rung=to.value), model, to, now_s, node_id)
            case "sleep":
                return self._down(replace(blank, rung=Rung.ASLEEP.value), model, Rung.ASLEEP, self._serving(model))
            case "unload" | "drain":
                return self._off(replace(blank, rung=rung.value if rung else ""), model, rung, now_s, node_id)
            case "unpin":
                return replace(blank, reason=f"{model.name} may leave from then on")
        raise BadRequest(f"no verb {verb!r}: one of {', '.join(VERBS)}", param="verb")

    # up

    def _up(self, blank: Cost, model: Model, to: Rung, now_s: float, node_id: str) -> Cost:
        if to is Rung.HOST:
            return self._to_host(blank, model, now_s, node_id)
        if node_id and self.fleet.nodes.by_id.get(node_id) is None:
            raise NotFound(f"no node {node_id!r}", param="node")
        check_nowhere_else(to, node_id, self._living(model))
        rows = [r for r in self._living(model) if node_id in ("", r.node_id)]
        for row in rows:
            rung = rung_of(row)
            is_lasting = not (blank.verb == "pin" and row.state is InstanceState.PREWARMED)  # a replica may be dropped
            is_there = is_ready(row) or (row.state.is_dormant and is_lasting and not row.is_outdated(model))
            if is_there and rung is not None and NEAR[rung] >= NEAR[to]:
                return replace(blank, node_id=row.node_id, reason=f"{row.instance_id} is {rung.value} on {row.node_id}")
        coming = [row for row in rows if is_coming(row)]
        if coming and to is Rung.READY:
            row = min(coming, key=lambda r: r.created_at + r.predicted_s)
            left_s = max(0.0, row.created_at + row.predicted_s - now_s)
            why = f"{row.instance_id} is {row.state.value} on {row.node_id}"
            return replace(blank, seconds=left_s, node_id=row.node_id, source="what is left of its start", reason=why)
        seen = self._placing.preview(model, now_s, node_id=node_id, waits=to is not Rung.READY)
        return self._start(blank, model, to, seen)

    def _start(self, blank: Cost, model: Model, to: Rung, seen: Preview) -> Cost:
        decision, expected = seen.decision, seen.expected
        if expected is None:
            rows = self.fleet.instances.by_id
            stay = [f"{rows[name].model_key} stays: {why}" for name, why in seen.held.items() if name in rows]
            why = "; ".join([decision.reason or "no GPU has the free memory", *stay[:MOST_HELD]])
            return replace(blank, source="", is_possible_now=False, reason=why, gpu_bytes=model.memory_bytes)
        node, rows = self.fleet.nodes.by_id[decision.node_id], self.fleet.instances.by_id
        scope, num = self.fleet.network.times.measured_by(model, expected.kind, gpu_kind_of(node))
        leaving = [self._leaving(rows[name]) for name in seen.victims if name in rows]
        leaving += [self._leaving(rows[name], "stopped") for name in decision.drops if name in rows]
        phases: dict[str, float] = {}
        for stage in expected.by_phase:
            for name, took in stage.items():
                phases[name] = round(max(took, phases.get(name, 0.0)), 4)
        after_s = 0.0
        if to in _LEAVES:
            after_s, _ = self.fleet.network.leave_s(model, _LEAVES[to]) or (LEAVE_S, 0)
        if leaving and seen.victims:
            after_s += self.fleet.leave_s(rows[name] for name in seen.victims if name in rows)
        shared = self._placing.shared_bytes(model, decision)
        num_bytes = decision.num_bytes - shared
        kept = {Rung.READY: num_bytes, Rung.PREWARMED: model.weights_bytes - shared}.get(to, 0)
        return replace(
            blank,
            seconds=round(expected.start_s + after_s, 4),
            kind=expected.kind.value,
            phases=phases,
            scope=scope,
            num_measured=num,
            source=_source(scope, num, expected.kind, model, blank.is_emulated),
            node_id=decision.node_id,
            gpu_ids=tuple(gpu_id for stage in decision.stages for gpu_id in stage.gpu_ids),
            gpu_bytes=num_bytes,
            kept_gpu_bytes=kept,
            fetch_bytes=model.fetch_bytes if model.weights.uri and expected.kind in _FETCHES else 0,
            leaving=tuple(leaving),
            num_in_flight=sum(self._in_flight(rows[name]) for name in seen.victims if name in rows),
            reason=decision.reason,
        )

    def _to_host(self, blank: Cost, model: Model, now_s: float, node_id: str) -> Cost:
        node = self._host.where(model, now_s, node_id)
        if self._host.holders(model, now_s, node.node_id):
            return replace(blank, node_id=node.node_id, reason=f"its weights are in the host memory of {node.node_id}")
        gpu_kind, times = gpu_kind_of(node), self.fleet.network.times
        kind = found_at(node, model)
        known, num = times.measured_by(model, kind, gpu_kind, stage="fetch_s")
        scope, seconds = str(known), times.predict(model, kind, gpu_kind).fetch_s
        source = _source(known, num, kind, model, blank.is_emulated)
        how = "read from the disk of" if kind is StartKind.DISK else "fetched to"
        if kind is StartKind.DISK and node.disk_bytes_per_s:
            seconds, scope, num = model.fetch_bytes / disk_rate(node, model, times), "disk", 0
            source = "measured: the rate at which weights came from that disk, or went to it"
        return replace(
            blank,
            seconds=round(seconds, 4),
            phases={"fetch": round(seconds, 4)},
            scope=scope,
            num_measured=num,
            source=source,
            node_id=node.node_id,
            fetch_bytes=model.fetch_bytes,
            reason=f"its weights are {how} {node.node_id}",
        )

    # down

    def _down(self, blank: Cost, model: Model, to: Rung | None, rows: list[Instance]) -> Cost:
        becomes = _LEAVES[to] if to else "stopped"
        nodes = [node for row in rows if (node := self.fleet.nodes.by_id.get(row.node_id)) is not None]
        unable = [n.node_id for n in nodes if to is Rung.ASLEEP and not n.can(model.engine, "swap")]
        becomes = "stopped" if unable else becomes
        leaving = tuple(self._leaving(row, becomes) for row in rows)
        serving = [row for row in rows if not row.state.is_dormant]
        if not rows:
            return replace(blank, reason=f"{model.name} has no instance to act on")
        took = self.fleet.network.leave_s(model, becomes)
        seconds, num = (0.0, 0) if not serving else took or (LEAVE_S, 0)
        times = counted(num, "time").removeprefix("1 ")
        measured = f"measured: the last {times} that this model left so, with what it ran then"
        default = "default: an idle engine; none of its kind has left yet"
        why = f"{model.engine} cannot sleep on {', '.join(unable)}, and would be stopped" if unable else ""
        return replace(
            blank,
            seconds=round(seconds, 4),
            source=measured if num else default if serving else "an instance that does not serve leaves at once",
            scope="model" if num else "prior" if serving else "",
            num_measured=num,
            node_id=rows[0].node_id,
            leaving=leaving,
            freed_gpu_bytes=self._freed(rows),
            num_in_flight=sum(map(self._in_flight, rows)),
            reason=why,
        )

    def _off(self, blank: Cost, model: Model, rung: Rung | None, now_s: float, node_id: str) -> Cost:
        every = rung in (None, Rung.HOST)
        is_host_alone = rung is Rung.HOST and bool(node_id)
        rows = [] if is_host_alone else [row for row in self._living(model) if every or rung_of(row) is rung]
        cost = self._down(blank, model, None, rows)
        notes = [cost.reason] if cost.reason else []
        if rung is Rung.HOST:
            digest = model.weights.digest
            freed = sum(
                cached.num_bytes
                for node in self._host.holders(model, now_s, node_id)
                for cached in node.cached
                if cached.digest == digest
            )
            source = cost.source if cost.leaving or not freed else "at once where no instance reads them"
            cost = replace(cost, freed_host_bytes=freed, source=source)
        if model.pinned_at in (Rung.READY, Rung.ASLEEP):
            notes.append(f"it is kept {model.pinned_at.value}, and comes back")
        return replace(cost, reason="; ".join(notes))

    def _leaving(self, row: Instance, becomes: str = "") -> Leaving:
        return Leaving(
            instance_id=row.instance_id,
            model_key=row.model_key,
            state=row.state.value,
            num_bytes=sum(worker.num_bytes for worker in row.workers),
            becomes=becomes or self.fleet.becomes_of(row),
        )

    def _freed(self, rows: list[Instance]) -> int:
        """Return the GPU memory freed once all of `rows` have left, less weights that others go on sharing."""
        held = [row for row in rows if row.state is not InstanceState.SWAPPED_OUT]
        total = sum(worker.num_bytes for row in held for worker in row.workers)
        names, capacity = {row.instance_id for row in held}, self.fleet.capacity
        return total - sum(
            capacity.counted_twice(gpu_id, names) for gpu_id in {w.gpu_id for r in held for w in r.workers}
        )

    def _in_flight(self, row: Instance) -> int:
        return self.fleet.loads.of(row.model_key).in_flight_by_instance.get(row.instance_id, 0)

    def _living(self, model: Model) -> list[Instance]:
        return list(self.fleet.instances.living(model.key).values())

    def _serving(self, model: Model) -> list[Instance]:
        return [row for row in self._living(model) if rung_of(row) is Rung.READY]


def _source(scope: Scope, num: int, kind: StartKind, model: Model, is_emulated: bool) -> str:
    starts = counted(num, "wake" if kind is StartKind.WAKE else "start")
    what = {
        "cold": " that were cold", "disk": " from disk", "cached": " from host memory", "growth": " from a replica"
    }.get(kind.value, "")  # fmt: skip
    said = {
        "model": f"measured on this fleet: the last {starts.removeprefix('1 ')}{what} of this model",
        "size": f"scaled from {starts}{what} of models of its size on this fleet",
        "engine": f"scaled from {starts}{what} of other models of {model.engine} on this fleet",
        "prior": f"default of {model.engine}: none has been measured",
    }[scope]
    return f"{said} (emulated: its time is modelled)" if is_emulated else said
