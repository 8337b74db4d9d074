"""A combination of cheap forecasts, weighed by how each did of late: for one model, kind of load and horizon.

No paper's: the five name one forecaster each (WarmServe 5.1 a corrected season, PreServe 4.1 a learned sequence), and
no single one is best on every load. The rule is that of exponential weights with a fixed share (Herbster and Warmuth
1998, "Tracking the best expert"); the experts are in `combined_experts.py`. It needs no training: experts that know too
little yet are left out.

    loss_i(t)  = min(3, |forecast_i - load| / max(load, scale / 10))        of the forecast made h windows before
    L_i        = discounted mean of loss_i and of `prior_windows` x h of PRIOR_i times the least: losses h windows ahead
                 overlap, and say the less
    w_i        ~ exp(-eta (L_i / min L - 1)), then a share is dealt to all alike
    forecast   = exp(sum_i w_i log(forecast_i + unit)) - unit

Bands: the 10 % and 90 % quantiles of the log error follow what came, by a step of the pinball loss for each window
(Gibbs and Candes 2021, "Adaptive conformal inference"), so that they hold four of five windows in the long run,
whatever the load is like.

What is not a measurement is bounded. A window that is missing, NaN or negative counts as its forecast and teaches
nothing. One above `spike_ratio` times all that is kept counts as that much; where the next one falls back, it is taken
out of the past as well. Each is said in `Forecast.anomaly`.
"""

import math
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.policies.prediction.alike import Alike
from glowplug.policies.prediction.combined_experts import NAMES, Array, Experts
from glowplug.policies.prediction.learned import CombinedParams
from glowplug.policies.prediction.port import Reading, WindowTotals, forecast_of, reading_of

Mask = NDArray[np.bool_]

