"""One node's disk tier of weights, behind its host memory: copies to write and to evict.

A copy is written ahead, in the background, while its weights are in host memory, so that no eviction waits. It is
written where reading it takes clearly less than fetching the weights again, both as measured. The policy `caching`
orders copies as it orders host memory; for mCache (Eq. 1) the penalty of a miss is the seconds that a fetch takes
longer than a read.

Both tiers together hold as much as they can: on a full disk, copies of weights that stay in host memory give way to
those of weights that have left it or leave it next.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from glowplug.controllers.effects import Effect, Record
from glowplug.controllers.prefetcher.cache import Cached, FetchSeconds
from glowplug.controllers.prefetcher.messages import CANCELLED, CopyEnded, DropCopy, StopCopy, WriteCopy
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.phrasing import listed
from glowplug.domain.units import show_bytes
from glowplug.policies.caching import ordering
from glowplug.policies.caching.mcache_importance import Importance
from glowplug.policies.caching.ordering import Ordering, Resident
from glowplug.policies.decisions import EvictDecision

MakeOrder = Callable[[Callable[[str, int], float]], Ordering]  # by the cost of a miss: (digest, bytes) -> seconds
REFUSED_REMEMBERED = 4096


class CopyState(StrEnum):
    WRITING = "being written"  # its bytes are reserved
    WHOLE = "whole"
    STOPPING = "being given up"
    UNREMOVED = "not removed"  # not read; removed again later


@dataclass(slots=True)
class Copy:
    digest: str
    num_bytes: int
    state: CopyState
    last_used_at: float
    model_keys: set[str] = field(default_factory=set)


class DiskTier:
    """Copies on disk, never more than `capacity_bytes`; 0: there is no tier. One copy is written at a time.

    `trouble`: why nothing is written now, as the disk is full or fails. Writing is retried later."""

    def __init__(
        self,
        node_id: str,
        params: PrefetcherParams,
        fetches: FetchSeconds,
        make_order: MakeOrder,
        held: Callable[[str], str],
    ) -> None:
        self.node_id, self.capacity_bytes, self._params = node_id, params.disk_bytes, params
        self.copies: dict[str, Copy] = {}
        self.trouble = params.disk_trouble
        self._fetches, self._held = fetches, held  # `held`: digest -> why its copy must stay, "" if it may go
        self._reads, self._writes = FetchSeconds(params.disk_seconds), FetchSeconds(params.disk_seconds)
        self._order = make_order(self.saved_s)
        self._refused: dict[str, str] = {}  # digest -> why
        self._again_at = 0.0

    @property
    def order(self) -> Ordering:
        return self._order

    @property
    def used_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies.values())

    def has(self, digest: str) -> bool:
        copy = self.copies.get(digest)
        return copy is not None and copy.state is CopyState.WHOLE

    @property
    def whole(self) -> tuple[CachedWeights, ...]:
        copies = (self.copies[digest] for digest in sorted(self.copies) if self.has(digest))
        return tuple(
            CachedWeights(
                digest=copy.digest,
                num_bytes=copy.num_bytes,
                model_keys=tuple(sorted(copy.model_keys)),
                last_used_at=copy.last_used_at,
            )
            for copy in copies
        )

    @property
    def bytes_per_s(self) -> float:
        """Rate of whole reads or, before any, writes; two digits, so that small changes do not show. 0.0 before
        both."""
        seconds = self._reads if self._reads.is_measured else self._writes
        return float(f"{seconds.bytes_per_s:.1e}")

    def read_s(self, digest: str, num_bytes: int) -> float:
        seconds = self._reads if self._reads.is_measured else self._writes
        return seconds.expected(digest, num_bytes)

    def saved_s(self, digest: str, num_bytes: int) -> float:
        return max(0.0, self._fetches.expected(digest, num_bytes) - self.read_s(digest, num_bytes))

    def why_not(self, digest: str, num_bytes: int) -> str:
        """Return why a copy of these weights is not worth writing; "" when it is."""
        if self.capacity_bytes < num_bytes:
            return f"{show_bytes(num_bytes)} of weights, and the disk tier has {show_bytes(self.capacity_bytes)}"
        if digest in self._refused:
            return self._refused[digest]
        fetch_s = self._fetches.expected(digest, num_bytes)
        if self.saved_s(digest, num_bytes) < self._params.disk_gain * fetch_s:
            read_s = self.read_s(digest, num_bytes)
            return f"a fetch takes {fetch_s:.2f} s, and to read it from disk {read_s:.2f} s"
        return ""

    # changes of copies

    def adopt(self, copy: Copy) -> None:
        self.copies[copy.digest] = copy
        self._order.used(copy.digest, copy.num_bytes, copy.last_used_at, hit=False)

    def used(self, digest: str, num_bytes: int, now_s: float, model_key: str) -> None:
        copy = self.copies.get(digest)
        if copy is not None:
            copy.last_used_at = now_s
            copy.model_keys |= {model_key}
        if copy is not None or isinstance(self._order, Importance):
            self._order.used(digest, num_bytes, now_s, hit=copy is not None)

    def was_read(self, digest: str, num_bytes: int, seconds: float) -> None:
        self._reads.measured(digest, num_bytes, seconds, "disk")

    def wrote(self, end: CopyEnded, now_s: float) -> list[Effect]:
        """End the writing of a copy. After a failure the tier rests, unless these weights alone are the reason."""
        copy = self.copies.get(end.digest)
        if copy is None:
            return []
        if not end.code and copy.state is CopyState.WRITING:
            copy.state, self.trouble = CopyState.WHOLE, ""
            self._writes.measured(end.digest, end.num_bytes, end.seconds, "disk")
            return []
        self._forget(end.digest)
        if not end.code:
            return [DropCopy(end.digest, num_bytes=copy.num_bytes)]  # it was whole before its writer stopped
        if end.is_needless:
            self._refused[end.digest] = end.message
            while len(self._refused) > REFUSED_REMEMBERED:
                del self._refused[next(iter(self._refused))]
        elif end.code != CANCELLED:
            self.failed(end.message, now_s)
        return []

    def failed(self, message: str, now_s: float) -> None:
        self.trouble, self._again_at = message, now_s + self._params.disk_retry_s

    def not_removed(self, digest: str, num_bytes: int, now_s: float) -> None:
        if digest not in self.copies:
            self.adopt(Copy(digest, num_bytes, CopyState.UNREMOVED, now_s))

    def drop(self, digest: str) -> list[Effect]:
        copy = self.copies.get(digest)
        self._refused.pop(digest, None)
        if copy is None or copy.state is CopyState.STOPPING:
            return []
        if copy.state is CopyState.WRITING:
            return self.stop(digest)
        self._forget(digest)
        return [DropCopy(digest, num_bytes=copy.num_bytes)]

    def stop(self, digest: str) -> list[Effect]:
        copy = self.copies.get(digest)
        if copy is None or copy.state is not CopyState.WRITING:
            return []
        copy.state = CopyState.STOPPING
        return [StopCopy(digest)]

    def _forget(self, digest: str) -> None:
        del self.copies[digest]
        self._order.left(digest)

    # writing

    def write_next(self, present: Mapping[str, Cached], leaving: Callable[[], Set[str]], now_s: float) -> list[Effect]:
        """Write the most important weights of host memory without a copy. On a full disk, copies of weights that stay
        in host memory leave first: the next start needs none of those. Such weights are written only into free
        space."""
        if not self.capacity_bytes or now_s < self._again_at or self.is_writing:
            return []
        if unremoved := [digest for digest, copy in self.copies.items() if copy.state is CopyState.UNREMOVED]:
            return [effect for digest in unremoved for effect in self.drop(digest)]
        wanted = {digest: c for digest, c in present.items() if self._is_wanted(c, now_s)}
        if not wanted:
            return []
        stays = {digest for digest, c in present.items() if c.complete} - leaving()
        for entry, less_important in self._by_importance(wanted, stays, now_s):
            decision = self._space_for(entry, less_important, stays, now_s)
            if decision is not None:
                return self._write(entry, decision, now_s)
        return []

    def _by_importance(
        self, wanted: Mapping[str, Cached], stays: Set[str], now_s: float
    ) -> Iterator[tuple[Cached, Set[str]]]:
        """Yield entries, the most important first, each with the less important copies; none for weights in `stays`."""
        if isinstance(self._order, Importance):
            everybody = [*map(_resident, wanted.values()), *map(_resident, self.copies.values())]
            ordered = [r.name for _, r in self._order.order(everybody, now_s)]
        else:  # other orders rank only their own entries: the latest use comes first
            used_at = {digest: c.last_used_at for digest, c in wanted.items()}
            used_at |= {digest: c.last_used_at for digest, c in self.copies.items()}
            ordered = sorted(used_at, key=lambda digest: (used_at[digest], digest))
        ordered.sort(key=lambda digest: digest not in stays)
        for at in reversed(range(len(ordered))):
            if (entry := wanted.get(ordered[at])) is not None:
                yield entry, frozenset() if entry.digest in stays else frozenset(ordered[:at])

    @property
    def is_writing(self) -> bool:
        return any(copy.state in (CopyState.WRITING, CopyState.STOPPING) for copy in self.copies.values())

    def _is_wanted(self, entry: Cached, now_s: float) -> bool:
        if not entry.complete or entry.stale or entry.digest in self.copies:
            return False
        return now_s - entry.came_at >= self._params.copy_after_s and not self.why_not(entry.digest, entry.num_bytes)

    def _space_for(self, entry: Cached, may_go: Set[str], stays: Set[str], now_s: float) -> EvictDecision | None:
        lacking = entry.num_bytes - (self.capacity_bytes - self.used_bytes)
        if lacking <= 0:
            return EvictDecision(reason="enough is free")
        kept = [
            replace(r, held=r.held or ("" if r.name in may_go else WORTH_MORE), priority=int(r.name not in stays))
            for r in self._residents()
        ]
        decision = ordering.evict(self._order, kept, lacking, now_s)
        return decision if decision.victims else None

    def _write(self, entry: Cached, decision: EvictDecision, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if decision.victims:
            effects.append(Record(self._record(decision, entry, now_s)))
        effects += self._evict(decision)
        copy = Copy(entry.digest, entry.num_bytes, CopyState.WRITING, entry.last_used_at, set(entry.model_keys))
        self.copies[entry.digest] = copy
        self._order.used(entry.digest, entry.num_bytes, entry.last_used_at, hit=False)
        return [*effects, WriteCopy(entry.digest, entry.num_bytes)]

    def shrink(self, now_s: float) -> list[Effect]:
        excess = self.used_bytes - self.capacity_bytes
        residents = self._residents()
        could = sum(r.num_bytes for r in residents if not r.held)
        decision = ordering.evict(self._order, residents, min(excess, could), now_s)
        return self._evict(decision)

    def _evict(self, decision: EvictDecision) -> list[Effect]:
        leaving = [
            DropCopy(digest, evicted=True, num_bytes=self.copies[digest].num_bytes) for digest in decision.victims
        ]
        for digest in decision.victims:
            self._forget(digest)
        return [*leaving]

    def _residents(self) -> list[Resident]:
        return [
            replace(_resident(c), held=self._held(c.digest) if c.state is CopyState.WHOLE else f"it is {c.state}")
            for c in self.copies.values()
        ]

    def _record(self, decision: EvictDecision, entry: Cached, now_s: float) -> DecisionRecord:
        leaving = [
            f"the copy of {', '.join(sorted(self.copies[d].model_keys)) or d[:12]}"
            f" ({show_bytes(self.copies[d].num_bytes)})"
            for d in decision.victims
        ]
        name = ", ".join(sorted(entry.model_keys)) or entry.digest[:12]
        leave, lacking = "leaves" if len(leaving) == 1 else "leave", show_bytes(decision.need_bytes)
        return DecisionRecord(
            decision_id=f"d-disk-{self.node_id}-{entry.digest[:12]}-{round(now_s * 1000)}",
            kind="evict",
            policy=self._params.caching,
            service="prefetcher",
            reason=f"{listed(leaving)} {leave} the disk of {self.node_id} for {name}, which lacks {lacking}: "
            f"{decision.reason}",
            made_at=now_s,
            node_id=self.node_id,
            chosen=", ".join(decision.victims),
            inputs={
                "capacity_bytes": self.capacity_bytes,
                "lacking_bytes": decision.need_bytes,
                "freed_bytes": decision.freed_bytes,
            },
            rivals=decision.rivals,
        )


WORTH_MORE = "it is worth more than the copy to be written"


def _resident(entry: Cached | Copy) -> Resident:
    return Resident(name=entry.digest, num_bytes=entry.num_bytes, last_used_at=entry.last_used_at)
