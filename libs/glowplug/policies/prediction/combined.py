"""A combination of cheap forecasts, weighted by their recent losses: for one model, kind of load and horizon.

Not from a paper: the five name one forecaster each (WarmServe 5.1 a corrected season, PreServe 4.1 a learned sequence),
and no single one is best on every load. The rule is that of exponential weights with a fixed share (Herbster and
Warmuth 1998, "Tracking the best expert"); the experts are in `combined_experts.py`. It needs no training: experts that
know too little yet are left out.

    loss_i(t)  = min(3, |forecast_i - load| / max(load, scale / 10))        of the forecast made h windows before
    w_i        from discounted losses, under rules that remember hours to days (`combined_weights.py`)
    mixture    = exp(sum_i w_i log(forecast_i + unit)) - unit
    forecast   = of the mixture and of it leaning to days like this one (there too), weighed likewise

Bands: the 10 % and 90 % quantiles of the log error follow the errors, by a step of the pinball loss for each window
(Gibbs and Candes 2021, "Adaptive conformal inference"), so that they hold four of five windows in the long run,
whatever the load is like. Far ahead they aim a little further out, since the errors they learn from are hours old.

Bad measurements are bounded. A window that is missing, NaN or negative counts as its forecast and teaches nothing. One
above `spike_ratio` times the highest load kept counts as that much; where the next one falls back, the spike is taken
out of the past as well. `Forecast.anomaly` reports each.
"""

import math
from typing import ClassVar, Final

import numpy as np

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.policies.prediction.combined_experts import DAYS_ALIKE, NAMES, Array, Experts
from glowplug.policies.prediction.combined_weights import ACROSS, LIKENED, RULES, Changes, Mask, Weights, prior_of
from glowplug.policies.prediction.learned import CombinedParams
from glowplug.policies.prediction.port import Reading, WindowTotals, forecast_of, reading_of

NAME: Final = "combined"
UNITS: Final = np.array(Reading(1.0, 100.0, 100.0, 0.05, 0.5))
"""What is small beside one request, by kind: it bounds ratios where load is nothing."""
MAX_LOSS: Final = 3.0
NUM_EXPERTS: Final = len(NAMES)
NUM_MIXED: Final = NUM_EXPERTS + len(RULES)
NUM_SAID: Final = NUM_MIXED + 2  # experts, each rule's mean, the mixture, and the mixture leaning to days alike
QUANTILES: Final = (0.1, 0.9)
LATE: Final = 0.02  # share that bands aim further out 12 windows ahead, where errors are known late and grow
BAND_STEP: Final = 0.04  # rate of the quantiles, in spreads per window
SPREAD_RATE: Final = 0.06  # rate of the mean error, per window
MOST_CHANGES: Final = 50  # changes in the mean of one window of the day: older ones fade
LEAST_REQUESTS: Final = 5.0  # in both windows, for a change to count
LARGEST_CHANGE: Final = 1.0  # bound of a change of the logarithm


class Alike:
    """Mean change of log requests from each window of the day to the next, over all models that share this object: the
    expectation for a model without a past."""

    def __init__(self, per_day: int) -> None:
        self._means = np.zeros(per_day)
        self._nums = np.zeros(per_day)

    def learn(self, number: int, before: float, after: float) -> None:
        """Learn the requests of window `number`, counted from any midnight, and of the one before it."""
        if min(before, after) < LEAST_REQUESTS:
            return
        slot = number % len(self._means)
        change = min(max(float(np.log(after / before)), -LARGEST_CHANGE), LARGEST_CHANGE)
        self._nums[slot] = min(self._nums[slot] + 1, MOST_CHANGES)
        self._means[slot] += (change - self._means[slot]) / self._nums[slot]

    def ahead(self, number: int, num_ahead: int) -> Array | None:
        """Changes from window `number` to each of those after it; None where some window on the way was never seen."""
        slots = (number + np.arange(1, num_ahead + 1)) % len(self._means)
        if not self._nums[slots].all():
            return None
        found: Array = np.cumsum(self._means[slots])
        return found


