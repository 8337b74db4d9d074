"""How the papers turn a trace, or nothing, into arrivals. Every chance comes from the `random.Random` given.

Power law over models: WarmServe section 7.1 (share of model i ~ i^-alpha). Gamma arrivals with a coefficient of
variation: HydraServe section 8.1. Thinning of counted traces: each request is kept with a probability of its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from glowplug.simulator.workload.arrival import Arrival, Count


def power_law_shares(num_models: int, alpha: float) -> list[float]:
    """Shares of `num_models` models, the most popular first; they sum to 1. alpha=0 is uniform.

    Raises ValueError for no model or a negative alpha.
    """
    if num_models < 1 or not alpha >= 0:
        raise ValueError(f"a power law over {num_models} models with alpha {alpha}")
    weights = [rank**-alpha for rank in range(1, num_models + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def gamma_times(rate: float, cv: float, seconds: float, chance: Random) -> Iterator[float]:
    """Times in [0, seconds) of a renewal process: `rate` a second, gaps with coefficient of variation `cv`.

    cv=1 is Poisson, cv=0 a clock. Raises ValueError for a rate that is not positive or a negative cv.
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
    """`num` times in [0, width_s), with gaps that are Gamma ("G") or Weibull ("W") with `shape` (ServeGen).

    The gaps are scaled to the window: its count was measured, so it is kept. A renewal process run freely would bring
    about (CV^2 - 1)/2 more in every window. A shape below 0.01 (CV 10 for Gamma, more for Weibull) is taken as 0.01,
    past which floats overflow.
    """
    shape = max(shape, 0.01)
    draw = chance.gammavariate if dist == "G" else lambda k, scale: chance.weibullvariate(scale, k)
    gaps = [draw(shape, 1.0) for _ in range(num + 1)]
    total = math.fsum(gaps)
    if not 0 < total < math.inf:  # a shape so small that every gap vanishes: all at once
        return iter([0.0] * num)
    return (min(at * width_s / total, math.nextafter(width_s, 0)) for at in accumulate(gaps[:-1]))


def thin(counts: Iterable[Count], keep: float, chance: Random) -> Iterator[Count]:
    """Each counted request is kept with probability `keep` (binomial). Raises ValueError outside (0, 1]."""
    if not 0 < keep <= 1:
        raise ValueError(f"thinning to {keep}, not in (0, 1]")
    for count in counts:
        yield count._replace(num_requests=binomial(count.num_requests, keep, chance))


def binomial(num: int, keep: float, chance: Random) -> int:
    """Successes of `num` trials with chance `keep`: by geometric gaps, so its cost is the number of successes."""
    if keep >= 1:
        return num
    log_miss, position, hits = math.log1p(-keep), 0, 0
    while True:
        position += int(math.log(1.0 - chance.random()) / log_miss) + 1
        if position > num:
            return hits
        hits += 1


def spread(counts: Iterable[Count], lengths: "Lengths", chance: Random) -> Iterator[Arrival]:
    """Counted requests at uniform times inside their bin, with drawn lengths; bins in order, so are arrivals."""
    for count in counts:
        times = sorted(chance.random() * count.width_s for _ in range(count.num_requests))
        for offset_s in times:
            prompt, response = lengths.draw(chance)
            yield Arrival(count.from_s + offset_s, count.model, prompt, response)


class Lengths:
    """Pairs of prompt and response tokens, drawn with replacement from `pairs`, each bounded."""

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        *,
        max_prompt: int = 0,
        min_response: int = 1,
        max_total: int = 0,
    ) -> None:
        if not pairs:
            raise ValueError("no lengths to draw from")
        self.pairs = [bounded(prompt, response, max_prompt, min_response, max_total) for prompt, response in pairs]

    def draw(self, chance: Random) -> tuple[int, int]:
        """One (prompt_tokens, response_tokens)."""
        return self.pairs[int(chance.random() * len(self.pairs))]


def bounded(prompt: int, response: int, max_prompt: int, min_response: int, max_total: int) -> tuple[int, int]:
    """Tokens of a request inside these bounds; a `max_` of 0 is none."""
    prompt = max(1, min(prompt, max_prompt) if max_prompt else prompt)
    response = max(min_response, response)
    if max_total:
        prompt = min(prompt, max_total - min_response)
        response = min(response, max_total - prompt)
    return prompt, response


def lognormal_pairs(
    num: int, chance: Random, *, prompt_mean: float, prompt_cv: float, response_mean: float, response_cv: float
) -> list[tuple[int, int]]:
    """`num` pairs of independent lognormal lengths with these means (tokens) and coefficients of variation."""

    def draw(mean: float, cv: float) -> int:
        variance = math.log1p(cv * cv)
        return max(1, round(chance.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))

    return [(draw(prompt_mean, prompt_cv), draw(response_mean, response_cv)) for _ in range(num)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How far expected response lengths are off, as a trained predictor's are.

    Paper: PreServe section 5.2.2, Table 2: mean absolute error 78.25 tokens; 56.77, 68.79 and 77.95 % of the
    predictions within 25, 50 and 100 tokens, for responses of up to 4096. Section 5.3 runs the scaler on true lengths
    and on lengths with errors "based on the error proportion distribution" of that table; the shape within its classes
    is not printed. Here errors are even within each class, and those above 100 tokens fall off exponentially, with the
    mean that gives the printed one. They go up or down by a coin, except where one way would leave [1, max_tokens].

    `within`: (tokens, share of predictions off by no more), both growing; the rest is off by more.
    """

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