NAME: Final = "combined"
UNITS: Final = np.array(Reading(1.0, 100.0, 100.0, 0.05, 0.5))
"""What is small beside one request, by kind: it bounds ratios where load is nothing."""
MAX_LOSS: Final = 3.0
QUANTILES: Final = (0.1, 0.9)
PRIOR: Final = {
    "last": (1.0, 1.5),
    "mean 0.5": (1.0, 1.53),
    "mean 0.25": (1.36, 1.6),
    "mean 0.1": (2.17, 1.75),
    "load mean 0.2": (1.84, 1.74),
    "holt 0.8": (1.02, 1.72),
    "holt 0.5": (1.0, 1.54),
    "ridge": (1.0, 1.15),
    "csp": (1.37, 1.3),
    "peers": (1.02, 1.35),
    "day naive": (2.85, 1.27),
    "day 1.0 1.0": (1.17, 1.28),
    "day 0.5 1.0": (1.26, 1.24),
    "day 0.5 0.9": (1.35, 1.31),
    "day 0.2 0.9": (1.67, 1.3),
    "day 0.5 0.7": (1.73, 1.42),
    "profile 0.7 1.0": (1.09, 1.24),
    "profile 0.3 1.0": (1.28, 1.22),
    "profile 0.3 0.9": (1.38, 1.62),
    "profile 0.1 0.95": (1.73, 1.38),
    "analog shape 0.93 1.0": (1.02, 1.06),
    "analog level 0.93 0.9": (1.08, 1.04),
    "analog level 0.97 0.95": (1.17, 1.04),
    "analog level 0.8 0.95": (1.03, 1.0),
    "analog level 0.8 0.9": (1.06, 1.0),
    "week 0.5 1.0": (1.3, 1.15),
    "week 0.3 0.9": (1.5, 1.25),
}
"""What is known of each expert before a load is: its mean loss over the best one's, 1 and 12 windows ahead, as measured
on the days and clients that `bench/forecast` calls tuned."""


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
        self._mixture: Mixture | None = None  # None while nothing ever came
        self._num_idle = 0

    def closed(self, window: WindowTotals) -> None:
        """The newest window. Windows left out since the last one count as missing; after more than a season of them the
        past begins anew, and so it does after `max_windows` without load."""
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
        """How other models change after this window, which they learn of too."""
        if self._alike is None:
            return None
        number = round(window.started_at / self.window_s)
        if math.isfinite(num_requests):
            if self._before[0] == number - 1:
                self._alike.learn(number, self._before[1], num_requests)
            self._before = number, num_requests
        return self._alike.ahead(number, self.params.num_horizons)

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Each window ahead with its band; those after the last horizon that is weighed repeat it."""
        if self._ended_at is None:
            return ()
        made = []
        for step in range(num_ahead):
            expected, low, high = self._expected(step)
            made.append(
                forecast_of(
                    Reading(*map(float, expected)),
                    self._ended_at + step * self.window_s,
                    self.window_s,
                    now_s,
                    NAME,
                    quantiles=tuple(
                        Quantile(share, *map(float, loads)) for share, loads in zip(QUANTILES, (low, high), strict=True)
                    ),
                    anomaly=self._anomaly,
                )
            )
        return tuple(made)

    def experts(self, kind: str = "num_requests") -> dict[str, list[tuple[float, float]]]:
        """What each expert expects of one kind of load (a field of `Reading`) and its weight in the combination, for
        each horizon; NaN and 0 where it knows too little. Empty while nothing ever came."""
        if self._mixture is None:
            return {}
        row = Reading._fields.index(kind)
        loads, weights = self._mixture.said(row)
        pairs = ((loads[:, at].tolist(), weights[:, at].tolist()) for at in range(len(NAMES)))
        return {name: list(zip(*pair, strict=True)) for name, pair in zip(NAMES, pairs, strict=True)}

    def _expected(self, step: int) -> tuple[Array, Array, Array]:
        """(expected, low, high), each by kind."""
        if self._mixture is None:
            nothing = np.zeros(len(UNITS))
            return nothing, nothing, nothing
        return self._mixture.at(min(step, self.params.num_horizons - 1))


class Mixture:
    """The experts of one model, their weights and the bands, as arrays by kind, horizon and expert."""

    def __init__(self, per_day: int, params: CombinedParams) -> None:
        self.params = params
        num_kinds, num_ahead = len(UNITS), params.num_horizons
        self._experts = Experts(num_kinds, per_day, UNITS, num_ahead, params.max_windows)
        self._losses = np.zeros((num_kinds, num_ahead, len(NAMES)))  # discounted sums
        self._counts = np.zeros((num_kinds, num_ahead, len(NAMES)))
        self._said = np.zeros((num_ahead, num_kinds, num_ahead, len(NAMES)), np.float32)  # by window number modulo H
        self._together = np.zeros((num_ahead, num_kinds, num_ahead))  # what was said of it all, log, likewise
        self._scale = np.zeros(num_kinds)  # what a window brings on average
        self._prior = prior_of(num_ahead)
        self._bands = Bands(num_kinds, num_ahead)
        self._lows = self._highs = self._middle = np.zeros((num_kinds, num_ahead))
        self._spike: tuple[Mask, Array] | None = None  # kinds bounded in the last window, what stands in for them

    def close(self, load: Array, peers: Array | None) -> str:
        """The next window, NaN where it is not known, and how other models' log load changes after it (H). What was
        wrong with it, in a word."""
        is_known = np.isfinite(load)
        expected = self.at(0)[0]
        load = np.where(is_known, load, expected)
        load, bounded = self._bounded(load, expected)
        self._judge(load, is_known & ~bounded)
        self._experts.add(load)
        rate = max(0.02, 1.0 / self._experts.count)
        self._scale += rate * (load - self._scale)
        self._expect(peers)
        return "spike" if bounded.any() else "" if is_known.all() else "missing"

    def at(self, step: int) -> tuple[Array, Array, Array]:
        """(expected, low, high) of the window so many after the next, by kind."""
        rows = (self._middle, self._lows, self._highs)
        middle, low, high = (np.maximum(np.exp(row[:, step]) - UNITS, 0.0) for row in rows)
        if self._experts.count == 0:
            return np.zeros(len(UNITS)), np.zeros(len(UNITS)), np.zeros(len(UNITS))
        return middle, low, high

    def said(self, row: int) -> tuple[Array, Array]:
        """(H, N) of one kind of load: what experts expect, and their weights."""
        z = self._said[(self._experts.count - 1) % len(self._said)].astype(float)
        loads: Array = np.maximum(np.exp(z[row]) - UNITS[row], 0.0)
        return loads, self._weights(np.isfinite(z))[row]

    def _bounded(self, load: Array, expected: Array) -> tuple[Array, Mask]:
        """The load with spikes cut, and where it was. A spike of one window leaves the past when the next is known."""
        none = np.zeros(len(load), bool)
        if self._experts.count == 0:
            return load, none
        if self._spike is not None:
            kinds, before = self._spike
            fell = kinds & (load < before * self.params.spike_ratio / 2)
            if fell.any():
                self._experts.replace_last(np.where(fell, before, self._experts.last()))
        limit = np.maximum(self.params.spike_ratio * self._experts.most(), self.params.spike_ratio * 2 * UNITS)
        bounded = load > limit
        self._spike = (bounded, expected) if bounded.any() else None
        return np.minimum(load, limit), bounded

    def _judge(self, load: Array, is_known: Mask) -> None:
        """What each expert said of this window, at every horizon it was forecast from; and the bands."""
        ahead = min(self._experts.count, len(self._said))
        if not ahead:
            return
        back = np.arange(ahead)
        rows = (self._experts.count - 1 - back) % len(self._said)
        said = self._said[rows, :, back].transpose(1, 0, 2).astype(float)
        least = np.maximum(load, np.maximum(0.1 * self._scale, 1e-9))[:, None, None]
        off = np.abs(np.maximum(np.exp(said) - UNITS[:, None, None], 0.0) - load[:, None, None]) / least
        counted = np.isfinite(off) & is_known[:, None, None]
        losses, counts = self._losses[:, :ahead], self._counts[:, :ahead]
        keep = np.where(is_known, self.params.memory, 1.0)[:, None, None]
        losses *= keep
        losses += np.where(counted, np.minimum(off, MAX_LOSS), 0.0)
        counts *= keep
        counts += counted
        self._bands.learn(np.log(load + UNITS)[:, None] - self._together[rows, :, back].T, is_known)

    def _expect(self, peers: Array | None) -> None:
        """Weigh the experts, and combine what they say now."""
        said = self._experts.ahead(peers)
        there = np.isfinite(said)
        self._middle = np.einsum("khn,khn->kh", self._weights(there), np.where(there, said, 0.0))
        at = (self._experts.count - 1) % len(self._said)
        self._said[at], self._together[at] = said, self._middle
        self._lows, self._highs = self._bands.around(self._middle)

    def _weights(self, there: Mask) -> Array:
        """(K, H, N), of sum 1 over N."""
        params = self.params
        seen = self._counts > 0
        means = np.divide(self._losses, self._counts, out=np.zeros_like(self._losses), where=seen)
        best = np.where(seen & there, means, np.inf).min(axis=2, keepdims=True)
        best = np.where(np.isfinite(best), np.maximum(best, 1e-4), 1.0)
        for_prior = params.prior_windows * np.arange(1, params.num_horizons + 1)[:, None]  # those in between overlap
        blended = (means * self._counts + best * self._prior * for_prior) / (self._counts + for_prior)
        least = np.where(there, blended, np.inf).min(axis=2, keepdims=True)
        raw = np.where(there, np.exp(-params.eta * np.minimum(blended / least - 1.0, 50.0 / params.eta)), 0.0)
        alike = there / there.sum(axis=2, keepdims=True)
        found: Array = (1 - params.share) * raw / raw.sum(axis=2, keepdims=True) + params.share * alike
        return found


class Bands:
    """Quantiles of log(load) - log(forecast), by kind and horizon, in units of its mean absolute value of late."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._spread = np.full((num_kinds, num_ahead), 0.2)
        self._quantiles = np.stack([np.full((num_kinds, num_ahead), sign * 1.6) for sign in (-1.0, 1.0)])  # of a normal
        self._num = np.zeros((num_kinds, num_ahead))

    def learn(self, errors: Array, is_known: Mask) -> None:
        """Errors of forecasts made 1.. windows before (K, up to H)."""
        ahead, known = errors.shape[1], is_known[:, None].astype(float)
        self._num[:, :ahead] += known
        spread = self._spread[:, :ahead]
        step = np.maximum(0.04, 1.0 / (self._num[:, :ahead] + 10.0)) * known
        for row, share in enumerate(QUANTILES):
            quantile = self._quantiles[row, :, :ahead]
            quantile += step * 2.0 * (share - (errors <= quantile * spread))
        spread += np.maximum(0.012, 1.0 / (self._num[:, :ahead] + 3.0)) * known * (np.abs(errors) - spread)

    def around(self, middle: Array) -> tuple[Array, Array]:
        """(low, high) of log loads, on either side of the middle."""
        low, high = self._quantiles * self._spread
        return middle + np.minimum(low, 0.0), middle + np.maximum(high, 0.0)


def prior_of(num_ahead: int) -> Array:
    """(H, N), in between by the logarithm of the horizon; the 12th stands for those after it."""
    along = np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)[:, None]
    near, far = np.array([PRIOR[name] for name in NAMES]).T
    found: Array = (1.0 - along) * near + along * far
    return found
