"""PreServe's workload predictor: prompt and response tokens of coming windows, learned from past days.

Paper: PreServe section 4.1, Algorithms 1-2: two multiplicative LSTMs per service (`preserve_mlstm.py`), windows of 10
minutes, k past windows in and the next one out, two steps ahead by using the forecast of the current window as its
load, retrained daily. mu and N belong to predictor and scaler.

Departures:
- Only tokens are learned. Requests and concurrency, which PreServe does not forecast, come from WarmServe's corrective
  seasonal predictor.
- Before `min_days` of data, and for models with load in fewer than `min_active` of their windows, tokens come from it
  too (the paper's cold-data mode leaves scaling to its defaults until days of data exist).
- Tokens are scaled by the training days' minimum and maximum; the paper scales by a window that holds the answer
  (erratum E30). Logarithms are scaled, since the error is a ratio: nights then matter as much as days.
- The model predicts the change to the next window, from each window, the change before it, and the change after it a
  day earlier (0 on the first day). After two days, k windows alone show neither hour nor day.
- k is not in the paper: 12 windows, two hours. The newest fifth of the samples is held out; the weights with the least
  error there are kept.
- Training is spread over windows, `epochs_per_window` passes each (four hours for 120), so that no request waits for
  all of it; yesterday's weights serve until then. The first training ends before `min_days` are full.
"""

import math
from array import array
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.snapshot import Forecast
from glowplug.domain.units import DAY_S
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug_lab.policies.preserve_mlstm import Array, Trainer, Weights, draw_weights, predict
from glowplug_lab.policies.warmserve_csp import WarmserveCsp

NUM_INPUTS = 3
GAIN = 5.0  # changes are small beside levels


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesParams:
    num_past: Count = 12  # k
    num_hidden: Count = 8
    num_epochs: Count = 120
    learning_rate: Positive = 0.01
    held_out: Positive = 0.2  # of the samples, the newest
    max_batch: Count = 240  # samples per pass; of more, every second or third
    max_days: Count = 7  # a day of 10-minute windows is about 1 kB
    seed: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadParams:
    min_days: Count = 2  # before the first training
    min_active: Positive = 0.5  # share of windows with any token
    epochs_per_window: Count = 5  # about 50 ms of a core for both series
    season_s: Positive = DAY_S  # shorter for compressed traces
    series: SeriesParams = field(default_factory=SeriesParams)


@dataclass(frozen=True, slots=True)
class Scale:
    """0 and 1 are the training days' extremes."""

    low: float
    high: float

    def to(self, tokens: Array) -> Array:
        scaled: Array = (np.log1p(np.maximum(tokens, 0.0)) - self.low) / (self.high - self.low)
        return scaled

    def back(self, scaled: float) -> float:
        """At most ten times the training maximum."""
        log = min(self.high + float(np.log(10)), scaled * (self.high - self.low) + self.low)
        return max(0.0, float(np.expm1(log)))


@dataclass(slots=True)
class _Training:
    scale: Scale
    inputs: Array
    answers: Array
    num_taught: int
    trainer: Trainer
    best: Weights
    best_loss: float
    num_epochs: int = 0


