"""Facts: events that have happened. Past tense, many readers. `TYPE` is `<entity>.<fact>`.

Facts under `evt` are kept by JetStream; those marked `TELEMETRY = True` are high-rate and use core subjects, and those
marked `USAGE = True` have a stream of JetStream of their own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Annotated, ClassVar

from glowplug.domain.access import ApiKey, Tenant
from glowplug.domain.bounds import Bounded, Bounds
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.limits import ScopeUse
from glowplug.domain.model import Model
from glowplug.domain.moment import Moment
from glowplug.domain.snapshot import Forecast, LiveRequest, ModelLoad
from glowplug.domain.usage import UsageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWaiting:
    """A router holds requests of a model without capacity. Repeated while that is so."""

    TYPE: ClassVar[str] = "request.waiting"
    model_key: str
    request_id: str  # the oldest waiting request
    router_id: str
    num_waiting: int
    waiting_since: Moment
    deadline_at: Moment
    by_class: Mapping[str, int] = field(default_factory=dict)  # of num_waiting, not standard: by Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRejected:
    """A router has answered a request with an error of its own. Requests refused before their model was known
    (`model_key` is "") are sampled when there are very many."""

    TYPE: ClassVar[str] = "request.rejected"
    TELEMETRY: ClassVar[bool] = True
    model_key: str
    request_id: str
    router_id: str
    status: int
    code: str
    retry_after_s: float = 0.0
    num_unlisted: int = 0  # requests refused without an event since the last such event
    tenant: str = ""  # whose key it came with; "" where the data port asks for none, or the key is not known
    key_id: str = ""


STAYS = "stays"  # no other engine could continue the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMove:
    """A stream's way from one engine to another, or why it took none. Epoch seconds."""

    at: Moment
    until: Moment  # the next engine began, or the stream stayed or ended
    reason: str  # engine_lost | engine_error | instance_ended | moved | drained | gave_way
    message: str
    num_tokens: int = 0  # at the client by then
    from_instance: str = ""
    to_instance: str = ""
    outcome: str = ""  # STAYS, or why it stayed


