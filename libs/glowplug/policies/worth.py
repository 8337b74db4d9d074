"""The worth of keeping something in memory, one measure for every rung of memory.

    worth = P(asked before it could be reloaded) x seconds to climb one rung / byte                          [s/B]

Seconds: the start from the rung below less the start from this one, measured (`fleet/start_times.py`; in host memory
and on disk the fetch saved). Bytes: freed by evicting it.

Derivation. Something of S bytes saves c seconds per request. Evicted now, it can be back after h = `away_s`: the new
holder's stay, and the reload. The first request before that waits c longer, so the expected loss is P(N(h) >= 1) c.
Evict first the least loss per byte: the greedy rule of the fractional knapsack, and the order of the greedy-dual
family, cost x frequency / size (Young 1994; Cao and Irani 1997, GreedyDual-Size; Cherkasova 1998, GDSF). All candidates
of a comparison have about the same h.

The published scores are special cases:

- mCache Eq. 1, P / (S T): penalty over size times the request rate 1 / T. For Poisson requests, P(N(h) >= 1) = h / T +
  O(h^2): the same order where h is short against the gaps, as in host memory.
- WarmServe Eq. 7-8, T_c exp(-i / N) for the i-th of N replicas: seconds of loading times a weight falling with the
  rank. Here that is the probability that the load reaches it, by the forecast's quantiles (`level`).
- LRU: no forecast, equal reload costs. One request t ago and none since leave a rate of Gamma(1, t), so that N(h) is
  geometric (Lomax gaps): asked again within h with probability h / (t + h).

The rate (`Asking`) has two sources, taken as independent: a forecast or count with a known spread, and the time since
the last request, unless a fading count of the same requests contains it:

    P(none within h) = (1 + rate h / k)^-k  x  t / (t + h)

with k the shape of a Gamma rate (mean `rate`, variance rate^2 / k); infinite, it is Poisson's exp(-rate h). Where a
rung above answers the first request, two are needed (`times=2`): weights in host memory below a replica.

Where nothing else wants the bytes, h = c, and the saving per second is c P(N(c) >= 1) / c, the probability itself
(`idle_worth`). A GPU is kept while its contents' sum is at least `price`. Without a forecast it is c / (t + c), kept
until t = c (1 / price - 1): the rule of rent or buy (Karlin et al. 1988).
"""

import math
from dataclasses import dataclass
from typing import Final

from glowplug.domain.access import Priority
from glowplug.domain.snapshot import Forecast, ModelLoad

STAY_S: Final = 60.0  # of the new holder: a start, some requests, a keep-alive
PRICE: Final = 0.0035  # seconds of waiting that a second of an otherwise unwanted GPU has to save: docs/adr/0025
BAND: Final = 2.563  # standard deviations between the quantiles of 10 and 90 %
UNSURE: Final = 0.25  # standard deviation over mean without quantiles
NEVER_S: Final = math.inf
FACTORS: Final = {Priority.INTERACTIVE: 4.0, Priority.STANDARD: 1.0, Priority.BATCH: 0.25}
PATIENCE_S: Final = 300.0  # until waiting batch counts as standard
BATCH_ALONE_S: Final = 60.0  # of batch alone, until expected requests count as batch


@dataclass(frozen=True, slots=True)
class Asking:
    """The rate of requests for something. `per_s`: requests a second; `shape`: k of that rate, infinite if certain;
    `idle_s`: seconds since the last request, infinite if unknown."""

    per_s: float = 0.0
    shape: float = math.inf
    idle_s: float = NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemory:
    """Something in memory. `asked`: expected requests before a reload, a probability unless some wait now; `climb_s`:
    seconds saved for each; `num_bytes`: freed by evicting it."""

    name: str
    asked: float
    climb_s: float
    num_bytes: int
    idle_worth: float = 0.0

    @property
    def saves_s(self) -> float:
        """Expected seconds of waiting that evicting it costs."""
        return self.asked * self.climb_s

    @property
    def worth(self) -> float:
        return self.saves_s / max(1, self.num_bytes)


def away_s(climb_s: float, stay_s: float = STAY_S) -> float:
    return stay_s + max(0.0, climb_s)


