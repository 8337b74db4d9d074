"""What a limiter is asked about and what it answers."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from glowplug.domain.access import AccessLimits
from glowplug.domain.bounds import check_bounds

FULL_S = 60.0  # a whole minute's amount, in seconds of its limit


class Limit(StrEnum):
    """The limits of a scope, by their names in AccessLimits."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"
    CONCURRENT = "concurrent"
    QUEUED = "queued"


@dataclass(slots=True, eq=False)
class Scope:
    """Whatever has limits of its own. `scope_id` is the same at every router: `tenant/<name>`, `key/<id>`,
    `model/<tenant>/<model_key>`."""

    scope_id: str
    limits: AccessLimits
    request_s: float = field(init=False)  # of a minute's amount that a request takes; 0: no limit
    token_s: float = field(init=False)  # likewise, a token
    has_windows: bool = field(init=False)
    concurrent: int = field(init=False)  # as of the limits

    def __post_init__(self) -> None:
        limits = self.limits
        self.request_s = FULL_S / limits.requests_per_minute if limits.requests_per_minute else 0.0
        self.token_s = FULL_S / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
        self.has_windows = bool(limits.tokens_per_day or limits.tokens_per_month)
        self.concurrent = limits.concurrent


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted. `wait_s`: seconds until it would be if nobody else asks; infinite for a request
    that is larger than the limit."""

    scope_id: str
    limit: Limit
    amount: int  # the limit's number
    wait_s: float

    @property
    def is_for_ever(self) -> bool:
        return math.isinf(self.wait_s)


@dataclass(slots=True, eq=False)
class Reservation:
    """An admitted request: its scopes, the tokens reserved in each, and whether it counts as held."""

    scopes: tuple[Scope, ...]
    states: list[Any]  # the limiter's own
    tokens: int
    is_held: bool = False
    was_sent: bool = False
    is_over: bool = False


# What is left of one limit per minute: its number, what may be taken now, and the seconds until it is whole.
Left = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterParams:
    """Times are seconds. Raises OutOfBounds naming the field."""

    silent_s: float = 2.5  # without a report from a router until its share is kept apart for it
    gone_s: float = 15.0  # without a report from a router until its share goes to the others
    floor: float = 0.1  # part of a limit that routers share equally, whatever their demand
    demand_s: float = 10.0  # over which the demand is measured
    slack_s: float = 1.0  # by which two routers' counts may differ, in seconds of the limit
    pull: float = 0.1  # part of a larger difference that is taken off at each report
    urgent_s: float = 3.0  # admitted since the last report, in seconds of the limit, that is reported soon
    nudge: float = 0.02  # part of a smaller difference by which copies move towards each other
    retry_s: float = 1.0  # wait until a request should be tried again that finds too many at once
    most_rows: int = 1000  # scopes in one report
    num_reviewed: int = 200  # scopes looked at for each report, to repeat or to forget
    forget_s: float = 120.0  # without a request until a scope without counts is forgotten

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("silent_s", "demand_s"), most_rows=1, num_reviewed=1)
