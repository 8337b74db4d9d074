"""Turns on GPUs that hold only some of the engines: when to drain a busy one, and fair shares of requests.

SwapServeLLM (section 3.5) says which engine is swapped out, not when a busy one must be. Ours:

- `fair`: a model that has waited for a while gets the GPU once the engine's turn has lasted a moment.
- `balanced`: an engine is drained once more requests wait elsewhere than would arrive for it in a round (two swaps and
  the other's turn) at the recent rate: a burst is served to its end. One with a queue stays until its model is
  `fair_requests` ahead of the waiting model (`Shares`), or for the longest turn.

SwapServeLLM lets the longest queue in and the shortest out. Under overload short queues then wait for ever, and models
with more slots answer more per turn. So dispatches are counted while models wait for memory: deficit round robin over
requests (Shreedhar and Varghese 1996, "Efficient fair queueing using deficit round robin"). A waiting model that far
behind another goes first; one that far ahead takes no free bytes. An empty queue saves nothing: a model that begins to
wait starts level with the waiting one given the least.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Turns = Literal["fair", "balanced"]
Victims = Literal["oldest_use", "shortest_queue", "least_worth"]
"""The GPU to take from: by the oldest use (LRU), by the shortest queue and then that (SwapServeLLM section 3.5), or,
ours, by the victims' expected cost together (policies/worth.py).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyEngine:
    """One busy engine, and the queue of the model that wants its GPU."""

    served_s: float  # since READY
    start_s: float  # of its last start
    num_in_flight: int
    num_waiting: int
    arriving_per_s: float  # for the engine's model, lately
    num_wanting: int  # for the other model
    ahead: int = 0  # lead of its model while memory is short: see Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    rule: Turns = "fair"
    turn_s: float = 5.0  # a start costs seconds
    least_s: float = 1.0  # balanced: so that its queue can reach it
    most_s: float = 30.0  # balanced, while others wait
    fair_requests: int = 6  # balanced: lead at which it gives way despite a queue; 0: no counting


def goes_on(turn: BusyEngine, params: TurnParams = TurnParams()) -> str:
    """Return why the engine stays for now; "" when it may be drained."""
    is_new = turn.served_s < params.turn_s
    if params.rule == "fair":
        return "its turn has just begun" if is_new and (turn.num_in_flight or turn.num_waiting) else ""
    if turn.served_s < params.least_s or (is_new and turn.num_waiting):
        return "its turn has just begun"
    is_owed = bool(params.fair_requests) and turn.ahead < params.fair_requests
    if is_owed and turn.num_waiting and turn.served_s < params.most_s:
        return f"it is {turn.ahead} requests ahead of the other, and may be {params.fair_requests}"
    would_wait = turn.arriving_per_s * (2 * turn.start_s + params.turn_s)
    if turn.num_wanting > would_wait or turn.served_s >= params.most_s:
        return ""
    return f"{would_wait:.1f} requests would come for it until it is back, and {turn.num_wanting} wait for the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    num_dispatched: int  # only its growth counts
    num_open: int  # waiting or in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Requests given to each model while memory is short; `short_at` in epoch seconds."""

    given: Mapping[str, int] = field(default_factory=dict)  # model_key -> dispatched since memory became short
    counted: Mapping[str, int] = field(default_factory=dict)  # at the last look
    open: frozenset[str] = frozenset()  # with requests at the last look
    short_at: float = float("-inf")  # when a model last waited for memory
    least_given: int = 0

    def ahead(self, model_key: str, of: str) -> int:
        if model_key not in self.given or of not in self.given:
            return 0
        return self.given[model_key] - self.given[of]

    def behind(self, waiting: Collection[str]) -> dict[str, int]:
        counted = [key for key in waiting if key in self.given]
        most = max((self.given[key] for key in counted), default=0)
        return {key: most - self.given[key] for key in counted}


def account(
    shares: Shares, demands: Mapping[str, ModelDemand], waiting: Collection[str], now_s: float, forget_s: float
) -> Shares:
    """Update the count to `now_s`. `demands`: of models that hold memory or are `waiting` for it. The count restarts
    once none has waited for `forget_s`."""
    if now_s - shares.short_at > forget_s:
        shares = Shares()
    given, counted = dict(shares.given), dict(shares.counted)
    for key in given.keys() & demands.keys():
        given[key] += max(0, demands[key].num_dispatched - counted[key])
    is_open = frozenset(key for key, demand in demands.items() if demand.num_open)
    level = min((given[key] for key in waiting if key in given and key in shares.open), default=0)
    for key, demand in demands.items():
        counted[key] = demand.num_dispatched
        if key in is_open and key not in shares.open:
            given[key] = max(given.get(key, 0), level)
        elif key not in given:
            given[key] = level
    short_at = now_s if waiting else shares.short_at
    least = min(given.values(), default=0)
    return Shares(given=given, counted=counted, open=is_open, short_at=short_at, least_given=least)
