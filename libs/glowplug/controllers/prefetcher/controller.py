"""The model-prefetcher's brain: which weights are in a node's host memory, which come next, who leaves.

One fetch per digest however many ask. Room is granted only when it fits, after evicting (policy room: caching)
what no instance uses; a fetch with no room waits `room_wait_s` and fails with `no_space`. Pure: the shell in
services/prefetcher moves the bytes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.controllers.fencing import LEADERS, Fence
from glowplug.controllers.prefetcher.answers import failed, fetched, one_per_model, progressed
from glowplug.controllers.prefetcher.cache import HostCache
from glowplug.controllers.prefetcher.holds import Holds
from glowplug.controllers.prefetcher.messages import (
    CANCELLED,
    Cached,
    DropAsked,
    DropRegion,
    FetchEnded,
    FetchJob,
    FetchProgressed,
    FetchSized,
    GrantRoom,
    MarkFailed,
    NameRegion,
    RaiseUrgency,
    RegionChanged,
    RegionLost,
    RegionsFound,
    Stage,
    StartFetch,
    StopFetch,
    UseRegion,
    Want,
)
from glowplug.controllers.prefetcher.seconds import FetchSeconds
from glowplug.domain.errors import Conflict, InvalidModelFile, NoSpace, NotFound, WeightsUnavailable
from glowplug.domain.instance import Instance
from glowplug.domain.model import WeightsRef
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.envelope import Event
from glowplug.events.facts import (
    InstanceChange,
    ModelDeployed,
    ModelUndeployed,
    WeightsEvicted,
    WeightsFetchFailed,
)
from glowplug.policies.caching.kinds import CacheFacts
from glowplug.policies.caching.mcache_importance import ImportanceParams
from glowplug.policies.registry import choose

WAITED_FOR = 1_000_000  # urgency of a fetch that an instance waits for, above any priority of one that none does
EVENTS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetcherParams:
    capacity_bytes: int
    max_fetches: int = 2  # at once
    max_queue: int = 1000
    room_wait_s: float = 10.0
    hold_s: float = 120.0  # a region asked for an instance nobody has seen yet stays so long
    heal_s: float = 2.0  # a starting instance whose weights nobody brings for so long is helped
    caching: str = "lru"  # who leaves first: a name of room `caching`
    importance: ImportanceParams = field(default_factory=lambda: ImportanceParams(renew_s=10.0))  # of mcache


class PrefetcherController:
    """State machine of one node's prefetcher. `digest_of` names the region of a reference (weights/region.py).
    Raises BadRequest for a name that room `caching` does not have."""

    def __init__(self, node_id: str, params: PrefetcherParams, *, digest_of: Callable[[WeightsRef], str]) -> None:
        self.node_id, self.params = node_id, params
        self._digest_of = digest_of
        self.seconds = FetchSeconds()
        facts = CacheFacts(
            capacity_bytes=params.capacity_bytes, penalty_s=self.seconds.expected, importance=params.importance
        )
        memory = choose("caching", params.caching)(facts)
        self.holds = Holds(node_id, digest_of, params.hold_s)
        self.cache = HostCache(node_id, params.capacity_bytes, params.caching, memory, self.holds.has_copy)
        self.jobs: dict[str, FetchJob] = {}
        self._fence = Fence()
        self._seen: deque[str] = deque(maxlen=EVENTS_REMEMBERED)
        self._failed: dict[str, None] = {}  # instances whose weights could not be had; insertion-ordered, bounded
        self._num_jobs = 0

    def held(self, digest: str, now_s: float) -> str:
        """Why the region may not leave; "" when it may."""
        if digest in self.jobs:
            return "it is being fetched"
        entry = self.cache.entries.get(digest)
        return self.holds.reason(digest, entry.model_keys if entry else frozenset(), now_s)

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        if isinstance(stimulus, Event):
            return self._on_event(stimulus, now_s)
        if isinstance(stimulus, Tick):
            self.holds.expire(now_s)
            first = [*self._drop_stale(now_s), *self._heal(now_s)]
            return [*first, *self._shrink(now_s), *self._settle_room(now_s), *self._start_next(now_s)]
        if isinstance(stimulus, FetchSized):
            return self._on_sized(stimulus, now_s)
        if isinstance(stimulus, FetchProgressed):
            return self._on_progressed(stimulus)
        if isinstance(stimulus, FetchEnded):
            return self._on_ended(stimulus, now_s)
        if isinstance(stimulus, RegionsFound):
            return self._on_found(stimulus, now_s)
        if isinstance(stimulus, RegionLost):
            self.cache.remove(stimulus.digest)
            return self._take(stimulus.want, stimulus.digest, now_s)
        if isinstance(stimulus, RegionChanged):
            if (entry := self.cache.entries.get(stimulus.digest)) is not None:
                entry.stale = True
            return self._drop_stale(now_s)
        if isinstance(stimulus, DropAsked):
            return self._on_drop_asked(stimulus, now_s)
        raise TypeError(f"the prefetcher knows no stimulus {type(stimulus).__name__}")

    def restore(self, table: str, rows: Mapping[str, Any], now_s: float) -> list[Effect]:
        if table == "instances":
            self.holds.set_instances(rows, now_s)
        elif table == "models":
            self.holds.set_models(rows)
        elif table == LEADERS:
            self._fence.raise_to(rows)
        return self._settle_room(now_s)

    # events

    def _on_event(self, event: Event, now_s: float) -> list[Effect]:
        data = event.data
        if isinstance(data, InstanceChange):
            self._on_instance(data.instance, now_s)
            gone = data.instance.state.is_gone
            return [*self._drop_stale(now_s), *self._settle_room(now_s)] if gone else []
        if isinstance(data, ModelDeployed):
            self.holds.set_model(data.model)
        elif isinstance(data, ModelUndeployed):
            self.holds.forget_model(data.model_key)
        elif isinstance(data, FetchWeights | DropWeights):
            self._fence.admit(event)
            if data.target != self.node_id or event.event_id in self._seen:
                return []
            self._seen.append(event.event_id)
            if isinstance(data, FetchWeights):
                return self._want(event, now_s)
            return self._drop(data.digest, data.reason, event, now_s)
        return []

    def _on_instance(self, instance: Instance, now_s: float) -> None:
        digest = self.holds.set_instance(instance, now_s)
        if digest in self.cache.entries:
            self.cache.entries[digest].last_used_at = now_s

    def _want(self, command: Event, now_s: float) -> list[Effect]:
        data: FetchWeights = command.data
        if data.instance_id and self.holds.is_gone(data.instance_id):
            return []  # a command overtaken by its instance's end
        want = Want(
            data.weights,
            data.model_key,
            data.instance_id,
            data.first_byte,
            data.last_byte,
            data.priority + (WAITED_FOR if data.instance_id else 0),
            command,
        )
        try:
            digest = self._digest_of(data.weights)
        except InvalidModelFile as error:
            fact = WeightsFetchFailed(
                node_id=self.node_id, model_key=data.model_key, digest="", code=error.code, message=error.message
            )
            return [Publish(fact, command)]
        self._failed.pop(data.instance_id, None)
        return self._take(want, digest, now_s)

    def _heal(self, now_s: float) -> list[Effect]:
        """Instances that start and whose weights nobody brings: the command was lost, or this process was."""
        effects: list[Effect] = []
        for instance, weights in self.holds.starting_before(now_s - self.params.heal_s):
            digest = self._digest_of(weights)
            entry = self.cache.entries.get(digest)
            if digest in self.jobs or instance.instance_id in self._failed or (entry and entry.complete):
                continue
            want = Want(weights, instance.model_key, instance.instance_id, 0, 0, WAITED_FOR, None)
            effects += self._take(want, digest, now_s)
        return effects

    def _take(self, want: Want, digest: str, now_s: float) -> list[Effect]:
        self.holds.hold(want.instance_id, digest, now_s)
        if (job := self.jobs.get(digest)) is not None:
            raised = want.urgency > job.urgency
            job.wants.append(want)
            if job.is_counted:
                self.cache.used(digest, job.num_bytes, now_s, hit=True)
            return [RaiseUrgency(digest, want.urgency)] if raised and job.stage is not Stage.QUEUED else []
        entry = self.cache.entries.get(digest)
        if entry is not None and entry.complete:
            entry.last_used_at = now_s
            entry.model_keys.add(want.model_key)
            self.cache.used(digest, entry.num_bytes, now_s, hit=True)
            return [UseRegion(digest, want), fetched(self.node_id, digest, want, entry.num_bytes, 0.0, "cache")]
        if len(self.jobs) >= self.params.max_queue:
            message = f"{len(self.jobs)} fetches are waiting on {self.node_id}"
            return self._refuse(digest, [want], WeightsUnavailable.code, message, keep=True)
        self._num_jobs += 1
        self.jobs[digest] = FetchJob(digest, [want], self._num_jobs, is_resumed=entry is not None)
        return self._start_next(now_s)

    def _start_next(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        while True:
            queued = [j for j in self.jobs.values() if j.stage is Stage.QUEUED]
            if not queued or len(self.jobs) - len(queued) >= self.params.max_fetches:
                return effects
            job = min(queued, key=lambda j: (-j.urgency, j.order))
            first = max(job.wants, key=lambda w: w.urgency)
            job.stage, job.started_at = Stage.SIZING, now_s
            job.first_byte, job.last_byte = first.first_byte, first.last_byte
            effects.append(
                StartFetch(
                    digest=job.digest,
                    weights=first.weights,
                    model_key=first.model_key,
                    urgency=job.urgency,
                    first_byte=job.first_byte,
                    last_byte=job.last_byte,
                    cause=first.cause,
                )
            )

    # room

    def _on_sized(self, sized: FetchSized, now_s: float) -> list[Effect]:
        job = self.jobs.get(sized.digest)
        if job is None or job.stage is Stage.STOPPING:
            return [StopFetch(sized.digest)]
        job.stage, job.num_bytes = Stage.SIZING, sized.num_bytes
        job.wants_room_bytes, job.room_asked_at = sized.num_bytes, now_s
        if not job.is_counted:  # before anybody is chosen for it: ARC learns from the miss first
            job.is_counted = True
            for at in range(len(job.wants)):
                self.cache.used(job.digest, sized.num_bytes, now_s, hit=at > 0)
        return self._make_room(job, now_s)

    def _settle_room(self, now_s: float) -> list[Effect]:
        """Try again for fetches that wait for room; give up those that waited too long."""
        effects: list[Effect] = []
        waiting = [j for j in self.jobs.values() if j.wants_room_bytes is not None and j.stage is Stage.SIZING]
        for job in sorted(waiting, key=lambda j: (-j.urgency, j.order)):
            effects += self._make_room(job, now_s)
        return effects

    def _make_room(self, job: FetchJob, now_s: float) -> list[Effect]:
        assert job.wants_room_bytes is not None
        fit = self.cache.fit(job.digest, job.wants_room_bytes, lambda digest: self.held(digest, now_s), now_s)
        if fit.num_bytes is None:
            waited = now_s - job.room_asked_at >= self.params.room_wait_s
            return self._give_up(job, fit.why) if fit.never or waited else []
        job.wants_room_bytes, job.stage = None, Stage.MOVING
        effects = self.cache.evict(fit.decision, job.wants[0], now_s)
        self.cache.reserve(job.digest, fit.num_bytes, {w.model_key for w in job.wants}, now_s)
        return [*effects, GrantRoom(job.digest, fit.num_bytes)]

    def _give_up(self, job: FetchJob, message: str) -> list[Effect]:
        """No room: stop the task; what it answers finds nobody waiting."""
        job.wants_room_bytes, job.stage = None, Stage.STOPPING
        wants, job.wants, job.is_counted = job.wants, [], False
        self.cache.never_came(job.digest)
        return [StopFetch(job.digest), *self._refuse(job.digest, wants, NoSpace.code, message, keep=False)]

    def _squeeze(self, job: FetchJob, now_s: float) -> list[Effect]:
        """Host memory is fuller than the cache knows (others use it too): let idle weights go and try once more."""
        if job.is_squeezed or not job.wants:
            return []
        job.is_squeezed = True
        decision = self.cache.free_up(job.num_bytes, lambda digest: self.held(digest, now_s), now_s)
        if decision.victims:
            job.stage, job.is_counted = Stage.QUEUED, False
            self.jobs[job.digest] = job
        return self.cache.evict(decision, job.wants[0], now_s)

    def _shrink(self, now_s: float) -> list[Effect]:
        return self.cache.evict(self.cache.shrink(lambda digest: self.held(digest, now_s), now_s), None, now_s)

    # ends

    def _on_progressed(self, progress: FetchProgressed) -> list[Effect]:
        job = self.jobs.get(progress.digest)
        if job is None or not job.wants:
            return []
        job.num_bytes_done, job.num_bytes = progress.num_bytes_done, progress.num_bytes
        return [progressed(self.node_id, job)]

    def _on_ended(self, end: FetchEnded, now_s: float) -> list[Effect]:
        job = self.jobs.pop(end.digest, None)
        if job is None:
            return []
        self.cache.settle(end.digest, end.num_bytes, end.whole, now_s)
        if end.whole:
            if not job.is_resumed:
                self.seconds.measured(end.digest, end.num_bytes, end.seconds, end.source)
            effects = self._answer(job, end)
        elif end.code == NoSpace.code and (freed := self._squeeze(job, now_s)):
            effects = freed
        elif end.code and end.code != CANCELLED:
            effects = self._refuse(end.digest, job.wants, end.code, end.message, keep=end.num_bytes > 0)
        else:
            effects = self._after_part(job, end)
        return [*effects, *self._settle_room(now_s), *self._start_next(now_s)]

    def _answer(self, job: FetchJob, end: FetchEnded) -> list[Effect]:
        effects: list[Effect] = []
        for want in one_per_model(job.wants):
            self.cache.entries[job.digest].model_keys.add(want.model_key)
            fact = fetched(self.node_id, job.digest, want, end.num_bytes, end.seconds, end.source)
            effects += [NameRegion(job.digest, want.model_key), fact]
        return effects

    def _after_part(self, job: FetchJob, end: FetchEnded) -> list[Effect]:
        """A byte range is here, or a fetch was stopped: go on for those who want more, drop what nobody wants."""
        if not end.code:
            job.wants = [w for w in job.wants if not w.within(job.first_byte, job.last_byte)]
        if job.wants:
            job.stage, job.wants_room_bytes, job.is_resumed = Stage.QUEUED, None, True
            self.jobs[job.digest] = job
            return []
        if end.code:
            self.cache.remove(job.digest)  # its bytes went when its failure was written
        return []

    def _refuse(self, digest: str, wants: list[Want], code: str, message: str, *, keep: bool) -> list[Effect]:
        waiting = tuple(dict.fromkeys(w.instance_id for w in wants if w.instance_id))
        self._failed |= dict.fromkeys(waiting)
        while len(self._failed) > EVENTS_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        effects: list[Effect] = [MarkFailed(digest, code, message, waiting, keep)]
        return [*effects, *(failed(self.node_id, digest, want, code, message) for want in one_per_model(wants))]

    # drops and adoption

    def _drop(self, digest: str, reason: str, cause: Event | None, now_s: float) -> list[Effect]:
        if (job := self.jobs.get(digest)) is not None:
            wants, job.wants = job.wants, []
            effects = self._refuse(
                digest, wants, WeightsUnavailable.code, f"the fetch was given up: {reason}", keep=False
            )
            if job.stage is Stage.QUEUED:
                del self.jobs[digest]
                self.cache.remove(digest)
                return effects
            job.stage = Stage.STOPPING
            return [StopFetch(digest), *effects]
        if digest not in self.cache.entries or self.held(digest, now_s):
            return []  # in use
        entry = self.cache.remove(digest)
        assert entry is not None
        fact = WeightsEvicted(node_id=self.node_id, digest=digest, num_bytes=entry.num_bytes, reason=reason)
        return [DropRegion(digest), Publish(fact, cause), *self._settle_room(now_s)]

    def _drop_stale(self, now_s: float) -> list[Effect]:
        stale = [c.digest for c in self.cache.entries.values() if c.stale]
        return [e for digest in stale for e in self._drop(digest, "its source has changed", None, now_s)]

    def _on_drop_asked(self, asked: DropAsked, now_s: float) -> list[Effect]:
        if asked.digest not in self.cache.entries and asked.digest not in self.jobs:
            raise NotFound(f"no weights {asked.digest} on {self.node_id}")
        if asked.digest not in self.jobs and (why := self.held(asked.digest, now_s)):
            raise Conflict(f"weights {asked.digest} are in use: {why}")
        return self._drop(asked.digest, asked.reason, None, now_s)

    def _on_found(self, found: RegionsFound, now_s: float) -> list[Effect]:
        entries = [Cached(w.digest, w.num_bytes, True, w.last_used_at, set(w.model_keys)) for w in found.complete]
        entries += [Cached(digest, num_bytes, False, changed_at) for digest, num_bytes, changed_at in found.partial]
        for entry in sorted(entries, key=lambda c: (c.last_used_at, c.digest)):
            if entry.digest not in self.jobs:
                self.cache.adopt(entry)
        self._failed |= dict.fromkeys(found.failed)
        return []  # a lowered capacity is enforced by the next tick, when the instances are known