@dataclass(slots=True, kw_only=True)  # a router makes one a request: a frozen one takes three times as long
class RequestFinished:
    """A request has ended; routers send these in `RouterRequestsFinished`. Token counts are exact only when the engine
    reported them."""

    TYPE: ClassVar[str] = "request.finished"
    TELEMETRY: ClassVar[bool] = True
    model_key: str
    request_id: str
    router_id: str
    instance_id: str
    status: int
    arrived_at: Moment
    finished_at: Moment
    queue_s: float
    ttft_s: float  # until the answer's first byte, which is a first token only if `stream`; 0 without an answer
    e2e_s: float
    prompt_tokens: int
    response_tokens: int
    tokens_exact: bool
    cold: bool  # the request waited for a start
    emulated: bool = False
    error_code: str = ""  # the error code that the client got, or "client_left"; "" when all went well
    stream: bool = False
    num_continued: int = 0  # how often its stream lost an instance and another was to continue
    tenant: str = ""  # whose key it came with; "" where the data port asks for none
    key_id: str = ""
    priority: str = ""  # the class that it counted as as it ended; "": standard
    operation: str = ""  # gen_ai.operation.name
    dispatched_s: float = 0.0  # until it was first sent to an engine; 0: never
    held: bool = False
    eta_s: float = 0.0  # expected wait as it was held
    moves: tuple[StreamMove, ...] = ()  # the latest, oldest first
    parent_span: str = ""  # the client's, 16 hexadecimal digits
    dropped_tools: tuple[str, ...] = ()  # kinds of its tools that were left out: another's servers run them

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token; 0 for an answer that was not streamed, whose first byte ends it."""
        return self.ttft_s if self.stream else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRequestsFinished:
    """The requests of one router that have ended since its last such report, in order: a `request.finished` each.
    Services that sum requests read this fact, a few times a second for a whole fleet."""

    TYPE: ClassVar[str] = "router.requests_finished"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    requests: tuple[RequestFinished, ...]
    traceparents: tuple[str, ...] = ()  # of each request, as its engine got it; old routers sent the sampled ones alone

    def traced(self) -> Iterator[tuple[RequestFinished, str]]:
        """Each request with its traceparent."""
        return zip(self.requests, chain(self.traceparents, repeat("")), strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecorded:
    """The usage of one router's requests. Sent until the bus has stored it, so that a record may come twice: its
    `record_id` names it."""

    TYPE: ClassVar[str] = "usage.recorded"
    USAGE: ClassVar[bool] = True
    router_id: str
    batch: int  # counts the batches of one router process, from 1
    records: tuple[UsageRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoadReported:
    """Requests that one router holds and runs, by model_key: all models, a part of all, or only models with news."""

    TYPE: ClassVar[str] = "router.load_reported"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    loads: Mapping[str, ModelLoad]
    part: int = 0  # number of this part of a whole report, from 0
    num_parts: int = 1  # parts of the whole report; 0: only models with news are named


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRequestsReported:
    """The requests that one router has not finished, oldest first, up to a bound; sent until none is left."""

    TYPE: ClassVar[str] = "router.requests_reported"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    num_live: int  # all unfinished requests, also those past the bound
    requests: tuple[LiveRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterUsageReported:
    """The part of the routers' common limits that one router has admitted; scopes with news, and a few others
    again. Sent about twice a second while anybody has limits."""

    TYPE: ClassVar[str] = "router.usage_reported"
    TELEMETRY: ClassVar[bool] = True
    router_id: str
    number: int  # grows with each report of a router, also when the router starts anew
    scopes: Mapping[str, ScopeUse]  # by `tenant/<name>`, `key/<id>` or `model/<tenant>/<model_key>`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeployed:
    """A model was created or changed (`revision` grows)."""

    TYPE: ClassVar[str] = "model.deployed"
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUndeployed:
    """A model was removed; its instances drain and stop."""

    TYPE: ClassVar[str] = "model.undeployed"
    model_key: str
    revision: int = 0  # of the removed row


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKeepAliveAsked(Bounded):
    """A client's request, now over, has set how long its model stays, within the router's limits."""

    TYPE: ClassVar[str] = "model.keep_alive_asked"
    model_key: str
    keep_alive_s: Annotated[float, Bounds(least=-1)]  # idle, before the last instance drains; -1 never, 0 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanged:
    """A key was created, changed or revoked (`revision` grows). The row holds the SHA-256 of the key, not the key."""

    TYPE: ClassVar[str] = "key.changed"
    api_key: ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRemoved:
    """A key was removed: no router accepts it."""

    TYPE: ClassVar[str] = "key.removed"
    key_id: str
    revision: int = 0  # of the removed row


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChanged:
    """A tenant was created or changed (`revision` grows)."""

    TYPE: ClassVar[str] = "tenant.changed"
    tenant: Tenant

    @property
    def tenant_name(self) -> str:
        """The tenant's name, which addresses the event."""
        return self.tenant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRemoved:
    """A tenant was removed; its keys open nothing."""

    TYPE: ClassVar[str] = "tenant.removed"
    tenant_name: str
    revision: int = 0  # of the removed row


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStarting:
    """An agent has granted the bytes; the engine process is starting."""

    TYPE: ClassVar[str] = "instance.starting"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoading:
    """The engine process is up and loads the weights."""

    TYPE: ClassVar[str] = "instance.loading"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady:
    """The instance answers at its `url`; routers may send it requests."""

    TYPE: ClassVar[str] = "instance.ready"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDraining:
    """The instance finishes its requests; routers send it no new ones."""

    TYPE: ClassVar[str] = "instance.draining"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStopped:
    """The engine has stopped as ordered, and its bytes are free."""

    TYPE: ClassVar[str] = "instance.stopped"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFailed:
    """The engine failed to start, or died; `code` says how, the instance's `reason` why."""

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
    source: str  # file | http | hf | s3 | gs | disk (the node's own copy) | cache (already in host memory)
    resumed_bytes: int = 0  # kept from an earlier fetch
    num_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPartFetched:
    """A node has in host memory the bytes that a stage of a pipeline needs. They are checked once all of the weights
    are there."""

    TYPE: ClassVar[str] = "weights.part_fetched"
    node_id: str
    model_key: str
    digest: str
    instance_id: str
    num_bytes: int
    seconds: float
    source: str
    resumed_bytes: int = 0
    num_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFetchFailed:
    """Weights could not be fetched; no byte of them is served."""

    TYPE: ClassVar[str] = "weights.fetch_failed"
    node_id: str
    model_key: str
    digest: str
    code: str
    message: str
    seconds: float = 0.0  # 0: it did not begin
    source: str = ""


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
    """The progress of a fetch."""

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
    """A node has been silent for its lease, or has announced that it leaves."""

    TYPE: ClassVar[str] = "node.left"
    node_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """An agent is alive: its node's whole row, each second."""

    TYPE: ClassVar[str] = "node.beat"
    TELEMETRY: ClassVar[bool] = True
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade:
    """A controller has decided; the record carries its inputs, rivals and reason."""

    TYPE: ClassVar[str] = "decision.made"
    decision: DecisionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePrewarmed:
    """A replica has its weights on its GPUs, or a drained instance has kept them there."""

    TYPE: ClassVar[str] = "instance.prewarmed"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSwappedOut:
    """An engine sleeps outside its GPUs and can be woken."""

    TYPE: ClassVar[str] = "instance.swapped_out"
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastMade:
    """The expected load of one model: one forecast for each window ahead, the next one first."""

    TYPE: ClassVar[str] = "forecast.made"
    model_key: str
    forecasts: tuple[Forecast, ...]
    horizon_s: float = 0.0  # expected duration of a start: an instance started now serves after it; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStarted:
    """A service process has started, with the epoch its commands carry."""

    TYPE: ClassVar[str] = "service.started"
    service: str
    service_id: str
    url: str
    version: str
    service_epoch: int = 0
    data_url: str = ""  # the port for clients, where it is not `url`: a router's


Fact = (
    RequestWaiting
    | RequestRejected
    | RequestFinished
    | RouterRequestsFinished
    | UsageRecorded
    | RouterLoadReported
    | RouterRequestsReported
    | RouterUsageReported
    | ModelDeployed
    | ModelUndeployed
    | ModelKeepAliveAsked
    | KeyChanged
    | KeyRemoved
    | TenantChanged
    | TenantRemoved
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
