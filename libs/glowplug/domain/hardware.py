"""Describe nodes, GPUs and links to the control plane."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from glowplug.domain.moment import Moment


class GpuRole(StrEnum):
    """WarmServe, Fig. 5: IDLE -> UNIVERSAL -> DEDICATED (-> grace) -> IDLE."""

    IDLE = "idle"
    UNIVERSAL = "universal"
    DEDICATED = "dedicated"


class GrantOwner(StrEnum):
    WEIGHTS = "weights"
    KV = "kv"
    PREWARM = "prewarm"
    RESERVATION = "reservation"
    SLEEPER = "sleeper"  # kept by a sleeping engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`holder`: instance or replica id."""

    holder: str
    owner: GrantOwner
    num_bytes: int


WEIGHT_OWNERS = frozenset({GrantOwner.WEIGHTS, GrantOwner.PREWARM})  # of engine and replica


SHARED = "shared"  # in `bytes_by_owner`: weights with several readers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Weights read by all `holders` on one GPU in the same pages. They count once: in a single holder's grant, or here
    if several."""

    key: str  # Model.share_key
    num_bytes: int
    holders: tuple[str, ...]  # oldest first

    @property
    def counts(self) -> bool:
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator; also a budget of host memory (`kind="host"`) or mere bookkeeping (`"emulated"`)."""

    gpu_id: str  # "<node_id>/<index>"
    total_bytes: int
    kind: str = "host"  # host | cuda | emulated
    role: GpuRole = GpuRole.IDLE
    grants: tuple[Grant, ...] = ()
    sleepers: tuple[Grant, ...] = ()  # of sleeping engines; count as free
    shared: tuple[SharedWeights, ...] = ()

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
        """Bytes for sleepers to give up so that all grants fit."""
        return max(0, sum(grant.num_bytes for grant in self.sleepers) - self.free_bytes)

    def shares(self, key: str) -> SharedWeights | None:
        return next((weights for weights in self.shared if weights.key == key), None)

    def freed_by(self, holders: Collection[str]) -> int:
        """Bytes freed when all these holders go. Weights shared with others stay; sleepers' bytes are free already."""
        freed = sum(grant.num_bytes for grant in self.grants if grant.holder in holders)
        for weights in self.shared:
            if weights.counts and all(holder in holders for holder in weights.holders):
                freed += weights.num_bytes
        return freed

    def seen_by(self, key: str) -> "Gpu":
        """View for one more instance with weights of that key: shared ones count as free, so no eviction frees them."""
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
class Devices:
    """An engine's GPUs on its node."""

    kind: str = "host"  # see Gpu
    ordinals: tuple[int, ...] = (0,)  # by rank
    num_bytes: int = 0  # granted on all


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path of bytes into a node."""

    link_id: str  # "<node_id>/nic"
    bytes_per_s: float
    bytes_in_flight: int = 0
    num_transfers: int = 0
    is_measured: bool = False  # else declared; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWeights:
    """One weight blob in host memory (prefetcher's cache), or its whole copy on disk."""

    digest: str
    num_bytes: int
    model_keys: tuple[str, ...] = ()
    last_used_at: Moment = 0.0
    stage_bytes: tuple[int, ...] = ()  # of each stage of 2, then of 3, then of 4; (): unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server with agent and prefetcher, alive while its lease is."""

    node_id: str
    gpus: tuple[Gpu, ...]
    engines: tuple[str, ...]  # startable, e.g. ("llamacpp", "emulated")
    agent_url: str
    prefetcher_url: str = ""
    host_cache_bytes: int = 0
    links: tuple[Link, ...] = ()
    cached: tuple[CachedWeights, ...] = ()
    draining: bool = False
    heartbeat_at: Moment = 0.0
    revision: int = 0
    abilities: tuple[str, ...] = ()  # "<engine>:<ability>"
    stages_at: str = ""  # "host:first-last", for first stages of pipelines; "": none
    on_disk: tuple[CachedWeights, ...] = ()  # whole copies
    disk_bytes_per_s: float = 0.0  # measured on whole copies; 0: not yet
    num_cores: float = 0.0  # that its engines may use; 0: unknown
    num_runnable: float = 0.0  # threads that run or wait for a core, mean of the last seconds
    swap_host_bytes: int = -1  # of host memory for sleeping engines; -1: unbounded

    @property
    def slowdown(self) -> float:
        """How many times as long a start from nothing takes now as on idle cores: the root of one more thread's
        (llama.cpp, which also reads and waits; bench/fidelity.py)."""
        return max(1.0, (self.num_runnable + 1) / self.num_cores) ** 0.5 if self.num_cores else 1.0

    def can(self, engine: str, ability: str) -> bool:
        """Abilities: "prewarm" (hold weights without KV, drop at once), "swap" (sleep and wake), "stages" (serve in a
        pipeline), "stream" (load arriving weights, importing meanwhile), "first_layers" (prewarm only these), "share"
        (read weights where the node keeps them)."""
        return f"{engine}:{ability}" in self.abilities
