"""Elect one leader among processes, and let out only its effects.

A standby is hot: it reads the bus, and its controller sees all facts and tables, but its effects are dropped.
controllers/election.py decides; here are the clock, the store and the two states.
"""

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from glowplug.controllers.effects import Save, Tick
from glowplug.controllers.election import RENEWALS, Ask, Change, Election
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.port import Elected
from glowplug.domain.errors import NotLeader
from glowplug.domain.lease import Leader, Lease
from glowplug.events import Event
from glowplug.events.envelope import COMMANDS
from glowplug.runtime.shell import Shell
from glowplug.runtime.tasks import end, essential
from glowplug.state.port import Store, StoreUnavailable
from glowplug.telemetry.metrics import ShellMetrics

log = logging.getLogger(__name__)
RETRY_S = 0.1


def unstopping_clock() -> float:
    """Seconds, also while the process is stopped or the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class Candidate:
    """Runs for leader of a service while `run` runs. `term(epoch)` runs while leading, is cancelled with time to
    clean up, and stops the service by an error."""

    def __init__(
        self,
        service: str,
        service_id: str,
        url: str,
        lease_s: float,
        store: Store,
        metrics: ShellMetrics,
        term: Callable[[int], Coroutine[Any, Any, None]],
        stopping: asyncio.Event,
        clock: Callable[[], float] = unstopping_clock,
        does: str = "",
    ) -> None:
        self._does = does
        self.service, self.service_id, self.url, self._lease_s = service, service_id, url, lease_s
        self._store, self._metrics, self._serve, self._stopping = store, metrics, term, stopping
        self._clock = clock
        self._election = Election(f"{service_id}@{uuid.uuid4().hex[:12]}", lease_s)
        self._term: asyncio.Task[None] | None = None
        metrics.leader.set(0)

    def may_act(self) -> bool:
        return self._election.may_act(self._clock())

    @property
    def lease(self) -> Lease:
        """The lease as last read; none if it was ours and has run out."""
        return self._election.seen(self._clock())

    @property
    def leader_id(self) -> str:
        return self.lease.holder.partition("@")[0]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._election.wait_s(self._clock()))
            await self._step()

    async def _step(self) -> None:
        election = self._election
        await self._change(election.passed(self._clock()))
        asked_at = self._clock()
        ask, newest = election.ask(asked_at), election.highest_epoch
        try:
            async with asyncio.timeout(self._lease_s / RENEWALS):
                lease = await self._put(ask)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("the %s cannot reach the store about its lease: %s", self.service, error)
            change = election.failed(self._clock())
        else:
            now = self._clock()
            change = election.passed(now)  # the answer may come after a pause
            if change is Change.NONE:
                change = election.answered(ask, lease, asked_at, now)
        if election.highest_epoch > newest:
            self._metrics.leader_changes.inc()
        await self._change(change)

    async def _put(self, ask: Ask) -> Lease:
        election, service = self._election, self.service
        if ask is Ask.TAKE:
            return await self._store.take_lease(service, election.holder, self.url, self._lease_s)
        if ask is Ask.KEEP:
            return await self._store.keep_lease(service, election.holder, election.epoch, self.url, self._lease_s)
        return await self._store.see_lease(service, election.highest_epoch)

    async def _change(self, change: Change) -> None:
        if change is Change.STEP_DOWN:
            what = self._does or "leads"
            log.warning("%s no longer %s; %s does", self.service_id, what, self.leader_id or "no process")
            await self._end_term()
        elif change is Change.LEAD:
            what = self._does or "is the leader"
            log.info("%s %s now, with epoch %d", self.service_id, what, self._election.epoch)
            await self._end_term()
            self._metrics.leader.set(1)
            name = f"{self.service} leading"
            self._term = asyncio.create_task(self._serve(self._election.epoch), name=name)
            essential(self._term, self._stopping)

    async def _end_term(self) -> None:
        self._metrics.leader.set(0)
        await end([self._term])
        self._term = None

    async def resign(self) -> None:
        """End the term and return the lease, so that a standby begins at once. Call after cancelling `run`."""
        await self._end_term()
        try:
            async with asyncio.timeout(self._lease_s / RENEWALS):
                await self._store.drop_lease(self.service, self._election.holder)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("the %s could not release its lease, which expires by itself: %s", self.service, error)


class ElectedShell(Shell):
    """A shell whose effects are performed only if `may_act`. `make(epoch)` makes a controller; epoch 0 is a
    standby's."""

    def __init__(
        self,
        service: str,
        service_id: str,
        make: Callable[[int], Elected],
        *around: Any,
        may_act: Callable[[], bool],
        **options: Any,
    ) -> None:
        super().__init__(service, service_id, make(0), *around, **options)
        self._make, self._may_act = make, may_act
        self._row: Leader | None = None

    def may_act(self) -> bool:
        return self.epoch > 0 and self._may_act()

    async def _handle(self, stimulus: Any) -> None:
        """A standby takes facts, but no ticks, commands or operators."""
        if not self.may_act():
            if isinstance(stimulus, Tick):
                return
            if not isinstance(stimulus, Event) or stimulus.type in COMMANDS:
                raise NotLeader(f"this {self.service} does not lead now", retry_after_s=1)
        await super()._handle(stimulus)

    async def _resync(self) -> bool:
        if not self.epoch:
            return await self._begin(0)
        synced = await super()._resync()
        if synced and self._row is not None:  # an emptied store has lost it, and with it the fence
            await self.execute([Save(LEADERS, self.service, self._row)])
        return synced

    async def _begin(self, epoch: int) -> bool:
        """Make a controller from the previous one's knowledge and the tables. Returns False if the store does not
        answer."""
        try:
            read = {table: await self._read(table) for table in self._tables}
        except StoreUnavailable as error:
            return self._not_synced(error)
        async with self._transaction:
            if epoch == 0 and self.epoch:
                return True  # the term began meanwhile
            now_s, successor = self._clock(), self._make(epoch)
            successor.inherit(self.controller, now_s)
            tables = {table: rows for table, rows in read.items() if rows is not None}
            effects = [effect for table, rows in tables.items() for effect in successor.restore(table, rows, now_s)]
            self.controller, self.epoch = successor, epoch
            await self.execute(effects)
        return self._synced()

    async def lead(self, epoch: int, url: str) -> None:
        """Begin a term: fence off the previous leader and read the tables."""
        self.store.fence(self.service, epoch)
        while not await self._begin(epoch):
            await asyncio.sleep(RETRY_S)
        self._row = Leader(
            service=self.service, service_id=self.service_id, url=url, epoch=epoch, since=round(self._clock(), 3)
        )
        await self.execute([Save(LEADERS, self.service, self._row)])

    def follow(self) -> None:
        """End a term, leaving undone effects to the next leader. A standby's own writes need no fence."""
        self._row = None
        self.epoch = 0
        self.store.fence(self.service, 0)
