"""The requests and answers of a limiter."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from glowplug.domain.access import AccessLimits
from glowplug.domain.bounds import Bounded, Count, Positive

FULL_S = 60.0  # a minute's amount, in seconds of its limit


class Limit(StrEnum):
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"
    CONCURRENT = "concurrent"
    QUEUED = "queued"


@dataclass(slots=True, eq=False)
class Scope:
    """An owner of limits. `scope_id` is the same at every router: `tenant/<name>`, `key/<id>`,
    `model/<tenant>/<model_key>`."""

    scope_id: str
    limits: AccessLimits
    request_s: float = field(init=False)  # of a minute's amount per request; 0: no limit
    token_s: float = field(init=False)  # likewise, a token
    has_windows: bool = field(init=False)
    concurrent: int = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.request_s = FULL_S / limits.requests_per_minute if limits.requests_per_minute else 0.0
        self.token_s = FULL_S / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
        self.has_windows = bool(limits.tokens_per_day or limits.tokens_per_month)
        self.concurrent = limits.concurrent


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """Why a request is not admitted. `wait_s`: seconds until it would be; infinite above the limit itself."""

    scope_id: str
    limit: Limit
    amount: int
    wait_s: float

    @property
    def is_for_ever(self) -> bool:
        return math.isinf(self.wait_s)


@dataclass(slots=True, eq=False)
class Reservation:
    scopes: tuple[Scope, ...]
    states: list[Any]
    tokens: int
    is_held: bool = False
    was_sent: bool = False
    is_over: bool = False


# Of one limit per minute: its number, the rest, and seconds until it is whole.
Left = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterParams(Bounded):
    """Times are seconds."""

    silent_s: Positive = 2.5  # without reports until a share is set apart
    gone_s: float = 15.0  # ... and until it goes to the others
    floor: float = 0.1  # part of a limit shared equally
    demand_s: Positive = 10.0  # over which demand is measured
    slack_s: float = 1.0  # tolerated difference of two counts, in seconds of the limit
    pull: float = 0.1  # part of a larger difference removed per report
    urgent_s: float = 3.0  # of the limit, unreported, to report soon
    nudge: float = 0.02  # part of a smaller difference removed
    retry_s: float = 1.0  # wait when too many run at once
    most_rows: Count = 1000  # per report
    num_reviewed: Count = 200  # scopes examined per report
    forget_s: float = 120.0  # without requests until an empty scope is forgotten
