"""What each model has been given while models wait for memory, so that none falls far behind another.

SwapServeLLM (section 3.5, demand-aware preemption) lets the longest queue in and the shortest queue out. Under a
demand that the GPUs cannot meet that is unfair: a short queue waits behind longer ones for ever, and of two long ones
the model with more slots has more answers in a turn of the same length.

Ours, beside it: deficit round robin (Shreedhar and Varghese 1996, "Efficient fair queueing using deficit round robin")
over dispatched requests. While models wait for memory the requests that each has had dispatched are counted. An engine
with a queue of its own stays until it is `fair_requests` ahead of who waits for its GPU, or for the longest turn
(turns.py); of those that wait, a model so far behind another goes first, and one so far ahead does not
take bytes that happen to be free. As in deficit round robin a queue that was empty saves nothing for later: a model
that begins to wait starts level with the waiting one that has been given the least.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """One model as the routers tell it."""

    num_dispatched: int  # since they started: only its growth counts
    num_open: int  # waiting or in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The count, and what it was counted from. `given` in requests, `short_at` in epoch seconds."""

    given: Mapping[str, int] = field(default_factory=dict)  # model_key -> dispatched since memory became short
    counted: Mapping[str, int] = field(default_factory=dict)  # model_key -> num_dispatched when last looked at
    open: frozenset[str] = frozenset()  # models that had requests when last looked at
    short_at: float = float("-inf")  # somebody waited for memory

    def ahead(self, model_key: str, of: str) -> int:
        """By how many requests one model is ahead of another; 0 where one of them is not counted."""
        if model_key not in self.given or of not in self.given:
            return 0
        return self.given[model_key] - self.given[of]

    def behind(self, model_key: str, waiting: Collection[str]) -> int:
        """By how many requests it is behind the one of `waiting` that has been given the most."""
        return max((self.ahead(other, model_key) for other in waiting), default=0)


def account(
    shares: Shares, demands: Mapping[str, ModelDemand], waiting: Collection[str], now_s: float, forget_s: float
) -> Shares:
    """The count as of now. `demands` of those that hold memory or wait for it; `waiting`: those that wait for it. When
    nobody has waited for `forget_s` the count begins anew with the next one who does."""
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
    return Shares(given=given, counted=counted, open=is_open, short_at=now_s if waiting else shares.short_at)
