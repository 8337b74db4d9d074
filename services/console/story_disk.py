"""The events of sampled stories on disk, so that they outlive their console."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from glowplug.events import Event
from glowplug.events.envelope import MalformedEvent, decode, encode
from glowplug.events.facts import RouterRequestsFinished
from glowplug.telemetry.tracing import is_sampled

log = logging.getLogger(__name__)
MAX_BYTES: Final = 16 << 20  # of one file
MAX_PENDING: Final = 10_000
WRITE_EVERY_S: Final = 0.5


class StoryDisk:
    """A file with an event of JSON per line. At `max_bytes` it replaces `<name>.1`, and a new one begins. `read` and
    `write` block. A disk that refuses costs only the copy, and is tried again."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        self._has_failed = False

    def read(self) -> Iterator[Event]:
        """Yield the events, oldest first. A line cut short by a kill, or written by a newer version, is left out."""
        for path in (self._older, self._path):
            try:
                lines = path.read_bytes().splitlines() if path.exists() else []
            except OSError as error:
                self._failed(error)
                continue
            for line in lines:
                try:
                    yield decode(line)
                except MalformedEvent:
                    continue

    def keep(self, event: Event) -> None:
        if isinstance(event.data, RouterRequestsFinished):
            ends = [end for end in event.data.traced() if is_sampled(end[1])]
            if not ends:
                return
            requests, traceparents = zip(*ends, strict=True)
            event = replace(event, data=replace(event.data, requests=requests, traceparents=traceparents))
        elif event.traceparent and not is_sampled(event.traceparent):
            return
        self._pending.append(encode(event))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            if self._pending:
                await asyncio.to_thread(self.write)

    def write(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(b"\n" + b"\n".join(lines) + b"\n")  # behind the remains of a failed write
                num_bytes = file.tell()
            if num_bytes >= self._max_bytes:
                self._path.replace(self._older)
            self._has_failed = False
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning("the console cannot use %s and keeps traces in memory only: %s", self._path, error)
        self._has_failed = True
