"""A combination of cheap forecasts, weighted by their recent losses, per model, kind of load and horizon.

Not from a paper: the five name one forecaster each (WarmServe 5.1 a corrected season, PreServe 4.1 a learned sequence),
and none is best on every load. The rule: exponential weights with a fixed share (Herbster and Warmuth 1998, "Tracking
the best expert"), without training; experts that know too little are left out.

    loss_i(t)  = min(3, |forecast_i - load| / max(load, scale / 10))        of the forecast made h windows before
    w_i        from discounted losses, under rules that remember hours to days
    mixture    = exp(sum_i w_i log(forecast_i + unit)) - unit
    forecast   = of the mixture and of it leaning to days like this one (there too), weighed likewise

Bands: the 10 % and 90 % quantiles of the log error follow it by a pinball-loss step per window (Gibbs and Candes 2021,
"Adaptive conformal inference"), and cover four of five windows in the long run on any load. Far ahead they aim further
out, since errors are hours old.

A missing, NaN or negative window counts as its forecast and teaches nothing. A load above `spike_ratio` times the
highest kept is cut; if the next falls back, the spike leaves the past too. `Forecast.anomaly` reports each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.fleet.forecasts import WindowDemand
from glowplug.policies.prediction.learned import CombinedParams
from glowplug.policies.prediction.port import WindowTotals, forecast_of, reading_of

# The experts of `combined`: cheap forecasts of one model, each right about some loads at some horizons.
#
# All use z = log(load + unit), so that an error is a ratio, and learn window by window. Shapes: K kinds of load (fields
# of `WindowDemand`), H windows ahead, N experts, D windows a season (a day), k = 1..7 seasons back.
#
#     level      the last window; means of the last ones, of z and of the load itself; damped trends (Holt)
#     day, week  S_k(h) + rho^h r_k                   S_k: z smoothed over some windows, k seasons before the target
#     profile    mean over k of S_k(h) + rho^h r_k           r_k: recent mean of z - S_k (rate alpha)
#     analog     the same, weighted by 1 / variance^2 of z - S_k: the days that this one resembles count most
#     wide       the same three over 13 windows instead of three: chance features of a single day count less
#     csp        WarmServe section 5.1, Eq. 2-4 (glowplug_lab/policies/warmserve_csp.py has the departures)
#     ridge      change = features x weights, least squares that forget, for each horizon
#     peers      the last window, and how the load of other models changed at that time of the day
#
# `NAMES` follows the last axis. Holt (1957) as damped by Gardner and McKenzie (1985).

Array = NDArray[np.float64]

MEANS: Final = (0.5, 0.25, 0.1)
LOAD_MEANS: Final = (0.2,)
HOLTS: Final = ((0.8, 0.3, 0.9), (0.5, 0.2, 0.8))  # level, trend, damping
RATES: Final = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1)  # of r_k
MEMORIES: Final = (0.8, 0.93, 0.97)  # of the variance of z - S_k, per window


class Kinds(NamedTuple):
    """(alpha, rho) each; for analogs (level or shape, index into MEMORIES, alpha, rho)."""

    num_sides: int  # windows on either side of one in its smoothed mean
    days: tuple[tuple[float, float], ...]
    profiles: tuple[tuple[float, float], ...]
    analogs: tuple[tuple[str, int, float, float], ...]
    weeks: tuple[tuple[float, float], ...]


NARROW: Final = Kinds(
    num_sides=1,
    days=((1.0, 1.0), (0.5, 1.0), (0.5, 0.9), (0.2, 0.9), (0.5, 0.7)),
    profiles=((0.7, 1.0), (0.3, 1.0), (0.3, 0.9), (0.1, 0.95)),
    analogs=(
        ("shape", 1, 0.5, 1.0),
        ("level", 1, 0.5, 0.9),
        ("level", 2, 0.3, 0.95),
        ("level", 0, 0.7, 0.95),
        ("level", 0, 0.5, 0.9),
    ),
    weeks=((0.5, 1.0), (0.3, 0.9)),
)
WIDE: Final = Kinds(
    num_sides=6,
    days=((0.7, 1.0), (0.5, 1.0), (0.3, 0.95)),
    profiles=((0.7, 1.0), (0.5, 1.0), (0.3, 0.95), (0.2, 0.9)),
    analogs=(("shape", 1, 0.7, 1.0), ("level", 0, 0.5, 0.97), ("level", 2, 0.3, 0.95)),
    weeks=((0.5, 1.0), (0.3, 0.9)),
)
NUM_DAYS: Final = 7
CSP_ERRORS: Final = 10
NUM_FEATURES: Final = 6
RIDGE: Final = 0.3
FORGET: Final = 0.995


def _names(kinds: Kinds, before: str) -> list[str]:
    return [
        *(f"{before}day {alpha} {rho}" for alpha, rho in kinds.days),
        *(f"{before}profile {alpha} {rho}" for alpha, rho in kinds.profiles),
        *(f"{before}analog {kind} {MEMORIES[memory]} {rho}" for kind, memory, _, rho in kinds.analogs),
        *(f"{before}week {alpha} {rho}" for alpha, rho in kinds.weeks),
    ]


NAMES: Final = (
    "last",
    *(f"mean {rate}" for rate in MEANS),
    *(f"load mean {rate}" for rate in LOAD_MEANS),
    *(f"holt {level}" for level, _, _ in HOLTS),
    "ridge",
    "csp",
    "peers",
    "day naive",
    *(name for kinds, before in ((NARROW, ""), (WIDE, "wide ")) for name in _names(kinds, before)),
)
MEANS_UNTIL: Final = 1 + len(MEANS)
HOLT_FROM: Final = MEANS_UNTIL + len(LOAD_MEANS)
RIDGE_AT: Final = NAMES.index("ridge")
SEASONAL_FROM: Final = NAMES.index("day naive")
DAYS_ALIKE: Final = NAMES.index("wide analog level 0.8 0.97")  # the one to lean towards


class Experts:
    """`add` takes windows without gaps; `ahead` forecasts from the last."""

    def __init__(self, num_kinds: int, per_day: int, units: Array, num_ahead: int, max_windows: int) -> None:
        self.per_day, self.num_ahead, self.units = per_day, num_ahead, units
        self.num_days = max(1, min(NUM_DAYS, max_windows // per_day))
        self.count = 0
        kept = self.num_days * per_day + 2
        self._past = np.zeros((num_kinds, kept), np.float32)  # z, by window number modulo `kept`
        self._means = np.zeros((len(MEANS), num_kinds))
        self._load_means = np.zeros((len(LOAD_MEANS), num_kinds))
        self._holts = np.zeros((len(HOLTS), 2, num_kinds))
        self._csp_sums = np.zeros((num_kinds, per_day), np.float32)
        self._csp_last = np.zeros((2, CSP_ERRORS, num_kinds))  # loads and errors, newest first
        self._ridge = Ridge(num_kinds, num_ahead)
        steps = np.arange(1, num_ahead + 1)
        within = (steps - 1) % per_day + 1  # the horizon may exceed a season
        offsets = within - np.arange(1, self.num_days + 1)[:, None] * per_day  # (k, H)
        self._seasons = [Season(kinds, num_kinds, per_day, kept, offsets, steps) for kinds in (NARROW, WIDE)]
        self._offsets, self._naive = offsets[0], np.empty(0)  # (K, H): z a season before
        self._trends = np.stack([np.cumsum(damping**steps) for _, _, damping in HOLTS])

    def add(self, load: Array) -> None:
        z, at = np.log(load + self.units), self.count
        if at == 0:
            self._means[:], self._load_means[:] = z, load
            self._holts[:, 0] = z
        for row, rate in enumerate(MEANS):
            self._means[row] += rate * (z - self._means[row])
        for row, rate in enumerate(LOAD_MEANS):
            self._load_means[row] += rate * (load - self._load_means[row])
        for row, (fast, slow, damping) in enumerate(HOLTS):
            level, trend = self._holts[row]
            error = z - level - damping * trend
            self._holts[row] = level + damping * trend + fast * error, damping * trend + fast * slow * error
        for season in self._seasons:
            season.learn(z, at)
        self._add_csp(load, at)
        before = self._at(at - 1) if at else z, self._at(at - 3) if at else z
        self._keep(z, at)
        self.count = at + 1
        if at >= self.per_day:
            self._naive = self._past[:, (at + self._offsets) % self._past.shape[1]].astype(float)
        for season in self._seasons:
            season.look_back(at)
        self._ridge.learn(z)
        self._ridge.see(self._features(z, before), z)

    def replace_last(self, load: Array) -> None:
        """Correct the last window in the past only; means keep the old load."""
        z, at = np.log(load + self.units), self.count - 1
        slot, where = at % self.per_day, at % self._past.shape[1]
        self._csp_sums[:, slot] += load - (np.exp(self._past[:, where]) - self.units)
        self._keep(z, at)

    def last(self) -> Array:
        return np.exp(self._at(self.count - 1)) - self.units

    def most(self) -> Array:
        kept = min(self.count, self._past.shape[1])
        found: Array = np.exp(self._past[:, :kept].max(axis=1).astype(float)) - self.units
        return found

    def ahead(self, peers: Array | None = None) -> Array:
        """Return z as (K, H, N); NaN for unready experts. `peers`: (H,), change of other models' z."""
        found = np.full((len(self.units), self.num_ahead, len(NAMES)), np.nan)
        z = self._at(self.count - 1)
        found[:, :, 0] = z[:, None]
        found[:, :, 1:MEANS_UNTIL] = self._means.T[:, None, :]
        found[:, :, MEANS_UNTIL:HOLT_FROM] = np.log(self._load_means + self.units).T[:, None, :]
        trends = self._holts[:, 0].T[:, None, :] + self._holts[:, 1].T[:, None, :] * self._trends.T
        found[:, :, HOLT_FROM:RIDGE_AT] = trends
        found[:, :, RIDGE_AT] = self._ridge.ahead(z)
        found[:, :, RIDGE_AT + 1] = self._csp_ahead()
        if peers is not None:
            found[:, :, RIDGE_AT + 2] = z[:, None] + peers
        if len(self._naive):
            found[:, :, SEASONAL_FROM] = self._naive
            at = SEASONAL_FROM + 1
            for season in self._seasons:
                season.ahead(found[:, :, at : at + season.num])
                at += season.num
        highest = np.log(2.0 * self.most() + self.units)[:, None, None]
        np.maximum(found, np.log(self.units)[:, None, None], out=found)
        np.minimum(found, highest, out=found)
        return found

    @property
    def distances(self) -> Array:
        """(K,): mean square of z's distance from the days alike; 0 in the first season."""
        return self._seasons[-1].distances

    def _keep(self, z: Array, at: int) -> None:
        self._past[:, at % self._past.shape[1]] = z
        for season in self._seasons:
            numbers = np.maximum(at - np.arange(2 * season.num_sides + 1), 0)
            season.smooth(self._past[:, numbers % self._past.shape[1]].astype(float), at)

    def _add_csp(self, load: Array, at: int) -> None:
        days, slot = at // self.per_day, at % self.per_day
        self._csp_last[:, 1:] = self._csp_last[:, :-1].copy()
        self._csp_last[:, 0] = load, load - self._csp_sums[:, slot] / max(1, days)
        self._csp_sums[:, slot] += load

    def _csp_ahead(self) -> Array:
        numbers = self.count + np.arange(self.num_ahead)
        slots = numbers % self.per_day
        days = (self.count - slots + self.per_day - 1) // self.per_day  # days learned of each slot
        season = self._csp_sums[:, slots] / np.maximum(1, days)
        loads = weighted(self._csp_last[0, : self.count])
        errors = weighted(self._csp_last[1, : max(0, self.count - self.per_day)])  # none in the first season
        expected = np.where(days > 0, season + errors[:, None], loads[:, None])
        found: Array = np.log(np.maximum(expected, 0.0) + self.units[:, None])
        return found

    def _features(self, z: Array, before: tuple[Array, Array]) -> Array:
        """Return (K, H, 6): changes over one and three windows, distance from the mean; and from the season before: the
        change to each target, z's distance from that day, and the mean change over all days."""
        found = np.zeros((len(z), self.num_ahead, NUM_FEATURES))
        found[:, :, :3] = np.stack((z - before[0], z - before[1], z - self._means[1]), axis=1)[:, None, :]
        season = self._seasons[0]
        if season.known:
            here = season.above[0, : season.known]
            found[:, :, 3] = self._naive + (here[0] - z)[:, None]
            found[:, :, 4] = here[0][:, None]
            found[:, :, 5] = season.profile + (here.mean(axis=0) - z)[:, None]
        return found

    def _at(self, number: int) -> Array:
        return self._past[:, max(0, number) % self._past.shape[1]].astype(float)


