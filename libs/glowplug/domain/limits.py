"""Carry the limits that routers keep together, by scope: a tenant, a key, a tenant at one model.

Amounts per minute are in seconds of the limit (60: a whole minute's amount), so readers need no limits and waits
survive a change of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowUse:
    """Tokens of ended requests, by one router, in a UTC day and month."""

    router_id: str
    day: int = 0  # since 1970-01-01
    day_tokens: int = 0
    month: int = 0  # 12 x year + month from 0
    month_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeUse:
    """One router's admissions in one scope since its last report, and the rest it knows of."""

    requests_s: float = 0.0
    tokens_s: float = 0.0  # admitted; negative after too large reservations
    requests_left_s: float = 60.0  # at most 60; negative: owed
    tokens_left_s: float = 60.0
    asked_s: float = 0.0  # recently admitted or refused: the demand
    num_running: int = 0  # held ones included
    num_held: int = 0
    windows: tuple[WindowUse, ...] = ()  # of this router, sometimes of all
