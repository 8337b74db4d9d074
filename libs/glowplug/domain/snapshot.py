"""Describe reported and forecast demand, and a router's choice of instances."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.access import Priority
from glowplug.domain.moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Look-ahead for one instance (PreServe section 4.3): KV use over the coming steps."""

    peak_ratio: float  # highest used share
    over_share: float  # share of steps over the threshold
    queued_tokens: int = 0  # prompt, not yet prefilled
    current_tokens: int = 0  # expected response

    def joined(self, other: "Outlook") -> "Outlook":
        """Combine two routers' outlooks. The sum of peaks is an upper bound, as their steps may differ."""
        return Outlook(
            peak_ratio=self.peak_ratio + other.peak_ratio,
            over_share=max(self.over_share, other.over_share),
            queued_tokens=self.queued_tokens + other.queued_tokens,
            current_tokens=self.current_tokens + other.current_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoad:
    """Part of a model's load in one class. `alone_s`: how long this class was alone before `last_active_at`; 0 if
    another came last."""

    num_waiting: int = 0
    in_flight_by_instance: Mapping[str, int] = field(default_factory=dict)
    alone_s: float = 0.0


_NONE = ClassLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    num_waiting: int = 0
    num_in_flight: int = 0
    last_active_at: Moment = 0.0  # latest arrival or finish
    in_flight_by_instance: Mapping[str, int] = field(default_factory=dict)
    outlook_by_instance: Mapping[str, Outlook] = field(default_factory=dict)
    num_arrived: int = 0  # since the router's start; 0: not counted
    num_dispatched: int = 0  # ... sent to an instance
    slots_per_instance: int = 0  # of READY instances; 0: none
    by_class: Mapping[str, ClassLoad] = field(default_factory=dict)  # except standard, by Priority
    num_batch_arrived: int = 0  # of num_arrived

    def of_class(self, priority: Priority) -> ClassLoad:
        return self.by_class.get(priority, _NONE)

    @property
    def num_urgent_arrived(self) -> int:
        """Urgent: of any class but batch."""
        return self.num_arrived - self.num_batch_arrived

    @property
    def num_urgent_waiting(self) -> int:
        return self.num_waiting - self.of_class(Priority.BATCH).num_waiting if self.by_class else self.num_waiting

    @property
    def num_urgent_in_flight(self) -> int:
        if not self.by_class:
            return self.num_in_flight
        return self.num_in_flight - sum(self.of_class(Priority.BATCH).in_flight_by_instance.values())

    def urgent_on(self, instance_id: str) -> int:
        num = self.in_flight_by_instance.get(instance_id, 0)
        if not (num and self.by_class):
            return num
        return num - self.of_class(Priority.BATCH).in_flight_by_instance.get(instance_id, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Progress of an unfinished request, without its text."""

    request_id: str
    model_key: str
    state: str  # held | dispatched | streaming
    arrived_at: Moment
    stream: bool = False
    position: int = 0  # in the queue, from 1; 0: not held
    eta_s: float = 0.0  # to dispatch; 0: not held
    queue_s: float = 0.0
    ttft_s: float = 0.0  # first byte: a token only if `stream`; 0: not yet
    response_tokens: int = 0  # events, inexact
    instance_id: str = ""
    cold: bool = False
    emulated: bool = False
    trace_id: str = ""  # "": not sampled
    tenant: str = ""
    key_id: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token; 0 before it and if not streamed."""
        return self.ttft_s if self.stream else 0.0


@dataclass(frozen=True, slots=True)
class Quantile:
    """Values not exceeded with probability `share`, by kind."""

    share: float
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    concurrency_mean: float = 0.0
    concurrency_peak: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Load of one model in one window. Tokens and requests are sums; rates are one instance's within objectives (mu of
    PreServe section 4.1), 0: unknown."""

    made_at: Moment
    window_s: float
    concurrency_mean: float
    concurrency_peak: float
    error_ratio: float = 0.0
    source: str = "none"
    starts_at: Moment = 0.0  # of this window
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t
    quantiles: tuple[Quantile, ...] = ()  # by rising share; may be empty
    anomaly: str = ""  # of the last window: missing | spike | ""
    rates_from: str = ""  # declared | measured | ""
    objective_ratio: float = 0.0  # objective share in the last window; above 1: missed; 0: unknown


@dataclass(frozen=True, slots=True)
class Target:
    """An instance that a router may choose."""

    instance_id: str
    num_in_flight: int
    max_concurrency: int
    kv_tokens: int = 0  # capacity of its KV cache
    step_s: float = 0.0  # by its engine, without load; 0: unknown
    ready_at: float = 0.0  # start of serving; a newer one means an empty KV cache
    num_sequences: int = 0  # cached, one per slot; 0: blocks
