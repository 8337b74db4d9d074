"""When engines take turns on GPUs that hold only some of them: whether a busy one may be drained for another model.

Ours: SwapServeLLM (section 3.5) says who is swapped out, not when the one at work must let go. `fair`: whoever waited
for a while has the GPU once the turn there has lasted a moment. `balanced` weighs two queues: while an engine stays,
who arrives for it is answered at once, and would wait a whole round (two swaps and the other's turn) were it gone; and
everyone waiting elsewhere waits on. So it goes as soon as more wait elsewhere than would arrive for it in a round at
the rate of the last seconds: a burst is served to its end, and the GPU is not kept for its last answers, which a drain
lets finish anyway. With a queue of its own it stays until it has been given `fair_requests` more than who waits for its
GPU (shares.py), so that a turn is worth its start and of two queues neither has many more answers.
"""

from dataclasses import dataclass
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

    served_s: float  # since it is READY
    start_s: float  # how long its last start took
    num_in_flight: int
    num_waiting: int  # for it
    arriving_per_s: float  # for its model, lately
    num_wanting: int  # requests that wait for the other model
    ahead: int = 0  # requests it has been given more than the other model, while memory is short: see shares.py


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    rule: Turns = "fair"
    turn_s: float = 5.0  # a start costs seconds, and is for more than one batch
    least_s: float = 1.0  # balanced: until its own queue has reached it
    most_s: float = 30.0  # balanced: nobody keeps a GPU longer from those that wait
    fair_requests: int = 6  # balanced: with a queue of its own it stays until so far ahead; 0: no counting


def goes_on(turn: Turn, params: TurnParams = TurnParams()) -> str:
    """Why the engine keeps its GPUs for now; "" when it may be drained."""
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
