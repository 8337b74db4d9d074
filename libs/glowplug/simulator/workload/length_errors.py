"""Expected response lengths that are off as a trained predictor's are: the true length and an error drawn for it.

Paper: PreServe section 5.2.2, Table 2: mean absolute error 78.25 tokens; 56.77, 68.79 and 77.95 % of the predictions
within 25, 50 and 100 tokens, for responses of up to 4096. Section 5.3 runs the scaler on true lengths and on lengths
with errors "based on the error proportion distribution" of that table; the shape within its classes is not printed.

Here errors are even within each class, and those above 100 tokens fall off exponentially, with the mean that gives the
printed one. They go up or down by a coin, except where one way would leave [1, max_tokens].
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from glowplug.simulator.workload.arrival import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """`within`: (tokens, share of predictions off by no more), both growing; the rest is off by more."""

    mean_tokens: float = 78.25
    within: tuple[tuple[int, float], ...] = ((25, 0.5677), (50, 0.6879), (100, 0.7795))

    def __post_init__(self) -> None:
        shares = [share for _, share in self.within]
        if not shares or sorted(self.within) != list(self.within) or not 0 < shares[0] <= shares[-1] < 1:
            raise ValueError(f"within: {self.within} does not grow to less than all")
        if self.tail_tokens <= 0:
            raise ValueError(f"mean_tokens: {self.mean_tokens} is less than the classes alone come to")

    @property
    def tail_tokens(self) -> float:
        """How far the rest is beyond the last class, on average."""
        mean, low, share = 0.0, -1, 0.0
        for high, upto in self.within:
            mean += (upto - share) * (low + 1 + high) / 2
            low, share = high, upto
        return (self.mean_tokens - mean) / (1 - share) - low


PRESERVE = ErrorShape()


def expected_tokens(
    true_tokens: int, seed: int | str, request_id: str | int, *, max_tokens: int = 4096, shape: ErrorShape = PRESERVE
) -> int:
    """What a predictor so good would expect of that response: 1 to `max_tokens`, the same for the same arguments.

    `seed` tells runs apart, `request_id` requests. Raises ValueError for a length outside [1, max_tokens].
    """
    if not 1 <= true_tokens <= max_tokens:
        raise ValueError(f"true_tokens: {true_tokens} is not in 1 to {max_tokens}")
    chance = Random(f"{seed}/{request_id}")
    error = min(_error(chance, shape), max(true_tokens - 1, max_tokens - true_tokens))
    above, below = true_tokens + error <= max_tokens, true_tokens - error >= 1
    if above and below:
        return true_tokens + (error if chance.random() < 0.5 else -error)
    return true_tokens + (error if above else -error)


def _error(chance: Random, shape: ErrorShape) -> int:
    at, low = chance.random(), -1
    for high, upto in shape.within:
        if at < upto:
            return chance.randint(low + 1, high)
        low = high
    # a whole number of tokens from low + 1 on, whose mean is low + tail_tokens
    beyond = shape.tail_tokens
    return low + 1 + (int(chance.expovariate(1.0) / -math.log1p(-1 / beyond)) if beyond > 1 else 0)


def with_errors(
    arrivals: Iterable[Arrival], seed: int | str, *, max_tokens: int = 4096, shape: ErrorShape = PRESERVE
) -> Iterator[Arrival]:
    """The same requests, each with what a predictor so good would expect of it. Longer responses than `max_tokens`
    are taken for as long as that."""
    for at, arrival in enumerate(arrivals):
        true_tokens = min(max_tokens, arrival.response_tokens)
        yield arrival._replace(
            expected_tokens=expected_tokens(true_tokens, seed, at, max_tokens=max_tokens, shape=shape)
        )
