"""The experts that `combined` weighs: cheap forecasts of one model, each right about some loads at some horizons.

All of them work on z = log(load + unit), so that an error is a ratio, and learn window by window. Shapes: K kinds of
load (the fields of `Reading`), H windows ahead, N experts, D windows a season (a day), k = 1..7 seasons back.

    level      the last window; means of the last ones, of z and of the load itself; damped trends (Holt)
    day, week  S_k(h) + rho^h r_k                   S_k: z smoothed over some windows, k seasons before the target
    profile    mean over k of S_k(h) + rho^h r_k           r_k: recent mean of z - S_k (rate alpha)
    analog     the same, weighted by 1 / variance^2 of z - S_k: the days that this one resembles count most
    wide       the same three over 13 windows instead of three: chance features of a single day count less
    csp        WarmServe section 5.1, Eq. 2-4 (`warmserve_csp.py` has the departures)
    ridge      change = features x weights, least squares that forget, for each horizon
    peers      the last window, and how the load of other models changed at that time of the day

`NAMES` lists them in the order of the last axis. Holt (1957) as damped by Gardner and McKenzie (1985).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MEANS: Final = (0.5, 0.25, 0.1)  # rates, of z
LOAD_MEANS: Final = (0.2,)  # rates, of the load itself
HOLTS: Final = ((0.8, 0.3, 0.9), (0.5, 0.2, 0.8))  # rates of level and trend, damping
RATES: Final = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1)  # of r_k
MEMORIES: Final = (0.8, 0.93, 0.97)  # of the variance of z - S_k, per window


class Kinds(NamedTuple):
    """The experts of one smoothing: (alpha, rho) each; of analogs (with the level or by the shape alone, index into
    MEMORIES, alpha, rho)."""

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
RIDGE: Final = 0.3  # weight of the prior of the least squares
FORGET: Final = 0.995  # of the least squares, per window


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
DAYS_ALIKE: Final = NAMES.index("wide analog level 0.8 0.97")  # the one towards which `combined_weights.py` leans


class Experts:
    """The experts of one model. `add` takes windows without gaps; `ahead` returns what each expert says after the last
    one."""

    def __init__(self, num_kinds: int, per_day: int, units: Array, num_ahead: int, max_windows: int) -> None:
        self.per_day, self.num_ahead, self.units = per_day, num_ahead, units
        self.num_days = max(1, min(NUM_DAYS, max_windows // per_day))
        self.count = 0  # windows added
        kept = self.num_days * per_day + 2
        self._past = np.zeros((num_kinds, kept), np.float32)  # z, by window number modulo `kept`
        self._means = np.zeros((len(MEANS), num_kinds))
        self._load_means = np.zeros((len(LOAD_MEANS), num_kinds))
        self._holts = np.zeros((len(HOLTS), 2, num_kinds))  # level and trend
        self._csp_sums = np.zeros((num_kinds, per_day), np.float32)
        self._csp_last = np.zeros((2, CSP_ERRORS, num_kinds))  # loads and errors of the last windows, newest first
        self._ridge = Ridge(num_kinds, num_ahead)
        steps = np.arange(1, num_ahead + 1)
        within = (steps - 1) % per_day + 1  # step within its season, since the horizon may be longer than a season
        offsets = within - np.arange(1, self.num_days + 1)[:, None] * per_day  # (k, H)
        self._seasons = [Season(kinds, num_kinds, per_day, kept, offsets, steps) for kinds in (NARROW, WIDE)]
        self._offsets, self._naive = offsets[0], np.empty(0)  # (K, H): z a season before each target
        self._trends = np.stack([np.cumsum(damping**steps) for _, _, damping in HOLTS])

    def add(self, load: Array) -> None:
        """Add the next window: K loads, none negative or NaN."""
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
        """Correct the load of the last window: in the past alone, not in the means that already include it."""
        z, at = np.log(load + self.units), self.count - 1
        slot, where = at % self.per_day, at % self._past.shape[1]
        self._csp_sums[:, slot] += load - (np.exp(self._past[:, where]) - self.units)
        self._keep(z, at)

    def last(self) -> Array:
        """The load of the last window, by kind."""
        return np.exp(self._at(self.count - 1)) - self.units

    def most(self) -> Array:
        """The highest load kept, by kind."""
        kept = min(self.count, self._past.shape[1])
        found: Array = np.exp(self._past[:, :kept].max(axis=1).astype(float)) - self.units
        return found

    def ahead(self, peers: Array | None = None) -> Array:
        """(K, H, N) of z; NaN for experts that know too little yet. `peers`: (H,), how z of other models changes."""
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
        """(K,): mean square of z's recent distance from the days alike, as `ahead` weighs them; 0 in the first
        season."""
        return self._seasons[-1].distances

    def _keep(self, z: Array, at: int) -> None:
        """Store z of a window, and update the means that contain it."""
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
        """(K, H, 6): changes over one and three windows, distance from the mean; and what followed a season before: the
        change from there to each target, z's distance from that day, and the mean of that change over all days."""
        found = np.zeros((len(z), self.num_ahead, NUM_FEATURES))
        found[:, :, :3] = np.stack((z - before[0], z - before[1], z - self._means[1]), axis=1)[:, None, :]
        season = self._seasons[0]
        if season.known:
            here = season.above[0, : season.known]  # z - S_k now
            found[:, :, 3] = self._naive + (here[0] - z)[:, None]
            found[:, :, 4] = here[0][:, None]
            found[:, :, 5] = season.profile + (here.mean(axis=0) - z)[:, None]
        return found

    def _at(self, number: int) -> Array:
        return self._past[:, max(0, number) % self._past.shape[1]].astype(float)


