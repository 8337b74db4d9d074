"""The prefetcher of one node: the weights in its host memory, the next ones to fetch, and those to evict.

    fetch and drop commands | instances and models | outcomes of fetch tasks | tick
        ──▶ one fetch per digest · policy `caching` ──▶ start, grant, stop, use, drop · weights.* facts

What it is notified of (reads.py, messages.py) and asks (messages.py: EFFECTS)
  - Commands to this node are fenced by the epoch of their sender. At ticks waiting fetches are retried, and lost
    commands made up for.
  - A record of each eviction, beside facts and effects.

What it promises
  - One fetch per digest for all requests, at most `max_fetches` at once of files of this machine, and as many of other
    sources, the most urgent first; one that an instance waits for takes the place of one that nothing waits for.
  - A fetch reads the node's own copy on disk, else the source. The disk tier never takes more than `disk_bytes`; a
    missing or failing one changes nothing else.
  - Granted bytes never exceed `capacity_bytes`. They are granted only when they fit, after evicting (policy kind
    `caching`) unused weights. A fetch that waits for `room_wait_s` fails with `no_space`.
  - Weights stay while an instance of this node uses them, for `hold_s` after a start asked for them, and while their
    model is pinned in host memory.
  - Every request for weights gets an answer: a fact per model, and a failure mark for each waiting instance.
  - A starting instance without a fetch for its weights gets one after `heal_s`.

What it never does
  - Move a byte or read a file: the shell in services/prefetcher does.
  - Fetch for a model by its own forecast: the placer commands that.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, get_args

from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.controllers.fencing import LEADERS, Fence
from glowplug.controllers.port import Handlers, dispatch
from glowplug.controllers.prefetcher import messages as msg
from glowplug.controllers.prefetcher.cache import Cached, FetchSeconds, HostCache
from glowplug.controllers.prefetcher.disk import Copy, CopyState, DiskTier
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.errors import Conflict, InvalidModelFile, NoSpace, NotFound, WeightsUnavailable
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import KeptAt, Model, WeightsRef
from glowplug.events import facts
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.envelope import Event
from glowplug.events.facts import RouterLoadReported
from glowplug.policies.caching.mcache_importance import CacheFacts, request_counter
from glowplug.policies.caching.ordering import Ordering
from glowplug.policies.placement.shape import stage_bytes
from glowplug.policies.registry import choose

# Requests that came for each model, from routers' counters. Batch is left out, as in forecasts: no weights are
# fetched ahead for it.

ROUTER_KEPT_S = 3600.0


class Arrivals:
    """Counters of each router since its start: the report after a lost one makes up for it."""

    def __init__(self) -> None:
        self._counted: dict[str, dict[str, int]] = {}  # router_id -> model_key -> num_urgent_arrived
        self._reported_at: dict[str, float] = {}
        self._whole: set[str] = set()

    def take(self, report: RouterLoadReported, now_s: float) -> dict[str, int]:
        """Return requests since the router's last report, by model_key. A router's first report adds nothing, nor does
        a counter that began anew; a model new to a known router adds all."""
        counted = self._counted.setdefault(report.router_id, {})
        first = 0 if report.router_id in self._whole else None
        found = {}
        for key, load in report.loads.items():
            before = counted.get(key, first)
            num_arrived = load.num_urgent_arrived
            if num_arrived == before:
                continue
            counted[key] = num_arrived
            if before is not None and num_arrived > before:
                found[key] = num_arrived - before
        self._reported_at[report.router_id] = now_s
        if report.num_parts == 1:
            self._whole.add(report.router_id)
        return found

    def expire(self, now_s: float) -> None:
        for router_id in [key for key, at in self._reported_at.items() if now_s - at > ROUTER_KEPT_S]:
            del self._reported_at[router_id], self._counted[router_id]
            self._whole.discard(router_id)


# Weights kept in host memory because instances use them or an operator pinned them.
#
# Uses are learned from fetch commands (before the instance is seen) and from the instances (after a restart).

GONE_REMEMBERED = 10_000


@dataclass(slots=True)
class _User:
    """An instance of this node. `digest`: of its weights, "" for none or unknown; `instance`: None until it is
    reported."""

    digest: str = ""
    since: float = 0.0
    instance: Instance | None = None
    has_part: bool = False  # a stage's part of the weights is here

    def holds(self, now_s: float, hold_s: float) -> bool:
        return bool(self.digest) and (self.instance is not None or now_s - self.since <= hold_s)


class Holds:
    def __init__(self, node_id: str, digest_of: Callable[[WeightsRef], str], hold_s: float) -> None:
        self._node_id, self._digest_of, self._hold_s = node_id, digest_of, hold_s
        self._users: dict[str, _User] = {}  # instance_id -> user
        self._gone: dict[str, None] = {}  # instance ids, insertion-ordered, bounded
        self._giving_way: dict[str, float] = {}  # replica -> when an instance last asked for its place
        self._models: dict[str, tuple[Model, str]] = {}  # model_key -> (model, its digest)

    def hold(self, instance_id: str, digest: str, now_s: float) -> None:
        if instance_id and instance_id not in self._gone:
            user = self._users.setdefault(instance_id, _User())
            user.digest, user.since, user.has_part = digest, now_s, False

    def set_instance(self, instance: Instance, now_s: float) -> str:
        key = instance.instance_id
        if instance.node_id != self._node_id or key in self._gone:  # a first stage lists the others' workers too
            return ""
        user = self._users.get(key) or _User()
        if user.instance and user.instance.revision > instance.revision:
            return ""
        known = self._declared(instance)
        digest = user.digest or (known[1] if known else "")
        if instance.state.is_gone:
            self._forget(key)
            return digest
        self._users[key] = user
        user.instance = instance
        if self._has_own_copy(instance):
            user.digest = ""  # its own copy also serves an instance that grows from it
        elif not user.digest:
            user.digest, user.since = digest, now_s
        return digest

    def set_instances(self, rows: Mapping[str, Instance], now_s: float) -> None:
        for instance in rows.values():
            self.set_instance(instance, now_s)
        for key, instance in self._seen():
            if key not in rows and now_s - instance.changed_at > self._hold_s:
                self._forget(key)

    def set_model(self, model: Model) -> None:
        known = self._models.get(model.key)
        if (known and known[0].revision > model.revision) or not model.weights.uri:
            return
        try:
            self._models[model.key] = model, self._digest_of(model.weights)
        except InvalidModelFile:
            return  # without a digest nothing can be fetched

    def set_models(self, rows: Mapping[str, Model]) -> None:
        for key in [k for k in self._models if k not in rows]:
            self.forget_model(key)
        for model in rows.values():
            self.set_model(model)

    def forget_model(self, model_key: str) -> None:
        self._models.pop(model_key, None)

    def digest_of_model(self, model_key: str) -> str:
        return self._models.get(model_key, (None, ""))[1]

    def models_by_digest(self) -> dict[str, list[Model]]:
        found: dict[str, list[Model]] = {}
        for model, digest in self._models.values():
            found.setdefault(digest, []).append(model)
        return found

    def is_gone(self, instance_id: str) -> bool:
        return instance_id in self._gone

    def part_came(self, instance_id: str) -> None:
        if (user := self._users.get(instance_id)) is not None:
            user.has_part = True

    def starting_before(self, before_s: float) -> list[tuple[Instance, Model]]:
        """Return living instances that began before `before_s` and are not ready; no stages with their part of the
        weights."""
        return [
            (instance, known[0])
            for key, instance in self._seen()
            if (instance.state.is_coming if instance.is_whole else self._lacks_its_part(key))
            if instance.created_at < before_s and (known := self._declared(instance)) is not None
        ]

    def _declared(self, instance: Instance) -> tuple[Model, str] | None:
        """Return its model as at its start, and the digest; None if unknown, or declared anew since."""
        known = self._models.get(instance.model_key)
        return None if known is None or instance.is_outdated(known[0]) else known

    def _lacks_its_part(self, instance_id: str) -> bool:
        user = self._users[instance_id]
        is_starting = user.instance is not None and user.instance.state is InstanceState.STARTING
        return is_starting and not user.has_part

    def give_way(self, instance_ids: Iterable[str], now_s: float) -> None:
        self._giving_way |= {key: now_s for key in instance_ids if key not in self._gone}

    def has_copy(self, model_keys: Set[str]) -> bool:
        """A whole replica on a GPU counts unless it was asked to leave."""
        return any(
            row.state is InstanceState.PREWARMED and row.model_key in model_keys and key not in self._giving_way
            for key, row in self._seen()
        )

    def expire(self, now_s: float) -> None:
        self._giving_way = {key: at for key, at in self._giving_way.items() if now_s - at <= self._hold_s}
        for key, user in list(self._users.items()):
            if user.instance is None and now_s - user.since > self._hold_s:
                del self._users[key]

    def reason(self, digest: str, model_keys: Set[str], now_s: float) -> str:
        """Return why `digest` is needed, or "". A living instance of `model_keys` counts when its own weights are
        unknown."""
        for model, needed in self._models.values():
            if needed == digest and model.kept_at is KeptAt.HOST:
                return f"{model.name} is pinned in host memory"
        for key, user in sorted(self._users.items()):
            if user.digest == digest and user.holds(now_s, self._hold_s):
                return f"{key} uses it"
        for key, instance in self._seen():
            is_unknown = not self._users[key].digest and not self._has_own_copy(instance)
            if is_unknown and instance.model_key in model_keys:
                return f"{key} uses it"
        return ""

    def _has_own_copy(self, instance: Instance) -> bool:
        """One that shares its weights needs them in host memory: dropping them would free nothing, and later instances
        would read other pages."""
        known = self._models.get(instance.model_key)
        reads_there = instance.shared_bytes or (known is not None and known[0].weights_shared)
        return instance.state.is_dormant and not reads_there

    def _seen(self) -> list[tuple[str, Instance]]:
        return [(key, user.instance) for key, user in sorted(self._users.items()) if user.instance is not None]

    def _forget(self, instance_id: str) -> None:
        self._users.pop(instance_id, None)
        self._giving_way.pop(instance_id, None)
        self._gone[instance_id] = None
        while len(self._gone) > GONE_REMEMBERED:
            del self._gone[next(iter(self._gone))]


TIER_MOVES_REMEMBERED = 4096


class Tier(StrEnum):
    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMove:
    source: Tier
    target: Tier
    num_bytes: int
    seconds: float
    ended_at: float


class TierMoves:
    def __init__(self) -> None:
        self._moves: OrderedDict[str, dict[tuple[Tier, Tier], TierMove]] = OrderedDict()

    def add(self, digest: str, move: TierMove) -> None:
        if not move.seconds > 0:
            return
        moves = self._moves.setdefault(digest, {})
        moves[move.source, move.target] = move
        self._moves.move_to_end(digest)
        while len(self._moves) > TIER_MOVES_REMEMBERED:
            self._moves.popitem(last=False)

    def of(self, digest: str) -> tuple[TierMove, ...]:
        return tuple(sorted(self._moves.get(digest, {}).values(), key=lambda move: -move.ended_at))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """One set of weights. `tiers` have it whole, the fastest first; REMOTE alone where the node has none of it.
    `num_bytes` 0: unknown. `expected_s`: measured seconds from each slower tier into host memory. `why_not_on_disk` is
    "" where a copy is on disk or planned."""

    digest: str
    model_keys: tuple[str, ...]
    num_bytes: int
    tiers: tuple[Tier, ...]
    expected_s: Mapping[str, float] = field(default_factory=dict)
    moves: tuple[TierMove, ...] = ()
    why_not_on_disk: str = ""


DISK = Tier.DISK.value  # source of a fetch from the node's own copy
LOCAL = "file:"
EVENTS_REMEMBERED = 4096


class FetchStage(StrEnum):
    QUEUED = "queued"
    SIZING = "sizing"  # its task runs, without its size yet or waiting for host memory
    MOVING = "moving"  # host memory is granted
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class MemoryAsk:
    num_bytes: int
    asked_at: float


@dataclass(slots=True)
class FetchJob:
    digest: str
    wants: list[msg.Want]
    order: int
    part: FetchWeights  # the command whose bytes are fetched
    stage: FetchStage = FetchStage.QUEUED
    started_at: float = 0.0
    asks: MemoryAsk | None = None  # set while memory is not granted, though its size is known or will not be
    num_bytes: int = 0
    num_bytes_done: int = 0
    is_counted: bool = False
    is_resumed: bool = False  # some bytes were here before: no measure of a whole fetch
    from_disk: bool = False
    is_squeezed: bool = False  # idle weights were already evicted for it: memory was fuller than known

    @property
    def urgency(self) -> int:
        return max((w.urgency for w in self.wants), default=0)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.command.instance_id for w in self.wants if w.command.instance_id))


class PrefetcherController:
    """State machine of one node's prefetcher. `digest_of` names the region of a reference (weights/region.py). Raises
    BadRequest for an unknown policy of the kind `caching`."""

    def __init__(self, node_id: str, params: PrefetcherParams, *, digest_of: Callable[[WeightsRef], str]) -> None:
        self.node_id, self.params = node_id, params
        self._digest_of = digest_of
        self.seconds, self.moves = FetchSeconds(), TierMoves()
        self.disk = DiskTier(node_id, params, self.seconds, self._make_order, self._read_now)
        order = self._make_order(self.miss_s)
        self.holds = Holds(node_id, digest_of, params.hold_s)
        self.cache = HostCache(node_id, params, order, self.held, self.holds.has_copy, self.disk.has)
        self.jobs: dict[str, FetchJob] = {}
        self._arrivals = Arrivals()
        self._counters = [one for one in map(request_counter, (order, self.disk.order)) if one is not None]
        self._fence = Fence()
        self._seen: deque[str] = deque(maxlen=EVENTS_REMEMBERED)
        self._failed: dict[str, None] = {}
        self._num_jobs = 0
        self.handlers: Handlers = {
            Tick: self._on_tick,
            **dict.fromkeys(get_args(facts.InstanceChange), self._on_instance),
            facts.ModelDeployed: self._on_deployed,
            facts.ModelUndeployed: self._on_undeployed,
            facts.RouterLoadReported: self._on_load,
            FetchWeights: self._on_command,
            DropWeights: self._on_command,
            msg.FetchSized: self._on_sized,
            msg.FetchProgressed: self._on_progressed,
            msg.FetchEnded: self._on_ended,
            msg.RegionsFound: self._on_found,
            msg.RegionLost: self._on_lost,
            msg.RegionChanged: self._on_changed,
            msg.FetchAsked: self._on_fetch_asked,
            msg.CopyEnded: self._on_copy_ended,
            msg.CopyLost: self._on_copy_lost,
            msg.DiskFailed: self._on_disk_failed,
            msg.DropAsked: self._on_drop_asked,
        }

    def _make_order(self, penalty_s: Callable[[str, int], float]) -> Ordering:
        policy = choose("caching", self.params.caching)
        made: Ordering = policy(CacheFacts(penalty_s=penalty_s, importance=self.params.importance))
        return made

    def miss_s(self, digest: str, num_bytes: int) -> float:
        fetch_s = self.seconds.expected(digest, num_bytes)
        return min(fetch_s, self.disk.read_s(digest, num_bytes)) if self.disk.has(digest) else fetch_s

    def placed(self) -> list[PlacedWeights]:
        models = self.holds.models_by_digest()
        digests = models.keys() | self.cache.entries.keys() | self.disk.copies.keys()
        return [self._placed(digest, models.get(digest, ())) for digest in sorted(digests)]

    def _placed(self, digest: str, models: Sequence[Model]) -> PlacedWeights:
        entry, copy = self.cache.entries.get(digest), self.disk.copies.get(digest)
        keys = {model.key for model in models}
        keys |= (entry.model_keys if entry else set()) | (copy.model_keys if copy else set())
        is_here, is_on_disk = entry is not None and entry.complete, self.disk.has(digest)
        found = (*((Tier.MEMORY,) if is_here else ()), *((Tier.DISK,) if is_on_disk else ()))
        known = entry.num_bytes if entry is not None and is_here else copy.num_bytes if copy is not None else 0
        num_bytes = known or max((model.fetch_bytes for model in models), default=0)
        seconds = {Tier.REMOTE.value: self.seconds.expected(digest, num_bytes)}
        if is_on_disk:
            seconds[Tier.DISK.value] = self.disk.read_s(digest, num_bytes)
        return PlacedWeights(
            digest=digest,
            model_keys=tuple(sorted(keys)),
            num_bytes=num_bytes,
            tiers=found or (Tier.REMOTE,),
            expected_s=seconds if num_bytes else {},
            moves=self.moves.of(digest),
            why_not_on_disk="" if copy is not None or not is_here else self.disk.why_not(digest, num_bytes),
        )

    def held(self, digest: str, now_s: float) -> str:
        if digest in self.jobs:
            return "it is being fetched"
        entry = self.cache.entries.get(digest)
        return self.holds.reason(digest, entry.model_keys if entry else frozenset(), now_s)

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Take a command (raises StaleEpoch), fact, message of the shell (NotFound, Conflict) or tick."""
        return dispatch(self.handlers, stimulus, now_s)

    def restore(self, table: str, rows: Mapping[str, Any], now_s: float) -> list[Effect]:
        if table == "instances":
            self.holds.set_instances(rows, now_s)
        elif table == "models":
            self.holds.set_models(rows)
        elif table == LEADERS:
            self._fence.raise_to(rows)
        return self._settle_waiting(now_s)

    # facts, commands and time

    def _on_tick(self, _: Tick, now_s: float) -> list[Effect]:
        self.holds.expire(now_s)
        self._arrivals.expire(now_s)
        first = [*self._drop_stale(now_s), *self._heal(now_s)]
        rest = [*self._shrink(now_s), *self._settle_waiting(now_s), *self._start_next(now_s)]
        return [*first, *rest, *self.disk.shrink(now_s), *self._write_copy(now_s)]

    def _on_instance(self, event: Event, now_s: float) -> list[Effect]:
        instance = event.data.instance
        digest = self.holds.set_instance(instance, now_s)
        if digest in self.cache.entries:
            self.cache.entries[digest].last_used_at = now_s
        return [*self._drop_stale(now_s), *self._settle_waiting(now_s)] if instance.state.is_gone else []

    def _on_deployed(self, event: Event, now_s: float) -> list[Effect]:
        self.holds.set_model(event.data.model)
        return []

    def _on_undeployed(self, event: Event, now_s: float) -> list[Effect]:
        self.holds.forget_model(event.data.model_key)
        return []

    def _on_load(self, event: Event, now_s: float) -> list[Effect]:
        for model_key, num_requests in self._arrivals.take(event.data, now_s).items() if self._counters else ():
            digest = self.holds.digest_of_model(model_key)
            for counter in self._counters if digest else ():
                counter.requested(digest, num_requests, now_s)
        return []

    def _on_command(self, event: Event, now_s: float) -> list[Effect]:
        self._fence.admit(event)
        if event.data.target != self.node_id or event.event_id in self._seen:
            return []
        self._seen.append(event.event_id)
        if isinstance(event.data, FetchWeights):
            return self._want(event, now_s)
        return self._drop(event.data.digest, event.data.reason, event, now_s)

    def _want(self, command: Event, now_s: float) -> list[Effect]:
        data: FetchWeights = command.data
        if data.instance_id and self.holds.is_gone(data.instance_id):
            return []  # overtaken by its instance's end
        self.holds.give_way(data.drops, now_s)
        want = msg.Want(data, command)
        try:
            digest = self._digest_of(data.weights)
        except InvalidModelFile as error:
            digest, why = data.weights.digest, {"code": error.code, "message": error.message}
            return [self._fact(facts.WeightsFetchFailed, digest, want, **why)]
        self._failed.pop(data.instance_id, None)
        return self._take(want, digest, now_s)

    def _heal(self, now_s: float) -> list[Effect]:
        """Fetch weights of starting instances without a fetch: the command was lost, or this process was down."""
        effects: list[Effect] = []
        for instance, model in self.holds.starting_before(now_s - self.params.heal_s):
            digest = self._digest_of(model.weights)
            entry = self.cache.entries.get(digest)
            if digest in self.jobs or instance.instance_id in self._failed or (entry and entry.complete):
                continue
            first_byte, last_byte = stage_bytes(model, instance.stage, instance.num_stages)
            command = FetchWeights(
                target=self.node_id,
                model_key=model.key,
                weights=model.weights,
                instance_id=instance.instance_id,
                first_byte=first_byte,
                last_byte=last_byte,
                stage=instance.stage,
                num_stages=instance.num_stages,
            )
            effects += self._take(msg.Want(command, None), digest, now_s)
        return effects

    def _take(self, want: msg.Want, digest: str, now_s: float) -> list[Effect]:
        model_key = want.command.model_key
        self.holds.hold(want.command.instance_id, digest, now_s)
        if (job := self.jobs.get(digest)) is not None:
            raised = want.urgency > job.urgency
            if not any(want.repeats(known) for known in job.wants):
                job.wants.append(want)
            if job.is_counted:
                self.cache.used(digest, job.num_bytes, now_s, hit=True)
                self.disk.used(digest, job.num_bytes, now_s, model_key)
            return [msg.RaiseUrgency(digest, want.urgency)] if raised and job.stage is not FetchStage.QUEUED else []
        entry = self.cache.entries.get(digest)
        if entry is not None and entry.complete:
            entry.last_used_at = now_s
            entry.model_keys.add(model_key)
            self.cache.used(digest, entry.num_bytes, now_s, hit=True)
            self.disk.used(digest, entry.num_bytes, now_s, model_key)
            hit = {"num_bytes": entry.num_bytes, "seconds": 0.0, "source": "cache"}
            return [msg.UseRegion(digest, want), self._fact(facts.WeightsFetched, digest, want, **hit)]
        if len(self.jobs) >= self.params.max_queue:
            message = f"{len(self.jobs)} fetches are waiting on {self.node_id}"
            return self._refuse(digest, [want], WeightsUnavailable.code, message, keep=True)
        self._num_jobs += 1
        self.jobs[digest] = FetchJob(digest, [want], self._num_jobs, want.command, is_resumed=entry is not None)
        return self._start_next(now_s)

    def _start_next(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        while True:
            queued = [j for j in self.jobs.values() if j.stage is FetchStage.QUEUED]
            if not queued:
                return effects
            running = Counter(self._is_local(j) for j in self.jobs.values() if j.stage is not FetchStage.QUEUED)
            may_start = [j for j in queued if running[self._is_local(j)] < self.params.max_fetches]
            if not may_start:
                return [*effects, *self._displace(queued)]
            job = min(may_start, key=lambda j: (-j.urgency, j.order))
            first = max(job.wants, key=lambda w: w.urgency)
            job.stage, job.started_at, job.part = FetchStage.SIZING, now_s, first.command
            job.from_disk = self.disk.has(job.digest)
            peers = tuple(dict.fromkeys(url for want in job.wants for url in want.command.peers))
            want = replace(first, command=replace(first.command, peers=peers))
            effects.append(msg.StartFetch(digest=job.digest, want=want, from_disk=job.from_disk))

    def _is_local(self, job: FetchJob) -> bool:
        """Return whether it takes no place of the link to the sources."""
        return job.from_disk or job.part.weights.uri.startswith(LOCAL) or self.disk.has(job.digest)

    def _displace(self, queued: Sequence[FetchJob]) -> list[Effect]:
        """Stop a fetch that nothing waits for, the latest of the least urgent first, for each of `queued` that an
        instance waits for; it goes on later where it stopped."""
        jobs = [job for job in self.jobs.values() if job.stage is not FetchStage.QUEUED]
        lacking = Counter(self._is_local(job) for job in queued if job.urgency >= msg.WAITED_FOR)
        lacking -= Counter(self._is_local(job) for job in jobs if job.stage is FetchStage.STOPPING)
        idle = [job for job in jobs if job.stage is not FetchStage.STOPPING and job.urgency < msg.WAITED_FOR]
        effects: list[Effect] = []
        for job in sorted(idle, key=lambda j: (j.urgency, -j.order)):
            if lacking[self._is_local(job)] > 0:
                lacking[self._is_local(job)] -= 1
                job.stage = FetchStage.STOPPING
                effects.append(msg.StopFetch(job.digest))
        return effects

    # host memory

    def _on_sized(self, sized: msg.FetchSized, now_s: float) -> list[Effect]:
        job = self.jobs.get(sized.digest)
        if job is None or job.stage is FetchStage.STOPPING:
            return [msg.StopFetch(sized.digest)]
        job.stage, job.num_bytes, job.asks = FetchStage.SIZING, sized.num_bytes, MemoryAsk(sized.num_bytes, now_s)
        if not job.is_counted:  # before choosing victims: ARC learns from the miss first
            job.is_counted = True
            for at, want in enumerate(job.wants):
                self.cache.used(job.digest, sized.num_bytes, now_s, hit=at > 0)
                self.disk.used(job.digest, sized.num_bytes, now_s, want.command.model_key)
        return self._make_space(job, now_s)

    def _settle_waiting(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        waiting = [j for j in self.jobs.values() if j.asks is not None and j.stage is FetchStage.SIZING]
        for job in sorted(waiting, key=lambda j: (-j.urgency, j.order)):
            effects += self._make_space(job, now_s)
        return effects

    def _make_space(self, job: FetchJob, now_s: float) -> list[Effect]:
        assert job.asks is not None
        fit = self.cache.fit(job.digest, job.asks.num_bytes, now_s)
        if fit.num_bytes is None:
            waited = now_s - job.asks.asked_at >= self.params.room_wait_s
            return self._give_up(job, fit.why) if fit.never or waited else []
        job.asks, job.stage = None, FetchStage.MOVING
        effects = self._leaving(self.cache.evict(fit.decision, job.wants[0], now_s))
        self.cache.reserve(job.digest, fit.num_bytes, {w.command.model_key for w in job.wants}, now_s)
        return [*effects, msg.GrantRoom(job.digest, fit.num_bytes)]

    def _give_up(self, job: FetchJob, message: str) -> list[Effect]:
        job.asks, job.stage = None, FetchStage.STOPPING
        wants, job.wants, job.is_counted = job.wants, [], False
        self.cache.never_came(job.digest)
        return [msg.StopFetch(job.digest), *self._refuse(job.digest, wants, NoSpace.code, message, keep=False)]

    def _squeeze(self, job: FetchJob, now_s: float) -> list[Effect]:
        """Evict idle weights and fetch once more where host memory is fuller than known: others use it too."""
        if job.is_squeezed or not job.wants:
            return []
        job.is_squeezed = True
        decision = self.cache.free_up(job.num_bytes, now_s)
        if decision.victims:
            job.stage, job.is_counted = FetchStage.QUEUED, False
            self.jobs[job.digest] = job
        return self._leaving(self.cache.evict(decision, job.wants[0], now_s))

    def _shrink(self, now_s: float) -> list[Effect]:
        return self._leaving(self.cache.evict(self.cache.shrink(now_s), None, now_s))

    # disk

    def _leaving(self, effects: list[Effect]) -> list[Effect]:
        found: list[Effect] = []
        for effect in effects:
            found += self.disk.stop(effect.digest) if isinstance(effect, msg.DropRegion) else []
            found.append(effect)
        return found

    def _read_now(self, digest: str) -> str:
        job = self.jobs.get(digest)
        return "it is being read" if job is not None and job.from_disk else ""

    def _write_copy(self, now_s: float) -> list[Effect]:
        if any(job.from_disk for job in self.jobs.values()):
            return []
        return self.disk.write_next(self.cache.entries, lambda: self.cache.leaving(now_s), now_s)

    def _on_copy_ended(self, end: msg.CopyEnded, now_s: float) -> list[Effect]:
        effects = self.disk.wrote(end, now_s)
        if self.disk.has(end.digest):
            self._moved(end.digest, Tier.MEMORY, Tier.DISK, end.num_bytes, end.seconds, now_s)
        return [*effects, *self._write_copy(now_s)]

    def _on_copy_lost(self, lost: msg.CopyLost, now_s: float) -> list[Effect]:
        if (job := self.jobs.get(lost.digest)) is not None:
            job.from_disk = False
        return self.disk.drop(lost.digest)

    def _on_disk_failed(self, failed: msg.DiskFailed, now_s: float) -> list[Effect]:
        self.disk.failed(failed.message, now_s)
        if failed.digest:
            self.disk.not_removed(failed.digest, failed.num_bytes, now_s)
        return []

    def _moved(self, digest: str, source: Tier, target: Tier, num_bytes: int, seconds: float, now_s: float) -> None:
        move = TierMove(source=source, target=target, num_bytes=num_bytes, seconds=seconds, ended_at=now_s)
        self.moves.add(digest, move)

    # ends

    def _on_progressed(self, progress: msg.FetchProgressed, now_s: float) -> list[Effect]:
        job = self.jobs.get(progress.digest)
        if job is None or not job.wants:
            return []
        job.num_bytes_done, job.num_bytes = progress.num_bytes_done, progress.num_bytes
        done = {"num_bytes_done": job.num_bytes_done, "num_bytes": job.num_bytes}
        return [self._fact(facts.WeightsProgressed, job.digest, job.wants[0], **done)]

    def _on_ended(self, end: msg.FetchEnded, now_s: float) -> list[Effect]:
        job = self.jobs.pop(end.digest, None)
        if job is None:
            return []
        self.cache.settle(end.digest, end.num_bytes, end.whole, now_s)
        if end.whole:
            if not job.is_resumed:
                self._measured(msg.Measured(end.digest, end.num_bytes, end.seconds, end.source), now_s)
            effects = self._answer(job, end)
        elif end.code == NoSpace.code and (freed := self._squeeze(job, now_s)):
            effects = freed
        elif end.code and end.code != msg.CANCELLED:
            tried = {"seconds": end.seconds, "source": end.source}
            effects = self._refuse(end.digest, job.wants, end.code, end.message, keep=end.num_bytes > 0, **tried)
        else:
            effects = self._after_part(job, end)
        return [*effects, *self._settle_waiting(now_s), *self._start_next(now_s)]

    def _measured(self, whole: msg.Measured, now_s: float) -> None:
        source = Tier.DISK if whole.source == DISK else Tier.REMOTE
        if source is Tier.DISK:
            self.disk.was_read(whole.digest, whole.num_bytes, whole.seconds)
        else:
            self.seconds.measured(whole.digest, whole.num_bytes, whole.seconds, whole.source)
        self._moved(whole.digest, source, Tier.MEMORY, whole.num_bytes, whole.seconds, now_s)

    def _answer(self, job: FetchJob, end: msg.FetchEnded) -> list[Effect]:
        effects: list[Effect] = []
        came = {"num_bytes": end.num_bytes, **_came(end)}
        for want in one_per_model(job.wants):
            model_key = want.command.model_key
            self.cache.entries[job.digest].model_keys.add(model_key)
            fact = self._fact(facts.WeightsFetched, job.digest, want, **came)
            effects += [msg.NameRegion(job.digest, model_key), fact]
        return effects

    def _after_part(self, job: FetchJob, end: msg.FetchEnded) -> list[Effect]:
        effects: list[Effect] = []
        if not end.code:
            come = [w for w in job.wants if w.within(job.part)]
            job.wants = [w for w in job.wants if w not in come]
            effects = [self._part_fact(end, want) for want in come if want.command.instance_id]
        if job.wants:
            job.stage, job.asks, job.is_resumed = FetchStage.QUEUED, None, True
            self.jobs[job.digest] = job
            return effects
        if end.code:
            self.cache.remove(job.digest)  # its bytes were dropped with the failure mark
        return effects

    def _part_fact(self, end: msg.FetchEnded, want: msg.Want) -> Publish:
        part = want.command
        self.holds.part_came(part.instance_id)
        num_bytes = (part.last_byte or end.num_bytes) - part.first_byte
        came = {"instance_id": part.instance_id, "num_bytes": num_bytes}
        return self._fact(facts.WeightsPartFetched, end.digest, want, **came, **_came(end))

    def _refuse(
        self, digest: str, wants: list[msg.Want], code: str, message: str, *, keep: bool, **tried: Any
    ) -> list[Effect]:
        waiting = tuple(dict.fromkeys(w.command.instance_id for w in wants if w.command.instance_id))
        self._failed |= dict.fromkeys(waiting)
        while len(self._failed) > EVENTS_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        why = {"code": code, "message": message, **tried}
        failures = [self._fact(facts.WeightsFetchFailed, digest, want, **why) for want in one_per_model(wants)]
        return [msg.MarkFailed(digest, code, message, waiting, keep), *failures]

    # regions

    def _drop(self, digest: str, reason: str, cause: Event | None, now_s: float) -> list[Effect]:
        if (job := self.jobs.get(digest)) is not None:
            wants, job.wants = job.wants, []
            effects = self._refuse(
                digest, wants, WeightsUnavailable.code, f"the fetch was given up: {reason}", keep=False
            )
            if job.stage is FetchStage.QUEUED:
                del self.jobs[digest]
                self.cache.remove(digest)
                return [*self.disk.drop(digest), *effects]
            job.stage = FetchStage.STOPPING
            return [msg.StopFetch(digest), *self.disk.drop(digest), *effects]
        if self.held(digest, now_s):
            return []
        effects = self.disk.drop(digest)
        if (entry := self.cache.remove(digest)) is None:
            return effects
        fact = facts.WeightsEvicted(node_id=self.node_id, digest=digest, num_bytes=entry.num_bytes, reason=reason)
        return [*effects, msg.DropRegion(digest), Publish(fact, cause), *self._settle_waiting(now_s)]

    def _on_lost(self, lost: msg.RegionLost, now_s: float) -> list[Effect]:
        self.cache.remove(lost.digest)
        return self._take(lost.want, lost.digest, now_s)

    def _on_changed(self, changed: msg.RegionChanged, now_s: float) -> list[Effect]:
        if (entry := self.cache.entries.get(changed.digest)) is not None:
            entry.stale = True
        return [*self.disk.drop(changed.digest), *self._drop_stale(now_s)]

    def _drop_stale(self, now_s: float) -> list[Effect]:
        stale = [c.digest for c in self.cache.entries.values() if c.stale]
        return [e for digest in stale for e in self._drop(digest, "its source has changed", None, now_s)]

    def _on_fetch_asked(self, asked: msg.FetchAsked, now_s: float) -> list[Effect]:
        command = FetchWeights(target=self.node_id, model_key=asked.model_key, weights=asked.weights)
        return self._take(msg.Want(command, None), self._digest_of(asked.weights), now_s)

    def _on_drop_asked(self, asked: msg.DropAsked, now_s: float) -> list[Effect]:
        if all(asked.digest not in known for known in (self.cache.entries, self.jobs, self.disk.copies)):
            raise NotFound(f"no weights {asked.digest} on {self.node_id}")
        if asked.digest not in self.jobs and (why := self.held(asked.digest, now_s)):
            raise Conflict(f"weights {asked.digest} are in use: {why}")
        return self._drop(asked.digest, asked.reason, None, now_s)

    def _on_found(self, found: msg.RegionsFound, now_s: float) -> list[Effect]:
        entries = [Cached(w.digest, w.num_bytes, True, w.last_used_at, set(w.model_keys)) for w in found.complete]
        entries += [Cached(digest, num_bytes, False, changed_at) for digest, num_bytes, changed_at in found.partial]
        for entry in sorted(entries, key=lambda c: (c.last_used_at, c.digest)):
            if entry.digest not in self.jobs:
                self.cache.adopt(entry)
        for copy in sorted(found.on_disk, key=lambda c: (c.last_used_at, c.digest)):
            whole = Copy(copy.digest, copy.num_bytes, CopyState.WHOLE, copy.last_used_at, set(copy.model_keys))
            self.disk.adopt(whole)
        for measured in found.measured:
            self._measured(measured, now_s)
        self._failed |= dict.fromkeys(found.failed)
        return []  # the next tick enforces a lowered capacity, when the instances are known

    # facts

    def _fact(self, cls: type[Any], digest: str, want: msg.Want, **fields: Any) -> Publish:
        return Publish(cls(node_id=self.node_id, model_key=want.command.model_key, digest=digest, **fields), want.cause)


def _came(end: msg.FetchEnded) -> dict[str, Any]:
    how = {"resumed_bytes": end.resumed_bytes, "num_retries": end.num_retries}
    return {"seconds": end.seconds, "source": end.source, **how}


def one_per_model(wants: Iterable[msg.Want]) -> Iterator[msg.Want]:
    """Return the first want of each model, the cause of its fact; the latest model first."""
    return iter({w.command.model_key: w for w in reversed(list(wants))}.values())