@dataclass(slots=True)
class TokenSeries:
    """`per_day` windows make a season. `learned` is None before the first training ends."""

    per_day: int
    params: SeriesParams = field(default_factory=SeriesParams)
    values: "array[float]" = field(default_factory=lambda: array("d"))
    learned: tuple[Scale, Weights] | None = None
    _training: _Training | None = None

    def add(self, tokens: float) -> None:
        if not self.values and tokens <= 0:
            return  # a model never asked for costs nothing
        self.values.append(float(tokens))
        del self.values[: max(0, len(self.values) - (self.params.max_days + 1) * self.per_day - self.params.num_past)]

    @property
    def is_training(self) -> bool:
        return self._training is not None

    def begin_training(self) -> bool:
        """Return False if there are too few windows, or all are equal."""
        values = np.array(self.values)
        values = values[-self.params.max_days * self.per_day :]
        if len(values) < 4 * self.params.num_past or not values.max() > values.min():
            return False
        logs = np.log1p(values)
        scale = Scale(float(logs.min()), float(logs.max()))
        scaled = scale.to(values)
        first = self.params.num_past + 1
        inputs = np.stack([self._inputs(scaled, at) for at in range(first, len(scaled))])
        weights = draw_weights(NUM_INPUTS, self.params.num_hidden, self.params.seed)
        answers = GAIN * np.diff(scaled)[first - 1 :]
        num_taught = round(len(inputs) * (1 - self.params.held_out))
        trainer = Trainer(weights, self.params.learning_rate)
        self._training = _Training(scale, inputs, answers, num_taught, trainer, weights, float("inf"))
        return True

    def train(self, num_epochs: int) -> bool:
        """Return True when the training has ended."""
        training = self._training
        if training is None:
            return False
        taught = training.num_taught
        turns = max(1, -(-taught // self.params.max_batch))
        for _ in range(num_epochs):
            rate = 0.5 * (1 + float(np.cos(np.pi * training.num_epochs / self.params.num_epochs)))
            turn = slice(training.num_epochs % turns, taught, turns)
            training.trainer.step(training.inputs[turn], training.answers[turn], rate)
            training.num_epochs += 1
            error = predict(training.trainer.weights, training.inputs[taught:]) - training.answers[taught:]
            loss = float(np.abs(error).mean()) if len(error) else -float(training.num_epochs)
            if loss < training.best_loss:
                training.best, training.best_loss = training.trainer.weights, loss
            if training.num_epochs >= self.params.num_epochs:
                self.learned, self._training = (training.scale, training.best), None
                return True
        return False

    def ahead(self, num_ahead: int) -> list[float]:
        """Tokens of coming windows; empty before the first training ends."""
        if self.learned is None or len(self.values) < self.params.num_past + 1:
            return []
        scale, weights = self.learned
        scaled = scale.to(np.array(self.values[-self.per_day - self.params.num_past - 2 :]))
        found: list[float] = []
        for _ in range(num_ahead):
            change = float(predict(weights, self._inputs(scaled, len(scaled))[None])[0]) / GAIN
            scaled = np.append(scaled, scaled[-1] + change)
            found.append(scale.back(float(scaled[-1])))
        return found

    def _inputs(self, scaled: Array, at: int) -> Array:
        """The k windows before `at`, the change before each, and the change after each a day earlier."""
        num = self.params.num_past
        past = scaled[at - num : at]
        before = np.diff(scaled[at - num - 1 : at])
        after = np.zeros(num)
        first = at - num + 1 - self.per_day  # follows the oldest of the k, a day before
        known = np.arange(max(1, first), first + num)
        known = known[known >= 1]
        if len(known):
            after[num - len(known) :] = scaled[known] - scaled[known - 1]
        return np.stack((past, GAIN * before, GAIN * after), axis=1)


NAME = "preserve_workload"


class PreserveWorkload:
    WINDOW_S: ClassVar[float] = 600.0

    def __init__(self, window_s: float = 600.0, params: WorkloadParams = WorkloadParams()) -> None:
        self.window_s, self.params = window_s, params
        self._per_day = max(1, round(params.season_s / window_s))
        self.prompts = TokenSeries(self._per_day, params.series)
        self.responses = TokenSeries(self._per_day, params.series)
        self._rest = WarmserveCsp(window_s, season_s=params.season_s)
        self._count = 0
        num_windows = math.ceil(params.series.num_epochs / params.epochs_per_window)
        self._first_training = max(1, params.min_days * self._per_day - num_windows - 2)

    def closed(self, window: WindowTotals) -> None:
        self._rest.closed(window)
        self.prompts.add(window.prompt_tokens)
        self.responses.add(window.response_tokens)
        self._count += 1
        since_first = self._count - self._first_training
        is_due = since_first >= 0 and since_first % self._per_day == 0
        for series in (self.prompts, self.responses):
            if is_due and self._is_active(series):
                series.begin_training()
            series.train(self.params.epochs_per_window)

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Tokens as learned, if trained; the rest by season and correction."""
        found = self._rest.forecast(now_s, num_ahead)
        prompts, responses = self.prompts.ahead(num_ahead), self.responses.ahead(num_ahead)
        return tuple(
            replace(
                one,
                source=NAME,
                prompt_tokens=prompts[at] if prompts else one.prompt_tokens,
                response_tokens=responses[at] if responses else one.response_tokens,
            )
            for at, one in enumerate(found)
        )

    def _is_active(self, series: TokenSeries) -> bool:
        return sum(v > 0 for v in series.values) >= self.params.min_active * len(series.values)


@dataclass(frozen=True)
class MakePreserveWorkload:
    WINDOW_S: float = 600.0

    def __call__(
        self, window_s: float, *, season_s: float = 0.0, params: WorkloadParams = WorkloadParams()
    ) -> Forecaster:
        return PreserveWorkload(window_s, replace(params, season_s=season_s or params.season_s))


preserve_workload = MakePreserveWorkload()
