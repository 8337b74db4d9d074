"""The worth of keeping something in memory: the one measure by which every rung of memory is kept or given up.

    worth = P(asked before it could be reloaded) x seconds to climb one rung / byte                          [s/B]

P: the probability that a request asks for it while it would be away. Seconds: how much longer that request waits, which
is the start from the rung below less the start from this one, both measured (`fleet/start_times.py`; in host memory
and on disk the seconds of the fetch that is saved). Bytes: what evicting it frees.

Derivation. Something of S bytes saves c seconds when it is asked for. If it is evicted now it can be back after h =
`away_s`: the new holder of its bytes stays for a while, and the reload takes c. The first request before that waits c
longer, and the reload puts it back. So the expected loss is P(N(h) >= 1) c seconds, and of all that could free the same
bytes, evict first what loses least per byte: the greedy rule of the fractional knapsack, and the order of the
greedy-dual family, cost x frequency / size (Young 1994; Cao and Irani 1997, GreedyDual-Size; Cherkasova 1998, GDSF).
All candidates of one comparison have about the same h.

The published scores are special cases:

- mCache Eq. 1, P / (S T), is penalty over size times the rate of requests 1 / T. Where they are Poisson, P(N(h) >= 1) =
  h / T + O(h^2): the same order where h is short against the gaps between requests. It is the case of host memory.
- WarmServe Eq. 7-8, T_c exp(-i / N) for the i-th of N replicas, is seconds of loading times a weight that falls with
  the rank. Here the weight is the probability that the load reaches that rank, by the forecast's quantiles (`level`).
- LRU is the case without a forecast where every reload costs the same: what was asked for t ago is asked again within h
  with probability h / (t + h). Of that rate nothing is known but one request t ago and none since: Gamma(1, t), so that
  N(h) is geometric (Lomax gaps).

How often something is asked for is known from two sources (`Asking`): a rate, forecast or counted, whose spread is
known too; and the time since the last request, unless the rate is a fading count of the same requests, which already
contains that time. The two are taken as independent streams:

    P(none within h) = (1 + rate h / k)^-k  x  t / (t + h)

with k the shape of a Gamma rate (mean `rate`, variance rate^2 / k); infinite, it is Poisson's exp(-rate h). Where a
rung above answers the first request, two have to come (`times=2`): weights in host memory below a replica.

Where nothing else wants the bytes they could come back at once, so that h = c, and what is saved in each second is c
P(N(c) >= 1) / c, the probability itself (`idle_worth`). A GPU is kept while that, summed over what it holds, is at
least a `price`: seconds of waiting that a second of a GPU has to save. Without a forecast it is c / (t + c), so that
what was asked for t ago stays until t is c (1 / price - 1): the rule of rent or buy (Karlin et al. 1988).
"""

import math
from dataclasses import dataclass
from typing import Final

from glowplug.domain.access import Priority
from glowplug.domain.snapshot import Forecast, ModelLoad

STAY_S: Final = 60.0  # of the new holder of the bytes: a start, some requests, a keep-alive
PRICE: Final = 0.0035  # seconds of waiting that a second of an otherwise unwanted GPU has to save: docs/adr/0025
FROM_ZERO: Final = {"from": 0}  # metadata of an option's field: 0 may be set, though its default is above 0
BAND: Final = 2.563  # standard deviations of a normal distribution between its quantiles of 10 and 90 %
UNSURE: Final = 0.25  # standard deviation over mean of a forecast without quantiles, unless its error is larger
NEVER_S: Final = math.inf
FACTORS: Final = {Priority.INTERACTIVE: 4.0, Priority.STANDARD: 1.0, Priority.BATCH: 0.25}  # as in fairness/port.py
PATIENCE_S: Final = 300.0  # batch requests that have waited so long, or half of what they may, count as standard ones
BATCH_ALONE_S: Final = 60.0  # requests expected of a model count as batch once only batch came for so long


