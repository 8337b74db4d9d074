"""The reader of usage records: from the bus into the ledger, acknowledged once they are committed there.

Consoles share one reader's name and, so, the records; several of them need one database. A database that is down leaves
a batch unacknowledged: it is tried again here, and given to another console or to the next process meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from glowplug.bus.port import Bus
from glowplug.events import Event
from glowplug.events.facts import UsageRecorded
from glowplug.events.subjects import among_facts, facts_of
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.usage_ledger import Ledger

log = logging.getLogger(__name__)
# By the reader's name. Versions up to 0.2 published among all facts; what is left there is read first.
FILTERS: Final = {"usage-ledger": among_facts("usage.recorded"), "usage-records": facts_of("usage.recorded")}
RETRY_S: Final = 1.0
FORGET_EVERY_S: Final = 3600.0
DAY_S: Final = 86400.0


class UsageReader:
    """Fills `ledger`, and deletes its records once they are `kept_days` old."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: ConsoleMetrics,
        kept_days: float,
        clock: Callable[[], float],
        retry_s: float = RETRY_S,
    ) -> None:
        self._ledger, self._metrics, self._kept_days = ledger, metrics, kept_days
        self._clock, self._retry_s = clock, retry_s
        self.problem = ""  # why the database takes nothing now

    async def listen(self, bus: Bus) -> None:
        """Subscribe, on a bus that is connected."""
        for durable, filter_ in FILTERS.items():
            await bus.subscribe((filter_,), self.take, durable=durable, patient=True)

    async def take(self, event: Event) -> None:
        """Commit a batch, however long the database needs."""
        data = event.data
        assert isinstance(data, UsageRecorded)
        while True:
            try:
                num = await asyncio.to_thread(self._ledger.add, data.records)
            except SQLAlchemyError as error:
                self._failed(error)
                await asyncio.sleep(self._retry_s)
                continue
            if self.problem:
                log.warning("the usage ledger takes records again")
                self.problem = ""
            self._metrics.usage_records.inc(num)
            self._metrics.usage_repeated.inc(len(data.records) - num)
            return

    async def forget(self) -> None:
        """Delete old records each FORGET_EVERY_S, for ever."""
        while True:
            try:
                num = await asyncio.to_thread(self._ledger.forget, self._clock() - self._kept_days * DAY_S)
                if num:
                    log.info("deleted %d usage records older than %g days; their totals stay", num, self._kept_days)
            except SQLAlchemyError as error:
                self._failed(error)
            await asyncio.sleep(FORGET_EVERY_S)

    def _failed(self, error: SQLAlchemyError) -> None:
        # The first line names the fault; those that follow hold the statement and its values.
        self._metrics.ledger_failures.inc()
        reason = str(error).splitlines()[0]
        if not self.problem:
            log.error("the usage ledger cannot use its database, and tries again: %s", reason)
        self.problem = reason
