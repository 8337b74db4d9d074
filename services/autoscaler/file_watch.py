"""Watch a directory of YAML declarations. A bad file leaves its earlier declarations in force."""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.errors import GlowplugError
from glowplug.runtime.shell import Shell
from glowplug.weights.files import NoAnswer, PatientReader

log = logging.getLogger(__name__)

POLL_S = 1.0
AGAIN_S = 15.0  # the obstacle may be elsewhere: missing weights, a permission, a full machine
READ_S = 5.0  # a healthy disk answers in milliseconds, a working network mount within a second or two


class FileWatch:
    """`errors`: file -> why it is not applied; `kind`: of declaration, for logs.

    Files are read in threads, each bounded by `timeout_s`: a pipe or a dead network mount keeps out only its own
    declarations."""

    kind = "file"
    reads = ""  # other sources that may not answer

    def __init__(self, directory: Path | None, poll_s: float = POLL_S, timeout_s: float = READ_S) -> None:
        self._directory, self._poll_s = directory, poll_s
        self.reader = PatientReader(timeout_s)
        self._seen: dict[str, tuple[int, int]] = {}  # file -> (mtime_ns, size)
        self._again: dict[str, float] = {}  # file kept out -> loop time of its next reading
        self._unanswered: dict[str, str] = {}  # file -> name of the directory reading that waits for it
        self.errors: dict[str, str] = {}
        self.has_read = directory is None  # each file is applied or among the errors

    def load(self, path: Path) -> Any:
        """Read a declaration, in a thread. Raises GlowplugError for a bad file, NoAnswer if a retry may work."""
        raise NotImplementedError

    async def apply_all(
        self, shell: Shell, controller: AutoscalerController, read: Mapping[str, Any], present: Collection[str]
    ) -> set[str]:
        """Apply the results of `load` of changed files, and end declarations that have left. Return the files to retry
        at the next poll: a name belongs to another file, or the controller refuses."""
        raise NotImplementedError

    def answered(self, name: str) -> None:
        """Note that a file was read, well or not."""

    async def _read(self, path: Path) -> Any:
        """Return what it declares; None for a bad file, which is retried after AGAIN_S. Raises NoAnswer."""
        name = str(path)
        try:
            return await self.reader.run(name, lambda: self.load(path))
        except GlowplugError as error:
            self.keep_out(path, error.message, again=True)
        except NoAnswer:
            raise
        except Exception as error:  # a bad file must not affect the others
            reason = f"cannot be read: {type(error).__name__}: {error}"
            if self.errors.get(name) != reason:
                log.exception("the autoscaler cannot read the %s %s", self.kind, path)
            self.keep_out(path, reason, again=True)
        return None

    def forget(self, name: str) -> None:
        for known in (self._seen, self._again, self.errors):
            known.pop(name, None)

    async def run(self, shell: Shell) -> None:
        while self._directory is not None:
            await self.poll(shell)
            self.has_read = True
            await asyncio.sleep(self._poll_s)

    async def poll(self, shell: Shell) -> None:
        """Apply changed files, and those kept out `AGAIN_S` ago. An unreadable directory changes nothing."""
        assert self._directory is not None
        controller = shell.controller
        assert isinstance(controller, AutoscalerController)
        directory = self._directory
        try:
            stamps = await self._stamps(directory)
        except OSError as error:
            reason = f"cannot read the directory: {error.strerror}"
            if self.errors.get(str(directory)) != reason:
                log.error("the autoscaler keeps the last state it read from %s: %s", directory, reason)
            self.errors[str(directory)] = reason
            return
        self.errors.pop(str(directory), None)
        now, read = asyncio.get_running_loop().time(), dict[str, Any]()
        for name, stamp in stamps.items():
            if self._seen.get(name) != stamp or now >= self._again.get(name, math.inf):
                self._again.pop(name, None)
                try:
                    declared = await self._read(Path(name))
                except NoAnswer as error:
                    self._seen.pop(name, None)
                    self.keep_out(Path(name), f"cannot be read{self.reads}: {error.strerror}")
                    continue
                self._seen[name] = stamp
                self.answered(name)
                if declared is not None:
                    read[name] = declared
        for name in await self.apply_all(shell, controller, read, stamps):
            self._seen.pop(name, None)
        for name in [n for n in {*self._seen, *self.errors} if n not in stamps and n != str(self._directory)]:
            self.forget(name)

    async def _stamps(self, directory: Path) -> dict[str, tuple[int, int]]:
        """In the order of names. A silent file system counts as unchanged and gets an error. Raises OSError for an
        unreadable directory."""
        for name, asked in list(self._unanswered.items()):
            if not self.reader.is_waiting(asked):
                del self._unanswered[name]
                self._seen.pop(name, None)  # the file system answers again
        listing = _Listing(directory, frozenset(self._unanswered))
        name = f"{directory} without {len(self._unanswered)}"
        try:
            found = await self.reader.run(name, listing.read)
        except NoAnswer as error:
            if not listing.asking:
                raise
            self._unanswered[listing.asking] = name
            self.keep_out(Path(listing.asking), f"cannot be read: {error.strerror}")
            return await self._stamps(directory)
        silent = {name: self._seen.setdefault(name, (0, 0)) for name in self._unanswered}
        return dict(sorted((found | silent).items()))

    def is_ours(self, source: str) -> bool:
        return bool(source) and Path(source).parent == self._directory

    def keep_out(self, path: Path, reason: str, *, again: bool = False) -> None:
        if again:
            self._again[str(path)] = asyncio.get_running_loop().time() + AGAIN_S
        if self.errors.get(str(path)) != reason:
            log.error("the autoscaler does not apply the %s %s: %s", self.kind, path, reason)
        self.errors[str(path)] = reason

    async def tell(self, shell: Shell, source: str, request: Any) -> bool:
        try:
            await shell.ask(request)
        except GlowplugError as error:
            self.keep_out(Path(source), error.message, again=error.param == "base")  # another file may declare it
            return False
        return True


class _Listing:
    """One reading of the directory. `asking`: the file whose file system is being asked."""

    def __init__(self, directory: Path, without: frozenset[str]) -> None:
        self._directory, self._without = directory, without
        self.asking = ""

    def read(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in sorted(self._directory.iterdir()):
            if path.suffix not in (".yaml", ".yml") or path.name.startswith(".") or str(path) in self._without:
                continue
            self.asking = str(path)
            try:
                stat = path.stat()
            except OSError:  # it alone is kept out, with the reason that its reading gives
                found[str(path)] = (0, 0)
            else:
                found[str(path)] = (stat.st_mtime_ns, stat.st_size)
        self.asking = ""
        return found
