"""What a predictor would have seen before the run: windows of every model, from the trace's own past.

A trace tells when requests came, not how long they ran, so concurrency is an estimate: the mean by Little's law with
one time in flight per model, the peak as the highest of a window's independent numbers in flight. Such a number has
the variance of a Poisson number, times CV^2 when the scenario's arrivals are more uneven than that, and is taken to be
gamma-distributed: arrivals that come in clusters have a long tail above, which a normal one of that variance has not.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist, fmean

from glowplug.policies.prediction.port import WindowTotals
from glowplug.simulator.scenario.traffic import Bin, Traffic
from glowplug.simulator.scenario.words import HistoryWords
from glowplug.simulator.setup import ModelSetup

BATCH = 8  # sequences that run together while a request's time in flight is estimated
EULER = 0.5772  # the mean of a Gumbel number


def windows_before(
    words: HistoryWords, traffic: Traffic, one: ModelSetup, window_s: float, began_s: float
) -> tuple[WindowTotals, ...]:
    """The closed windows of one model before `began_s` (epoch seconds), oldest first, without a gap, on the grid of
    multiples of `window_s`. Empty when the trace has no past."""
    key = one.model.key
    bins = traffic.past(key, words.seconds)
    if not bins:
        return ()
    pairs = traffic.lengths_of(key).pairs[:2000]
    prompt, response = fmean(p for p, _ in pairs), fmean(r for _, r in pairs)
    request_s = words.request_s or request_seconds(one, prompt, response)
    spread = max(1.0, traffic.words.cv)
    last = int(began_s // window_s)
    first = math.ceil((began_s + bins[0][0]) / window_s)
    grouped: dict[int, list[Bin]] = {}
    for bin_ in bins:
        for number, part in _cut(bin_, began_s, window_s):
            grouped.setdefault(number, []).append(part)
    return tuple(
        _window(grouped.get(number, []), number * window_s, window_s, prompt, response, request_s, spread)
        for number in range(first, last)
    )


def request_seconds(one: ModelSetup, prompt: float, response: float) -> float:
    """How long a request of these lengths is in flight on the model's first kind of GPU, in a batch of 8."""
    costs = next(iter(one.costs.values()))
    context = round(BATCH * (prompt + response / 2))
    return costs.prefill_s(round(prompt), round(prompt * prompt)) + response * costs.decode_s(BATCH, context)


def _cut(bin_: Bin, began_s: float, window_s: float) -> Iterator[tuple[int, Bin]]:
    """The parts of a bin that lie in each window it touches, by the number of the window."""
    from_s, width_s, num = bin_
    at_s, end_s = began_s + from_s, began_s + from_s + width_s
    while at_s < end_s:
        number = int(at_s // window_s)
        upto_s = min(end_s, (number + 1) * window_s)
        if upto_s <= at_s:  # rounding: nothing is left of it
            return
        yield number, (at_s - began_s, upto_s - at_s, num * (upto_s - at_s) / width_s)
        at_s = upto_s


def _window(
    bins: list[Bin], started_at: float, window_s: float, prompt: float, response: float, request_s: float, spread: float
) -> WindowTotals:
    num = math.fsum(b[2] for b in bins)
    level = max((b[2] / b[1] * request_s for b in bins), default=0.0)
    peak = highest(level, spread, max(2.0, window_s / request_s)) if level else 0.0
    return WindowTotals(
        started_at=started_at,
        window_s=window_s,
        num_requests=num,
        prompt_tokens=num * prompt,
        response_tokens=num * response,
        concurrency_mean=num * request_s / window_s,
        concurrency_peak=max(peak, 1.0 if num >= 0.5 else 0.0),
    )


def highest(mean: float, cv: float, num: float) -> float:
    """The mean of the highest of `num` independent gamma-distributed numbers of this mean and a variance of
    cv^2 mean, at least that mean: the quantile that e^-0.577 of `num` pass (Gumbel), by Wilson and Hilferty."""
    shape = mean / (cv * cv)
    deviate = max(0.0, NormalDist().inv_cdf(1 - math.exp(-EULER) / num))
    root = 1 - 1 / (9 * shape) + deviate / (3 * math.sqrt(shape))
    return max(mean, mean * root**3)
