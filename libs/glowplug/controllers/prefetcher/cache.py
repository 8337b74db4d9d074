"""Host memory of one node for weights: entries, evictions, and the cost of a miss."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from glowplug.controllers.effects import Effect, Publish, Record
from glowplug.controllers.prefetcher.messages import DropRegion, Want
from glowplug.controllers.prefetcher.params import PrefetcherParams, SecondsParams
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.phrasing import listed
from glowplug.domain.units import show_bytes
from glowplug.events.facts import WeightsEvicted
from glowplug.policies.caching import ordering
from glowplug.policies.caching.ordering import Ordering, Resident
from glowplug.policies.decisions import EvictDecision


@dataclass(slots=True)
class Cached:
    digest: str
    num_bytes: int
    complete: bool
    last_used_at: float
    model_keys: set[str] = field(default_factory=set)
    came_at: float = 0.0  # end of its fetch
    stale: bool = False  # dropped once unused


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a fetch fits. `num_bytes` None: not now, see `why`. `decision`: its evictions."""

    num_bytes: int | None
    decision: EvictDecision
    why: str = ""
    never: bool = False  # larger than the whole cache


class HostCache:
    """Host memory, never more than `capacity_bytes`. Every entry counts: complete, partial or reserved. `order` is
    notified of every use and eviction, and chooses the victims. `held`: why a digest must stay now, "" if it may go;
    `has_copy`: whether a GPU has a replica of one of the models."""

    def __init__(
        self,
        node_id: str,
        params: PrefetcherParams,
        order: Ordering,
        held: Callable[[str, float], str],
        has_copy: Callable[[Set[str]], bool],
        on_disk: Callable[[str], bool],
    ) -> None:
        self.node_id, self.capacity_bytes = node_id, params.capacity_bytes
        self._policy, self._order = params.caching, order
        self._held, self._has_copy, self._on_disk = held, has_copy, on_disk
        self.entries: dict[str, Cached] = {}

    @property
    def used_bytes(self) -> int:
        return sum(c.num_bytes for c in self.entries.values())

    def adopt(self, entry: Cached) -> None:
        self.entries[entry.digest] = entry
        self._order.used(entry.digest, entry.num_bytes, entry.last_used_at, hit=False)

    def used(self, digest: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        self._order.used(digest, num_bytes, now_s, hit=hit)

    def remove(self, digest: str) -> Cached | None:
        if (entry := self.entries.pop(digest, None)) is not None:
            self._order.left(digest)
        return entry

    def never_came(self, digest: str) -> None:
        if digest not in self.entries:
            self._order.left(digest)

    def fit(self, digest: str, size: int, now_s: float) -> Fit:
        """Return whether `size` bytes of `digest` (0: unknown, takes all free ones) fit, its own bytes included."""
        if size > self.capacity_bytes:
            has = f"the host cache of {self.node_id} has {show_bytes(self.capacity_bytes)}"
            why = f"the weights take {show_bytes(size)}, and {has}"
            return Fit(None, EvictDecision(reason=why), why, never=True)
        own = self.entries.get(digest)
        free = self.capacity_bytes - self.used_bytes + (own.num_bytes if own else 0)
        if max(size, 1) <= free:
            return Fit(size or free, EvictDecision(reason="enough is free"))
        residents = self._residents(now_s, without=digest)
        decision = ordering.evict(self._order, residents, max(size, 1) - free, now_s)
        if decision.victims:
            return Fit(size or free + decision.freed_bytes, decision)
        users = ", ".join(f"{r.name[:12]} ({r.held})" for r in residents if r.held)
        return Fit(
            None,
            decision,
            f"{decision.reason}; the host cache of {self.node_id} holds weights that are in use: {users}",
        )

    def reserve(self, digest: str, num_bytes: int, model_keys: Iterable[str], now_s: float) -> None:
        known = self.entries.get(digest)
        keys = (known.model_keys if known else set()) | set(model_keys)
        self.entries[digest] = Cached(digest, num_bytes, False, now_s, keys)

    def settle(self, digest: str, num_bytes: int, complete: bool, now_s: float) -> None:
        known = self.entries.pop(digest, None)
        if num_bytes > 0:
            self.entries[digest] = Cached(
                digest, num_bytes, complete, now_s, known.model_keys if known else set(), came_at=now_s
            )
        self.never_came(digest)

    def shrink(self, now_s: float) -> EvictDecision:
        excess = self.used_bytes - self.capacity_bytes
        if excess <= 0:
            return EvictDecision(reason="nothing needs to be freed")
        return ordering.evict(self._order, self._residents(now_s), excess, now_s)

    def free_up(self, num_bytes: int, now_s: float) -> EvictDecision:
        residents = self._residents(now_s)
        could = sum(r.num_bytes for r in residents if not r.held)
        return ordering.evict(self._order, residents, min(num_bytes, could), now_s)

    def leaving(self, now_s: float) -> frozenset[str]:
        """Return entries that would leave next for weights as large as the largest here; empty while that much is
        free."""
        largest = max((c.num_bytes for c in self.entries.values()), default=0)
        lacking = largest - (self.capacity_bytes - self.used_bytes)
        if lacking <= 0:
            return frozenset()
        ordered = [resident for _, resident in self._order.order(self._residents(now_s), now_s)]
        ordered.sort(key=lambda resident: bool(resident.held))  # entries in use leave last
        return frozenset(resident.name for resident in ordering.first_enough(ordered, lacking))

    def evict(self, decision: EvictDecision, want: Want | None, now_s: float) -> list[Effect]:
        """Carry out an eviction for `want`; None: for a lowered capacity."""
        if not decision.victims:
            return []
        cause = want.cause if want else None
        effects: list[Effect] = []
        reason = self._sentence(decision, want, now_s)
        for digest in decision.victims:
            num_bytes = self.entries.pop(digest).num_bytes
            self._order.left(digest)
            fact = WeightsEvicted(node_id=self.node_id, digest=digest, num_bytes=num_bytes, reason=reason)
            effects += [DropRegion(digest, evicted=True), Publish(fact, cause)]
        record = DecisionRecord(
            decision_id=f"d-evict-{self.node_id}-{decision.victims[0][:12]}-{round(now_s * 1000)}",
            kind="evict",
            policy=self._policy,
            service="prefetcher",
            reason=reason,
            made_at=now_s,
            node_id=self.node_id,
            model_key=want.command.model_key if want else "",
            instance_id=want.command.instance_id if want else "",
            chosen=", ".join(decision.victims),
            inputs={
                "capacity_bytes": self.capacity_bytes,
                "lacking_bytes": decision.need_bytes,
                "freed_bytes": decision.freed_bytes,
            },
            rivals=decision.rivals,
            cause_id=cause.event_id if cause else "",
            traceparent=cause.traceparent if cause else "",
        )
        return [*effects, Record(record, cause)]

    def _sentence(self, decision: EvictDecision, want: Want | None, now_s: float) -> str:
        leaving = []
        for digest in decision.victims:
            entry = self.entries[digest]
            name = ", ".join(sorted(entry.model_keys)) or digest[:12]
            idle_s = max(0.0, now_s - entry.last_used_at)
            stays = ", a copy stays on disk" if self._on_disk(digest) else ""
            size = show_bytes(entry.num_bytes)
            leaving.append(f"the weights of {name} ({size}, last used {idle_s:.0f} s ago{stays})")
        whom = f"for {want.command.model_key}, which lacks" if want else "since the cache holds too much by"
        where = f"leave the host memory of {self.node_id} {whom} {show_bytes(decision.need_bytes)}"
        return f"{listed(leaving)} {where}: {decision.reason}"

    def _residents(self, now_s: float, without: str = "") -> list[Resident]:
        return [
            Resident(
                name=c.digest,
                num_bytes=c.num_bytes,
                last_used_at=c.last_used_at,
                held=self._held(c.digest, now_s),
                has_copy=self._has_copy(c.model_keys),
            )
            for c in self.entries.values()
            if c.digest != without
        ]


@dataclass(slots=True)
class _Seen:
    seconds: float
    num_bytes: int
    source: str


class FetchSeconds:
    """Cost of a miss on this node, P of mCache Eq. 1: seconds to bring weights into host memory. The paper profiles it
    offline per model; here every whole fetch is a measurement.

    Per digest, an average of its own fetches; for one never fetched whole, its bytes at the pace of all fetches.
    """

    def __init__(self, params: SecondsParams = SecondsParams()) -> None:
        self._params = params
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._pace: dict[str, float] = {}  # source -> seconds a byte

    @property
    def is_measured(self) -> bool:
        return bool(self._pace)

    @property
    def bytes_per_s(self) -> float:
        """Mean rate over all sources; 0.0 before the first measurement."""
        return len(self._pace) / sum(self._pace.values()) if self._pace else 0.0

    def measured(self, digest: str, num_bytes: int, seconds: float, source: str) -> None:
        """Learn from one whole fetch, from nothing. One that took no time is no measurement."""
        if num_bytes <= 0 or not seconds > 0:
            return
        share = self._params.newest
        seen = self._seen.pop(digest, None)
        known = seen.seconds if seen and seen.num_bytes == num_bytes and seen.source == source else seconds
        self._seen[digest] = _Seen(share * seconds + (1 - share) * known, num_bytes, source)
        while len(self._seen) > self._params.max_digests:
            self._seen.popitem(last=False)
        pace = seconds / num_bytes
        self._pace[source] = share * pace + (1 - share) * self._pace.get(source, pace)

    def expected(self, digest: str, num_bytes: int) -> float:
        seen = self._seen.get(digest)
        if seen is not None and num_bytes == seen.num_bytes:
            return seen.seconds
        if seen is not None:
            return num_bytes * self._pace[seen.source]
        if not self._pace:
            return num_bytes / self._params.bytes_per_s
        return num_bytes * sum(self._pace.values()) / len(self._pace)
