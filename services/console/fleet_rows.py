"""The rows of the fleet as the page and `glowplug top` read them: flat, small, JSON-ready. Times are epoch seconds."""

import msgspec


class PhaseRow(msgspec.Struct, frozen=True):
    """One stage of a start; `offset_s` counts from the moment the instance was asked for."""

    name: str
    offset_s: float
    duration_s: float
    predicted_s: float


class ColdStart(msgspec.Struct, frozen=True):
    """The latest start of a model that came to ready."""

    instance_id: str
    node_id: str
    ready_at: float
    seconds: float
    emulated: bool
    phases: tuple[PhaseRow, ...]


class Failure(msgspec.Struct, frozen=True):
    """Why the latest instance of a model failed."""

    instance_id: str
    failed_at: float
    reason: str


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: ready, loading, starting, draining, asleep, waiting, failed or cold. `eta_s` is 0 when ready."""

    key: str
    name: str
    engine: str
    temperature: str
    state: str
    eta_s: float
    eta_measured: bool
    num_waiting: int
    num_in_flight: int
    num_ready: int
    max_instances: int
    memory_bytes: int
    keep_alive_s: float
    pinned: bool
    suspended: bool  # drained by its operator: no start until it is loaded again
    emulated: bool
    instances: tuple[str, ...]
    last_cold_start: ColdStart | None
    failure: Failure | None


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    model_key: str
    engine: str
    state: str
    node_id: str
    gpu_id: str
    num_bytes: int
    num_in_flight: int
    max_concurrency: int
    created_at: float
    ready_at: float
    changed_at: float
    reason: str
    decision_id: str
    emulated: bool


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a GPU with whose they are; `model_key` is "" when the holder is not known."""

    holder: str
    owner: str
    num_bytes: int
    model_key: str
    emulated: bool


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    gpu_id: str
    kind: str
    role: str
    total_bytes: int
    free_bytes: int
    grants: tuple[GrantRow, ...]


class CachedRow(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    num_bytes: int
    model_keys: tuple[str, ...]


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A path into a node; `bytes_per_s` is what it is allowed, 0 when nothing limits it."""

    link_id: str
    bytes_per_s: float
    bytes_in_flight: int
    num_transfers: int


class FetchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Weights on their way into a node. `bytes_per_s` is measured over the latest reports; 0 when none came lately."""

    digest: str
    model_key: str
    num_bytes_done: int
    num_bytes: int
    bytes_per_s: float


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """`lost_since` is 0 while the node's beats arrive. `draining`: it goes, or its operator drains it (`cordoned`)."""

    node_id: str
    is_alive: bool
    lost_since: float
    draining: bool
    cordoned: bool
    engines: tuple[str, ...]
    gpus: tuple[GpuRow, ...]
    host_cache_bytes: int
    cached: tuple[CachedRow, ...]
    links: tuple[LinkRow, ...]
    fetches: tuple[FetchRow, ...]
    bytes_in_flight: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request that ended, well or badly."""

    request_id: str
    model_key: str
    status: int
    code: str
    finished_at: float
    queue_s: float
    ttft_s: float
    e2e_s: float
    response_tokens: int
    tokens_exact: bool
    cold: bool
    emulated: bool
    instance_id: str
    trace_id: str


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    decision_id: str
    kind: str
    policy: str
    service: str
    reason: str
    made_at: float
    model_key: str
    instance_id: str
    node_id: str
    gpu_id: str
    chosen: str
    trace_id: str


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where the page's data comes from. `stale_since` is 0 while it is fresh."""

    is_up: bool
    stale_since: float
