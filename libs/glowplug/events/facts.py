"""Facts: what has happened. Past tense, many readers. `TYPE` is `<entity>.<fact>`.

Facts under `evt` are kept by JetStream; those marked `TELEMETRY = True` are high-rate and ride core subjects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast, LiveRequest, ModelLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWaiting:
    """A router holds requests of a model that has no capacity. Repeated while it is true."""

    TYPE: ClassVar[str] = "request.waiting"
    model_key: str
    request_id: str  # the oldest waiting
    router_id: str
    num_waiting: int
    waiting_since: float
    deadline_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRejected:
    """A router has answered a request with an error of its own: bad, unknown, refused or without capacity."""

    TYPE: ClassVar[str] = "request.rejected"
    TELEMETRY: ClassVar[bool] = True
    model_key: str
    request_id: str
    router_id: str
    status: int
    code: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """One request's end. Token counts are exact only when the engine reported them."""

    TYPE: ClassVar[str] = "request.finished"
    TELEMETRY: ClassVar[bool] = True
    model_key: str
    request_id: str
    router_id: str
    instance_id: str
    status: int
    arrived_at: float
    finished_at: float
    queue_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    response_tokens: int
    tokens_exact: bool
    cold: bool  # it waited for a start
    emulated: bool = False
    error_code: str = ""  # the error code that the client got, or "client_left"; "" when all went well
    stream: bool = False
    num_continued: int = 0  # how often its stream lost an instance, behind which another was to go on


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoadReported:
    """What one router holds and runs, by model_key: all of it, a part of it all, or only what has something to say."""

    TYPE: ClassVar[str] = "router.load_reported"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    loads: Mapping[str, ModelLoad]
    part: int = 0  # of a whole in parts: which, from 0
    num_parts: int = 1  # of a whole; 0: no whole, models that are not named are as they were


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRequestsReported:
    """The requests one router has not finished, oldest first, up to a bound; sent while there are any, and once when
    there are none any more."""

    TYPE: ClassVar[str] = "router.requests_reported"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    num_live: int  # all of them, also those past the bound
    requests: tuple[LiveRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeployed:
    """A model was created or changed (`revision` grows)."""

    TYPE: ClassVar[str] = "model.deployed"
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUndeployed:
    """A model was taken away; its instances drain and stop."""

    TYPE: ClassVar[str] = "model.undeployed"
    model_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStarting:
    """An agent has granted the bytes; the engine process is on its way."""

    TYPE: ClassVar[str] = "instance.starting"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoading:
    """The engine process is up and weights go in."""

    TYPE: ClassVar[str] = "instance.loading"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady:
    """The instance answers at its `url`; routers may send it requests."""

    TYPE: ClassVar[str] = "instance.ready"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDraining:
    """The instance finishes what it has; routers send it nothing more."""

    TYPE: ClassVar[str] = "instance.draining"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStopped:
    """The engine is gone and its bytes are free, as was asked."""

    TYPE: ClassVar[str] = "instance.stopped"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFailed:
    """The engine did not come up or died; `code` says how, the instance's `reason` why."""

    TYPE: ClassVar[str] = "instance.failed"
    instance: Instance
    code: str = "engine_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFetched:
    """A node has a model's weights, whole and checked, in host memory."""

    TYPE: ClassVar[str] = "weights.fetched"
    node_id: str
    model_key: str
    digest: str
    num_bytes: int
    seconds: float
    source: str  # file | http | hf | s3 | gs | disk (the node's own copy) | cache (it was in host memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPartFetched:
    """A node has the bytes in host memory that a stage of a pipeline asked for. They are checked once all are there."""

    TYPE: ClassVar[str] = "weights.part_fetched"
    node_id: str
    model_key: str
    digest: str
    instance_id: str
    num_bytes: int
    seconds: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFetchFailed:
    """Weights could not be brought; nothing of them is served."""

    TYPE: ClassVar[str] = "weights.fetch_failed"
    node_id: str
    model_key: str
    digest: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsEvicted:
    """Weights left a node's host memory for others, or because they were dropped."""

    TYPE: ClassVar[str] = "weights.evicted"
    node_id: str
    digest: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProgressed:
    """How far a fetch has come."""

    TYPE: ClassVar[str] = "weights.progressed"
    TELEMETRY: ClassVar[bool] = True
    node_id: str
    model_key: str
    digest: str
    num_bytes_done: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node is new, or back."""

    TYPE: ClassVar[str] = "node.joined"
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node has given no sign of life for its lease, or has said that it leaves."""

    TYPE: ClassVar[str] = "node.left"
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """An agent is alive: its node, whole, each second."""

    TYPE: ClassVar[str] = "node.beat"
    TELEMETRY: ClassVar[bool] = True
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade:
    """A controller decided; the record carries its inputs, rivals and reason."""

    TYPE: ClassVar[str] = "decision.made"
    decision: DecisionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePrewarmed:
    """A replica has its weights on its GPUs (or an instance that drained has kept them there)."""

    TYPE: ClassVar[str] = "instance.prewarmed"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSwappedOut:
    """An engine sleeps outside its GPUs and can be woken."""

    TYPE: ClassVar[str] = "instance.swapped_out"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastMade:
    """What is expected of one model: one forecast for each window ahead, the next one first."""

    TYPE: ClassVar[str] = "forecast.made"
    model_key: str
    forecasts: tuple[Forecast, ...]
    horizon_s: float = 0.0  # what a start of the model takes: what is begun now serves from then on; 0 where not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStarted:
    """A service process has started, with the epoch its commands carry."""

    TYPE: ClassVar[str] = "service.started"
    service: str
    service_id: str
    url: str
    version: str
    service_epoch: int = 0
    data_url: str = ""  # the port clients use, where it is another one than `url`: a router's


Fact = (
    RequestWaiting
    | RequestRejected
    | RequestFinished
    | RouterLoadReported
    | RouterRequestsReported
    | ModelDeployed
    | ModelUndeployed
    | InstanceStarting
    | InstanceLoading
    | InstanceReady
    | InstanceDraining
    | InstanceStopped
    | InstanceFailed
    | WeightsFetched
    | WeightsPartFetched
    | WeightsFetchFailed
    | WeightsEvicted
    | WeightsProgressed
    | NodeJoined
    | NodeLeft
    | NodeBeat
    | DecisionMade
    | ServiceStarted
    | InstancePrewarmed
    | InstanceSwappedOut
    | ForecastMade
)
InstanceChange = (
    InstanceStarting
    | InstanceLoading
    | InstanceReady
    | InstanceDraining
    | InstanceStopped
    | InstanceFailed
    | InstancePrewarmed
    | InstanceSwappedOut
)
