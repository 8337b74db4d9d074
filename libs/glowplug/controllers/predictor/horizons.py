"""How far ahead forecasts of a model must reach: what its starts took of late.

What is begun now serves once it is ready, so what is expected until then decides. Starts from a replica or from sleep
are shorter and are the aim of acting early, so that only those from nothing count: cold, from disk, or with weights in
host memory.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from glowplug.domain.instance import Instance
from glowplug.policies.start_times import FROM_NOTHING

NUM_STARTS: Final = 3


@dataclass(slots=True)
class Horizons:
    """The seconds of the last starts, by model_key."""

    _took: dict[str, deque[tuple[str, float]]] = field(default_factory=dict)  # (instance_id, seconds)

    def take(self, row: Instance) -> None:
        """A row of an instance; each start counts once."""
        if row.start_kind not in FROM_NOTHING or not 0 < row.created_at < row.ready_at:
            return
        known = self._took.setdefault(row.model_key, deque(maxlen=NUM_STARTS))
        if all(instance_id != row.instance_id for instance_id, _ in known):
            known.append((row.instance_id, row.ready_at - row.created_at))

    def restore(self, rows: Iterable[Instance]) -> None:
        """Rows of the table, in the order in which they became ready."""
        for row in sorted(rows, key=lambda row: (row.ready_at, row.instance_id)):
            self.take(row)

    def drop(self, model_key: str) -> None:
        """The model is gone."""
        self._took.pop(model_key, None)

    def of(self, model_key: str) -> float:
        """Median seconds; 0 before the first start."""
        known = self._took.get(model_key)
        return median(seconds for _, seconds in known) if known else 0.0
