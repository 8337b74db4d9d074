"""The scaling policy's learned figures of each model, stored for the next leader.

One row per model, written when a figure changes. A successor takes sound rows of its own policy and version, and leaves
the others until it has learned figures itself. An emptied store gets the rows again. Undeploying a known model removes
its row; a model that merely cannot be read keeps it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from glowplug.controllers.autoscaler.models import ModelRecord, ModelRecords
from glowplug.controllers.effects import Effect, Remove, Save
from glowplug.policies.scaling.port import learner

SCALING_LEARNED: Final = "scaling_learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRow:
    """`format`: policy and version; `revision` grows with each change."""

    key: str
    format: str
    revision: int
    figures: Mapping[str, float]


class Learned:
    def __init__(self, scale: Callable[..., Any]) -> None:
        self._state = learner(scale)
        self._rows: dict[str, LearnedRow] = {}
        self._undeployed: set[str] = set()  # until their rows have left the table

    def noted(self, record: ModelRecord) -> list[Effect]:
        """Save figures that differ from the saved row."""
        if self._state is None or not isinstance(record.policy_state, self._state):
            return []
        figures, known = record.policy_state.figures(), self._rows.get(record.key)
        if figures == (known.figures if known else {}):
            return []
        revision = known.revision + 1 if known else 1
        row = LearnedRow(key=record.key, format=self._state.FORMAT, revision=revision, figures=figures)
        self._rows[record.key] = row
        return [Save(SCALING_LEARNED, row.key, row)]

    def forget(self, model_key: str) -> None:
        self._undeployed.add(model_key)

    def inherit(self, earlier: "Learned", models: ModelRecords, now_s: float) -> None:
        self._undeployed = set(earlier._undeployed)
        for row in earlier._rows.values():
            self._take(row, models, now_s)

    def restore(self, rows: Mapping[str, LearnedRow], models: ModelRecords, now_s: float) -> list[Effect]:
        """Take the table, whose rows may predate the latest write."""
        if self._state is None:
            return []
        for row in rows.values():
            known = self._rows.get(row.key)
            if known is None or (row.revision >= known.revision and row != known):
                self._take(row, models, now_s)
        self._rows = {key: row for key, row in self._rows.items() if models.find(key)}
        lost = [Save(SCALING_LEARNED, key, row) for key, row in self._rows.items() if rows.get(key) != row]
        self._undeployed = {key for key in self._undeployed if key in rows and not models.find(key)}
        return [*lost, *(Remove(SCALING_LEARNED, key) for key in sorted(self._undeployed))]

    def _take(self, row: LearnedRow, models: ModelRecords, now_s: float) -> None:
        """Continue from a row, if it is the policy's own and sound."""
        if self._state is None or row.format != self._state.FORMAT or models.find(row.key) is None:
            return
        try:
            state = self._state.with_figures(row.figures, now_s)
        except ValueError:
            return  # the next learned row replaces unsound figures
        models.of(row.key).policy_state = state
        self._rows[row.key] = row
