"""Leader election, the deciding part: when to ask the store for the lease, and how to take its answer.

    standby ── the lease is free ──▶ leader ── lost, or not renewed in time ──▶ standby

Times are seconds of a clock that never stops or jumps, not even while the process is paused: a waking leader first
notices that its lease has run out. Each term has a new epoch, so that an earlier leader's commands are refused
(ADR 10).
"""

import math
from enum import StrEnum

from glowplug.domain.lease import Lease

MARGIN = 0.1  # unused share of a lease: the store's clock and this process's differ
RENEWALS = 3  # tries in one lease
RETRIES = 10
SHORTEST_WAIT_S = 0.02


class Ask(StrEnum):
    SEE = "see"
    TAKE = "take"
    KEEP = "keep"


class Change(StrEnum):
    NONE = "none"
    LEAD = "lead"
    STEP_DOWN = "step_down"


class Election:
    """One candidate for one lease of `lease_s`. `holder` is unique to this process, past ones included."""

    def __init__(self, holder: str, lease_s: float) -> None:
        self.holder, self._lease_s = holder, lease_s
        self.epoch = 0  # 0: it does not lead
        self.lease = Lease()  # the store's last answer
        self._valid_until = self._next_at = self._looked_at = -math.inf
        self._free_at = math.inf
        self._unknown_since: float | None = None  # since then the store has lacked epochs known to this process
        self.highest_epoch = 0

    @property
    def leads(self) -> bool:
        """The last answer made this process leader. `may_act` tells whether the lease still holds."""
        return self.epoch > 0

    def may_act(self, now: float) -> bool:
        return self.leads and now < self._valid_until

    def seen(self, now: float) -> Lease:
        is_over = self.lease.holder == self.holder and not self.may_act(now)
        return Lease(newest_epoch=self.highest_epoch) if is_over else self.lease

    def wait_s(self, now: float) -> float:
        until = min(self._next_at, self._valid_until) if self.leads else self._next_at
        return max(until - now, SHORTEST_WAIT_S)

    def passed(self, now: float) -> Change:
        return self._step_down() if self.leads and not self.may_act(now) else Change.NONE

    def ask(self, now: float) -> Ask:
        if self.leads:
            return Ask.KEEP
        is_fresh = now - self._looked_at <= 2 * self._lease_s / RENEWALS  # not asleep since
        return Ask.TAKE if is_fresh and now >= self._free_at else Ask.SEE

    def answered(self, asked: Ask, lease: Lease, asked_at: float, now: float) -> Change:
        self.lease = lease
        is_mine = lease.holder == self.holder
        if asked is Ask.KEEP:
            if not (is_mine and lease.epoch == self.epoch and self._extend(lease, asked_at, now)):
                self._look_again(lease, now)
                return self._step_down()
        elif asked is Ask.TAKE and is_mine and self._extend(lease, asked_at, now):
            self.epoch = lease.epoch
            self.highest_epoch = max(self.highest_epoch, lease.newest_epoch)
            return Change.LEAD
        else:
            self._look_again(lease, now)
        self.highest_epoch = max(self.highest_epoch, lease.newest_epoch)
        return Change.NONE

    def failed(self, now: float) -> Change:
        self._next_at = now + self._lease_s / RETRIES
        return self.passed(now)

    def _extend(self, lease: Lease, asked_at: float, now: float) -> bool:
        """Count the lease from before the question, so that the store's lease outlasts it. False: it came too late."""
        self._valid_until = asked_at + lease.left_s * (1 - MARGIN)
        self._next_at = asked_at + self._lease_s / RENEWALS
        return now < self._valid_until

    def _look_again(self, lease: Lease, now: float) -> None:
        """Compute when the lease will be free. A store with no or older epochs is new or was emptied: a leader that
        lost its lease with it has a lease's time to write it again."""
        self._looked_at = now
        if not lease.holder and (lease.newest_epoch == 0 or lease.newest_epoch < self.highest_epoch):
            self._unknown_since = now if self._unknown_since is None else self._unknown_since
            self._free_at = self._unknown_since + self._lease_s
        else:
            self._unknown_since = None
            self._free_at = now + lease.left_s
        self._next_at = min(now + self._lease_s / RENEWALS, max(self._free_at, now))

    def _step_down(self) -> Change:
        self.epoch, self._valid_until = 0, -math.inf
        return Change.STEP_DOWN
