"""Model files kept in force: read at start and when they change; a bad file leaves the old models as they are."""

import asyncio
import logging
from pathlib import Path

from glowplug.controllers.autoscaler import AutoscalerController
from glowplug.controllers.operator import Deploy, Undeploy
from glowplug.domain.errors import GlowplugError
from glowplug.runtime import model_files
from glowplug.runtime.shell import Shell

log = logging.getLogger(__name__)


class ModelWatch:
    """`errors`: file -> why it is not in force (shown by REST and on the models it declares)."""

    def __init__(self, directory: Path | None, poll_s: float) -> None:
        self._directory, self._poll_s = directory, poll_s
        self._seen: dict[str, tuple[int, int]] = {}  # file -> (mtime_ns, size)
        self.errors: dict[str, str] = {}

    async def run(self, shell: Shell) -> None:
        """Poll for ever."""
        while self._directory is not None:
            await self.poll(shell)
            await asyncio.sleep(self._poll_s)

    async def poll(self, shell: Shell) -> None:
        """Take what changed since the last poll. An unreadable directory changes nothing."""
        assert self._directory is not None
        controller = shell.controller
        assert isinstance(controller, AutoscalerController)
        try:
            files = {str(p): p for p in sorted(self._directory.iterdir()) if p.suffix in (".yaml", ".yml")}
            stamps = {name: (p.stat().st_mtime_ns, p.stat().st_size) for name, p in files.items()}
        except OSError as error:
            self.errors[str(self._directory)] = f"cannot read the directory: {error.strerror}"
            return
        self.errors.pop(str(self._directory), None)
        for name, stamp in stamps.items():
            if self._seen.get(name) != stamp:
                self._seen[name] = stamp
                await self._take(shell, controller, files[name])
        for key, model in list(controller.models.items()):
            if self._is_ours(model.source) and model.source not in stamps:
                await self._tell(shell, model.source, Undeploy(key))
        for name in [n for n in {*self._seen, *self.errors} if n not in stamps and n != str(self._directory)]:
            self._seen.pop(name, None)
            self.errors.pop(name, None)

    def _is_ours(self, source: str) -> bool:
        return bool(source) and Path(source).parent == self._directory

    async def _take(self, shell: Shell, controller: AutoscalerController, path: Path) -> None:
        try:
            models = model_files.load(path)
        except GlowplugError as error:
            self.errors[str(path)] = error.message
            log.error("model file kept out: %s", error.message)
            return
        self.errors.pop(str(path), None)
        for model in models:
            await self._tell(shell, str(path), Deploy(model=model))
        declared = {m.key for m in models}
        for key in [k for k, m in controller.models.items() if m.source == str(path) and k not in declared]:
            await self._tell(shell, str(path), Undeploy(key))

    async def _tell(self, shell: Shell, source: str, request: Deploy | Undeploy) -> None:
        try:
            await shell.ask(request)
        except GlowplugError as error:
            self.errors[source] = error.message
            log.error("model file %s: %s", source, error.message)
