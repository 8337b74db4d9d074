"""One series of tokens per window, learned by a multiplicative LSTM: scaled, cut into samples, trained, asked.

Paper: PreServe section 4.1: k past windows in, the next one out; two steps ahead by taking the first answer for the
window in between (Algorithm 2); trained anew every day on the days before.

Departures:
- Tokens are scaled by the least and the most of the training days alone; the paper scales by a window that holds the
  answer (erratum E30). They are scaled as logarithms unless `literal_scale`: the error that counts is a ratio, and a
  series that falls tenfold at night is all of one size then.
- The model answers by how much the next window differs from the last, and is told, beside each window and its change,
  by how much the window after it changed a day before (0 on the first day). With two days to learn from, k windows
  alone tell neither the hour nor the day.
- k is not in the paper: 12 windows, two hours. The last fifth of the samples is held out, and the weights that did best
  there are kept.
- Training goes on in parts (`train`), so that nobody waits for the whole of it.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np

from glowplug.policies.prediction.learned import SeriesParams
from glowplug.policies.prediction.preserve_mlstm import Array, Trainer, Weights, draw_weights, predict

NUM_INPUTS = 3
GAIN = 5.0  # changes are small beside levels: they are brought to about one size


@dataclass(frozen=True, slots=True)
class Scale:
    """To and from what the model sees: 0 is the least of the training days, 1 the most."""

    low: float
    high: float
    literal: bool

    def to(self, tokens: Array) -> Array:
        bent: Array = tokens if self.literal else np.log1p(np.maximum(tokens, 0.0))
        return (bent - self.low) / (self.high - self.low)

    def back(self, scaled: float) -> float:
        """Tokens; never below none, nor above ten times the most there was."""
        most = self.high * 10 if self.literal else self.high + float(np.log(10))
        bent = min(most, scaled * (self.high - self.low) + self.low)
        return max(0.0, bent if self.literal else float(np.expm1(bent)))


@dataclass(slots=True)
class _Training:
    scale: Scale
    inputs: Array
    answers: Array
    num_taught: int  # samples that are not held out
    trainer: Trainer
    best: Weights
    best_loss: float
    num_epochs: int = 0


@dataclass(slots=True)
class TokenSeries:
    """`per_day` windows make a season. `learned` is None until a first training has ended."""

    per_day: int
    params: SeriesParams = field(default_factory=SeriesParams)
    values: "array[float]" = field(default_factory=lambda: array("d"))  # from the first window with any token on
    learned: tuple[Scale, Weights] | None = None
    _training: _Training | None = None

    def add(self, tokens: float) -> None:
        """What the newest window brought; windows older than `max_days` (and a day and k before) are forgotten."""
        if not self.values and tokens <= 0:
            return  # a model that was never asked for costs nothing
        self.values.append(float(tokens))
        del self.values[: max(0, len(self.values) - (self.params.max_days + 1) * self.per_day - self.params.num_past)]

    @property
    def is_training(self) -> bool:
        return self._training is not None

    def begin_training(self) -> bool:
        """Start anew on what is there. False when it is too little, or all of one size."""
        values = np.array(self.values)
        values = values[-self.params.max_days * self.per_day :]
        if len(values) < 4 * self.params.num_past or not values.max() > values.min():
            return False
        bent = values if self.params.literal_scale else np.log1p(values)
        scale = Scale(float(bent.min()), float(bent.max()), self.params.literal_scale)
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
        """Go on with the training; True when that has ended it."""
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
        """Tokens of the windows to come, each from the answers before it. Empty while nothing has been learned."""
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
        """What is known before window `at`: k windows, the change that led to each, and the change that followed each
        a day before."""
        num = self.params.num_past
        past = scaled[at - num : at]
        before = np.diff(scaled[at - num - 1 : at])
        after = np.zeros(num)
        first = at - num + 1 - self.per_day  # the window that followed the oldest of the k, a day before
        known = np.arange(max(1, first), first + num)
        known = known[known >= 1]
        if len(known):
            after[num - len(known) :] = scaled[known] - scaled[known - 1]
        return np.stack((past, GAIN * before, GAIN * after), axis=1)
