"""The predictor: counts the demand of each model by window, and forecasts later windows.

    router.load_reported | router.requests_finished | tick ──▶ windows ──▶ policy `prediction` ──▶ forecast.made

What it is notified of (reads.py)
  - `model.deployed`, for objectives; every `instance.*`, for start seconds, engines' reports and whether they serve.
  - Ticks, which close windows and forget the load of a router silent for `router_lease_s`.

What it asks
  - `forecast.made`, one per model when a window has closed: forecasts of the open and later windows, with mu (tokens
    per second of one instance, PreServe section 4.1, and whether declared or measured) and the forecaster's recent
    error. Where the policy follows starts, they reach as far as a start takes (`horizon_s`).

What it promises
  - A window's concurrency is the integral of the routers' load, however frequent the ticks.
  - It keeps `num_windows` windows of at most `max_models` models; empty windows cost nothing.
  - The next leader inherits the past, which no table has.
  - An emptied store drops no series; a model missing from a table with rows loses its series.

What it never does
  - It changes nothing: autoscaler and placer act on forecasts, or do without.
  - It forecasts no batch requests: those fill idle capacity, without starts or prewarming. One that has waited long
    enough to count as standard (controllers/router/controller.py) counts here too.
  - It reads no prompt and keeps no single request, only sums of a window and of an instance's last minutes.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final, get_args

from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.controllers.port import Handlers, dispatch
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.access import Priority
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Slo
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.envelope import Event
from glowplug.events.facts import (
    ForecastMade,
    InstanceChange,
    InstanceReady,
    ModelDeployed,
    RequestFinished,
    RouterLoadReported,
    RouterRequestsFinished,
)
from glowplug.fleet.demand import LoadReports
from glowplug.fleet.start_times import FROM_NOTHING
from glowplug.fleet.tables import InstanceTable
from glowplug.fleet.throughput import Capacity, CapacityParams, Served, Throughput
from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.prediction.port import Forecaster, MakeForecaster, WindowTotals, make_with, shared

# Demand is concurrency (WarmServe section 5.1: average is time-weighted, peak is the maximum of a window) and tokens
# per window (PreServe section 4.1).


@dataclass(slots=True)
class Window:
    """Demand of one model in one window; token counts are exact if `num_tokens_exact` covers every request."""

    started_at: float
    num_requests: int = 0
    num_cold: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_tokens_exact: int = 0
    concurrency_peak: int = 0
    concurrency_seconds: float = 0.0  # integral
    num_missed: int = 0
    num_judged: int = 0  # requests in `objective_sum`
    objective_sum: float = 0.0  # of the shares that requests took of their objective
    instance_seconds: float = 0.0  # integral of the number of busy ones
    kv_peak_ratio: float = 0.0  # expected by a router
    slots_per_instance: int = 0  # most requests on one instance; 0: not reported

    @property
    def objective_ratio(self) -> float:
        """Mean share of the objective taken: above 1 missed; 0 if no request counts."""
        return self.objective_sum / self.num_judged if self.num_judged else 0.0

    def totals(self, window_s: float) -> WindowTotals:
        return WindowTotals(
            started_at=self.started_at,
            window_s=window_s,
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            concurrency_mean=self.concurrency_seconds / window_s,
            concurrency_peak=self.concurrency_peak,
        )


@dataclass(frozen=True, slots=True)
class RouterLoad:
    concurrency: int
    busy: Collection[str]


@dataclass(slots=True)
class Series:
    """Windows by number (start over width); empty ones are not stored."""

    window_s: float
    num_kept: int
    first: int = 0  # oldest kept, empty or not
    last: int = 0
    windows: dict[int, Window] = field(default_factory=dict)
    by_router: dict[str, RouterLoad] = field(default_factory=dict)
    concurrency: int = 0
    changed_at: float = 0.0

    def at(self, number: int) -> Window:
        """Return a window; an empty one if nothing happened."""
        return self.windows.get(number) or Window(started_at=number * self.window_s)

    def open(self) -> Window:
        window = self.windows.get(self.last)
        if window is None:
            started_at = self.last * self.window_s
            window = self.windows[self.last] = Window(started_at, concurrency_peak=self.concurrency)
        return window

    def advance(self, now_s: float) -> None:
        """Close windows up to `now_s`, spread the current concurrency over them, and drop old ones."""
        width, number = self.window_s, int(now_s // self.window_s)
        if number == self.last:
            self._spread(now_s)
            return
        oldest = number - self.num_kept + 1
        if self.last < oldest:  # after a long pause, skip windows too old to keep
            self.last, self.changed_at = oldest, max(self.changed_at, oldest * width)
        while self.last < number and self.concurrency:
            self._spread((self.last + 1) * width)
            self.last += 1
        self.last = max(self.last, number)
        self._spread(now_s)
        self.first = max(self.first, oldest)
        while self.windows and (first := next(iter(self.windows))) < oldest:
            del self.windows[first]

    def report(self, router_id: str, load: RouterLoad, kv_peak_ratio: float = 0.0, slots: int = 0) -> None:
        """`slots`: of each instance; `kv_peak_ratio`: highest expected KV cache usage."""
        before = self.by_router.get(router_id)
        self.by_router[router_id] = load
        self.concurrency += load.concurrency - (before.concurrency if before else 0)
        if self.concurrency:
            window = self.open()
            window.concurrency_peak = max(window.concurrency_peak, self.concurrency)
            window.kv_peak_ratio = max(window.kv_peak_ratio, kv_peak_ratio)
            window.slots_per_instance = max(window.slots_per_instance, slots)

    def left(self, router_id: str) -> None:
        self.concurrency -= self.by_router.pop(router_id).concurrency

    def _spread(self, until_s: float) -> None:
        if self.concurrency:
            seconds, window = max(0.0, until_s - self.changed_at), self.open()
            window.concurrency_seconds += self.concurrency * seconds
            window.instance_seconds += self._num_busy() * seconds
        self.changed_at = max(self.changed_at, until_s)

    def _num_busy(self) -> int:
        if len(self.by_router) == 1:
            return len(next(iter(self.by_router.values())).busy)
        return len({i for load in self.by_router.values() for i in load.busy})


# A forecast carries one instance's capacity (PreServe's mu, fleet/throughput.py). A model without objectives is judged
# by the paper's own: `normalized_s` seconds per response token (section 5.1).

LEAST_GROWS = 1.01  # per window, so that a slower model shows after a while
LEAST_RATIO = 0.01  # to grow from: a window without a miss has 0
NUM_ERRORS = 30
AHEAD_KEPT = frozenset((1, 2, 3, 6, 12))  # windows ahead, beside the furthest
NUM_PAST = 288  # a day of 300 s windows


@dataclass(slots=True)
class ModelForecasts:
    """Forecasts of one model. `next_number`: the window that its forecaster learns next."""

    forecaster: Forecaster
    next_number: int
    num_kept: int
    latest: tuple[Forecast, ...] = ()
    past: deque[Forecast] = field(default_factory=deque)  # oldest window and oldest forecast first
    _to_come: dict[int, list[Forecast]] = field(default_factory=dict)  # by window number, oldest first
    throughput: Throughput = field(default_factory=Throughput)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)
    _objective_ratio: float = 0.0
    _least_ratio: float = math.inf  # of recent windows

    def close(self, series: Series) -> bool:
        """Learn every window closed since the last call; return False if none."""
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
        """Learn earlier windows, oldest first, without a gap."""
        for window in history:
            self.forecaster.closed(window)
            self.next_number = round((window.started_at + window.window_s) / window.window_s)

    @property
    def error_ratio(self) -> float:
        """Mean absolute error of the mean concurrency over its actual mean."""
        came = sum(value for _, value in self._errors)
        return sum(off for off, _ in self._errors) / came if came > 0 else 0.0

    def _held_against_the_least(self, window: Window) -> float:
        """Hold a model that takes half of its objective or more even in its best windows, as with few tokens after a
        long prompt, to twice those: more instances do not help."""
        if not window.num_judged:
            return 0.0
        self._least_ratio = min(max(self._least_ratio, LEAST_RATIO) * LEAST_GROWS, window.objective_ratio)
        return window.objective_ratio / max(1.0, 2 * self._least_ratio)

    def _judge(self, window: Window, window_s: float) -> None:
        self._keep(window, window_s)
        about = next((f for f in self.latest if abs(f.starts_at - window.started_at) < window_s / 2), None)
        if about is None:
            return
        came = window.concurrency_seconds / window_s
        self._errors.append((abs(about.concurrency_mean - came), came))
        if len(self._errors) > NUM_ERRORS:
            self._errors.popleft()

    def _keep(self, window: Window, window_s: float) -> None:
        number = round(window.started_at / window_s)
        self.past.extend(self._to_come.get(number, ()))
        self._to_come = {at: made for at, made in self._to_come.items() if at > number}
        oldest = (number - min(NUM_PAST, self.num_kept) + 0.5) * window_s
        while self.past and self.past[0].starts_at < oldest:
            self.past.popleft()


def served(request: RequestFinished, model: Model | None, params: CapacityParams) -> Served | None:
    """Measure an instance by one answer; None if it had no instance, or several."""
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
    """Return the share of its model's objective that a request took; None if it waited for a start or its client left.

    With objectives, the mean is the share of requests that missed one over the share that may: above 1 the window
    missed. Without, it is seconds per token over those allowed.
    """
    if request.cold or request.error_code == "client_left":
        return None
    slo = model.slo if model is not None else None
    if request.error_code or (slo is not None and (slo.ttft_s or slo.tpot_s)):
        return missed(request, model, params) / max(1e-3, 1 - params.clean_share)
    return request.e2e_s / max(1, request.response_tokens) / params.normalized_s


def missed(request: RequestFinished, model: Model | None, params: CapacityParams) -> bool:
    """Return whether a request failed or missed an objective. A client that leaves misses nothing."""
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
    _took: dict[str, deque[tuple[str, float]]] = field(default_factory=dict)

    def take(self, row: Instance) -> None:
        """Count each start from nothing once."""
        if row.start_kind not in FROM_NOTHING or not 0 < row.created_at < row.ready_at:
            return
        known = self._took.setdefault(row.model_key, deque(maxlen=NUM_STARTS))
        if all(instance_id != row.instance_id for instance_id, _ in known):
            known.append((row.instance_id, row.ready_at - row.created_at))

    def restore(self, rows: Iterable[Instance]) -> None:
        """Take rows in order of readiness."""
        for row in sorted(rows, key=lambda row: (row.ready_at, row.instance_id)):
            self.take(row)

    def drop(self, model_key: str) -> None:
        self._took.pop(model_key, None)

    def of(self, model_key: str) -> float:
        """Return the median seconds of the last starts; 0 before the first."""
        known = self._took.get(model_key)
        return median(seconds for _, seconds in known) if known else 0.0


MAX_AHEAD: Final = 288  # windows


class PredictorController:
    """State machine of the predictor. `make`: a policy of the kind "prediction"; `history`: earlier windows by
    model_key, oldest first, of the same width; `capacities`: of one instance, measured elsewhere."""

    def __init__(
        self,
        params: PredictorParams = PredictorParams(),
        make: MakeForecaster = Nothing,
        *,
        history: Mapping[str, Sequence[WindowTotals]] | None = None,
        capacities: Mapping[str, Capacity] | None = None,
    ) -> None:
        self.params, self._make = params, make
        self.window_s: float = params.window_s or getattr(make, "WINDOW_S", Nothing.WINDOW_S)
        self._capacities = dict(capacities or {})
        self._series: dict[str, Series] = {}
        self._expected: dict[str, ModelForecasts] = {}
        self._models: Mapping[str, Model] = {}
        self._reports = LoadReports()
        self._horizons = Horizons()
        self._instances = InstanceTable(keeps_gone=False)
        self._unsteady_at: dict[str, float] = {}  # last seen not READY, by instance_id
        self._throughputs: dict[str, Throughput] = {}
        self._alike = shared(make, self.window_s, params.season_s)
        self._follows_starts: bool = getattr(make, "FOLLOWS_STARTS", False)
        self.handlers: Handlers = {
            Tick: self._on_tick,
            RouterLoadReported: self._on_load,
            RouterRequestsFinished: self._on_finished,
            ModelDeployed: self._on_deployed,
            **dict.fromkeys(get_args(InstanceChange), self._on_instance),
        }
        for key, windows in (history or {}).items():
            self._expecting(key, 0).learn(windows)

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        return dispatch(self.handlers, stimulus, now_s)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take `models`, dropping series of missing ones (none over an emptied store), or `instances`, learning start
        seconds."""
        if table == "instances":
            self._horizons.restore(rows.values())
            for row in self._instances.restore(rows, now_s):
                self._seen(row, now_s)
            self._unsteady_at = {i: at for i, at in self._unsteady_at.items() if i in self._instances.by_id}
            return []
        if not rows:
            return []
        self._know(dict(rows))
        for key in [k for k in self._series if k not in rows]:
            del self._series[key]
            self._expected.pop(key, None)
            self._throughputs.pop(key, None)
            self._horizons.drop(key)
        return []

    def inherit(self, earlier: "PredictorController", now_s: float) -> None:
        self._series, self._expected, self._models = earlier._series, earlier._expected, earlier._models
        self._reports, self._horizons, self._throughputs = earlier._reports, earlier._horizons, earlier._throughputs
        self._unsteady_at = dict(earlier._unsteady_at)
        self._alike = earlier._alike  # shared with the inherited forecasters

    @property
    def forecasts(self) -> dict[str, tuple[Forecast, ...]]:
        return {key: expected.latest for key, expected in self._expected.items() if expected.latest}

    def past_forecasts(self, model_key: str) -> list[Forecast]:
        """Return forecasts of closed windows, oldest first, each made several windows ahead."""
        expected = self._expected.get(model_key)
        return list(expected.past) if expected else []

    def horizon_s(self, model_key: str) -> float:
        """Return recent start seconds where forecasts reach that far; else 0."""
        return self._horizons.of(model_key) if self._follows_starts else 0.0

    def windows(self, model_key: str) -> list[Window]:
        """Return the windows, oldest first, with empty ones; the last is open."""
        series = self._series.get(model_key)
        return [] if series is None else [series.at(n) for n in range(series.first, series.last + 1)]

    @property
    def model_keys(self) -> list[str]:
        return sorted(self._series)

    def _know(self, models: Mapping[str, Model]) -> None:
        self._models = self._reports.deployed = models

    def _on_load(self, event: Event, now_s: float) -> list[Effect]:
        report: RouterLoadReported = event.data
        self._absent(report.router_id, self._reports.take(report, now_s).keys(), now_s)
        for key, load in report.loads.items():
            self._count_load(key, report.router_id, load, now_s)
        return []

    def _on_instance(self, event: Event, now_s: float) -> list[Effect]:
        row: Instance = event.data.instance
        if isinstance(event.data, InstanceReady):
            self._horizons.take(row)
        if self._instances.apply(row, now_s):
            self._seen(row, now_s)
        return []

    def _on_deployed(self, event: Event, now_s: float) -> list[Effect]:
        self._know({**self._models, event.data.model.key: event.data.model})
        return []

    def _on_tick(self, _: Tick, now_s: float) -> list[Effect]:
        for router_id in self._reports.expire(now_s, self.params.router_lease_s):
            self._absent(router_id, frozenset(), now_s)
        for key in [k for k in self._expected if k not in self._series]:
            self._of(key, now_s)  # a model with a history is forecast before its first request
        effects: list[Effect] = []
        for key, series in self._series.items():
            series.advance(now_s)
            if key in self._throughputs:
                self._measure(key, now_s)
            effects += self._forecast(key, series, now_s)
        return effects

    def _seen(self, row: Instance, now_s: float) -> None:
        if row.state is not InstanceState.READY or row.consolidating:
            self._unsteady_at[row.instance_id] = now_s

    def _measure(self, key: str, now_s: float) -> Throughput:
        known, model = self.throughput(key), self._models.get(key)
        known.close(now_s, self._instances.living(key), self._unsteady_at, model.slo if model is not None else Slo())
        return known

    def throughput(self, model_key: str) -> Throughput:
        known = self._throughputs.get(model_key)
        if known is None:
            params = self.params.capacity
            declared = self._capacities.get(model_key, params.declared)
            known = self._throughputs[model_key] = Throughput(params, declared)
        return known

    def _forecast(self, key: str, series: Series, now_s: float) -> list[Effect]:
        if self._make is Nothing:
            return []
        expected = self._expecting(key, series.first)
        if not expected.close(series) and expected.latest:
            return []
        horizon_s = self.horizon_s(key)
        num_ahead = max(self.params.num_ahead, min(MAX_AHEAD, 1 + math.ceil(horizon_s / self.window_s)))
        forecasts = expected.make(now_s, num_ahead)
        return [Publish(ForecastMade(model_key=key, forecasts=forecasts, horizon_s=horizon_s))] if forecasts else []

    def _expecting(self, model_key: str, number: int) -> ModelForecasts:
        """A new forecaster learns windows from `number` on."""
        expected = self._expected.get(model_key)
        if expected is None:
            expected = self._expected[model_key] = ModelForecasts(
                make_with(self._make, self.window_s, self.params.season_s, self._alike),
                number,
                self.params.num_windows,
                throughput=self.throughput(model_key),
            )
        return expected

    def _of(self, model_key: str, now_s: float) -> Series | None:
        series = self._series.get(model_key)
        if series is None:
            if len(self._series) >= self.params.max_models and model_key not in self._models:
                return None
            width = self.window_s
            number = int(now_s // width)
            series = Series(width, self.params.num_windows, first=number, last=number, changed_at=now_s)
            self._series[model_key] = series
        series.advance(now_s)
        return series

    def _count_load(self, key: str, router_id: str, load: ModelLoad, now_s: float) -> None:
        series = self._of(key, now_s)
        if series is not None:
            fullest = max((o.peak_ratio for o in load.outlook_by_instance.values()), default=0.0)
            here = RouterLoad(load.num_waiting + load.num_in_flight, load.in_flight_by_instance.keys())
            if load.by_class:
                busy = {i for i in load.in_flight_by_instance if load.urgent_on(i)}
                here = RouterLoad(load.num_urgent_waiting + load.num_urgent_in_flight, busy)
            series.report(router_id, here, fullest, load.slots_per_instance)

    def _absent(self, router_id: str, present: Set[str], now_s: float) -> None:
        """Clear a router's load of models missing from its report, which is complete."""
        for key, series in self._series.items():
            if key not in present and router_id in series.by_router:
                series.advance(now_s)
                series.left(router_id)

    def _on_finished(self, event: Event, now_s: float) -> list[Effect]:
        for request in event.data.requests:
            self._count(request, now_s)
        return []

    def _count(self, data: RequestFinished, now_s: float) -> None:
        series, model = self._of(data.model_key, now_s), self._models.get(data.model_key)
        if series is not None:
            if (one := served(data, model, self.params.capacity)) is not None:
                self._measure(data.model_key, now_s).add(one)
            if data.priority == Priority.BATCH:
                return
            window = series.open()
            window.num_requests += 1
            window.num_cold += data.cold
            window.prompt_tokens += data.prompt_tokens
            window.response_tokens += data.response_tokens
            window.num_tokens_exact += data.tokens_exact
            window.num_missed += missed(data, model, self.params.capacity)
            if (used := objective_used(data, model, self.params.capacity)) is not None:
                window.num_judged += 1
                window.objective_sum += used