class Season:
    """Forecasts from the smoothed days before, and distances from them."""

    def __init__(
        self, kinds: Kinds, num_kinds: int, per_day: int, kept: int, offsets: NDArray[np.int_], steps: NDArray[np.int_]
    ) -> None:
        self.num_sides, self.num = kinds.num_sides, sum(len(of) for of in kinds[1:])
        self.known, self.before = 0, np.empty(0)  # number of seasons back; (k, K, H): S_k
        self.profile = np.empty(0)
        num_days = len(offsets)
        self.above = np.zeros((len(RATES), num_days, num_kinds))
        # Mean square of z - S_k over the days, weighted as by the shortest-memory `level` analog.
        self.distances = np.zeros(num_kinds)
        self._per_day, self._offsets, self._kinds = per_day, offsets, kinds
        self._smooth = np.zeros((num_kinds, kept), np.float32)  # by window number modulo `kept`
        self._moments = np.zeros((len(MEMORIES), 3, num_days, num_kinds))  # weight, sum, sum of squares
        self._keep, self._rates = np.array(MEMORIES)[:, None, None, None], np.array(RATES)[:, None, None]
        self._days, self._profiles, self._weeks, self._analogs = (
            _fades(pairs, steps)
            for pairs in (kinds.days, kinds.profiles, kinds.weeks, [(alpha, rho) for *_, alpha, rho in kinds.analogs])
        )
        sorts = [(kind, memory) for kind, memory, _, _ in kinds.analogs]
        self._memories = np.array([memory for _, memory in sorts])
        self._are_shapes = np.array([kind == "shape" for kind, _ in sorts], float)[:, None, None]
        self._nearest = sorts.index(("level", 0))  # the analog whose weights `distances` uses

    def smooth(self, newest_first: Array, at: int) -> None:
        """Update the means that contain window `at`, from z of the last windows (K, 2 sides + 1)."""
        num = min(self.num_sides, at, self._smooth.shape[1] - 1) + 1
        back = np.arange(num)
        over = np.minimum(back + self.num_sides, at) + 1
        sums = np.cumsum(newest_first, axis=1)
        self._smooth[:, (at - back) % self._smooth.shape[1]] = sums[:, over - 1] / over

    def learn(self, z: Array, at: int) -> None:
        known = min(len(self._offsets), at // self._per_day)
        if known == 0:
            return
        numbers = at - np.arange(1, known + 1) * self._per_day
        error = z - self._smooth[:, numbers % self._smooth.shape[1]].T  # (k, K)
        is_new = numbers == 0
        rates = np.where(is_new[:, None], 1.0, self._rates)
        above = self.above[:, :known]
        above += rates * (error - above)
        moments = self._moments[:, :, :known]
        moments *= self._keep
        moments[:, 0] += 1.0
        moments[:, 1] += error
        moments[:, 2] += error * error

    def look_back(self, at: int) -> None:
        """Look up S_k of every target after window `at`."""
        self.known = min(len(self._offsets), at // self._per_day)
        if self.known:
            where = (at + self._offsets[: self.known]) % self._smooth.shape[1]
            self.before = self._smooth[:, where].astype(float).transpose(1, 0, 2)
            self.profile = self.before.mean(axis=0)

    def ahead(self, found: Array) -> None:
        if not self.known:
            return
        above, at = self.above[:, : self.known], 0
        (rates, fades), until = self._days, len(self._kinds.days)
        found[:, :, :until] = self.before[0][..., None] + above[rates, 0].T[:, None, :] * fades
        (rates, fades), at = self._profiles, until
        until = at + len(self._kinds.profiles)
        level = above.mean(axis=1)
        found[:, :, at:until] = self.profile[..., None] + level[rates].T[:, None, :] * fades
        (rates, fades), at = self._analogs, until
        shares = self._likeness()
        levels = (shares * above[rates]).sum(axis=1)
        until = at + len(self._kinds.analogs)
        found[:, :, at:until] = np.einsum("ndk,dkh->khn", shares, self.before) + levels.T[:, None, :] * fades
        if self.known == NUM_DAYS:
            rates, fades = self._weeks
            found[:, :, until:] = self.before[-1][..., None] + above[rates, -1].T[:, None, :] * fades

    def _likeness(self) -> Array:
        """Return (n, k, K), summing to 1 over k: likeness of this day to those before, per analog."""
        weight, first, second = self._moments[:, :, : self.known].swapaxes(0, 1)
        squares, mean = second / weight, first / weight
        variance = np.maximum(squares[self._memories] - self._are_shapes * mean[self._memories] ** 2, 0.0)
        likeness = 1.0 / (variance + 0.05 * variance.min(axis=1, keepdims=True) + 1e-4) ** 2
        shares: Array = likeness / likeness.sum(axis=1, keepdims=True)
        self.distances = (shares[self._nearest] * squares[0]).sum(axis=0)
        return shares


class Ridge:
    """Least squares of z(t + h) - z(t), per kind and horizon, forgetting towards a prior: 0.7 of the mean change on the
    days before."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        shape = (num_kinds, num_ahead, NUM_FEATURES)
        self._prior = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.7])
        self._squares = np.broadcast_to(RIDGE * np.eye(NUM_FEATURES), (*shape, NUM_FEATURES)).copy()
        self._products = np.broadcast_to(RIDGE * self._prior, shape).copy()
        self._seen = np.zeros((num_ahead, *shape), np.float32)  # features, by window number modulo H
        self._was = np.zeros((num_ahead, num_kinds))
        self._num = 0

    def see(self, features: Array, z: Array) -> None:
        at = self._num % len(self._seen)
        self._seen[at], self._was[at] = features, z
        self._num += 1

    def learn(self, z: Array) -> None:
        ahead = min(self._num, len(self._seen))
        if not ahead:
            return
        back = np.arange(ahead)
        rows = (self._num - 1 - back) % len(self._seen)
        features = self._seen[rows, :, back].transpose(1, 0, 2).astype(float)
        change = np.minimum(np.maximum(z[:, None] - self._was[rows].T, -2.0), 2.0)
        squares, products = self._squares[:, :ahead], self._products[:, :ahead]
        squares *= FORGET
        squares += features[..., :, None] * features[..., None, :] + (1 - FORGET) * RIDGE * np.eye(NUM_FEATURES)
        products *= FORGET
        products += features * change[..., None] + (1 - FORGET) * RIDGE * self._prior

    def ahead(self, z: Array) -> Array:
        features = self._seen[(self._num - 1) % len(self._seen)]
        weights = np.linalg.solve(self._squares, self._products[..., None])[..., 0]
        found: Array = z[:, None] + (features * weights).sum(axis=2)
        return found


def weighted(newest_first: Array) -> Array:
    """Mean of rows with weights halving by age: WarmServe Eq. 3 as intended (erratum E1); zeros without rows."""
    weights = 0.5 ** np.arange(len(newest_first))
    found: Array = weights @ newest_first / max(float(weights.sum()), 1.0)
    return found


def _fades(pairs: Sequence[tuple[float, float]], steps: NDArray[np.int_]) -> tuple[NDArray[np.int_], Array]:
    rates = np.array([RATES.index(alpha) for alpha, _ in pairs])
    return rates, np.array([rho for _, rho in pairs]) ** steps[:, None]


# Weights of `combined`: exponential weights under several rules, weights of the rules, and the lean to days alike.
#
#     L_i     = discounted mean of loss_i and of `prior_windows` x sqrt(h) of prior_i times the least: losses h windows
#               ahead overlap, and say the less
#     w_i     ~ exp(-eta (L_i / min L - 1)), then a share is given to all alike
#
# A rule that forgets within hours is right after a change, one that remembers days on a steady load. Each of RULES
# makes a forecast; these are weighted by the same formula (ACROSS): several learning rates, as in van Erven and Koolen
# 2016, "MetaGrad".
#
# Twelve windows ahead, losses are known twelve windows late and overlap, but the load's distance from the days before
# is known at each window. So the mixture leans by it towards the expert of days alike (`DAYS_ALIKE`, `Changes`):
#
#     d      weighted mean over these days of the recent mean square of z - S_k
#     v_h    mean square of z's change within h windows
#     g_h    = 1 / (1 + d / (NEAR (v_h - v_1))): a day alike explains what a load changes within h windows beyond its
#              change from each to the next; for a load without a shape this is nothing
#     likened = mixture + g_h (days alike - mixture)

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """`memory`: of losses, per window. `eta`: sharpness of the weights' fall with the loss. `prior_windows`: the
    prior's weight, one window ahead."""

    memory: float
    eta: float
    prior_windows: float
    share: float = 0.01


RULES: Final = (
    WeightRule(memory=0.9, eta=12.0, prior_windows=5.0),
    WeightRule(memory=0.97, eta=16.0, prior_windows=5.0),
    WeightRule(memory=0.99, eta=25.0, prior_windows=5.0),
)
ACROSS: Final = WeightRule(memory=0.99, eta=20.0, prior_windows=5.0)
LIKENED: Final = WeightRule(memory=0.99, eta=40.0, prior_windows=5.0)
PRIOR: Final = {
    "last": (1.00, 1.37),
    "mean 0.5": (1.16, 1.41),
    "mean 0.25": (1.56, 1.48),
    "mean 0.1": (2.45, 1.64),
    "load mean 0.2": (2.01, 1.58),
    "holt 0.8": (1.17, 1.59),
    "holt 0.5": (1.13, 1.42),
    "ridge": (1.01, 1.11),
    "csp": (1.51, 1.24),
    "peers": (1.02, 1.35),
    "day naive": (4.06, 1.57),
    "day 1.0 1.0": (1.17, 1.14),
    "day 0.5 1.0": (1.33, 1.14),
    "day 0.5 0.9": (1.42, 1.41),
    "day 0.2 0.9": (1.86, 1.44),
    "day 0.5 0.7": (1.86, 1.55),
    "profile 0.7 1.0": (1.14, 1.15),
    "profile 0.3 1.0": (1.44, 1.15),
    "profile 0.3 0.9": (1.53, 1.55),
    "profile 0.1 0.95": (2.03, 1.37),
    "analog shape 0.93 1.0": (1.10, 1.01),
    "analog level 0.93 0.9": (1.17, 1.26),
    "analog level 0.97 0.95": (1.28, 1.14),
    "analog level 0.8 0.95": (1.05, 1.08),
    "analog level 0.8 0.9": (1.15, 1.25),
    "week 0.5 1.0": (1.55, 1.51),
    "week 0.3 0.9": (1.97, 1.66),
    "wide day 0.7 1.0": (1.14, 1.13),
    "wide day 0.5 1.0": (1.24, 1.13),
    "wide day 0.3 0.95": (1.46, 1.25),
    "wide profile 0.7 1.0": (1.04, 1.10),
    "wide profile 0.5 1.0": (1.12, 1.10),
    "wide profile 0.3 0.95": (1.33, 1.30),
    "wide profile 0.2 0.9": (1.60, 1.55),
    "wide analog shape 0.93 1.0": (1.00, 1.00),
    "wide analog level 0.8 0.97": (1.01, 1.07),
    "wide analog level 0.97 0.95": (1.23, 1.12),
    "wide week 0.5 1.0": (1.41, 1.46),
    "wide week 0.3 0.9": (1.83, 1.63),
}
"""Prior loss over the best expert's, 1 and 12 windows ahead, as measured on the days and clients that `bench/forecast`
calls tuned (`python -m bench.forecast priors`).
"""


class Weights:
    def __init__(self, rules: Sequence[WeightRule], num_kinds: int, prior: Array) -> None:
        num_ahead, num = prior.shape
        self._memory, self._eta, windows, self._share = (
            np.array(of, np.float32)[:, None, None, None]
            for of in zip(*((rule.memory, rule.eta, rule.prior_windows, rule.share) for rule in rules), strict=True)
        )
        self._for_prior = windows * np.sqrt(np.arange(1, num_ahead + 1, dtype=np.float32))[:, None]
        self._priors = prior.astype(np.float32) * self._for_prior
        self._losses = np.zeros((len(rules), num_kinds, num_ahead, num), np.float32)
        self._counts = np.zeros_like(self._losses)

    def learn(self, losses: Array, is_known: Mask) -> None:
        """Learn losses (K, up to H, N), NaN for none; skip kinds with an unknown load."""
        ahead, counted = losses.shape[1], np.isfinite(losses) & is_known[:, None, None]
        sums, counts = self._losses[:, :, :ahead], self._counts[:, :, :ahead]
        keep = np.where(is_known[:, None, None], self._memory, np.float32(1.0))
        sums *= keep
        sums += np.where(counted, losses, 0.0)
        counts *= keep
        counts += counted

    def of(self, there: Mask) -> Array:
        """Return weights (M, K, H, N), summing to 1 over N, of forecasts `there` (K, H, N)."""
        silent = np.where(there, np.float32(0.0), np.float32(np.inf))
        means = np.full_like(self._losses, np.inf)
        np.divide(self._losses, self._counts, out=means, where=self._counts > 0)
        means += silent
        best = means.min(axis=3, keepdims=True)
        best = np.where(np.isfinite(best), np.maximum(best, np.float32(1e-4)), np.float32(1.0))
        blended = np.multiply(best, self._priors, out=means)
        blended += self._losses
        blended /= self._counts + self._for_prior
        blended += silent
        over = np.divide(blended, blended.min(axis=3, keepdims=True), out=blended)
        over -= np.float32(1.0)
        over *= -self._eta
        found: Array = np.exp(np.maximum(over, np.float32(-50.0), out=over), out=over)
        found *= there
        found *= (1 - self._share) / found.sum(axis=3, keepdims=True)
        found += self._share * (there / there.sum(axis=2, keepdims=True, dtype=np.float32))
        return found


def prior_of(num_ahead: int) -> Array:
    along = np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)[:, None]
    near, far = np.array([PRIOR[name] for name in NAMES]).T
    found: Array = (1.0 - along) * near + along * far
    return found


NEAR: Final = 0.4  # d over v_h - v_1 for equal weights
MEMORY: Final = 0.99
LARGEST: Final = 2.0


class Changes:
    """v_h: mean square of z's change within 1..H windows."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._past = np.full((num_kinds, num_ahead), np.nan)  # z of the last H windows, newest first
        self._sums = np.zeros((num_kinds, num_ahead))
        self._weights = np.zeros((num_kinds, num_ahead))

    def learn(self, z: Array) -> None:
        changes = np.minimum(np.abs(z[:, None] - self._past), LARGEST)
        known = np.isfinite(changes)
        self._sums = self._sums * MEMORY + np.where(known, changes, 0.0) ** 2
        self._weights = self._weights * MEMORY + known
        self._past[:, 1:] = self._past[:, :-1].copy()
        self._past[:, 0] = z

    def trust(self, distances: Array) -> Array:
        """Return g_h, (K, H), for distances d (K); 0 one window ahead."""
        squares = self._sums / np.maximum(self._weights, 1.0)
        explained = np.maximum(squares - squares[:, :1], 0.0)
        found: Array = NEAR * explained / (NEAR * explained + distances[:, None] + 1e-9)
        return found


NAME: Final = "combined"
UNITS: Final = np.array(WindowDemand(1.0, 100.0, 100.0, 0.05, 0.5))
"""Small amounts beside one request: they bound ratios at zero load."""
MAX_LOSS: Final = 3.0
NUM_EXPERTS: Final = len(NAMES)
NUM_MIXED: Final = NUM_EXPERTS + len(RULES)
NUM_SAID: Final = NUM_MIXED + 2  # experts, rules' means, mixture, and its lean to days alike
QUANTILES: Final = (0.1, 0.9)
LATE: Final = 0.02  # widening of bands 12 windows ahead
BAND_STEP: Final = 0.04  # in spreads per window
SPREAD_RATE: Final = 0.06  # per window
MOST_CHANGES: Final = 50
LEAST_REQUESTS: Final = 5.0  # in both windows, for a change to count
LARGEST_CHANGE: Final = 1.0


class Alike:
    """Mean change of log requests between windows of the day, over all models that share this object."""

    def __init__(self, per_day: int) -> None:
        self._means = np.zeros(per_day)
        self._nums = np.zeros(per_day)

    def learn(self, number: int, before: float, after: float) -> None:
        if min(before, after) < LEAST_REQUESTS:
            return
        slot = number % len(self._means)
        change = min(max(float(np.log(after / before)), -LARGEST_CHANGE), LARGEST_CHANGE)
        self._nums[slot] = min(self._nums[slot] + 1, MOST_CHANGES)
        self._means[slot] += (change - self._means[slot]) / self._nums[slot]

    def ahead(self, number: int, num_ahead: int) -> Array | None:
        """Return changes from window `number`; None if any between was never seen."""
        slots = (number + np.arange(1, num_ahead + 1)) % len(self._means)
        if not self._nums[slots].all():
            return None
        found: Array = np.cumsum(self._means[slots])
        return found


class Combined:
    WINDOW_S: ClassVar[float] = 300.0

    def __init__(
        self, window_s: float = 300.0, params: CombinedParams = CombinedParams(), *, alike: Alike | None = None
    ) -> None:
        self.window_s, self.params = window_s, params
        self._alike = alike
        self._before = -1, 0.0
        self._per_day = max(1, round(params.season_s / window_s))
        self._ended_at: float | None = None
        self._anomaly = ""
        self._mixture: Mixture | None = None
        self._num_idle = 0

    def closed(self, window: WindowTotals) -> None:
        """Add a window; skipped ones count as missing. The past restarts after more than a season of them, or
        `max_windows` without load."""
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
        """Return other models' expected changes, and teach them this one's."""
        if self._alike is None:
            return None
        number = round(window.started_at / self.window_s)
        if math.isfinite(num_requests):
            if self._before[0] == number - 1:
                self._alike.learn(number, self._before[1], num_requests)
            self._before = number, num_requests
        return self._alike.ahead(number, self.params.num_horizons)

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast with bands; windows after the last weighted horizon repeat it."""
        if self._ended_at is None:
            return ()
        made, expected_by_step = [], self._expected()
        for step in range(num_ahead):
            expected, low, high = expected_by_step[min(step, len(expected_by_step) - 1)]
            made.append(
                forecast_of(
                    WindowDemand(*expected),
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
        """Return each expert's forecast of one kind (a field of `WindowDemand`) and weight, per horizon; NaN and 0 if
        unready."""
        if self._mixture is None:
            return {}
        row = WindowDemand._fields.index(kind)
        loads, weights = self._mixture.said(row)
        pairs = ((loads[:, at].tolist(), weights[:, at].tolist()) for at in range(len(NAMES)))
        return {name: list(zip(*pair, strict=True)) for name, pair in zip(NAMES, pairs, strict=True)}

    def _expected(self) -> list[list[list[float]]]:
        if self._mixture is None:
            return np.zeros((1, 3, len(UNITS))).tolist()
        return self._mixture.loads.transpose(2, 0, 1).tolist()


class Mixture:
    """Experts, weights and bands of one model, by kind, horizon and expert; `units` is a small amount of each kind."""

    def __init__(self, per_day: int, params: CombinedParams, units: Array = UNITS) -> None:
        self.params, self._units = params, units
        num_kinds, num_ahead = len(units), params.num_horizons
        self._experts = Experts(num_kinds, per_day, units, num_ahead, params.max_windows)
        self._weights = Weights(RULES, num_kinds, prior_of(num_ahead))
        self._across = Weights((ACROSS,), num_kinds, np.ones((num_ahead, len(RULES))))
        self._likened = Weights((LIKENED,), num_kinds, np.ones((num_ahead, 2)))
        self._changes = Changes(num_kinds, num_ahead)
        self._leans = np.zeros((num_kinds, num_ahead))
        self._said = np.zeros((num_ahead, num_kinds, num_ahead, NUM_SAID), np.float32)  # by window number modulo H
        self._together = np.zeros((num_ahead, num_kinds, num_ahead))  # log of the final forecast, likewise
        self._scale = np.zeros(num_kinds)
        self._bands = Bands(num_kinds, num_ahead)
        self.loads = np.zeros((3, num_kinds, num_ahead))  # expected, low and high of each window ahead
        self._spike: tuple[Mask, Array] | None = None  # kinds bounded last, their forecasts

    def close(self, load: Array, peers: Array | None) -> str:
        """Add a window, NaN where unknown; `peers` (H): change of other models' log load. Returns "spike", "missing" or
        ""."""
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
        middle, low, high = self.loads[:, :, step]
        return middle, low, high

    @property
    def latest(self) -> Array:
        """(K, H, N and more): log load by expert, NaN if unready."""
        found: Array = self._said[(self._experts.count - 1) % len(self._said)]
        return found

    def said(self, row: int) -> tuple[Array, Array]:
        """Return the experts' forecasts of one kind and their weights, (H, N) each."""
        z = self.latest
        loads: Array = np.maximum(np.exp(z[row, :, :NUM_EXPERTS].astype(float)) - self._units[row], 0.0)
        there = np.isfinite(z)
        weights = self._weights.of(there[..., :NUM_EXPERTS])
        rules = self._across.of(there[..., NUM_EXPERTS:NUM_MIXED])[0]
        shared: Array = np.einsum("mkhn,khm->khn", weights, rules)[row] * (1.0 - self._leans[row])[:, None]
        shared[:, DAYS_ALIKE] += self._leans[row]
        return loads, shared

    def _bounded(self, load: Array, expected: Array) -> tuple[Array, Mask]:
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
    """Quantiles of log(load) - log(forecast), in units of its recent mean absolute value."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._spread = np.full((num_kinds, num_ahead), 0.2)
        self._quantiles = np.stack([np.full((num_kinds, num_ahead), sign * 1.6) for sign in (-1.0, 1.0)])
        self._num = np.zeros((num_kinds, num_ahead))
        outside = LATE * np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)
        self._shares = QUANTILES[0] - outside, QUANTILES[1] + outside

    def learn(self, errors: Array, is_known: Mask) -> None:
        """Learn errors of forecasts made 1, 2, ... windows before (K, up to H)."""
        ahead, known = errors.shape[1], is_known[:, None].astype(float)
        self._num[:, :ahead] += known
        spread = self._spread[:, :ahead]
        step = np.maximum(BAND_STEP, 1.0 / (self._num[:, :ahead] + 10.0)) * known
        for row, share in enumerate(self._shares):
            quantile = self._quantiles[row, :, :ahead]
            quantile += step * 2.0 * (share[:ahead] - (errors <= quantile * spread))
        spread += np.maximum(SPREAD_RATE, 1.0 / (self._num[:, :ahead] + 3.0)) * known * (np.abs(errors) - spread)

    def around(self, middle: Array) -> tuple[Array, Array]:
        low, high = self._quantiles * self._spread
        return middle + np.minimum(low, 0.0), middle + np.maximum(high, 0.0)
