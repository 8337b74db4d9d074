"""Keeps the history: samples the fleet's picture at a steady beat, and writes what is new to the disk."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.events import Event
from glowplug.services.console.fleet_view import FleetView
from glowplug.services.console.history import History, Sample
from glowplug.services.console.history_disk import HistoryDisk

log = logging.getLogger(__name__)
SAMPLE_EVERY_S: Final = 2.0
SAVE_EVERY_S: Final = 10.0


class HistoryKeeper:
    """One console's history. Without `open_disk` it lives in memory alone."""

    def __init__(self, view: FleetView, clock: Callable[[], float]) -> None:
        self.history = History()
        self._view, self._clock = view, clock
        self._disk: HistoryDisk | None = None
        self._has_failed = False

    def open_disk(self, path: Path) -> None:
        """Read what the last process kept, and keep what is to come. Blocks; a disk that takes nothing is logged."""
        try:
            self._disk = HistoryDisk(path)
            self.history.restore(self._disk.read(), self._clock())
        except (OSError, sqlite3.Error) as error:
            log.warning("the history is kept in memory only, because %s cannot be used: %s", path, error)
            self._disk = None

    def take(self, event: Event, now_s: float) -> None:
        self.history.take(event, now_s)

    async def keep(self) -> None:
        """Sample and save, for ever."""
        beats = 0
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self.sample()
            beats += 1
            if beats * SAMPLE_EVERY_S >= SAVE_EVERY_S:
                beats = 0
                await self.save()

    def sample(self) -> None:
        """Note the fleet as it is now; nothing while the bus is away, for then nobody knows it."""
        if self._view.sources["bus"].is_up:
            now_s = self._clock()
            self.history.sample(sample_of(self._view, now_s), now_s)

    async def save(self) -> None:
        """Write what is new; what the disk does not take is tried again the next time."""
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
        """Save the rest, and let go of the file."""
        await self.save()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)
            self._disk = None


def sample_of(view: FleetView, now_s: float) -> Sample:
    """The requests of all models, and the bytes of the GPUs of nodes that live."""
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
    """Bytes that are held for a start and not in use yet."""
    return sum(grant.num_bytes for grant in gpu.grants if grant.owner is GrantOwner.RESERVATION)
