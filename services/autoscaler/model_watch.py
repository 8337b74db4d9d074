"""Watch model files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.operator import Deploy, Undeploy
from glowplug.domain.model import Model
from glowplug.runtime import model_files
from glowplug.runtime.shell import Shell
from glowplug.services.autoscaler.file_watch import POLL_S, READ_S, FileWatch
from glowplug.weights.measure import Measure, Remembered, not_asked


class ModelWatch(FileWatch):
    """Watch a directory of model files. REST also shows `errors` on a file's models. `measure`: size of weights on
    other machines."""

    kind = "model file"
    reads = " (it, or the weights it names)"

    def __init__(
        self, directory: Path | None, poll_s: float = POLL_S, timeout_s: float = READ_S, measure: Measure = not_asked
    ) -> None:
        super().__init__(directory, poll_s, timeout_s)
        self.measure = measure
        self._sizes: dict[str, Remembered] = {}  # file -> sizes known so far, while others are not answered
        self._keys: dict[str, set[str]] = {}  # file -> keys of its models, as last read

    def load(self, path: Path) -> list[Model]:
        return model_files.load(path, self._sizes.setdefault(str(path), Remembered(self.measure)))

    def answered(self, name: str) -> None:
        self._sizes.pop(name, None)

    async def apply_all(
        self, shell: Shell, controller: AutoscalerController, read: Mapping[str, list[Model]], present: Collection[str]
    ) -> set[str]:
        """Apply until no file gets any further: models and names change their files together."""
        self._keys |= {name: {model.key for model in models} for name, models in read.items()}
        left = {name for name in read if not await self.apply(shell, controller, Path(name), read[name], present)}
        kept = await self.gone(shell, controller, present)
        num_left = len(read) + 1
        while 0 < len(left) < num_left:
            num_left = len(left)
            await self._let_go(shell, controller, {name: read[name] for name in left})
            left = {n for n in sorted(left) if not await self.apply(shell, controller, Path(n), read[n], present)}
        for name in read.keys() - left - kept:
            self.errors.pop(name, None)
        return left | kept

    async def apply(
        self, shell: Shell, controller: AutoscalerController, path: Path, declared: Any, present: Collection[str]
    ) -> bool:
        models: list[Model] = declared
        for model in models:
            known = controller.models.get(model.key)
            if known is not None and known.source != str(path) and self._declares(known.source, model.key, present):
                self.keep_out(path, f"name: model {model.name!r} comes from {Path(known.source).name} already")
                return False
        return all([await self.tell(shell, str(path), Deploy(model=model)) for model in models])

    async def _let_go(
        self, shell: Shell, controller: AutoscalerController, left: Mapping[str, Sequence[Model]]
    ) -> None:
        """Take from the models of refused files the aliases that they no longer declare and others of them do."""
        wanted = {name for models in left.values() for model in models for name in model.names}
        for file, models in left.items():
            for model in models:
                known = controller.models.get(model.key)
                lost = wanted.intersection(known.aliases).difference(model.names) if known is not None else ()
                if known is not None and lost:
                    aliases = tuple(alias for alias in known.aliases if alias not in lost)
                    await self.tell(shell, file, Deploy(model=replace(known, aliases=aliases)))

    async def gone(self, shell: Shell, controller: AutoscalerController, present: Collection[str]) -> set[str]:
        undeclared = [
            model
            for key, model in controller.models.items()
            if self.is_ours(model.source)
            and not self._declares(model.source, key, present)
            and not any(key in self._keys[file] for file in self._keys.keys() & set(present))
        ]
        undeclared.sort(key=lambda model: not model.base)  # a base is undeployed after its adapters
        kept = {m.source for m in undeclared if not await self.tell(shell, m.source, Undeploy(m.key))}
        return kept.intersection(present)

    def _declares(self, file: str, key: str, present: Collection[str]) -> bool:
        """Return whether a file declares a model, as far as is known."""
        return file in present and (file not in self._keys or key in self._keys[file])

    def forget(self, name: str) -> None:
        super().forget(name)
        self.answered(name)
        self._keys.pop(name, None)
