"""Demand as routers report it and as it is forecast, and what a router chooses from."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a router's look-ahead sees of one instance (PreServe section 4.3): KV use over the coming steps."""

    peak_ratio: float  # the highest use
    over_share: float  # share of the steps above the overload threshold
    queued_tokens: int = 0  # prompt tokens sent there and not yet prefilled
    current_tokens: int = 0  # response tokens still expected of what runs there

    def joined(self, other: "Outlook") -> "Outlook":
        """What two routers see of one instance, each of its own requests. Their peaks may lie at different steps: it is
        the most that can be."""
        return Outlook(
            peak_ratio=self.peak_ratio + other.peak_ratio,
            over_share=max(self.over_share, other.over_share),
            queued_tokens=self.queued_tokens + other.queued_tokens,
            current_tokens=self.current_tokens + other.current_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """Demand for one model, summed over routers."""

    num_waiting: int = 0
    num_in_flight: int = 0
    last_active_at: float = 0.0  # epoch seconds of the latest arrival or finish
    in_flight_by_instance: Mapping[str, int] = field(default_factory=dict)
    outlook_by_instance: Mapping[str, Outlook] = field(default_factory=dict)
    num_arrived: int = 0  # requests that have come since the router started; 0 where it does not count them
    num_dispatched: int = 0  # ... that it has sent to an instance
    slots_per_instance: int = 0  # requests that each of its READY instances runs at once; 0: none is READY


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request a router has not finished. No text of it, only where it stands."""

    request_id: str
    model_key: str
    state: str  # held | dispatched | streaming
    arrived_at: float
    stream: bool = False
    position: int = 0  # among the held ones of its model, from 1; 0 when not held
    eta_s: float = 0.0  # until it goes on; 0 when not held
    queue_s: float = 0.0
    ttft_s: float = 0.0  # 0 before the first token
    response_tokens: int = 0  # events so far, not exact
    instance_id: str = ""
    cold: bool = False
    emulated: bool = False
    trace_id: str = ""  # "" when it is not sampled


@dataclass(frozen=True, slots=True)
class Quantile:
    """What a window stays below with a probability of `share`, each kind of load by itself."""

    share: float
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    concurrency_mean: float = 0.0
    concurrency_peak: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the predictor expects of one model over one window; absent when the predictor is. Its age and error go with
    it. Tokens and requests are sums over the window; rates are what one instance takes within its objectives (mu of
    PreServe section 4.1), 0 while that is not known."""

    made_at: float
    window_s: float
    concurrency_mean: float
    concurrency_peak: float
    error_ratio: float = 0.0
    source: str = "none"
    starts_at: float = 0.0  # of the window that is forecast
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t
    quantiles: tuple[Quantile, ...] = ()  # share rising; empty where the policy says none
    anomaly: str = ""  # of the last window it was made from: missing | spike; "" for nothing
    rates_from: str = ""  # where the three rates are from: declared | measured; "" while none is known


@dataclass(frozen=True, slots=True)
class Target:
    """One instance a router may choose: what it runs now and how much it can take."""

    instance_id: str
    num_in_flight: int
    max_concurrency: int
    kv_tokens: int = 0  # tokens its KV cache holds
    step_s: float = 0.0  # seconds of a step without load, as its engine says; 0: not known
