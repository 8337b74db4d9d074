"""What routers tell each other of the limits they keep together, by scope: a tenant, a key, a tenant at one model.

Amounts of a minute are given in seconds: 60 is a whole minute's amount of the limit, whatever its number, so that a
reader needs no limits and a limit that is changed keeps its waits.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowUse:
    """Tokens that one router has counted in a UTC day and month: those of requests that have ended."""

    router_id: str
    day: int = 0  # days since 1970-01-01
    day_tokens: int = 0
    month: int = 0  # 12 times the year, and the month from 0
    month_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeUse:
    """What one router has admitted of one scope since its last report, and what it knows to be left."""

    requests_s: float = 0.0  # admitted, in seconds of the limit
    tokens_s: float = 0.0  # likewise; below 0 where reservations were too large
    requests_left_s: float = 60.0  # at most 60; below 0: to be paid back
    tokens_left_s: float = 60.0
    asked_s: float = 0.0  # admitted and refused in the last seconds: the demand
    num_running: int = 0  # requests at once, held ones included
    num_held: int = 0
    windows: tuple[WindowUse, ...] = ()  # of this router, and now and then of all
