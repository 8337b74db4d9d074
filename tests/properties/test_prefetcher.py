"""Invariants of a prefetcher."""

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.prefetcher import messages as msg
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.facts import InstanceReady, InstanceStopped, WeightsFetched, WeightsFetchFailed
from glowplug.policies.registry import installed
from tests.fleet_builder import an_event, an_instance

CAPACITY = 100
DISK = 120
names = st.sampled_from("abcd")
indices = st.integers(0, 1)
instance_ids = st.sampled_from(["", "i-1", "i-2", "i-3"])


class Prefetching(RuleBasedStateMachine):
    """A shell that obeys the controller, in a world that asks, kills and fails at will. `disk`: granted and not yet
    removed. `copies`: those on the disk behind it. `unanswered`: whole weights requested, without a fact so far."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetcher = self.born("lru")
        self.now_s = 0.0
        self.disk: dict[str, int] = {}
        self.complete: set[str] = set()
        self.tasks: dict[str, bool] = {}  # digest -> has memory
        self.users: dict[str, str] = {}  # instance_id -> digest
        self.gone: set[str] = set()
        self.later: list[Any] = []  # on their way to the controller
        self.copies: dict[str, int] = {}
        self.writing: set[str] = set()
        self.unanswered: set[str] = set()
        self.changed: set[str] = (
            set()
        )  # weights that may leave the disk under a reader, who then continues from their source

    def born(self, caching: str) -> PrefetcherController:
        params = PrefetcherParams(capacity_bytes=CAPACITY, max_fetches=2, room_wait_s=5.0, hold_s=1e9, caching=caching)
        params = replace(params, disk_bytes=DISK, copy_after_s=0.0, disk_retry_s=3.0)
        return PrefetcherController("n", params, digest_of=lambda ref: ref.uri)

    @initialize(caching=st.sampled_from(installed("caching")))
    def begin(self, caching: str) -> None:
        self.prefetcher = self.born(caching)

    def give(self, stimulus: Any) -> None:
        self.now_s += 1.0
        for effect in self.prefetcher.handle(stimulus, self.now_s):
            self.do(effect)
        assert sum(self.disk.values()) <= CAPACITY
        assert sum(self.copies.values()) <= DISK

    def do(self, effect: Any) -> None:
        if isinstance(effect, Publish):
            if isinstance(effect.payload, WeightsFetched | WeightsFetchFailed):
                self.unanswered.discard(effect.payload.digest)
        elif isinstance(effect, msg.WriteCopy | msg.StopCopy | msg.DropCopy):
            self.do_on_disk(effect)
        elif isinstance(effect, msg.StartFetch):
            assert effect.from_disk <= (effect.digest in self.copies and effect.digest not in self.writing)
            assert effect.digest not in self.tasks, "two fetches of one digest"
            self.tasks[effect.digest] = False
            assert len(self.tasks) <= 2
        elif isinstance(effect, msg.GrantRoom):
            if effect.digest in self.tasks:
                self.tasks[effect.digest] = True
                self.disk[effect.digest] = effect.max_bytes
            else:
                assert any(end.digest == effect.digest for end in self.later), "granted to a task that nobody started"
        elif isinstance(effect, msg.StopFetch):
            self.end(effect.digest, msg.CANCELLED, kept=False)
        elif isinstance(effect, msg.MarkFailed):
            if not effect.keep:
                self.disk.pop(effect.digest, None)
                self.complete.discard(effect.digest)
        elif isinstance(effect, msg.DropRegion):
            assert effect.digest not in self.tasks, "removed under a running fetch"
            if effect.digest in self.complete:
                users = [i for i, d in self.users.items() if d == effect.digest and i not in self.gone]
                assert not users, f"{effect.digest} dropped while {users} use it"
            assert effect.digest not in self.writing, "removed while it is copied"
            self.disk.pop(effect.digest, None)
            self.complete.discard(effect.digest)

    def do_on_disk(self, effect: msg.WriteCopy | msg.StopCopy | msg.DropCopy) -> None:
        if isinstance(effect, msg.WriteCopy):
            assert effect.digest in self.complete and effect.digest not in self.copies and not self.writing
            self.copies[effect.digest] = effect.num_bytes
            self.writing.add(effect.digest)
        elif isinstance(effect, msg.StopCopy):
            self.copy_ends(effect.digest, msg.CANCELLED)
        else:
            job = self.prefetcher.jobs.get(effect.digest)
            is_read = job is not None and job.from_disk and effect.digest in self.tasks
            assert not is_read or effect.digest in self.changed, "dropped while it is read"
            assert effect.digest not in self.writing
            self.copies.pop(effect.digest, None)

    def copy_ends(self, digest: str, code: str) -> None:
        """The outcome comes later."""
        if digest not in self.writing:
            return
        self.writing.discard(digest)
        num_bytes = self.copies[digest] if not code else self.copies.pop(digest)
        self.later.append(msg.CopyEnded(digest=digest, num_bytes=num_bytes, code=code, message=code, seconds=0.1))

    @rule(code=st.sampled_from(["", "", "no_space"]))
    def copied(self, code: str) -> None:
        for digest in sorted(self.writing):
            self.copy_ends(digest, code)

    @rule(name=names)
    def copy_is_damaged(self, name: str) -> None:
        """A fetch that reads the copy notices, and continues from the source."""
        job = self.prefetcher.jobs.get(name)
        if job is not None and job.from_disk and name in self.tasks:
            job.from_disk = True
            self.later.append(msg.CopyLost(name, "damaged"))

    @rule(name=names)
    def source_changes(self, name: str) -> None:
        self.changed.add(name)
        self.later.append(msg.RegionChanged(name))

    def end(self, digest: str, code: str, *, kept: bool) -> None:
        """Its outcome follows the pending effects, as over a queue."""
        if self.tasks.pop(digest, None) is None:
            return
        if not kept:
            self.disk.pop(digest, None)
        self.later.append(msg.FetchEnded(digest=digest, num_bytes=self.disk.get(digest, 0), code=code, message=code))

    @rule(name=names, instance_id=instance_ids, priority=st.integers(0, 3), ranged=st.booleans())
    def ask(self, name: str, instance_id: str, priority: int, ranged: bool) -> None:
        if instance_id and instance_id not in self.gone:
            self.users[instance_id] = name
        command = FetchWeights(
            target="n",
            model_key="m",
            weights=WeightsRef(uri=name),
            instance_id=instance_id,
            priority=priority,
            first_byte=2 if ranged else 0,
            last_byte=5 if ranged else 0,
        )
        event = an_event(command, issuer="placer-1", epoch=1)
        if not ranged and (not instance_id or instance_id not in self.gone):
            self.unanswered.add(name)
        self.give(event)

    def running(self, index: int, has_memory: bool) -> str:
        some = sorted(name for name, granted in self.tasks.items() if granted is has_memory)
        return some[index % len(some)] if some else ""

    @rule(index=indices, size=st.sampled_from([0, 20, 50, 50, 60, 60, 120]))
    def size(self, index: int, size: int) -> None:
        if name := self.running(index, has_memory=False):
            self.give(msg.FetchSized(name, size))

    @rule(index=indices)
    def finish(self, index: int) -> None:
        if name := self.running(index, has_memory=True):
            job = self.prefetcher.jobs[name]
            whole = job.part.first_byte == 0
            del self.tasks[name]
            if whole:
                self.complete.add(name)
            source, seconds = ("disk", 1.0) if job.from_disk else ("http", 9.0)
            num_bytes = self.disk[name]
            self.give(msg.FetchEnded(digest=name, num_bytes=num_bytes, whole=whole, source=source, seconds=seconds))

    @rule(name=names)
    def bring(self, name: str) -> None:
        self.receive()
        self.ask(name, "", 0, ranged=False)
        for _ in range(2):
            for running, has_memory in list(self.tasks.items()):
                if not has_memory:
                    self.give(msg.FetchSized(running, 50))
            for index in range(len(self.tasks)):
                self.finish(index)
        self.give(Tick())
        self.copied("")
        self.receive()

    @rule(index=indices, has_memory=st.booleans(), how=st.sampled_from(["kept", "lost", "no_space"]))
    def fail(self, index: int, has_memory: bool, how: str) -> None:
        if name := self.running(index, has_memory):
            self.end(name, "no_space" if how == "no_space" else "weights_unavailable", kept=how == "kept")

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.give(an_event(DropWeights(target="n", digest=name, reason="r"), issuer="placer-1", epoch=1))

    @rule(instance_id=instance_ids, ends=st.booleans())
    def instance(self, instance_id: str, ends: bool) -> None:
        if not instance_id or instance_id in self.gone:
            return
        if ends:
            self.gone.add(instance_id)
            stopped = an_instance(instance_id, state=InstanceState.STOPPED, gpu_id="n/0", revision=2)
            self.give(an_event(InstanceStopped(instance=stopped)))
        else:
            self.give(an_event(InstanceReady(instance=an_instance(instance_id, gpu_id="n/0"))))

    @rule()
    def tick(self) -> None:
        self.give(Tick())

    @rule()
    def receive(self) -> None:
        while self.later:
            self.give(self.later.pop(0))

    @invariant()
    def counted_bytes_cover_the_real_ones(self) -> None:
        assert self.prefetcher.cache.used_bytes <= CAPACITY
        for digest, num_bytes in self.disk.items():
            entry = self.prefetcher.cache.entries.get(digest)
            assert entry is not None and entry.num_bytes >= num_bytes, f"{digest} takes bytes nobody counts"

    @invariant()
    def the_disk_is_counted_as_it_is(self) -> None:
        tier = self.prefetcher.disk
        assert tier.used_bytes <= DISK
        assert self.copies.items() <= {digest: copy.num_bytes for digest, copy in tier.copies.items()}.items()
        assert {digest for digest in tier.copies if tier.has(digest)} <= self.copies.keys()

    @invariant()
    def whoever_waits_for_an_answer_has_a_fetch(self) -> None:
        assert self.unanswered <= self.prefetcher.jobs.keys()

    @invariant()
    def every_complete_region_is_known(self) -> None:
        assert {d for d, c in self.prefetcher.cache.entries.items() if c.complete} <= self.complete


Prefetching.TestCase.settings = settings()
test_prefetching = Prefetching.TestCase
