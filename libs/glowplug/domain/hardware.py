"""Nodes, GPUs and links as the control plane sees them."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum


class GpuRole(StrEnum):
    """The use of a GPU (WarmServe, Fig. 5): IDLE -> UNIVERSAL -> DEDICATED (-> grace) -> IDLE."""

    IDLE = "idle"
    UNIVERSAL = "universal"
    DEDICATED = "dedicated"


class GrantOwner(StrEnum):
    """The purpose for which bytes of a GPU's ledger are held."""

    WEIGHTS = "weights"
    KV = "kv"
    PREWARM = "prewarm"
    RESERVATION = "reservation"
    SLEEPER = "sleeper"  # what a sleeping engine keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Bytes of one GPU held for one owner. `holder` is the instance (or replica) id."""

    holder: str
    owner: GrantOwner
    num_bytes: int


WEIGHT_OWNERS = frozenset({GrantOwner.WEIGHTS, GrantOwner.PREWARM})  # of a running engine, and of a replica


SHARED = "shared"  # a key of `bytes_by_owner` beside the owners: weights that several holders read


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Bytes of weights that all `holders` on one GPU read in the same pages. They count once: in the grant of a single
    holder, or here alone where there are several."""

    key: str  # of the engine and the weights: Model.share_key
    num_bytes: int
    holders: tuple[str, ...]  # in the order they came

    @property
    def counts(self) -> bool:
        """Whether its bytes are in no grant."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator; on a laptop a budget of host memory (`kind="host"`), or bytes only counted (`"emulated"`)."""

    gpu_id: str  # unique in the fleet: "<node_id>/<index>"
    total_bytes: int
    kind: str = "host"  # host | cuda | emulated
    role: GpuRole = GpuRole.IDLE
    grants: tuple[Grant, ...] = ()
    sleepers: tuple[Grant, ...] = ()  # what sleeping engines keep; counts as free, since starts may take it
    shared: tuple[SharedWeights, ...] = ()  # weights that several engines may read in the same pages

    @property
    def all_grants(self) -> tuple[Grant, ...]:
        return self.grants + self.sleepers

    @property
    def used_bytes(self) -> int:
        used = 0
        for grant in self.grants:
            used += grant.num_bytes
        for weights in self.shared:
            if weights.counts:
                used += weights.num_bytes
        return used

    @property
    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes held for each owner, sleepers included; `shared` for weights that several holders read."""
        held: dict[str, int] = {}
        for grant in self.all_grants:
            held[grant.owner.value] = held.get(grant.owner.value, 0) + grant.num_bytes
        for weights in self.shared:
            if weights.counts:
                held[SHARED] = held.get(SHARED, 0) + weights.num_bytes
        return held

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    @property
    def lacking_bytes(self) -> int:
        """Bytes that sleepers have to give up so that every grant can be used."""
        return max(0, sum(grant.num_bytes for grant in self.sleepers) - self.free_bytes)

    def shares(self, key: str) -> SharedWeights | None:
        """The shared weights with that key, or None."""
        return next((weights for weights in self.shared if weights.key == key), None)

    def freed_by(self, holders: Collection[str]) -> int:
        """Bytes that come free once all these holders have gone: what each holds alone, and what they share with no
        other holder. What sleepers keep is free already."""
        freed = sum(grant.num_bytes for grant in self.grants if grant.holder in holders)
        for weights in self.shared:
            if weights.counts and all(holder in holders for holder in weights.holders):
                freed += weights.num_bytes
        return freed

    def seen_by(self, key: str) -> "Gpu":
        """This GPU as one more instance with weights of that key sees it: the weights it would share count as free, so
        no eviction frees them."""
        mine = self.shares(key)
        if mine is None:
            return self
        grants, shared = self.grants, tuple(weights for weights in self.shared if weights is not mine)
        if not mine.counts:
            grants = tuple(
                replace(g, num_bytes=max(0, g.num_bytes - mine.num_bytes))
                if g.holder in mine.holders and g.owner in WEIGHT_OWNERS
                else g
                for g in grants
            )
        return replace(self, grants=grants, shared=shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path on which bytes come into a node, with its present transfers."""

    link_id: str  # "<node_id>/nic"
    bytes_per_s: float
    bytes_in_flight: int = 0
    num_transfers: int = 0
    is_measured: bool = False  # bytes_per_s was measured; else it is declared, or 0 where unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWeights:
    """One weight blob in a node's host memory (prefetcher's cache), or a whole copy of it on the node's disk."""

    digest: str
    num_bytes: int
    model_keys: tuple[str, ...] = ()
    last_used_at: float = 0.0
    stage_bytes: tuple[int, ...] = ()  # bytes of each stage of 2, then of 3, then of 4; (): unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server with an agent and a prefetcher. Alive while its lease in the store is."""

    node_id: str
    gpus: tuple[Gpu, ...]
    engines: tuple[str, ...]  # engine drivers the agent can start, e.g. ("llamacpp", "emulated")
    agent_url: str
    prefetcher_url: str = ""
    host_cache_bytes: int = 0
    links: tuple[Link, ...] = ()
    cached: tuple[CachedWeights, ...] = ()
    draining: bool = False
    heartbeat_at: float = 0.0
    revision: int = 0
    abilities: tuple[str, ...] = ()  # abilities of its engines besides serving: "<engine>:<ability>"
    stages_at: str = ""  # "host:first-last", ports for the first stages of pipelines; "": none
    on_disk: tuple[CachedWeights, ...] = ()  # whole copies on its disk, from which a fetch reads
    disk_bytes_per_s: float = 0.0  # measured on reads and writes of whole copies; 0: none yet

    def can(self, engine: str, ability: str) -> bool:
        """Return whether that engine has an ability here: "prewarm" (hold weights without KV, drop them at once),
        "swap" (sleep and wake), "stages" (serve as one stage of a pipeline), "stream" (load weights while they arrive,
        and import beside that), "first_layers" (hold only the first layers when prewarmed), "share" (read weights where
        the node keeps them)."""
        return f"{engine}:{ability}" in self.abilities
