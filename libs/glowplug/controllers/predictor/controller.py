"""The predictor: it counts the demand of each model by window, and forecasts the windows to come.

    router.load_reported | router.requests_finished | tick ──▶ windows ──▶ policy `prediction` ──▶ forecast.made

What it is notified of
  - Telemetry: `router.load_reported` (what each router holds and runs, on which instances) and
    `router.requests_finished`.
  - Facts: `model.deployed`, for the objectives of a model; every `instance.*`, for the seconds of starts, for what
    engines report of themselves and whether they serve. Tables: `models`, `instances`.
  - Ticks, which close windows, and forget the load of a router that has been silent for `router_lease_s`.

What it asks
  - `forecast.made`, one per model when a window has closed: forecasts of the open window and of later ones, with mu
    (the tokens per second that one instance takes, PreServe section 4.1, and whether declared or measured) and the
    forecaster's recent error. Where the policy follows starts, the forecasts reach as far as a start of the model takes
    (`horizon_s`).

What it promises
  - A window's concurrency is the integral of what routers held and ran, whether ticks came often or seldom.
  - It keeps `num_windows` windows of at most `max_models` models; a window in which nothing happened costs nothing.
  - The next leader inherits the past, which no table has.
  - An emptied store drops no series; a model that is gone from a table with rows loses its series.

What it never does
  - It changes nothing: autoscaler and placer act on forecasts, or do without where none covers their time.
  - It forecasts no batch requests: those fill idle capacity, and nothing is started or prewarmed ahead for them. One
    that has waited for so long that it counts as standard (controllers/router/classes.py) counts here too.
  - It reads no prompt and keeps no single request, only sums of a window, and of an instance's last minutes.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, get_args

from glowplug.controllers.effects import Effect, Publish, Tick
from glowplug.controllers.port import Handlers, dispatch
from glowplug.controllers.predictor.forecasts import Horizons, ModelForecasts, missed, objective_used, served
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.controllers.predictor.series import RouterLoad, Series, Window
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
from glowplug.fleet.tables import InstanceTable
from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.prediction.port import MakeForecaster, WindowTotals, make_with, shared
from glowplug.policies.throughput import Capacity, Throughput

MAX_AHEAD: Final = 288  # windows, however long starts take


class PredictorController:
    """State machine of the predictor: counts demand by model and window, and forecasts when a window closes.

    `make` is a policy of the kind "prediction". `history`: earlier windows by model_key, oldest first, of the same
    width; `capacities`: the capacity of one instance of a model, as measured elsewhere.
    """

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
        self._unsteady_at: dict[str, float] = {}  # instance_id -> when it was last seen in another state than READY
        self._throughputs: dict[str, Throughput] = {}  # by model_key
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
        """Take a stimulus: a tick closes windows, and everything else is counted."""
        return dispatch(self.handlers, stimulus, now_s)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take the table `models`, and drop the series of models that are gone (none over an emptied store), or the
        table `instances`, and learn the seconds of their starts."""
        if table == "instances":
            self._horizons.restore(rows.values())
            for row in self._instances.restore(rows, now_s):
                self._seen(row, now_s)
            self._unsteady_at = {i: at for i, at in self._unsteady_at.items() if i in self._instances.by_id}
            return []
        if not rows:
            return []
        self._models = dict(rows)
        for key in [k for k in self._series if k not in rows]:
            del self._series[key]
            self._expected.pop(key, None)
            self._throughputs.pop(key, None)
            self._horizons.drop(key)
        return []

    def inherit(self, earlier: "PredictorController", now_s: float) -> None:
        """Take over what an earlier predictor counted and forecast, which no table has."""
        self._series, self._expected, self._models = earlier._series, earlier._expected, earlier._models
        self._reports, self._horizons, self._throughputs = earlier._reports, earlier._horizons, earlier._throughputs
        self._unsteady_at = dict(earlier._unsteady_at)
        self._alike = earlier._alike  # shared with the inherited forecasters

    @property
    def forecasts(self) -> dict[str, tuple[Forecast, ...]]:
        """The latest forecasts by model_key: of the open window, and of later ones."""
        return {key: expected.latest for key, expected in self._expected.items() if expected.latest}

    def past_forecasts(self, model_key: str) -> list[Forecast]:
        """Forecasts of closed windows, oldest first, each made several windows ahead, to compare with `windows`."""
        expected = self._expected.get(model_key)
        return list(expected.past) if expected else []

    def horizon_s(self, model_key: str) -> float:
        """Recent seconds of a model's starts, where forecasts reach that far; else 0."""
        return self._horizons.of(model_key) if self._follows_starts else 0.0

    def windows(self, model_key: str) -> list[Window]:
        """The model's windows, oldest first, empty ones too; the last one is still open."""
        series = self._series.get(model_key)
        return [] if series is None else [series.at(n) for n in range(series.first, series.last + 1)]

    @property
    def model_keys(self) -> list[str]:
        return sorted(self._series)

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
        self._models = {**self._models, event.data.model.key: event.data.model}
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
        """Measure what the model's instances served in past minutes, of those ready throughout."""
        known, model = self.throughput(key), self._models.get(key)
        known.close(now_s, self._instances.living(key), self._unsteady_at, model.slo if model is not None else Slo())
        return known

    def throughput(self, model_key: str) -> Throughput:
        """The capacity of one instance of the model, as measured by the answers so far."""
        known = self._throughputs.get(model_key)
        if known is None:
            params = self.params.capacity
            declared = self._capacities.get(model_key, params.declared)
            known = self._throughputs[model_key] = Throughput(params, declared)
        return known

    def _forecast(self, key: str, series: Series, now_s: float) -> list[Effect]:
        """Forecast one model when a window has closed."""
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
        """The model's forecaster; a new one learns windows from `number` on."""
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
            if len(self._series) >= self.params.max_models:
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
        """Note that a router holds and runs nothing of models missing from its report, since a report is whole."""
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