class Combined:
    """One model's forecaster. The same windows give the same forecasts."""

    WINDOW_S: ClassVar[float] = 300.0

    def __init__(
        self, window_s: float = 300.0, params: CombinedParams = CombinedParams(), *, alike: Alike | None = None
    ) -> None:
        self.window_s, self.params = window_s, params
        self._alike = alike
        self._before = -1, 0.0  # number and requests of the last window that had any
        self._per_day = max(1, round(params.season_s / window_s))
        self._ended_at: float | None = None
        self._anomaly = ""
        self._mixture: Mixture | None = None  # None before the first load
        self._num_idle = 0

    def closed(self, window: WindowTotals) -> None:
        """Add the newest window. Windows skipped since the last one count as missing; the past begins anew after more
        than a season of them, or after `max_windows` without load."""
        num_missing = 0
        if self._ended_at is not None:
            num_missing = max(0, round((window.started_at - self._ended_at) / self.window_s))
        self._ended_at = window.started_at + window.window_s
        load = np.array(reading_of(window), float)
        load = np.where(np.isfinite(load) & (load >= 0), load, np.nan)
        is_idle = not np.nansum(load) > 0
        self._num_idle = self._num_idle + 1 + num_missing if is_idle else 0
        if self._num_idle >= self.params.max_windows or num_missing > self._per_day:
            self._mixture = None
        if self._mixture is None:
            self._anomaly = ""
            if is_idle:
                return
            self._mixture = Mixture(self._per_day, self.params)
        else:
            for _ in range(num_missing):
                self._mixture.close(np.full(len(load), np.nan), None)
        self._anomaly = self._mixture.close(load, self._peers(window, float(load[0])))
        if num_missing and not self._anomaly:
            self._anomaly = "missing"

    def _peers(self, window: WindowTotals, num_requests: float) -> Array | None:
        """Changes of other models' load after this window, from which those models learn too."""
        if self._alike is None:
            return None
        number = round(window.started_at / self.window_s)
        if math.isfinite(num_requests):
            if self._before[0] == number - 1:
                self._alike.learn(number, self._before[1], num_requests)
            self._before = number, num_requests
        return self._alike.ahead(number, self.params.num_horizons)

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast each window ahead with its band; windows after the last weighted horizon repeat it."""
        if self._ended_at is None:
            return ()
        made, expected_by_step = [], self._expected()
        for step in range(num_ahead):
            expected, low, high = expected_by_step[min(step, len(expected_by_step) - 1)]
            made.append(
                forecast_of(
                    Reading(*expected),
                    self._ended_at + step * self.window_s,
                    self.window_s,
                    now_s,
                    NAME,
                    quantiles=(Quantile(QUANTILES[0], *low), Quantile(QUANTILES[1], *high)),
                    anomaly=self._anomaly,
                )
            )
        return tuple(made)

    def experts(self, kind: str = "num_requests") -> dict[str, list[tuple[float, float]]]:
        """The load of one kind (a field of `Reading`) that each expert expects and the expert's weight in the
        combination, for each horizon; NaN and 0 where the expert knows too little. Empty before the first load."""
        if self._mixture is None:
            return {}
        row = Reading._fields.index(kind)
        loads, weights = self._mixture.said(row)
        pairs = ((loads[:, at].tolist(), weights[:, at].tolist()) for at in range(len(NAMES)))
        return {name: list(zip(*pair, strict=True)) for name, pair in zip(NAMES, pairs, strict=True)}

    def _expected(self) -> list[list[list[float]]]:
        """(expected, low, high) of each window ahead, each by kind."""
        if self._mixture is None:
            return np.zeros((1, 3, len(UNITS))).tolist()
        return self._mixture.loads.transpose(2, 0, 1).tolist()


class Mixture:
    """The experts of one model, their weights and the bands, as arrays by kind, horizon and expert. Each kind of load
    is computed independently of the others; `units` is a small amount of each."""

    def __init__(self, per_day: int, params: CombinedParams, units: Array = UNITS) -> None:
        self.params, self._units = params, units
        num_kinds, num_ahead = len(units), params.num_horizons
        self._experts = Experts(num_kinds, per_day, units, num_ahead, params.max_windows)
        self._weights = Weights(RULES, num_kinds, prior_of(num_ahead))
        self._across = Weights((ACROSS,), num_kinds, np.ones((num_ahead, len(RULES))))
        self._likened = Weights((LIKENED,), num_kinds, np.ones((num_ahead, 2)))
        self._changes = Changes(num_kinds, num_ahead)
        self._leans = np.zeros((num_kinds, num_ahead))  # weight of the expert of days alike in the forecast
        self._said = np.zeros((num_ahead, num_kinds, num_ahead, NUM_SAID), np.float32)  # by window number modulo H
        self._together = np.zeros((num_ahead, num_kinds, num_ahead))  # log of the final forecast, likewise
        self._scale = np.zeros(num_kinds)  # mean load of a window
        self._bands = Bands(num_kinds, num_ahead)
        self.loads = np.zeros((3, num_kinds, num_ahead))  # expected, low and high of each window ahead
        self._spike: tuple[Mask, Array] | None = None  # kinds bounded in the last window, their forecasts

    def close(self, load: Array, peers: Array | None) -> str:
        """Add the next window, NaN where unknown, and how other models' log load changes after it (H). Returns "spike",
        "missing" or ""."""
        is_known = np.isfinite(load)
        expected = self.at(0)[0]
        load = np.where(is_known, load, expected)
        load, bounded = self._bounded(load, expected)
        self._judge(load, is_known & ~bounded)
        self._experts.add(load)
        self._changes.learn(np.log(load + self._units))
        rate = max(0.02, 1.0 / self._experts.count)
        self._scale += rate * (load - self._scale)
        self._expect(peers)
        return "spike" if bounded.any() else "" if is_known.all() else "missing"

    def at(self, step: int) -> tuple[Array, Array, Array]:
        """(expected, low, high) of the window `step` windows after the next, by kind."""
        middle, low, high = self.loads[:, :, step]
        return middle, low, high

    @property
    def latest(self) -> Array:
        """(K, H, N and more): the log load that each expert expects, NaN where it knows too little."""
        found: Array = self._said[(self._experts.count - 1) % len(self._said)]
        return found

    def said(self, row: int) -> tuple[Array, Array]:
        """(H, N) of one kind of load: what experts expect, and their weights."""
        z = self.latest
        loads: Array = np.maximum(np.exp(z[row, :, :NUM_EXPERTS].astype(float)) - self._units[row], 0.0)
        there = np.isfinite(z)
        weights = self._weights.of(there[..., :NUM_EXPERTS])
        rules = self._across.of(there[..., NUM_EXPERTS:NUM_MIXED])[0]
        shared: Array = np.einsum("mkhn,khm->khn", weights, rules)[row] * (1.0 - self._leans[row])[:, None]
        shared[:, DAYS_ALIKE] += self._leans[row]
        return loads, shared

    def _bounded(self, load: Array, expected: Array) -> tuple[Array, Mask]:
        """The load with spikes cut, and where it was cut. A spike of one window is removed from the past when the next
        is known."""
        none = np.zeros(len(load), bool)
        if self._experts.count == 0:
            return load, none
        if self._spike is not None:
            kinds, before = self._spike
            fell = kinds & (load < before * self.params.spike_ratio / 2)
            if fell.any():
                self._experts.replace_last(np.where(fell, before, self._experts.last()))
        limit = np.maximum(self.params.spike_ratio * self._experts.most(), self.params.spike_ratio * 2 * self._units)
        bounded = load > limit
        self._spike = (bounded, expected) if bounded.any() else None
        return np.minimum(load, limit), bounded

    def _judge(self, load: Array, is_known: Mask) -> None:
        """Score what each expert and rule forecast of this window, at every horizon, and update the bands."""
        ahead = min(self._experts.count, len(self._said))
        if not ahead:
            return
        back = np.arange(ahead)
        rows = (self._experts.count - 1 - back) % len(self._said)
        units, came, least = (
            of.astype(np.float32)[:, None, None]
            for of in (self._units, load, np.maximum(load, np.maximum(0.1 * self._scale, 1e-9)))
        )
        off = np.abs(np.maximum(np.exp(self._said[rows, :, back].transpose(1, 0, 2)) - units, 0.0) - came) / least
        losses = np.minimum(off, MAX_LOSS)
        self._weights.learn(losses[..., :NUM_EXPERTS], is_known)
        self._across.learn(losses[..., NUM_EXPERTS:NUM_MIXED], is_known)
        self._likened.learn(losses[..., NUM_MIXED:], is_known)
        self._bands.learn(np.log(load + self._units)[:, None] - self._together[rows, :, back].T, is_known)

    def _expect(self, peers: Array | None) -> None:
        """Weigh the experts under each rule, weigh the rules, combine the forecasts, and lean towards days alike."""
        at = (self._experts.count - 1) % len(self._said)
        said = self._said[at]
        said[..., :NUM_EXPERTS] = alone = self._experts.ahead(peers)
        there = np.isfinite(alone)
        filled = np.where(there, said[..., :NUM_EXPERTS], np.float32(0.0))
        by_rule = np.einsum("mkhn,khn->khm", self._weights.of(there), filled).astype(float)
        said[..., NUM_EXPERTS:NUM_MIXED] = by_rule
        mixed = np.einsum("khm,khm->kh", self._across.of(np.isfinite(by_rule))[0], by_rule)
        day = alone[..., DAYS_ALIKE]
        trust = np.where(there[..., DAYS_ALIKE], self._changes.trust(self._experts.distances), 0.0)
        said[..., NUM_MIXED] = mixed
        lean = np.where(trust > 0.0, day, mixed) - mixed
        said[..., NUM_MIXED + 1] = mixed + trust * lean
        self._leans = trust * self._likened.of(np.isfinite(said[..., NUM_MIXED:]))[0, ..., 1]
        self._together[at] = middle = mixed + self._leans * lean
        around = np.stack((middle, *self._bands.around(middle)))
        self.loads = np.maximum(np.exp(around) - self._units[:, None], 0.0)


class Bands:
    """Quantiles of log(load) - log(forecast), by kind and horizon, in units of its recent mean absolute value."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._spread = np.full((num_kinds, num_ahead), 0.2)
        self._quantiles = np.stack([np.full((num_kinds, num_ahead), sign * 1.6) for sign in (-1.0, 1.0)])  # of a normal
        self._num = np.zeros((num_kinds, num_ahead))
        outside = LATE * np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)
        self._shares = QUANTILES[0] - outside, QUANTILES[1] + outside  # target shares, by horizon

    def learn(self, errors: Array, is_known: Mask) -> None:
        """Learn the errors of forecasts made 1, 2, ... windows before (K, up to H)."""
        ahead, known = errors.shape[1], is_known[:, None].astype(float)
        self._num[:, :ahead] += known
        spread = self._spread[:, :ahead]
        step = np.maximum(BAND_STEP, 1.0 / (self._num[:, :ahead] + 10.0)) * known
        for row, share in enumerate(self._shares):
            quantile = self._quantiles[row, :, :ahead]
            quantile += step * 2.0 * (share[:ahead] - (errors <= quantile * spread))
        spread += np.maximum(SPREAD_RATE, 1.0 / (self._num[:, :ahead] + 3.0)) * known * (np.abs(errors) - spread)

    def around(self, middle: Array) -> tuple[Array, Array]:
        """(low, high) of log loads, on either side of the middle."""
        low, high = self._quantiles * self._spread
        return middle + np.minimum(low, 0.0), middle + np.maximum(high, 0.0)
