"""Turns on GPUs that hold only some of the engines: whether a busy one may be drained for another model, and how many
requests each model was given while models wait for memory, so that none falls far behind another.

SwapServeLLM (section 3.5) says who is swapped out, not when a busy engine must be. Ours:

- `fair`: a model that has waited for a while gets the GPU once the turn of the engine there has lasted a moment.
- `balanced` weighs two queues. While an engine stays, requests that arrive for it are answered at once; if it were
  drained they would wait a whole round (two swaps and the other's turn). While it stays, all requests for other models
  wait on. So the engine is drained as soon as more wait elsewhere than would arrive for it in a round at the rate of
  the last seconds: a burst is served to its end, and the GPU is not kept for the last answers, which a drain lets
  finish anyway. An engine with a queue of its own stays until its model has been given `fair_requests` more than the
  model that waits for its GPU (`Shares`), or for the longest turn.

SwapServeLLM lets the longest queue in and the shortest queue out. Under a demand that the GPUs cannot meet that is
unfair: a short queue waits behind longer ones for ever, and of two long ones the model with more slots has more answers
in a turn of the same length. So the requests that each model has had dispatched are counted while models wait for
memory: deficit round robin over requests (Shreedhar and Varghese 1996, "Efficient fair queueing using deficit round
robin"). Of the models that wait, one that is that far behind another goes first, and one that is that far ahead does
not take bytes that happen to be free. As in deficit round robin an empty queue saves nothing for later: a model that
begins to wait starts level with the waiting one that has been given the least.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Turns = Literal["fair", "balanced"]
Victims = Literal["oldest_use", "shortest_queue", "least_worth"]
"""Which GPU instances leave, of those on which they could. The eviction policy says who leaves one GPU; this says which
GPU, in the same order: by the oldest use (LRU), by the shortest queue and then that (SwapServeLLM section 3.5), or,
ours, by what their going is expected to cost together (policies/worth.py).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One busy engine, and the queue of the model that wants its GPU."""

    served_s: float  # since the engine is READY
    start_s: float  # how long its last start took
    num_in_flight: int
    num_waiting: int  # for the engine
    arriving_per_s: float  # for the engine's model, lately
    num_wanting: int  # requests that wait for the other model
    ahead: int = 0  # requests its model was given more than the other one, while memory is short: see Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    rule: Turns = "fair"
    turn_s: float = 5.0  # a start costs seconds, and is for more than one batch
    least_s: float = 1.0  # balanced: shortest turn, so that its own queue can reach it
    most_s: float = 30.0  # balanced: longest turn while other models wait
    fair_requests: int = 6  # balanced: lead at which an engine with a queue gives way; 0: no counting


def goes_on(turn: Turn, params: TurnParams = TurnParams()) -> str:
    """Say why the engine keeps its GPUs for now; "" when it may be drained."""
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
    """Requests of one model, as the routers report them."""

    num_dispatched: int  # since the routers started: only its growth counts
    num_open: int  # waiting or in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Requests given to each model while memory is short. `given` in requests, `short_at` in epoch seconds."""

    given: Mapping[str, int] = field(default_factory=dict)  # model_key -> dispatched since memory became short
    counted: Mapping[str, int] = field(default_factory=dict)  # model_key -> num_dispatched when last looked at
    open: frozenset[str] = frozenset()  # models that had requests when last looked at
    short_at: float = float("-inf")  # when a model last waited for memory
    least_given: int = 0  # to any model

    def ahead(self, model_key: str, of: str) -> int:
        """The number of requests by which one model is ahead of another; 0 where one of them is not counted."""
        if model_key not in self.given or of not in self.given:
            return 0
        return self.given[model_key] - self.given[of]

    def behind(self, waiting: Collection[str]) -> dict[str, int]:
        """The number of requests by which each counted model of `waiting` is behind the one that was given the most."""
        counted = [key for key in waiting if key in self.given]
        most = max((self.given[key] for key in counted), default=0)
        return {key: most - self.given[key] for key in counted}


def account(
    shares: Shares, demands: Mapping[str, ModelDemand], waiting: Collection[str], now_s: float, forget_s: float
) -> Shares:
    """Update the count to `now_s`. `demands` are of models that hold memory or wait for it, `waiting` the latter. When
    none has waited for `forget_s`, the count begins anew with the next that does."""
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
