"""Watch model files."""

from collections.abc import Collection
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

    def load(self, path: Path) -> list[Model]:
        return model_files.load(path, self._sizes.setdefault(str(path), Remembered(self.measure)))

    def answered(self, name: str) -> None:
        self._sizes.pop(name, None)

    async def apply(
        self, shell: Shell, controller: AutoscalerController, path: Path, declared: Any, present: Collection[str]
    ) -> bool:
        models: list[Model] = declared
        for model in models:
            known = controller.models.get(model.key)
            if known is not None and known.source != str(path) and known.source in present:
                self.keep_out(path, f"name: model {model.name!r} comes from {Path(known.source).name} already")
                return False
        refused = [m for m in models if not await self.tell(shell, str(path), Deploy(model=m))]
        keys = {m.key for m in models}
        removed = [k for k, m in controller.models.items() if m.source == str(path) and k not in keys]
        for key in removed:
            await self.tell(shell, str(path), Undeploy(key))
        if removed:  # another may have one of their names by now
            refused = [m for m in refused if not await self.tell(shell, str(path), Deploy(model=m))]
        if not refused:
            self.errors.pop(str(path), None)
        return not refused

    async def gone(self, shell: Shell, controller: AutoscalerController, present: Collection[str]) -> None:
        for key, model in list(controller.models.items()):
            if self.is_ours(model.source) and model.source not in present:
                await self.tell(shell, model.source, Undeploy(key))

    def forget(self, name: str) -> None:
        super().forget(name)
        self.answered(name)
