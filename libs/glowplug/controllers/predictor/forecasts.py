"""Forecasts of one model: its forecaster learns each closed window, and past forecasts are compared with it.

A forecast carries the capacity of one instance (PreServe's mu, policies/throughput.py). A model without objectives is
judged by the paper's own: `normalized_s` seconds per response token (section 5.1).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from glowplug.controllers.predictor.series import Series, Window
from glowplug.domain.access import Priority
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import RequestFinished
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug.policies.start_times import FROM_NOTHING
from glowplug.policies.throughput import CapacityParams, Served, Throughput

LEAST_GROWS = 1.01  # growth per window, so that a model that became slower shows after a while
LEAST_RATIO = 0.01  # least value to grow from: a window without a miss has 0
NUM_ERRORS = 30  # recent forecasts that `error_ratio` averages
AHEAD_KEPT = frozenset((1, 2, 3, 6, 12))  # windows ahead of the forecasts kept, beside those furthest ahead
NUM_PAST = 288  # past windows whose forecasts are kept: a day of 300 s windows


@dataclass(slots=True)
class ModelForecasts:
    """Forecasts of one model. `next_number`: the window that its forecaster learns next."""

    forecaster: Forecaster
    next_number: int
    num_kept: int
    latest: tuple[Forecast, ...] = ()
    past: deque[Forecast] = field(default_factory=deque)  # of past windows, oldest window and oldest forecast first
    _to_come: dict[int, list[Forecast]] = field(default_factory=dict)  # by number of the window, oldest first
    throughput: Throughput = field(default_factory=Throughput)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)  # (absolute error, actual value)
    _objective_ratio: float = 0.0  # of the last closed window
    _least_ratio: float = math.inf  # the least of recent windows

    def close(self, series: Series) -> bool:
        """Learn every window that has closed since the last call; False when none has."""
        if self.next_number >= series.last:
            return False
        for number in range(max(self.next_number, series.last - series.num_kept + 1), series.last):
            window = series.at(number)
            self._judge(window, series.window_s)
            self.forecaster.closed(window.totals(series.window_s))
            self._objective_ratio = self._held_against_the_least(window)
        self.next_number = series.last
        return True

    def make(self, now_s: float, num_ahead: int) -> tuple[Forecast, ...]:
        """Make the forecasts of the next `num_ahead` windows, with mu and the recent error of such forecasts."""
        made, mu = self.forecaster.forecast(now_s, num_ahead), self.throughput.capacity
        self.latest = tuple(
            replace(
                one,
                error_ratio=self.error_ratio,
                prompt_per_s=mu.prompt_per_s,
                response_per_s=mu.response_per_s,
                total_per_s=mu.total_per_s,
                rates_from=self.throughput.source,
                objective_ratio=self._objective_ratio,
            )
            for one in made
        )
        for ahead, one in enumerate(self.latest, 1):
            if ahead in AHEAD_KEPT or ahead == len(self.latest):
                self._to_come.setdefault(round(one.starts_at / one.window_s), []).append(one)
        return self.latest

    def learn(self, history: Iterable[WindowTotals]) -> None:
        """Learn windows from before this process began, oldest first, without a gap."""
        for window in history:
            self.forecaster.closed(window)
            self.next_number = round((window.started_at + window.window_s) / window.window_s)

    @property
    def error_ratio(self) -> float:
        """Mean absolute error of the mean concurrency, over the mean of the actual one; 0 while there was none."""
        came = sum(value for _, value in self._errors)
        return sum(off for off, _ in self._errors) / came if came > 0 else 0.0

    def _held_against_the_least(self, window: Window) -> float:
        """The share of its objective that the window took. Where the model takes half of it or more even in its best
        windows, as with few tokens after a long prompt, twice those is its objective: more instances do not help."""
        if not window.num_judged:
            return 0.0
        self._least_ratio = min(max(self._least_ratio, LEAST_RATIO) * LEAST_GROWS, window.objective_ratio)
        return window.objective_ratio / max(1.0, 2 * self._least_ratio)

    def _judge(self, window: Window, window_s: float) -> None:
        """Compare what was forecast of a closed window with what came."""
        self._keep(window, window_s)
        about = next((f for f in self.latest if abs(f.starts_at - window.started_at) < window_s / 2), None)
        if about is None:
            return
        came = window.concurrency_seconds / window_s
        self._errors.append((abs(about.concurrency_mean - came), came))
        if len(self._errors) > NUM_ERRORS:
            self._errors.popleft()

    def _keep(self, window: Window, window_s: float) -> None:
        """Keep the forecasts of a closed window, and drop those of windows long past."""
        number = round(window.started_at / window_s)
        self.past.extend(self._to_come.get(number, ()))
        self._to_come = {at: made for at, made in self._to_come.items() if at > number}
        oldest = (number - min(NUM_PAST, self.num_kept) + 0.5) * window_s
        while self.past and self.past[0].starts_at < oldest:
            self.past.popleft()


def served(request: RequestFinished, model: Model | None, params: CapacityParams) -> Served | None:
    """The measurement of an instance by one answer; None where the answer had no instance, or several."""
    if not request.instance_id or request.num_continued or not request.response_tokens:
        return None
    return Served(
        instance_id=request.instance_id,
        sent_at=request.arrived_at + request.queue_s,
        first_at=request.arrived_at + max(request.queue_s, request.ttft_s),
        ended_at=request.finished_at,
        prompt_tokens=request.prompt_tokens,
        response_tokens=request.response_tokens,
        missed=not request.cold and request.priority != Priority.BATCH and missed(request, model, params),
    )


def objective_used(request: RequestFinished, model: Model | None, params: CapacityParams) -> float | None:
    """The share of its model's objective that one request took; None for a request that waited for a start or whose
    client left. Where the model has objectives, the mean over a window is the share of requests that missed one, over
    the share that may: above 1 the window has missed. Else it is the seconds per token over the allowed ones."""
    if request.cold or request.error_code == "client_left":
        return None
    slo = model.slo if model is not None else None
    if request.error_code or (slo is not None and (slo.ttft_s or slo.tpot_s)):
        return missed(request, model, params) / max(1e-3, 1 - params.clean_share)
    return request.e2e_s / max(1, request.response_tokens) / params.normalized_s


def missed(request: RequestFinished, model: Model | None, params: CapacityParams) -> bool:
    """Return whether a request failed or missed an objective of its model. A client that leaves misses nothing."""
    if request.error_code and request.error_code != "client_left":
        return True
    slo = model.slo if model is not None else None
    num_more = max(1, request.response_tokens - 1)
    if slo is not None and (slo.ttft_s or slo.tpot_s):
        is_late = slo.ttft_s > 0 and request.ttft_s > slo.ttft_s
        return is_late or (slo.tpot_s > 0 and (request.e2e_s - request.ttft_s) / num_more > slo.tpot_s)
    return request.e2e_s / max(1, request.response_tokens) > params.normalized_s


NUM_STARTS: Final = 3


@dataclass(slots=True)
class Horizons:
    """The seconds of each model's last starts, by model_key."""

    _took: dict[str, deque[tuple[str, float]]] = field(default_factory=dict)  # (instance_id, seconds)

    def take(self, row: Instance) -> None:
        """Take a row of an instance; each start from nothing counts once."""
        if row.start_kind not in FROM_NOTHING or not 0 < row.created_at < row.ready_at:
            return
        known = self._took.setdefault(row.model_key, deque(maxlen=NUM_STARTS))
        if all(instance_id != row.instance_id for instance_id, _ in known):
            known.append((row.instance_id, row.ready_at - row.created_at))

    def restore(self, rows: Iterable[Instance]) -> None:
        """Take the rows of the table, in the order in which they became ready."""
        for row in sorted(rows, key=lambda row: (row.ready_at, row.instance_id)):
            self.take(row)

    def drop(self, model_key: str) -> None:
        """Forget a model that is gone."""
        self._took.pop(model_key, None)

    def of(self, model_key: str) -> float:
        """Median seconds of the model's last starts; 0 before the first."""
        known = self._took.get(model_key)
        return median(seconds for _, seconds in known) if known else 0.0
