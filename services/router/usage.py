"""Usage of a router's requests: one record each, spooled and sent to the console's ledger in batches."""

import asyncio
import contextlib
import logging
import math
from pathlib import Path

from glowplug.bus.port import Bus, BusUnavailable
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, UsageRecorded
from glowplug.runtime.clock import CLOCK, now_s
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.usage_journal import ROUTER_LOST, SUFFIX, Journal, has_ended, left_in
from glowplug.services.router.usage_spool import Line, Spool, read

log = logging.getLogger(__name__)
SEND_EVERY_S = 1.0
BATCH = 1000  # records of one event: below half a megabyte of the bus's four
ADOPT_EVERY = 30  # rounds between looks for ended processes
FINISH_WITHIN_S = 3.0
CLIENT_LEFT = 499


class UsageLog:
    def __init__(self, spool: Spool, metrics: RouterMetrics, journal: Journal) -> None:
        self._spool, self._metrics, self.journal = spool, metrics, journal

    def take(
        self, fact: RequestFinished, ticket: int, path: bytes, cached_tokens: int, gpu_s: float = math.nan
    ) -> None:
        """Keep an ended request's usage. A refused request has no record; one that an engine refused (4xx), or whose
        client left the queue, has one without tokens. `gpu_s`: NaN if unknown."""
        status = fact.status
        if not fact.instance_id and status != CLIENT_LEFT:
            return
        used = fact.instance_id and (status < 400 or status >= CLIENT_LEFT)
        prompt, response = (fact.prompt_tokens, fact.response_tokens) if used else (0, 0)
        record = Line(
            record_id=f"{self.journal.prefix}-{ticket}",
            request_id=fact.request_id,
            tenant=fact.tenant,
            key_id=fact.key_id,
            model_key=fact.model_key,
            path=path.decode("latin-1"),
            arrived_at=fact.arrived_at + CLOCK.behind_s,
            finished_at=fact.finished_at + CLOCK.behind_s,
            prompt_tokens=prompt,
            cached_tokens=min(max(cached_tokens, 0), prompt),
            response_tokens=response,
            tokens_exact=fact.tokens_exact,
            held_s=fact.queue_s,
            cold=fact.cold,
            instance_id=fact.instance_id,
            status=status,
            error_code=fact.error_code,
            emulated=fact.emulated,
            gpu_s=round(gpu_s, 6) if gpu_s == gpu_s else 0.0,
            gpu_known=gpu_s == gpu_s,
        )
        self._spool.append(record)
        self._metrics.used(fact.tenant, prompt, response)

    def adopt(self, folder: Path) -> None:
        """Take over the records of ended processes, in this router's folder and in absent routers' below `folder`.
        Requests in progress there get records."""
        own = self._spool.folder
        self._spool.adopt()
        for one in (own, *sorted(set(folder.glob(f"*/{own.name}")) - {own})):
            try:
                if one != own:
                    if not has_ended(one):
                        continue
                    self._spool.adopt_all(one)
                for path in sorted(one.glob(f"*{SUFFIX}")):
                    self._adopt_journal(path)
            except OSError as error:
                log.error("the router cannot take over the usage records in %s: %s", one, error)

    def _adopt_journal(self, path: Path) -> None:
        with left_in(path) as (records, num_bad):
            for record in records:
                self._spool.append(record)
                if self._spool.problem:  # the journal stays for the next time
                    raise OSError(self._spool.problem)
                self._metrics.used(record.tenant, record.prompt_tokens, record.response_tokens)
            if num_bad:
                self._metrics.usage_lost.inc(num_bad)
                log.error("%d requests in %s cannot be read, and have no usage records", num_bad, path)
        if records:
            log.warning(
                "a router was killed while it served %d requests: their usage records say %s", len(records), ROUTER_LOST
            )


class UsageSender:
    """The sender of the spool's records. A batch may be sent twice: readers know its records by their ids."""

    def __init__(
        self,
        spool: Spool,
        bus: Bus,
        router_id: str,
        metrics: RouterMetrics,
        usage: UsageLog | None = None,
        folder: Path = Path(),
    ) -> None:
        """`folder`: of all routers' records."""
        self._spool, self._bus, self._router_id, self._metrics = spool, bus, router_id, metrics
        self._usage, self._folder = usage, folder
        self.journal = usage.journal if usage is not None else Journal()
        self._num_batches = 0
        self._sending = asyncio.Lock()
        metrics.spool_bytes.set_function(lambda: spool.num_bytes)

    async def run(self) -> None:
        num = 0
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            num += 1
            self.journal.beat()
            if self._usage is not None and num % ADOPT_EVERY == 0:
                self._usage.adopt(self._folder)
            await self.send()

    async def send(self) -> bool:
        """Send the whole spool. Returns False if the bus did not take it all; the rest stays."""
        if not self._bus.connected or self._bus.refusal:
            return False
        async with self._sending:
            try:
                for segment in self._spool.seal():
                    offset = 0
                    while (end := await self._send_batch(segment, offset)) > offset:
                        offset = end
                    self._spool.remove(segment)
            except BusUnavailable as error:
                log.debug("the bus did not accept usage records, which stay in the spool: %s", error)
                return False
            except OSError as error:
                log.error("the router cannot read or remove its usage records, which stay in the spool: %s", error)
                return False
        return True

    async def finish(self) -> None:
        """Send the rest within FINISH_WITHIN_S, or leave it to the next process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_WITHIN_S):
                await self.send()
        self._spool.close()
        self.journal.close(keeps_file=self._spool.num_bytes > 0)

    async def _send_batch(self, segment: Path, offset: int) -> int:
        records, end, num_bad = await asyncio.to_thread(read, segment, offset, BATCH)
        if num_bad:
            self._metrics.usage_lost.inc(num_bad)
            log.error("skipped %d lines of %s that are not usage records", num_bad, segment)
        if records:
            self._num_batches += 1
            data = UsageRecorded(router_id=self._router_id, batch=self._num_batches, records=tuple(records))
            event = Event(  # the same id when sent again: the bus stores it once
                event_id=f"usage-{segment.stem}-{offset}",
                type=data.TYPE,
                occurred_at=now_s() + CLOCK.behind_s,
                issuer=self._router_id,
                data=data,
            )
            await self._bus.publish(event)
            self._metrics.published(event.type)
        return end


def open_usage(settings: RouterSettings, bus: Bus, metrics: RouterMetrics) -> tuple[UsageLog | None, UsageSender]:
    """Open a router's records, with those of ended processes; None where it makes none."""
    folder = Path(settings.usage_dir) if settings.usage_dir else settings.state_dir
    spool = Spool(folder / settings.service_id / "usage", settings.usage_spool_bytes, metrics.usage_lost.inc)
    usage = None
    if settings.usage_spool_bytes:
        usage = UsageLog(spool, metrics, Journal(spool.folder, settings.usage_slots))
        usage.adopt(folder)
    return usage, UsageSender(spool, bus, settings.service_id, metrics, usage, folder)
