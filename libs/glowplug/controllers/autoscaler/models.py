"""The table of models, which the autoscaler owns: rows by revision, and what is known of rows that are gone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.errors import Conflict
from glowplug.domain.model import Model
from glowplug.events.facts import ModelDeployed


class ModelTable:
    """model_key -> Model, as deployed. Every change grows the row's revision, also over an undeployment."""

    def __init__(self) -> None:
        self.by_key: dict[str, Model] = {}
        self._absent_since: dict[str, float] = {}  # model_key of models without a row
        self._undeployed: dict[str, int] = {}  # model_key -> revision it left with, until its row has left too

    def restore(self, rows: Mapping[str, Model], now_s: float) -> list[Effect]:
        """A lost row is written again, one of an undeployed model removed. `rows` may have been read before the latest
        change here was written."""
        absent = [key for key in self.by_key if rows and key not in rows]
        self._absent_since = {key: self._absent_since.get(key, now_s) for key in absent}
        self._undeployed = {key: revision for key, revision in self._undeployed.items() if key in rows}
        left = [key for key, revision in self._undeployed.items() if rows[key].revision <= revision]
        for key, model in rows.items():
            if key not in left and (key not in self.by_key or model.revision > self.by_key[key].revision):
                self.by_key[key] = model
        lost = [Save("models", key, model) for key, model in self.by_key.items() if key not in rows]
        return [*lost, *(Remove("models", key) for key in left if key not in self.by_key)]

    def inherit(self, earlier: "ModelTable", now_s: float, absent_s: float) -> None:
        """A store that came back empty gets its models from us. One that the leader has undeployed is known by the
        fact, or by its row having gone alone, more than `absent_s` ago."""
        absent = {key for key, since in earlier._absent_since.items() if now_s - since > absent_s}
        self.by_key = {key: model for key, model in earlier.by_key.items() if key not in absent}
        self._absent_since = {key: since for key, since in earlier._absent_since.items() if key in self.by_key}

    def deploy(self, model: Model, *, create: bool, now_s: float) -> Model | None:
        """The row as it is now; None when it is what it was. Raises Conflict when a name belongs to another, or when
        it exists and `create` is set."""
        known = self.by_key.get(model.key)
        if known is not None and create:
            raise Conflict(f"model {model.name!r} exists (its key is {model.key!r})", param="name")
        for other in self.by_key.values():
            clash = set(model.names) & set(other.names) if other.key != model.key else set()
            if clash:
                raise Conflict(f"the name {min(clash)!r} belongs to model {other.name!r}", param="aliases")
        if known is not None:
            model = replace(model, suspended=known.suspended, pinned=model.pinned or known.pinned)
            if replace(model, revision=known.revision) == known:
                return None
        last = known.revision if known else self._undeployed.pop(model.key, -1)
        self.by_key[model.key] = model = replace(model, revision=max(int(now_s * 1000), last + 1))
        return model

    def change(self, model: Model, now_s: float, **fields: Any) -> list[Effect]:
        """Set fields of a row; what tells the others."""
        changed = replace(model, revision=max(int(now_s * 1000), model.revision + 1), **fields)
        self.by_key[model.key] = changed
        return [Save("models", model.key, changed), Publish(ModelDeployed(model=changed))]

    def forget(self, model: Model) -> None:
        """It is undeployed."""
        del self.by_key[model.key]
        self._undeployed[model.key] = model.revision
