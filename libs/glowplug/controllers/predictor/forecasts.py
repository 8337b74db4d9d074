"""One model's forecaster at work: it learns each closed window, its forecasts are compared with what came, and they
carry what one instance takes (PreServe's mu, policies/throughput.py).

A model without objectives is held to the paper's own: `normalized_s` seconds per response token (section 5.1).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from glowplug.controllers.predictor.series import Series, Window
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import RequestFinished
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug.policies.throughput import CapacityParams, Served, Throughput

NUM_ERRORS = 30  # forecasts of late that `error_ratio` is about


@dataclass(slots=True)
class ModelForecasts:
    """What is expected of one model. `next_number` is the window that its forecaster learns next."""

    forecaster: Forecaster
    next_number: int
    num_kept: int
    latest: tuple[Forecast, ...] = ()
    past: deque[Forecast] = field(default_factory=deque)  # of windows gone by, one each
    throughput: Throughput = field(default_factory=Throughput)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)  # (how far off, what came)

    def close(self, series: Series) -> bool:
        """Learn every window that has closed since; False when there is none."""
        if self.next_number >= series.last:
            return False
        for number in range(max(self.next_number, series.last - series.num_kept + 1), series.last):
            window = series.at(number)
            self._judge(window, series.window_s)
            self.forecaster.closed(window.totals(series.window_s))
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
            )
            for one in made
        )
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

    def _judge(self, window: Window, window_s: float) -> None:
        """Compare what was expected of the window with what came."""
        about = next((f for f in self.latest if abs(f.starts_at - window.started_at) < window_s / 2), None)
        if about is None:
            return
        came = window.concurrency_seconds / window_s
        self._errors.append((abs(about.concurrency_mean - came), came))
        if len(self._errors) > NUM_ERRORS:
            self._errors.popleft()
        self.past.append(about)
        if len(self.past) > self.num_kept:
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
