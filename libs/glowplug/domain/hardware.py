"""Nodes, GPUs and links as the control plane sees them."""

from dataclasses import dataclass
from enum import StrEnum


class GpuRole(StrEnum):
    """WarmServe, Fig. 5: IDLE -> UNIVERSAL -> DEDICATED (-> grace) -> IDLE."""

    IDLE = "idle"
    UNIVERSAL = "universal"
    DEDICATED = "dedicated"


class GrantOwner(StrEnum):
    """Who holds bytes in a GPU's ledger."""

    WEIGHTS = "weights"
    KV = "kv"
    PREWARM = "prewarm"
    RESERVATION = "reservation"
    SLEEPER = "sleeper"  # what an engine that sleeps keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Bytes of one GPU held for one owner. `holder` is the instance (or replica) id."""

    holder: str
    owner: GrantOwner
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator; on a laptop a budget of host memory (`kind="host"`), or bytes only counted (`"emulated"`)."""

    gpu_id: str  # unique in the fleet: "<node_id>/<index>"
    total_bytes: int
    kind: str = "host"  # host | cuda | emulated
    role: GpuRole = GpuRole.IDLE
    grants: tuple[Grant, ...] = ()
    sleepers: tuple[Grant, ...] = ()  # what engines that sleep keep: it is free, since they give way to what starts

    @property
    def all_grants(self) -> tuple[Grant, ...]:
        return self.grants + self.sleepers

    @property
    def used_bytes(self) -> int:
        used = 0
        for grant in self.grants:
            used += grant.num_bytes
        return used

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    @property
    def lacking_bytes(self) -> int:
        """What sleepers have to give up, so that everybody has what he was granted."""
        return max(0, sum(grant.num_bytes for grant in self.sleepers) - self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path that bytes take into a node, with what is moving on it now."""

    link_id: str  # "<node_id>/nic"
    bytes_per_s: float
    bytes_in_flight: int = 0
    num_transfers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedWeights:
    """One weight blob in a node's host memory (prefetcher's cache)."""

    digest: str
    num_bytes: int
    model_keys: tuple[str, ...] = ()
    last_used_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server with an agent and a model-prefetcher. Alive while its lease in the store is."""

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
    abilities: tuple[str, ...] = ()  # what its engines can do besides serving: "<engine>:<ability>"
    stages_at: str = ""  # "host:first-last", of which the first stage of a pipeline takes a port; "": it offers none

    def can(self, engine: str, ability: str) -> bool:
        """Abilities: "prewarm" (hold weights without KV, drop them at once), "swap" (sleep and wake), "stages" (serve
        as one stage of a pipeline), "stream" (load what is fetched as it comes in, and import beside that),
        "first_layers" (prewarmed, hold the first layers alone), "share" (read weights where the node keeps them)."""
        return f"{engine}:{ability}" in self.abilities
