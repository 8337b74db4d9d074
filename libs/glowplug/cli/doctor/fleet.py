"""What was found out about a running fleet: plain values, gathered by `fleet_facts.py`, judged by its neighbours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """One process. `error` says why its admin port did not answer; `metrics` sums each of its metrics over labels."""

    name: str  # "placer-1", "agent of node-2"
    service: str  # router | predictor | placer | autoscaler | console | agent | prefetcher
    url: str
    error: str = ""
    ready: bool = False
    reason: str = ""  # why it is not ready
    version: str = ""
    role: str = ""  # leader | standby where there is an election, single where not
    leader: str = ""  # who leads, as it knows
    skew_s: float | None = None  # its clock minus ours; known to about a second
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """Redis or Valkey. `error` says why it did not answer, `unknown` why it was not asked."""

    unknown: str = ""
    error: str = ""
    version: str = ""
    role: str = ""  # master | slave
    append_only: bool | None = None  # None: the server does not tell
    fsync: str = ""
    aof_problem: str = ""
    used_bytes: int = 0
    max_bytes: int = 0
    policy: str = ""
    epochs: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    instances: Mapping[str, Instance] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()  # "instances/i-7: why"
    is_shared: bool = False  # services reach it with one credential, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """One JetStream stream as the server has it; `problem` when it is missing."""

    name: str
    problem: str = ""
    on_file: bool = True
    replicas: int = 1
    replicas_current: int = 1
    max_age_s: float = 0.0
    wanted_age_s: float = 0.0
    num_bytes: int = 0
    max_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFacts:
    """NATS. `sync` is JetStream's sync_interval where it can be read, "" where not; `storing` likewise is why it stores
    nothing."""

    unknown: str = ""
    error: str = ""
    version: str = ""
    cluster_size: int = 1
    sync: str = ""
    storing: str = ""
    streams: tuple[StreamFacts, ...] = ()
    backlog: Mapping[str, int] = field(default_factory=dict)  # durable reader -> events it has not taken
    is_shared: bool = False  # services reach it with one credential, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node's agent and prefetcher say beside their rows."""

    unavailable: Mapping[str, str] = field(default_factory=dict)  # engine -> why it cannot start
    warnings: tuple[str, ...] = ()
    cache_capacity_bytes: int | None = None
    cache_used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """Everything. `now_s` is epoch seconds of the machine that asks; rows of REST answers are kept as they came."""

    where: str  # the state directory or the variables that name the fleet
    now_s: float
    version: str  # of this command
    expected: tuple[str, ...] = ()  # services that must be there
    processes: tuple[Mapping[str, Any], ...] = ()  # of fleet.json
    services: tuple[ServiceFacts, ...] = ()
    store: StoreFacts = StoreFacts()
    bus: BusFacts = BusFacts()
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    models: tuple[Mapping[str, Any], ...] | None = None  # GET autoscaler/v1/models; None: not known
    file_errors: Mapping[str, str] = field(default_factory=dict)
    queues: tuple[Mapping[str, Any], ...] | None = None
    placements: tuple[Mapping[str, Any], ...] = ()
    data_port: str = ""  # "" or why the OpenAI API does not answer
    console_problem: str = ""  # why its page says it is stale
    num_traces: int | None = None
    missing_files: Mapping[str, str] = field(default_factory=dict)  # model file -> why it is not there
    weights: Mapping[str, str] = field(default_factory=dict)  # model -> what is wrong with its local weights
    num_weights_checked: int = 0
