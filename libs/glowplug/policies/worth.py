"""What keeping something in memory is worth: the one currency in which every rung of memory is bought and sold.

    worth = P(asked before it could be reloaded) x seconds to climb one rung / byte                          [s/B]

P: the probability that somebody asks for it while it would be away. Seconds: how much longer that one waits, which is
the start from the rung below less the start from this one, both measured (`policies/start_times.py`; in host memory
and on disk the seconds of the fetch that is saved). Bytes: what its going frees.

Derivation. Something of S bytes saves c seconds when it is asked for. If it goes now its bytes come back to it after
h = `away_s`: whoever takes them stays for a while, and the reload takes c. The first who asks before that waits c
longer, and leaves it there again. So the expected loss is P(N(h) >= 1) c seconds, and of all that may go for the same
bytes those go first that lose least per byte: the greedy rule of the fractional knapsack, and the order of the
greedy-dual family, cost x frequency / size (Young 1994; Cao and Irani 1997, GreedyDual-Size; Cherkasova 1998, GDSF).
Who is compared is compared over about the same h.

The published scores are cases of it:

- mCache Eq. 1, P / (S T), is penalty over size times the rate of requests 1 / T. Where they are Poisson, P(N(h) >= 1) =
  h / T + O(h^2): the same order where h is short against the gaps between requests. It is the case of host memory.
- WarmServe Eq. 7-8, T_c exp(-i / N) for the i-th of N replicas, is seconds of loading times a weight that falls with
  the rank. Here the weight is the probability that the load reaches that rank, by the forecast's quantiles (`level`).
- LRU is the case without a forecast where all cost the same: who was asked for t ago is asked again within h with
  probability h / (t + h). That is a rate of which nothing is known but one request t ago and none since: Gamma(1, t),
  so that N(h) is geometric (Lomax gaps).

How often something is asked for is known from two sources (`Asking`): a rate, forecast or counted, of which the spread
is known too, and the time since it was last asked for, unless the rate is counted from the same requests with weights
that fade, and so holds it already. They are taken as independent streams:

    P(none within h) = (1 + rate h / k)^-k  x  t / (t + h)

with k the shape of a Gamma rate (mean `rate`, variance rate^2 / k); infinite, it is Poisson's exp(-rate h). Where a
holder above answers the first who asks, two have to come (`times=2`): weights in host memory below a replica.

Where nobody else wants the bytes they could come back at once, so that h = c, and what is saved in each second is
c P(N(c) >= 1) / c, the probability itself (`idle_worth`). GPUs are kept while that, summed over what lies there, is at
least a `price`: seconds of waiting that a second of a GPU has to save. Without a forecast it is c / (t + c), so that
who was asked for t ago stays until t is c (1 / price - 1): the rule of rent or buy (Karlin et al. 1988).
"""

import math
from dataclasses import dataclass
from typing import Final

from glowplug.domain.snapshot import Forecast

STAY_S: Final = 60.0  # of whoever takes the bytes: a start, some requests, a keep-alive
PRICE: Final = 0.0035  # seconds of waiting that a second of a GPU has to save where nobody else wants it: docs/adr/0025
FROM_ZERO: Final = {"from": 0}  # metadata of a field of options: 0 may be set, though its default is above
BAND: Final = 2.563  # standard deviations of a normal distribution between its quantiles of 10 and 90 %
UNSURE: Final = 0.25  # the standard deviation of a forecast without quantiles over it, unless its error is more
NEVER_S: Final = math.inf


@dataclass(frozen=True, slots=True)
class Asking:
    """How often something is asked for. `per_s`: requests a second that are expected; `shape`: k of that rate, infinite
    where it is certain; `idle_s`: seconds since it was last asked for, infinite where that is not known."""

    per_s: float = 0.0
    shape: float = math.inf
    idle_s: float = NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Something that lies in memory. `asked`: how many are expected to ask for it before it could be reloaded, which is
    a probability where nobody waits now; `climb_s`: seconds that who asks is spared; `num_bytes`: what its going
    frees; `idle_worth`: see there."""

    name: str
    asked: float
    climb_s: float
    num_bytes: int
    idle_worth: float = 0.0

    @property
    def saves_s(self) -> float:
        """Seconds of waiting that its going is expected to cost."""
        return self.asked * self.climb_s

    @property
    def worth(self) -> float:
        """Those seconds a byte."""
        return self.saves_s / max(1, self.num_bytes)


def away_s(climb_s: float, stay_s: float = STAY_S) -> float:
    """Seconds until something could lie there again if it went now."""
    return stay_s + max(0.0, climb_s)


def asked(asking: Asking, within_s: float, times: int = 1) -> float:
    """The probability that it is asked for at least so many times (1 or 2) within those seconds."""
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
    """Seconds of waiting that something saves in each second in which nobody else wants its bytes: the probability that
    it is asked for before it could be there again."""
    return asked(asking, climb_s)


# what a forecast says


def first(forecast: Forecast | None, idle_s: float = NEVER_S) -> Asking:
    """A model's next request, by the forecast of a window (None: there is none) and the time since its last one."""
    if forecast is None or forecast.window_s <= 0:
        return Asking(idle_s=idle_s)
    mean = max(0.0, forecast.num_requests, forecast.concurrency_peak)  # as many as run at once have come at least
    spread = _spread([(q.share, q.num_requests) for q in forecast.quantiles], mean, forecast.error_ratio)
    beyond = spread**2 - mean  # Poisson's own spread is no doubt about the rate
    shape = mean**2 / beyond if beyond > 0 and mean > 0 else math.inf
    return Asking(mean / forecast.window_s, shape, idle_s)


def level(forecast: Forecast | None, num_before: int, num_slots: int, idle_s: float = NEVER_S) -> Asking:
    """A model's instance or replica behind `num_before` others, each of which runs `num_slots` requests at once; behind
    none its next request. It is needed once more run at once than those have slots for, or more tokens come than they
    have been seen to take (mu of PreServe section 4.1). `idle_s`: seconds since it last was."""
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
    """The standard deviation behind the outermost quantiles; behind the error of late where there are none."""
    if len(band) < 2:
        return max(error_ratio, UNSURE) * mean
    (low_share, low), (high_share, high) = band[0], band[-1]
    return max(0.0, high - low) / (BAND * (high_share - low_share) / 0.8) if high_share > low_share else 0.0


def _above(limit: float, mean: float, band: list[tuple[float, float]], error_ratio: float) -> float:
    """P(X > limit) of a normal one."""
    spread = _spread(band, mean, error_ratio)
    if spread <= 0:
        return 1.0 if mean > limit else 0.0
    return 0.5 * math.erfc((limit - mean) / (spread * math.sqrt(2)))
