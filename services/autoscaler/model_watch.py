"""Model files kept in force: read at start and when they change; a bad file leaves the old models as they are."""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.operator import Deploy, Undeploy
from glowplug.domain.errors import GlowplugError
from glowplug.runtime import model_files
from glowplug.runtime.shell import Shell
from glowplug.weights.files import NoAnswer, PatientReader
from glowplug.weights.measure import Measure, Remembered, not_asked

log = logging.getLogger(__name__)

READ_S = 5.0  # a healthy disk answers in milliseconds, a network mount that is up within a second or two


class ModelWatch:
    """`errors`: file -> why it is not in force (shown by REST and on the models it declares).

    Files are read beside the event loop: a pipe, or a network mount that has died, keeps out what it holds and nothing
    else. `timeout_s` bounds each reading; `measure` asks for the size of weights on other machines.
    """

    def __init__(
        self, directory: Path | None, poll_s: float, timeout_s: float = READ_S, measure: Measure = not_asked
    ) -> None:
        self._directory, self._poll_s, self.measure = directory, poll_s, measure
        self.reader = PatientReader(timeout_s)
        self._seen: dict[str, tuple[int, int]] = {}  # file -> (mtime_ns, size)
        self._unanswered: dict[str, str] = {}  # file -> the reading of the directory that waits for it
        self._sizes: dict[str, Remembered] = {}  # file -> sizes that were answered for it, while others were not
        self.errors: dict[str, str] = {}
        self.has_read = directory is None  # each file once: what it declares is in force, or it is among the errors

    async def run(self, shell: Shell) -> None:
        """Poll for ever."""
        while self._directory is not None:
            await self.poll(shell)
            self.has_read = True
            await asyncio.sleep(self._poll_s)

    async def poll(self, shell: Shell) -> None:
        """Take what changed since the last poll. An unreadable directory changes nothing."""
        assert self._directory is not None
        controller = shell.controller
        assert isinstance(controller, AutoscalerController)
        directory = self._directory
        try:
            stamps = await self._stamps(directory)
        except OSError as error:
            reason = f"cannot read the directory: {error.strerror}"
            if self.errors.get(str(directory)) != reason:
                log.error("%s: %s", directory, reason)
            self.errors[str(directory)] = reason
            return
        self.errors.pop(str(directory), None)
        for name, stamp in stamps.items():
            if self._seen.get(name) != stamp:
                self._seen[name] = stamp
                if not await self._take(shell, controller, Path(name), stamps):
                    del self._seen[name]  # asked again: what stands in its way may change or go
        for key, model in list(controller.models.items()):
            if self._is_ours(model.source) and model.source not in stamps:
                await self._tell(shell, model.source, Undeploy(key))
        for name in [n for n in {*self._seen, *self.errors} if n not in stamps and n != str(self._directory)]:
            self._seen.pop(name, None)
            self._sizes.pop(name, None)
            self.errors.pop(name, None)

    async def _stamps(self, directory: Path) -> dict[str, tuple[int, int]]:
        """Model file -> (mtime_ns, size), in the order of their names. One whose file system does not answer counts as
        unchanged, and is named. Raises OSError when the directory cannot be read."""
        for name, asked in list(self._unanswered.items()):
            if not self.reader.is_waiting(asked):
                del self._unanswered[name]
                self._seen.pop(name, None)  # it answers again: read it anew
        listing = _Listing(directory, frozenset(self._unanswered))
        name = f"{directory} without {len(self._unanswered)}"
        try:
            found = await self.reader.run(name, listing.read)
        except NoAnswer as error:
            if not listing.asking:
                raise
            self._unanswered[listing.asking] = name
            self._keep_out(Path(listing.asking), f"cannot be read: {error.strerror}")
            return await self._stamps(directory)
        silent = {name: self._seen.setdefault(name, (0, 0)) for name in self._unanswered}
        return dict(sorted((found | silent).items()))

    def _is_ours(self, source: str) -> bool:
        return bool(source) and Path(source).parent == self._directory

    async def _take(self, shell: Shell, controller: AutoscalerController, path: Path, present: Collection[str]) -> bool:
        """Put a file in force. False when a name in it belongs to another model or file, or when its file system does
        not answer: it is asked again."""
        measure = self._sizes.setdefault(str(path), Remembered(self.measure))
        try:
            models = await self.reader.run(str(path), lambda: model_files.load(path, measure))
        except GlowplugError as error:
            self._sizes.pop(str(path), None)
            self._keep_out(path, error.message)
            return True
        except NoAnswer as error:
            self._keep_out(path, f"cannot be read (it, or the weights it names): {error.strerror}")
            return False
        self._sizes.pop(str(path), None)
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


class _Listing:
    """One reading of the directory, in a thread; `asking` is the file that is being asked about."""

    def __init__(self, directory: Path, without: frozenset[str]) -> None:
        self._directory, self._without = directory, without
        self.asking = ""

    def read(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in sorted(self._directory.iterdir()):
            if path.suffix not in (".yaml", ".yml") or str(path) in self._without:
                continue
            self.asking = str(path)
            stat = path.stat()
            found[str(path)] = (stat.st_mtime_ns, stat.st_size)
        self.asking = ""
        return found
