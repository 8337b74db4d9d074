"""Draw arrivals as in the papers, with all randomness from the given `random.Random`.

Power law over models: WarmServe section 7.1 (share of model i ~ i^-alpha). Gamma arrivals with a coefficient of
variation: HydraServe section 8.1. Thinning of counted traces: each request is kept independently, with one probability.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Final

from glowplug_lab.simulator.workload.arrival import Arrival, Count


def power_law_shares(num_models: int, alpha: float) -> list[float]:
    """Shares, the most popular model first; alpha=0 is uniform.

    Raises ValueError for no model or a negative alpha.
    """
    if num_models < 1 or not alpha >= 0:
        raise ValueError(f"a power law over {num_models} models with alpha {alpha}")
    weights = [rank**-alpha for rank in range(1, num_models + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def gamma_times(rate: float, cv: float, seconds: float, chance: Random) -> Iterator[float]:
    """Times in [0, seconds) of a renewal process: `rate` a second, gaps with coefficient of variation `cv`.

    cv=1 is Poisson, cv=0 has equal gaps. Raises ValueError for a non-positive rate or negative cv.
    """
    if not rate > 0 or not cv >= 0:
        raise ValueError(f"arrivals at {rate} a second with CV {cv}")
    shape = 1 / (cv * cv) if cv else 0.0
    at_s = 0.0
    while True:
        at_s += chance.gammavariate(shape, 1 / (rate * shape)) if cv else 1 / rate
        if at_s >= seconds:
            return
        yield at_s


def renewal_times(num: int, width_s: float, dist: str, shape: float, chance: Random) -> Iterator[float]:
    """Draw `num` times in [0, width_s), with Gamma ("G") or Weibull ("W") gaps of `shape` (ServeGen).

    Gaps are scaled to the window, to keep its measured count; a free renewal process would bring about (CV^2 - 1)/2
    more per window. Shapes below 0.01 (CV 10 for Gamma, more for Weibull) count as 0.01, since floats overflow.
    """
    shape = max(shape, 0.01)
    draw = chance.gammavariate if dist == "G" else lambda k, scale: chance.weibullvariate(scale, k)
    gaps = [draw(shape, 1.0) for _ in range(num + 1)]
    total = math.fsum(gaps)
    if not 0 < total < math.inf:  # every gap vanishes
        return iter([0.0] * num)
    return (min(at * width_s / total, math.nextafter(width_s, 0)) for at in accumulate(gaps[:-1]))


def binomial(num: int, keep: float, chance: Random) -> int:
    """Draw successes by geometric gaps."""
    if keep >= 1:
        return num
    log_miss, position, hits = math.log1p(-keep), 0, 0
    while True:
        position += int(math.log(1.0 - chance.random()) / log_miss) + 1
        if position > num:
            return hits
        hits += 1


def spread(count: Count, lengths: "Lengths", chance: Random) -> Iterator[Arrival]:
    for offset_s in sorted(chance.random() * count.width_s for _ in range(count.num_requests)):
        yield Arrival(count.from_s + offset_s, count.model, *lengths.draw(chance))


class Lengths:
    """Drawn with replacement."""

    def __init__(
        self, pairs: Sequence[tuple[int, int]], max_prompt: int = 0, min_response: int = 1, max_total: int = 0
    ) -> None:
        if not pairs:
            raise ValueError("no lengths to draw from")
        self.pairs = [bounded(prompt, response, max_prompt, min_response, max_total) for prompt, response in pairs]

    def draw(self, chance: Random) -> tuple[int, int]:
        return self.pairs[int(chance.random() * len(self.pairs))]


def bounded(prompt: int, response: int, max_prompt: int, min_response: int, max_total: int) -> tuple[int, int]:
    """Bound both lengths; a `max_` of 0 is no bound."""
    prompt = max(1, min(prompt, max_prompt) if max_prompt else prompt)
    response = max(min_response, response)
    if max_total:
        prompt = min(prompt, max_total - min_response)
        response = min(response, max_total - prompt)
    return prompt, response


def lognormal_pairs(
    num: int, chance: Random, *, prompt_mean: float, prompt_cv: float, response_mean: float, response_cv: float
) -> list[tuple[int, int]]:
    """Independent lognormal lengths with these means (tokens) and CVs."""

    def draw(mean: float, cv: float) -> int:
        variance = math.log1p(cv * cv)
        return max(1, round(chance.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))

    return [(draw(prompt_mean, prompt_cv), draw(response_mean, response_cv)) for _ in range(num)]


# Errors of expected response lengths. Paper: PreServe section 5.2.2, Table 2: mean absolute error 78.25 tokens; 56.77,
# 68.79 and 77.95 % of predictions within 25, 50 and 100 tokens, for responses up to 4096. Section 5.3 uses true lengths
# and errors "based on the error proportion distribution" of that table, without printing the shape within classes. Here
# errors are even within classes and exponential above 100 tokens, with the printed mean; the sign is a coin's, except
# where one would leave [1, MAX_EXPECTED].
MAX_EXPECTED: Final = 4096
CLASSES: Final = ((0, 25, 0.5677), (26, 50, 0.6879), (51, 100, 0.7795))  # from, to, cumulative share
TAIL_TOKENS: Final = 170.61383219954644  # mean beyond the last class


def expected_tokens(true_tokens: int, seed: int | str, request_id: str | int) -> int:
    """A prediction from 1 to `MAX_EXPECTED`; deterministic.

    `seed` distinguishes runs, `request_id` requests. Raises ValueError for a true length outside 1 to `MAX_EXPECTED`.
    """
    if not 1 <= true_tokens <= MAX_EXPECTED:
        raise ValueError(f"true_tokens: {true_tokens} is not in 1 to {MAX_EXPECTED}")
    chance = Random(f"{seed}/{request_id}")
    error = min(_error(chance), max(true_tokens - 1, MAX_EXPECTED - true_tokens))
    above, below = true_tokens + error <= MAX_EXPECTED, true_tokens - error >= 1
    if above and below:
        return true_tokens + (error if chance.random() < 0.5 else -error)
    return true_tokens + (error if above else -error)


def _error(chance: Random) -> int:
    at = chance.random()
    for low, high, share in CLASSES:
        if at < share:
            return chance.randint(low, high)
    # whole tokens, on average TAIL_TOKENS beyond the last class
    return CLASSES[-1][1] + 1 + int(chance.expovariate(1.0) / -math.log1p(-1 / TAIL_TOKENS))


def with_errors(arrivals: Iterable[Arrival], seed: int | str) -> Iterator[Arrival]:
    """Add `expected_tokens`; longer responses count as `MAX_EXPECTED`."""
    for at, arrival in enumerate(arrivals):
        expected = expected_tokens(min(MAX_EXPECTED, arrival.response_tokens), seed, at)
        yield arrival._replace(expected_tokens=expected)
