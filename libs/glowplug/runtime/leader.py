"""One process of several leads: the shell around the election, and the shell that only a leader's effects leave.

A standby is hot: its bus readers run, its controller sees every fact and every reading of the tables, and what it
would do is not done. Deciding is left to controllers/election.py; here are a clock, the store and the two states.
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
    """Seconds that pass while this process is stopped and while its machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class Candidate:
    """Stands for the lead of one service, for as long as `run` runs. `term(epoch)` is run while this process leads,
    cancelled when it does not any more, and gets time to clean up; its error stops the service."""

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
        self._does = does  # what the leader does, where that is not the whole service
        self.service, self.service_id, self.url, self._lease_s = service, service_id, url, lease_s
        self._store, self._metrics, self._serve, self._stopping = store, metrics, term, stopping
        self._clock = clock
        self._election = Election(f"{service_id}@{uuid.uuid4().hex[:12]}", lease_s)
        self._term: asyncio.Task[None] | None = None
        metrics.leader.set(0)

    def may_act(self) -> bool:
        """Whether this process leads at this very moment."""
        return self._election.may_act(self._clock())

    @property
    def lease(self) -> Lease:
        """Who leads, as last read; none where that was this process and its lease has run out."""
        return self._election.seen(self._clock())

    @property
    def leader_id(self) -> str:
        """Service id of the leader, or ""."""
        return self.lease.holder.partition("@")[0]

    async def run(self) -> None:
        """Stand for ever."""
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
            change = election.passed(now)  # an answer may come after a pause of ours
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
        """End the term and give the lease back, so that a standby begins at once. After `run` has been cancelled."""
        await self._end_term()
        try:
            async with asyncio.timeout(self._lease_s / RENEWALS):
                await self._store.drop_lease(self.service, self._election.holder)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("the %s could not give its lease back, which runs out by itself: %s", self.service, error)


class ElectedShell(Shell):
    """A shell whose effects are carried out while `may_act` says so. `make(epoch)` gives a new controller; epoch 0 is
    a standby's. The other arguments are those of Shell."""

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
        self._row: Leader | None = None  # ours, while we lead

    def may_act(self) -> bool:
        return self.epoch > 0 and self._may_act()

    async def _handle(self, stimulus: Any) -> None:
        """A standby takes facts, decides nothing as time passes, and neither commands nor operators reach it."""
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
        if synced and self._row is not None:  # a store that was emptied has lost it, and with it who is fenced off
            await self.execute([Save(LEADERS, self.service, self._row)])
        return synced

    async def _begin(self, epoch: int) -> bool:
        """A new controller with what the earlier one knew and the tables say. False when the store does not answer."""
        try:
            read = {table: await self._read(table) for table in self._tables}
        except StoreUnavailable as error:
            return self._not_synced(error)
        async with self._transaction:
            if epoch == 0 and self.epoch:
                return True  # the term has begun while this was read
            now_s, successor = self._clock(), self._make(epoch)
            successor.inherit(self.controller, now_s)
            tables = {table: rows for table, rows in read.items() if rows is not None}
            effects = [effect for table, rows in tables.items() for effect in successor.restore(table, rows, now_s)]
            self.controller, self.epoch = successor, epoch
            await self.execute(effects)
        return self._synced()

    async def lead(self, epoch: int, url: str) -> None:
        """Begin a term: the leader before is fenced off, and the term goes on from what the tables say."""
        self.store.fence(self.service, epoch)
        while not await self._begin(epoch):
            await asyncio.sleep(RETRY_S)
        self._row = Leader(
            service=self.service, service_id=self.service_id, url=url, epoch=epoch, since=round(self._clock(), 3)
        )
        await self.execute([Save(LEADERS, self.service, self._row)])

    def follow(self) -> None:
        """End a term. What was decided and not done is left to the next leader. What a standby writes, its own
        service id, is fenced no more."""
        self._row = None
        self.epoch = 0
        self.store.fence(self.service, 0)
