"""Figures that the scaling policy has learned of each model, stored for the autoscaler that leads next.

One row a model, written when a figure changes. A successor takes sound rows of its own policy and version; other rows
stay as they are until it has learned figures itself. An emptied store gets the rows again. The row of a model that was
known and has been undeployed is removed; a model that merely cannot be read keeps its row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from glowplug.controllers.autoscaler.models import ModelRecord, ModelRecords
from glowplug.controllers.effects import Effect, Remove, Save
from glowplug.policies.scaling.port import learner

SCALING_LEARNED: Final = "scaling_learned"  # the table of the store; the autoscaler writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRow:
    """Figures learned of one model, as a row of the store. `format`: the policy that learned them and its version;
    `revision` grows with each change."""

    key: str  # of the model
    format: str
    revision: int
    figures: Mapping[str, float]


class Learned:
    """The rows that one autoscaler wrote last, or took."""

    def __init__(self, scale: Callable[..., Any]) -> None:
        self._state = learner(scale)
        self._rows: dict[str, LearnedRow] = {}
        self._undeployed: set[str] = set()  # models undeployed, until their rows have left the table

    def noted(self, record: ModelRecord) -> list[Effect]:
        """Save what the policy has learned by its last answer, where that differs from the saved row."""
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
        """Forget a model that has been undeployed."""
        self._undeployed.add(model_key)

    def inherit(self, earlier: "Learned", models: ModelRecords, now_s: float) -> None:
        """Take over the rows of another autoscaler of the same policy."""
        self._undeployed = set(earlier._undeployed)
        for row in earlier._rows.values():
            self._take(row, models, now_s)

    def restore(self, rows: Mapping[str, LearnedRow], models: ModelRecords, now_s: float) -> list[Effect]:
        """Take the table, whose rows may have been read before the latest one was written."""
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
        """Let the policy continue from a row, if the row is its own and sound."""
        if self._state is None or row.format != self._state.FORMAT or models.find(row.key) is None:
            return
        try:
            state = self._state.with_figures(row.figures, now_s)
        except ValueError:
            return  # unsound figures are ignored: the next learned row replaces them
        models.of(row.key).policy_state = state
        self._rows[row.key] = row
