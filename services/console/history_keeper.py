"""Keep the history: sample the fleet at a steady beat, and write changes to disk."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.events import Event
from glowplug.services.console.fleet_view import ShownFleet
from glowplug.services.console.history import History, Sample, SavedCell

# The history on disk: one SQLite file of this console alone, so that a restart loses seconds at most. Methods block.

log = logging.getLogger(__name__)
_TABLE: Final = """CREATE TABLE IF NOT EXISTS history (
    width_s INTEGER, start INTEGER, scope TEXT, is_open INTEGER, cell BLOB,
    PRIMARY KEY (width_s, start, scope)) WITHOUT ROWID"""


class HistoryDisk:
    """Rename a file that is not a database to `<name>.broken`. Raises OSError or sqlite3.Error if the folder is not
    writable."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._one = threading.Lock()  # an abandoned write continues in its thread
        try:
            self._connection = _opened(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("%s is not a database, and is renamed to %s.broken: %s", path, path.name, error)
            path.replace(path.with_name(f"{path.name}.broken"))
            self._connection = _opened(path)

    def read(self) -> Iterable[SavedCell]:
        """By rising start."""
        asked = "SELECT width_s, start, scope, is_open, cell FROM history ORDER BY start, width_s, scope"
        for width_s, start, scope, is_open, cell in self._connection.execute(asked):
            yield SavedCell(width_s, start, scope, bool(is_open), cell)

    def write(
        self, slots: Iterable[tuple[int, int]], rows: Iterable[SavedCell], bounds: Mapping[int, tuple[int, int]]
    ) -> None:
        """Replace the contents of these slots by `rows`, and delete slots outside the bounds of their width, in one
        transaction. Raises sqlite3.Error."""
        with self._one, self._connection:
            self._connection.executemany("DELETE FROM history WHERE width_s = ? AND start = ?", slots)
            self._connection.executemany("INSERT INTO history VALUES (?, ?, ?, ?, ?)", rows)
            for width_s, (oldest, newest) in bounds.items():
                self._connection.execute(
                    "DELETE FROM history WHERE width_s = ? AND (start < ? OR start > ?)", (width_s, oldest, newest)
                )

    def close(self) -> None:
        with self._one, contextlib.suppress(sqlite3.Error):
            self._connection.close()


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may cost seconds, not the file
        connection.execute(_TABLE)
    except BaseException:
        connection.close()
        raise
    return connection


SAMPLE_EVERY_S: Final = 2.0
SAVE_EVERY_S: Final = 10.0


class HistoryKeeper:
    """Without `open_disk` the history is in memory only."""

    def __init__(self, view: ShownFleet, clock: Callable[[], float]) -> None:
        self.history = History()
        self._view, self._clock = view, clock
        self._disk: HistoryDisk | None = None
        self._has_failed = False

    def open_disk(self, path: Path) -> None:
        """Read the last process's history, and write from now on. Blocks; disk errors are logged."""
        try:
            self._disk = HistoryDisk(path)
            self.history.restore(self._disk.read(), self._clock())
        except (OSError, sqlite3.Error) as error:
            log.warning("the history is kept in memory only, because %s cannot be used: %s", path, error)
            self._disk = None

    def take(self, event: Event, now_s: float) -> None:
        self.history.take(event, now_s)

    async def keep(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self.sample()
            beats += 1
            if beats * SAMPLE_EVERY_S >= SAVE_EVERY_S:
                beats = 0
                await self.save()

    def sample(self) -> None:
        """Sample the fleet, unless the bus is down and its state unknown."""
        if self._view.sources["bus"].is_up:
            now_s = self._clock()
            self.history.sample(sample_of(self._view, now_s), now_s)

    async def save(self) -> None:
        if self._disk is None:
            return
        slots, rows = self.history.changes()
        try:
            await asyncio.to_thread(self._disk.write, slots, rows, self.history.bounds)
        except sqlite3.Error as error:
            self.history.not_saved(slots)
            if not self._has_failed:
                log.warning("failed to write the history to disk; it stays in memory: %s", error)
            self._has_failed = True
        else:
            self._has_failed = False

    async def close(self) -> None:
        await self.save()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)
            self._disk = None


def sample_of(view: ShownFleet, now_s: float) -> Sample:
    loads = view.loads(now_s)
    used = reserved = total = 0
    for node_id, node in view.nodes.items():
        if not view.node_table.is_alive(node_id, now_s):
            continue
        for gpu in node.gpus:
            held = reserved_bytes(gpu)
            used += gpu.used_bytes - held
            reserved += held
            total += gpu.total_bytes
    return Sample(
        waiting={key: load.num_waiting for key, load in loads.items()},
        running={key: load.num_in_flight for key, load in loads.items()},
        used_bytes=used,
        reserved_bytes=reserved,
        total_bytes=total,
    )


def reserved_bytes(gpu: Gpu) -> int:
    return sum(grant.num_bytes for grant in gpu.grants if grant.owner is GrantOwner.RESERVATION)
