"""The last lines that engines wrote, in memory: their log files are followed, each by its new bytes."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from glowplug.domain.instance import Instance
from glowplug.telemetry.log_ring import LogRing

POLL_S: Final = 0.5
MAX_READ_BYTES: Final = 64 << 10  # of one file at a time; of what an engine writes faster, the newest
_LEVEL: Final = re.compile(r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_LEVELS: Final = {"warn": "warning", "fatal": "critical"}
_LEVEL_CHARS: Final = 80  # a level stands near the beginning of a line


@dataclass(slots=True)
class _File:
    """How far a file was read, and the line that has no end yet."""

    offset: int
    rest: bytes = b""


class EngineOutputs:
    """Follows the log files of a node's engines into `ring`. Two instances that one process serves share a file: its
    lines are those of the newer one."""

    def __init__(self, ring: LogRing, node_id: str, path_of: Callable[[str], Path]) -> None:
        self.ring = ring
        self._node_id, self._path_of = node_id, path_of
        self._files: dict[tuple[int, int], _File] = {}  # (device, inode) -> how far

    async def follow(self, instances: Callable[[], Iterable[Instance]]) -> None:
        """For ever."""
        while True:
            rows = sorted(instances(), key=lambda row: -row.created_at)
            await asyncio.to_thread(self.read, rows, time.time())
            await asyncio.sleep(POLL_S)

    def read(self, instances: Iterable[Instance], now_s: float) -> None:
        """Read what came since the last time; newer instances before older ones."""
        seen: dict[tuple[int, int], _File] = {}
        for instance in instances:
            path = self._path_of(instance.instance_id)
            try:
                stat = path.stat()
            except OSError:  # it has written nothing yet, or is forgotten
                continue
            place = (stat.st_dev, stat.st_ino)
            if place in seen:
                continue
            file = seen[place] = self._files.get(place) or _File(max(0, stat.st_size - MAX_READ_BYTES))
            if stat.st_size != file.offset:
                self._take(path, stat.st_size, file, instance, now_s)
        self._files = seen

    def _take(self, path: Path, size: int, file: _File, instance: Instance, now_s: float) -> None:
        begin = file.offset if file.offset <= size else 0  # it was emptied
        if size - begin > MAX_READ_BYTES:
            begin, file.rest = size - MAX_READ_BYTES, b""
        try:
            with path.open("rb") as log:
                log.seek(begin)
                data = log.read(size - begin)
        except OSError:
            return
        file.offset = begin + len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        fields = {"instance": instance.instance_id, "model": instance.model_key, "node": self._node_id}
        for line in lines:
            if text := line.decode("utf-8", "replace").rstrip():
                self.ring.put(now_s, level_of(text), text, fields)
        if len(file.rest) > MAX_READ_BYTES:
            file.rest = b""  # nothing that a person reads


def level_of(line: str) -> str:
    """The level that a line names near its beginning, else "info"."""
    found = _LEVEL.search(line, 0, _LEVEL_CHARS)
    word = found[1].lower() if found else "info"
    return _LEVELS.get(word, word)
