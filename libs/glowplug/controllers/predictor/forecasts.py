"""One model's forecaster at work: it learns each closed window, its forecasts are compared with what came, and they
carry what one instance takes (PreServe's mu, policies/throughput.py).

A model without objectives is held to the paper's own: `normalized_s` seconds per response token (section 5.1).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from glowplug.controllers.predictor.series import Series, Window
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import RequestFinished
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug.policies.throughput import CapacityParams, Served, Throughput

LEAST_GROWS = 1.01  # by window, so that a model which has become slower is known after a while
LEAST_RATIO = 0.01  # from which it grows: a window that missed nothing took 0
NUM_ERRORS = 30  # forecasts of late that `error_ratio` is about
AHEAD_KEPT = frozenset((1, 2, 3, 6, 12))  # windows ahead; those made as far ahead as any are kept too
NUM_PAST = 288  # windows gone by whose forecasts are kept: a day of 300 s windows


@dataclass(slots=True)
class ModelForecasts:
    """What is expected of one model. `next_number` is the window that its forecaster learns next."""

    forecaster: Forecaster
    next_number: int
    num_kept: int
    latest: tuple[Forecast, ...] = ()
    past: deque[Forecast] = field(default_factory=deque)  # of windows gone by, oldest window and oldest forecast first
    _to_come: dict[int, list[Forecast]] = field(default_factory=dict)  # by number of the window, oldest first
    throughput: Throughput = field(default_factory=Throughput)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)  # (how far off, what came)
    _objective_ratio: float = 0.0  # of the last closed window
    _least_ratio: float = math.inf  # of any window of late

    def close(self, series: Series) -> bool:
        """Learn every window that has closed since; False when there is none."""
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
        """Forecasts of the windows to come, with their kind's error of late and mu."""
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
        """Windows of before this process's time, oldest first, without a gap."""
        for window in history:
            self.forecaster.closed(window)
            self.next_number = round((window.started_at + window.window_s) / window.window_s)

    @property
    def error_ratio(self) -> float:
        """Mean absolute error of the mean concurrency, over the mean of what came; 0 while nothing came."""
        came = sum(value for _, value in self._errors)
        return sum(off for off, _ in self._errors) / came if came > 0 else 0.0

    def _held_against_the_least(self, window: Window) -> float:
        """Of its objective, what the window took. Where the model takes half of it or more even in its best windows,
        as with a few tokens after a long prompt, twice of those is its objective: more instances change nothing."""
        if not window.num_judged:
            return 0.0
        self._least_ratio = min(max(self._least_ratio, LEAST_RATIO) * LEAST_GROWS, window.objective_ratio)
        return window.objective_ratio / max(1.0, 2 * self._least_ratio)

    def _judge(self, window: Window, window_s: float) -> None:
        """Compare what was expected of the window with what came."""
        self._keep(window, window_s)
        about = next((f for f in self.latest if abs(f.starts_at - window.started_at) < window_s / 2), None)
        if about is None:
            return
        came = window.concurrency_seconds / window_s
        self._errors.append((abs(about.concurrency_mean - came), came))
        if len(self._errors) > NUM_ERRORS:
            self._errors.popleft()

    def _keep(self, window: Window, window_s: float) -> None:
        """What had been expected of a window that has closed stays beside it, until that is too long ago."""
        number = round(window.started_at / window_s)
        self.past.extend(self._to_come.get(number, ()))
        self._to_come = {at: made for at, made in self._to_come.items() if at > number}
        oldest = (number - min(NUM_PAST, self.num_kept) + 0.5) * window_s
        while self.past and self.past[0].starts_at < oldest:
            self.past.popleft()


def served(request: RequestFinished, model: Model | None, params: CapacityParams) -> Served | None:
    """What one answer says of its instance; nothing where it had none, or several."""
    if not request.instance_id or request.num_continued or not request.response_tokens:
        return None
    return Served(
        instance_id=request.instance_id,
        sent_at=request.arrived_at + request.queue_s,
        first_at=request.arrived_at + max(request.queue_s, request.ttft_s),
        ended_at=request.finished_at,
        prompt_tokens=request.prompt_tokens,
        response_tokens=request.response_tokens,
        missed=not request.cold and missed(request, model, params),
    )


def objective_used(request: RequestFinished, model: Model | None, params: CapacityParams) -> float | None:
    """How much of its model's objective one request took; nothing is said by one that waited for a start, and by one
    whose client left. Where the model has objectives its mean over a window is the share that missed one, over the
    share that may: above 1 the window has missed; else it is the seconds per token over those that are allowed."""
    if request.cold or request.error_code == "client_left":
        return None
    slo = model.slo if model is not None else None
    if request.error_code or (slo is not None and (slo.ttft_s or slo.tpot_s)):
        return missed(request, model, params) / max(1e-3, 1 - params.clean_share)
    return request.e2e_s / max(1, request.response_tokens) / params.normalized_s


def missed(request: RequestFinished, model: Model | None, params: CapacityParams) -> bool:
    """Whether one request was not served as its model's objectives say. A client that leaves misses nothing."""
    if request.error_code and request.error_code != "client_left":
        return True
    slo = model.slo if model is not None else None
    num_more = max(1, request.response_tokens - 1)
    if slo is not None and (slo.ttft_s or slo.tpot_s):
        is_late = slo.ttft_s > 0 and request.ttft_s > slo.ttft_s
        return is_late or (slo.tpot_s > 0 and (request.e2e_s - request.ttft_s) / num_more > slo.tpot_s)
    return request.e2e_s / max(1, request.response_tokens) > params.normalized_s
