"""Model files kept in force: read at start and when they change; a bad file leaves the old models as they are."""

import asyncio
import logging
from collections.abc import Collection
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
                if not await self._take(shell, controller, files[name], stamps):
                    del self._seen[name]  # asked again: what stands in its way may change or go
        for key, model in list(controller.models.items()):
            if self._is_ours(model.source) and model.source not in stamps:
                await self._tell(shell, model.source, Undeploy(key))
        for name in [n for n in {*self._seen, *self.errors} if n not in stamps and n != str(self._directory)]:
            self._seen.pop(name, None)
            self.errors.pop(name, None)

    def _is_ours(self, source: str) -> bool:
        return bool(source) and Path(source).parent == self._directory

    async def _take(self, shell: Shell, controller: AutoscalerController, path: Path, present: Collection[str]) -> bool:
        """Put a file in force. False when a name in it belongs to another model or file."""
        try:
            models = model_files.load(path)
        except GlowplugError as error:
            self._keep_out(path, error.message)
            return True
        for model in models:
            known = controller.models.get(model.key)
            if known is not None and known.source != str(path) and known.source in present:
                self._keep_out(path, f"name: model {model.name!r} comes from {Path(known.source).name} already")
                return False
        done = [await self._tell(shell, str(path), Deploy(model=model)) for model in models]
        declared = {m.key for m in models}
        for key in [k for k, m in controller.models.items() if m.source == str(path) and k not in declared]:
            await self._tell(shell, str(path), Undeploy(key))
        if all(done):
            self.errors.pop(str(path), None)
        return all(done)

    def _keep_out(self, path: Path, reason: str) -> None:
        if self.errors.get(str(path)) != reason:
            log.error("model file %s kept out: %s", path, reason)
        self.errors[str(path)] = reason

    async def _tell(self, shell: Shell, source: str, request: Deploy | Undeploy) -> bool:
        try:
            await shell.ask(request)
        except GlowplugError as error:
            self._keep_out(Path(source), error.message)
            return False
        return True
