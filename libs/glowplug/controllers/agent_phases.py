"""The phases of a cold start: what they took, and what they are expected to take from the starts before."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from glowplug.controllers.agent_words import Holding
from glowplug.domain.instance import Phase, PhaseName

_ORDER = {name: rank for rank, name in enumerate(PhaseName)}
MAX_MODELS = 1000


def history_key(holding: Holding) -> str:
    """Under which a start is remembered: its model, its number of stages, and what it grew from."""
    stages = f"/{holding.instance.num_stages}" if holding.instance.num_stages > 1 else ""
    return f"{holding.instance.model_key}{stages}" + (f"<{holding.warmth}" if holding.warmth else "")


@dataclass(slots=True)
class PhaseHistory:
    """Exponentially weighted mean seconds per model_key and phase, of this node."""

    weight: float = 0.3
    means: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, means: Mapping[str, Mapping[str, float]], weight: float) -> "PhaseHistory":
        return cls(weight, {key: dict(by_phase) for key, by_phase in means.items()})

    def predicted_s(self, model_key: str, phase: PhaseName) -> float:
        """0 when no start of that model has been seen here."""
        return self.means.get(model_key, {}).get(phase.value, 0.0)

    def predict(self, model_key: str, phases: Iterable[Phase]) -> tuple[Phase, ...]:
        """`phases` in order, each with its expectation where it carries none yet."""
        return tuple(
            p if p.predicted_s else replace(p, predicted_s=self.predicted_s(model_key, p.name))
            for p in sorted(phases, key=lambda p: (_ORDER[p.name], p.started_at))
        )

    def learn(self, model_key: str, phases: Iterable[Phase]) -> None:
        """Take the measured seconds of one start. The longest unused model is forgotten past `MAX_MODELS`."""
        means = self.means.pop(model_key, {})
        for phase in phases:
            old, new = means.get(phase.name.value), max(phase.actual_s, 0.0)
            means[phase.name.value] = new if old is None else old + self.weight * (new - old)
        self.means[model_key] = means
        if len(self.means) > MAX_MODELS:
            del self.means[next(iter(self.means))]

    def frozen(self) -> dict[str, dict[str, float]]:
        """A copy to keep."""
        return {key: dict(by_phase) for key, by_phase in self.means.items()}