class Season:
    """Forecasts from the days before, smoothed over some windows, and this day's distance from each of them."""

    def __init__(
        self, kinds: Kinds, num_kinds: int, per_day: int, kept: int, offsets: NDArray[np.int_], steps: NDArray[np.int_]
    ) -> None:
        self.num_sides, self.num = kinds.num_sides, sum(len(of) for of in kinds[1:])
        self.known, self.before = 0, np.empty(0)  # number of seasons back; (k, K, H): S_k
        self.profile = np.empty(0)  # (K, H): mean of S_k
        num_days = len(offsets)
        self.above = np.zeros((len(RATES), num_days, num_kinds))  # r_k
        # Mean square of z - S_k over the days, weighted as by the `level` analog with the shortest memory.
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
        """Update the means that contain window `at`, from z of the last windows (K, 2 sides + 1); the newest means are
        of the windows known so far."""
        num = min(self.num_sides, at, self._smooth.shape[1] - 1) + 1
        back = np.arange(num)
        over = np.minimum(back + self.num_sides, at) + 1  # windows in each mean
        sums = np.cumsum(newest_first, axis=1)
        self._smooth[:, (at - back) % self._smooth.shape[1]] = sums[:, over - 1] / over

    def learn(self, z: Array, at: int) -> None:
        """Learn how far window `at` lies above the same window of each day before."""
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
        """Look up S_k of every target after window `at`; none in the first season."""
        self.known = min(len(self._offsets), at // self._per_day)
        if self.known:
            where = (at + self._offsets[: self.known]) % self._smooth.shape[1]
            self.before = self._smooth[:, where].astype(float).transpose(1, 0, 2)
            self.profile = self.before.mean(axis=0)

    def ahead(self, found: Array) -> None:
        """Write what the season's experts expect into `found` (K, H, num). NaN stays where they know too little."""
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
        levels = (shares * above[rates]).sum(axis=1)  # (n, K)
        until = at + len(self._kinds.analogs)
        found[:, :, at:until] = np.einsum("ndk,dkh->khn", shares, self.before) + levels.T[:, None, :] * fades
        if self.known == NUM_DAYS:
            rates, fades = self._weeks
            found[:, :, until:] = self.before[-1][..., None] + above[rates, -1].T[:, None, :] * fades

    def _likeness(self) -> Array:
        """(n, k, K), of sum 1 over k: how much this day is like each of those before, for each analog."""
        weight, first, second = self._moments[:, :, : self.known].swapaxes(0, 1)
        squares, mean = second / weight, first / weight
        variance = np.maximum(squares[self._memories] - self._are_shapes * mean[self._memories] ** 2, 0.0)
        likeness = 1.0 / (variance + 0.05 * variance.min(axis=1, keepdims=True) + 1e-4) ** 2
        shares: Array = likeness / likeness.sum(axis=1, keepdims=True)
        self.distances = (shares[self._nearest] * squares[0]).sum(axis=0)
        return shares


class Ridge:
    """Least squares of z(t + h) - z(t) on features, one for each kind and horizon, that forgets at rate FORGET towards
    a prior: 0.7 of the mean change on the days before."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        shape = (num_kinds, num_ahead, NUM_FEATURES)
        self._prior = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.7])
        self._squares = np.broadcast_to(RIDGE * np.eye(NUM_FEATURES), (*shape, NUM_FEATURES)).copy()
        self._products = np.broadcast_to(RIDGE * self._prior, shape).copy()
        self._seen = np.zeros((num_ahead, *shape), np.float32)  # features, by window number modulo H
        self._was = np.zeros((num_ahead, num_kinds))  # z, likewise
        self._num = 0

    def see(self, features: Array, z: Array) -> None:
        """Store the features known after a window of `z`."""
        at = self._num % len(self._seen)
        self._seen[at], self._was[at] = features, z
        self._num += 1

    def learn(self, z: Array) -> None:
        """Learn that the window after those seen brought `z`."""
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
        """Expected z, (K, H)."""
        features = self._seen[(self._num - 1) % len(self._seen)]
        weights = np.linalg.solve(self._squares, self._products[..., None])[..., 0]
        found: Array = z[:, None] + (features * weights).sum(axis=2)
        return found


def weighted(newest_first: Array) -> Array:
    """WarmServe Eq. 3 as intended (erratum E1): the mean of the rows, with weights that halve from each row to the next
    older one; zeros if there is no row."""
    weights = 0.5 ** np.arange(len(newest_first))
    found: Array = weights @ newest_first / max(float(weights.sum()), 1.0)
    return found


def _fades(pairs: Sequence[tuple[float, float]], steps: NDArray[np.int_]) -> tuple[NDArray[np.int_], Array]:
    """The index of each alpha in RATES, and rho^h as (H, n)."""
    rates = np.array([RATES.index(alpha) for alpha, _ in pairs])
    return rates, np.array([rho for _, rho in pairs]) ** steps[:, None]
