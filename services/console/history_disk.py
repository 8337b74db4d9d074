"""The history of a console on its disk: one SQLite file, so that a restart loses no more than seconds.

Methods block. The file is this console's own, also where several consoles share a database for the usage ledger.
"""

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from glowplug.services.console.history import Row

log = logging.getLogger(__name__)
_TABLE: Final = """CREATE TABLE IF NOT EXISTS history (
    width_s INTEGER, start INTEGER, scope TEXT, is_open INTEGER, cell BLOB,
    PRIMARY KEY (width_s, start, scope)) WITHOUT ROWID"""


class HistoryDisk:
    """Open it once; a file that is no database is put aside as `<name>.broken`. Raises OSError or sqlite3.Error where
    the folder takes no file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._one = threading.Lock()  # a write that was given up goes on in its thread
        try:
            self._connection = _opened(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("%s is no database, and becomes %s.broken: %s", path, path.name, error)
            path.replace(path.with_name(f"{path.name}.broken"))
            self._connection = _opened(path)

    def read(self) -> Iterable[Row]:
        """All rows, by rising start."""
        asked = "SELECT width_s, start, scope, is_open, cell FROM history ORDER BY start, width_s, scope"
        for width_s, start, scope, is_open, cell in self._connection.execute(asked):
            yield Row(width_s, start, scope, bool(is_open), cell)

    def write(
        self, slots: Iterable[tuple[int, int]], rows: Iterable[Row], bounds: Mapping[int, tuple[int, int]]
    ) -> None:
        """Put `rows` in the place of what these slots held, and delete slots outside the bounds of their width, all in
        one transaction. Raises sqlite3.Error; then nothing is kept of it."""
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