@dataclass(frozen=True, slots=True)
class Asking:
    """The rate at which something is asked for. `per_s`: expected requests a second; `shape`: k of that rate, infinite
    where the rate is certain; `idle_s`: seconds since the last request, infinite where unknown."""

    per_s: float = 0.0
    shape: float = math.inf
    idle_s: float = NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Something that lies in memory. `asked`: expected requests for it before it could be reloaded, a probability where
    no request waits now; `climb_s`: seconds that such a request is spared; `num_bytes`: what evicting it frees;
    `idle_worth`: what the function `idle_worth` returns."""

    name: str
    asked: float
    climb_s: float
    num_bytes: int
    idle_worth: float = 0.0

    @property
    def saves_s(self) -> float:
        """Expected seconds of waiting that evicting it would cost."""
        return self.asked * self.climb_s

    @property
    def worth(self) -> float:
        """Expected seconds saved per byte."""
        return self.saves_s / max(1, self.num_bytes)


def away_s(climb_s: float, stay_s: float = STAY_S) -> float:
    """Seconds until something evicted now could be back in memory."""
    return stay_s + max(0.0, climb_s)


def asked(asking: Asking, within_s: float, times: int = 1) -> float:
    """The probability that something is asked for at least `times` times (1 or 2) within those seconds."""
    if within_s <= 0:
        return 0.0
    expected, idle_s = max(0.0, asking.per_s) * within_s, max(0.0, asking.idle_s)
    if math.isinf(asking.shape) or expected == 0:
        none, once = math.exp(-expected), expected * math.exp(-expected)
    else:
        none = (1.0 + expected / asking.shape) ** -asking.shape
        once = none * expected / (1.0 + expected / asking.shape)
    lately = 0.0 if math.isinf(idle_s) else within_s / (idle_s + within_s)  # geometric
    least = none * (1.0 - lately)
    if times > 1:
        least += once * (1.0 - lately) + none * (1.0 - lately) * lately
    return min(1.0, max(0.0, 1.0 - least))


def idle_worth(asking: Asking, climb_s: float) -> float:
    """Seconds of waiting that something saves in each second in which nothing else wants its bytes: the probability
    that it is asked for before it could be reloaded."""
    return asked(asking, climb_s)


# the class of requests, a factor on the seconds that they wait


def patience_s(max_wait_s: float) -> float:
    """Seconds of waiting after which a batch request counts as a standard one, where its model's may wait that long."""
    return min(PATIENCE_S, max_wait_s / 2)


def batch_factor(waited_s: float, max_wait_s: float) -> float:
    """The factor of a batch request, which rises to a standard one's while it waits."""
    share = min(1.0, max(0.0, waited_s) / patience_s(max_wait_s)) if max_wait_s > 0 else 1.0
    return FACTORS[Priority.BATCH] + share * (1.0 - FACTORS[Priority.BATCH])


def num_weighted(num: int, load: ModelLoad) -> float:
    """`num` requests, all that wait for a model, weighted by their classes."""
    return num + sum((FACTORS[Priority(name)] - 1.0) * one.num_waiting for name, one in load.by_class.items())


def running_factor(load: ModelLoad) -> float:
    """The factor of the most urgent class that a model runs requests of."""
    if load.of_class(Priority.INTERACTIVE).in_flight_by_instance:
        return FACTORS[Priority.INTERACTIVE]
    return 1.0 if load.num_urgent_in_flight > 0 else FACTORS[Priority.BATCH]


def expected_factor(load: ModelLoad) -> float:
    """The factor of the requests that are still to come for a model."""
    return FACTORS[Priority.BATCH] if load.of_class(Priority.BATCH).alone_s >= BATCH_ALONE_S else 1.0


# what a forecast says


def first(forecast: Forecast | None, idle_s: float = NEVER_S) -> Asking:
    """A model's next request, by the forecast of a window (None: no forecast) and the time since its last request."""
    if forecast is None or forecast.window_s <= 0:
        return Asking(idle_s=idle_s)
    mean = max(0.0, forecast.num_requests, forecast.concurrency_peak)  # at least as many requests come as run at once
    spread = _spread([(q.share, q.num_requests) for q in forecast.quantiles], mean, forecast.error_ratio)
    beyond = spread**2 - mean  # Poisson's own spread does not make the rate uncertain
    shape = mean**2 / beyond if beyond > 0 and mean > 0 else math.inf
    return Asking(mean / forecast.window_s, shape, idle_s)


def level(forecast: Forecast | None, num_before: int, num_slots: int, idle_s: float = NEVER_S) -> Asking:
    """The rate at which a model needs its instance or replica after `num_before` others, each of which runs `num_slots`
    requests at once; after none, the rate of its requests. The next one is needed once more requests run at once than
    the others have slots, or more tokens come than the others serve (mu of PreServe section 4.1). `idle_s`: seconds
    since that was so."""
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
    """The standard deviation by the outermost quantiles, or by the forecast's recent error where there are none."""
    if len(band) < 2:
        return max(error_ratio, UNSURE) * mean
    (low_share, low), (high_share, high) = band[0], band[-1]
    return max(0.0, high - low) / (BAND * (high_share - low_share) / 0.8) if high_share > low_share else 0.0


def _above(limit: float, mean: float, band: list[tuple[float, float]], error_ratio: float) -> float:
    """P(X > limit) for a normal X."""
    spread = _spread(band, mean, error_ratio)
    if spread <= 0:
        return 1.0 if mean > limit else 0.0
    return 0.5 * math.erfc((limit - mean) / (spread * math.sqrt(2)))
