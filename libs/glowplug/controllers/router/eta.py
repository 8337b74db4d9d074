"""When a model will be able to take a request, from what starts and requests took before."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.policies.start_times import StartKind, StartTimes, fresh_kind


@dataclass(slots=True)
class Estimates:
    """Seconds. Starts are predicted as the placer predicts them (`times`); answers are exponentially weighted means per
    model_key. A model of which nothing is known has the defaults."""

    default_start_s: float = 5.0
    times: StartTimes = field(default_factory=StartTimes)
    default_service_s: float = 3.0
    weight: float = 0.3  # of the newest sample
    overdue_s: float = 0.5  # what is left of a start that takes longer than the mean
    longest_s: float = 600.0  # bound of every Retry-After
    least_samples: int = 5  # answers of a model before its mean is a measurement
    steady_weight: float = 0.05  # least weight of the newest sample in a mean that a refusal may rest on
    service_s: dict[str, float] = field(default_factory=dict)
    _steady_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # model_key -> samples, mean

    def learn_service(self, model_key: str, took_s: float) -> None:
        """One measured answer, dispatch to last byte."""
        if took_s > 0:
            self._learn(self.service_s, model_key, took_s)
            num, mean = self._steady_s.get(model_key, (0, 0.0))
            weight = max(1 / (num + 1), self.steady_weight)
            self._steady_s[model_key] = (num + 1, mean + weight * (took_s - mean))

    def measured_service_s(self, model_key: str) -> float | None:
        """Seconds that an answer takes, over its last twenty or so; None before enough of them have been seen."""
        num, mean = self._steady_s.get(model_key, (0, 0.0))
        return mean if num >= self.least_samples else None

    def forget(self, model_key: str) -> None:
        """Drop what was learned of a model that is no more."""
        self.times.forget(lambda key: key == model_key)
        self.service_s.pop(model_key, None)
        self._steady_s.pop(model_key, None)

    def _learn(self, means: dict[str, float], key: str, sample: float) -> None:
        old = means.get(key)
        means[key] = sample if old is None else old + self.weight * (sample - old)

    def start_left_s(self, model: Model | None, rows: Iterable[Instance], now_s: float) -> float:
        """Seconds until the first of a model's instances is ready, by what its placement expected; a whole start when
        none is on its way."""
        rows = list(rows)
        coming = [row for row in rows if row.state.is_coming and row.serves]
        if not coming:
            return self.start_s(model, rows)
        return min(
            max((row.predicted_s or self.start_s(model, ())) - (now_s - row.created_at), self.overdue_s)
            for row in coming
        )

    def start_s(self, model: Model | None, rows: Iterable[Instance]) -> float:
        """Seconds of a whole start: from the dormant copy among `rows` that a placement would take, else as it went
        last."""
        if model is None or not self.times.knows(model):
            return self.default_start_s
        return self.times.predict(model, self._kind(model, {row.state for row in rows})).whole_s

    def _kind(self, model: Model, states: set[InstanceState]) -> StartKind:
        if InstanceState.PREWARMED in states:
            return StartKind.GROWTH
        if InstanceState.SWAPPED_OUT in states:
            return StartKind.WAKE
        unseen = fresh_kind(is_cached=not model.weights.uri)
        return self.times.latest(model, (StartKind.COLD, StartKind.CACHED)) or unseen

    def queue_s(self, model_key: str, num_ahead: int, num_slots: int) -> float:
        """Seconds until `num_ahead` requests have been taken by `num_slots` slots."""
        service_s = self.service_s.get(model_key, self.default_service_s)
        return math.ceil(num_ahead / max(num_slots, 1)) * service_s

    def retry_after_s(self, seconds: float) -> float:
        """`seconds` as a Retry-After: whole, at least 1, bounded."""
        return float(min(max(math.ceil(seconds), 1), math.ceil(self.longest_s)))
