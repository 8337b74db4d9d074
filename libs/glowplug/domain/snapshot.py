"""Demand as routers report it, demand as forecast, and the instances that a router chooses from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.access import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A router's look-ahead for one instance (PreServe section 4.3): KV use over the coming steps."""

    peak_ratio: float  # highest share of the KV cache in use
    over_share: float  # share of the steps above the overload threshold
    queued_tokens: int = 0  # prompt tokens sent and not yet prefilled
    current_tokens: int = 0  # response tokens still expected of running requests

    def joined(self, other: "Outlook") -> "Outlook":
        """Combine two routers' outlooks of one instance, each for its own requests. The sum of the peaks is an upper
        bound, since they may lie at different steps."""
        return Outlook(
            peak_ratio=self.peak_ratio + other.peak_ratio,
            over_share=max(self.over_share, other.over_share),
            queued_tokens=self.queued_tokens + other.queued_tokens,
            current_tokens=self.current_tokens + other.current_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoad:
    """The part of a model's load that belongs to one class of requests. `alone_s`: how long before the model's
    `last_active_at` every request has been of this class; 0 where the latest was of another."""

    num_waiting: int = 0
    in_flight_by_instance: Mapping[str, int] = field(default_factory=dict)
    alone_s: float = 0.0


_NONE = ClassLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """Demand for one model, summed over routers."""

    num_waiting: int = 0
    num_in_flight: int = 0
    last_active_at: float = 0.0  # epoch seconds of the latest arrival or finish
    in_flight_by_instance: Mapping[str, int] = field(default_factory=dict)
    outlook_by_instance: Mapping[str, Outlook] = field(default_factory=dict)
    num_arrived: int = 0  # requests since the router started; 0 where it does not count them
    num_dispatched: int = 0  # ... sent to an instance
    slots_per_instance: int = 0  # requests that each READY instance runs at once; 0: none is READY
    by_class: Mapping[str, ClassLoad] = field(default_factory=dict)  # of these, not standard: by Priority
    num_batch_arrived: int = 0  # of num_arrived, those of the batch class

    def of_class(self, priority: Priority) -> ClassLoad:
        """The part of the load that belongs to a class other than standard."""
        return self.by_class.get(priority, _NONE)

    @property
    def num_urgent_arrived(self) -> int:
        """Requests since the router started that are not batch."""
        return self.num_arrived - self.num_batch_arrived

    @property
    def num_urgent_waiting(self) -> int:
        """Waiting requests that are not batch."""
        return self.num_waiting - self.of_class(Priority.BATCH).num_waiting if self.by_class else self.num_waiting

    @property
    def num_urgent_in_flight(self) -> int:
        """Running requests that are not batch."""
        if not self.by_class:
            return self.num_in_flight
        return self.num_in_flight - sum(self.of_class(Priority.BATCH).in_flight_by_instance.values())

    def urgent_on(self, instance_id: str) -> int:
        """Running requests of an instance that are not batch."""
        num = self.in_flight_by_instance.get(instance_id, 0)
        if not (num and self.by_class):
            return num
        return num - self.of_class(Priority.BATCH).in_flight_by_instance.get(instance_id, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request that a router has not finished: its progress, and none of its text."""

    request_id: str
    model_key: str
    state: str  # held | dispatched | streaming
    arrived_at: float
    stream: bool = False
    position: int = 0  # in its model's queue, from 1; 0 when not held
    eta_s: float = 0.0  # expected seconds until it is dispatched; 0 when not held
    queue_s: float = 0.0
    ttft_s: float = 0.0  # 0 before the first byte, which is a first token only if `stream`
    response_tokens: int = 0  # events so far, not exact
    instance_id: str = ""
    cold: bool = False
    emulated: bool = False
    trace_id: str = ""  # "" when the request is not sampled
    tenant: str = ""
    key_id: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token; 0 before it, and for an answer that is not streamed."""
        return self.ttft_s if self.stream else 0.0


@dataclass(frozen=True, slots=True)
class Quantile:
    """Values that a window stays below with a probability of `share`, for each kind of load by itself."""

    share: float
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    concurrency_mean: float = 0.0
    concurrency_peak: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected load of one model over one window. Tokens and requests are sums over the window; rates are what one
    instance serves within its objectives (mu of PreServe section 4.1), 0 while unknown."""

    made_at: float
    window_s: float
    concurrency_mean: float
    concurrency_peak: float
    error_ratio: float = 0.0
    source: str = "none"
    starts_at: float = 0.0  # start of the window that is forecast
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t
    quantiles: tuple[Quantile, ...] = ()  # by rising share; empty where the policy gives none
    anomaly: str = ""  # of the last window used: missing | spike; "" for none
    rates_from: str = ""  # source of the three rates: declared | measured; "" while unknown
    objective_ratio: float = 0.0  # last closed window's share of its objective; above 1: missed; 0: unknown


@dataclass(frozen=True, slots=True)
class Target:
    """One instance that a router may choose: its present requests and its capacity."""

    instance_id: str
    num_in_flight: int
    max_concurrency: int
    kv_tokens: int = 0  # capacity of its KV cache
    step_s: float = 0.0  # seconds of a step without load, by its engine; 0: unknown
    ready_at: float = 0.0  # when its engine began to serve; a later one has an empty KV cache
    num_sequences: int = 0  # that its KV cache keeps, one in each slot; 0: it keeps blocks of any prompts