def asked(asking: Asking, within_s: float, times: int = 1) -> float:
    """Return the probability of at least `times` (1 or 2) requests."""
    if within_s <= 0:
        return 0.0
    expected, idle_s = max(0.0, asking.per_s) * within_s, max(0.0, asking.idle_s)
    if math.isinf(asking.shape) or expected == 0:
        none, once = math.exp(-expected), expected * math.exp(-expected)
    else:
        none = (1.0 + expected / asking.shape) ** -asking.shape
        once = none * expected / (1.0 + expected / asking.shape)
    lately = 0.0 if math.isinf(idle_s) else within_s / (idle_s + within_s)
    least = none * (1.0 - lately)
    if times > 1:
        least += once * (1.0 - lately) + none * (1.0 - lately) * lately
    return min(1.0, max(0.0, 1.0 - least))


def idle_worth(asking: Asking, climb_s: float) -> float:
    """Return seconds of waiting saved per second while nothing else wants the bytes."""
    return asked(asking, climb_s)


# The class of requests, a factor on their waiting seconds.


def patience_s(max_wait_s: float) -> float:
    return min(PATIENCE_S, max_wait_s / 2)


def batch_factor(waited_s: float, max_wait_s: float) -> float:
    """Rises to a standard request's factor during the wait."""
    share = min(1.0, max(0.0, waited_s) / patience_s(max_wait_s)) if max_wait_s > 0 else 1.0
    return FACTORS[Priority.BATCH] + share * (1.0 - FACTORS[Priority.BATCH])


def num_weighted(num: int, load: ModelLoad) -> float:
    """Weight `num` requests, all that wait for a model, by class."""
    return num + sum((FACTORS[Priority(name)] - 1.0) * one.num_waiting for name, one in load.by_class.items())


def running_factor(load: ModelLoad) -> float:
    if load.of_class(Priority.INTERACTIVE).in_flight_by_instance:
        return FACTORS[Priority.INTERACTIVE]
    return 1.0 if load.num_urgent_in_flight > 0 else FACTORS[Priority.BATCH]


def expected_factor(load: ModelLoad) -> float:
    return FACTORS[Priority.BATCH] if load.of_class(Priority.BATCH).alone_s >= BATCH_ALONE_S else 1.0


def first(forecast: Forecast | None, idle_s: float = NEVER_S) -> Asking:
    """Return a model's next request, by forecast and time since the last."""
    if forecast is None or forecast.window_s <= 0:
        return Asking(idle_s=idle_s)
    mean = max(0.0, forecast.num_requests, forecast.concurrency_peak)
    spread = _spread([(q.share, q.num_requests) for q in forecast.quantiles], mean, forecast.error_ratio)
    beyond = spread**2 - mean  # without Poisson's own spread
    shape = mean**2 / beyond if beyond > 0 and mean > 0 else math.inf
    return Asking(mean / forecast.window_s, shape, idle_s)


def level(forecast: Forecast | None, num_before: int, num_slots: int, idle_s: float = NEVER_S) -> Asking:
    """Return the rate of need beyond `num_before` instances or replicas (0: of requests): more concurrent requests than
    `num_slots` each, or more tokens than they serve (mu of PreServe section 4.1). `idle_s`: seconds since that was so.
    """
    if num_before <= 0:
        return first(forecast, idle_s)
    if forecast is None or forecast.window_s <= 0:
        return Asking(idle_s=idle_s)
    peak = [(q.share, q.concurrency_peak) for q in forecast.quantiles]
    over = [_above(num_before * num_slots + 0.5, max(0.0, forecast.concurrency_peak), peak, forecast.error_ratio)]
    prompts = [(q.share, q.prompt_tokens) for q in forecast.quantiles]
    answers = [(q.share, q.response_tokens) for q in forecast.quantiles]
    for tokens, band, per_s in (
        (forecast.prompt_tokens, prompts, forecast.prompt_per_s),
        (forecast.response_tokens, answers, forecast.response_per_s),
    ):
        if per_s > 0:
            over.append(_above(num_before * per_s * forecast.window_s, tokens, band, forecast.error_ratio))
    return Asking(-math.log(max(1e-9, 1.0 - max(over))) / forecast.window_s, math.inf, idle_s)


def _spread(band: list[tuple[float, float]], mean: float, error_ratio: float) -> float:
    if len(band) < 2:
        return max(error_ratio, UNSURE) * mean
    (low_share, low), (high_share, high) = band[0], band[-1]
    return max(0.0, high - low) / (BAND * (high_share - low_share) / 0.8) if high_share > low_share else 0.0


def _above(limit: float, mean: float, band: list[tuple[float, float]], error_ratio: float) -> float:
    spread = _spread(band, mean, error_ratio)
    if spread <= 0:
        return 1.0 if mean > limit else 0.0
    return 0.5 * math.erfc((limit - mean) / (spread * math.sqrt(2)))
