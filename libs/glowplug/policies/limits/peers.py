"""The routers that share the limits, and each one's share of a limit while some are not heard.

A router hears its own reports too: one that does not is cut off from the bus.
"""

import math
from collections.abc import Iterable, Mapping

from glowplug.policies.limits.count import Heard
from glowplug.policies.limits.scope import LimiterParams


class Peers:
    """The routers that have reported, this one among them. `silent`: those that have not been heard for a while. While
    this router is cut off, all others are silent, and none is taken to be gone."""

    def __init__(self, router_id: str, params: LimiterParams) -> None:
        self.router_id, self._params = router_id, params
        self._heard: dict[str, float] = {}  # by router: when last
        self._numbers: dict[str, int] = {}  # by router: of its last report
        self._met: tuple[str, ...] = ()  # known from before this router's start, until the first refresh
        self.silent: tuple[str, ...] = ()
        self.is_cut = False

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._heard

    def __len__(self) -> int:
        return len(self._heard)

    def others(self) -> list[str]:
        """The other routers, sorted by id."""
        return sorted(router_id for router_id in self._heard if router_id != self.router_id)

    def met(self, router_ids: Iterable[str]) -> None:
        """Add routers that this one knew before it was started anew."""
        self._met = tuple(router_ids)

    def hear(self, router_id: str, number: int, now_s: float) -> bool:
        """Note a report. Returns whether it is newer than those before it; a router that starts anew counts on from a
        larger number."""
        if number <= self._numbers.get(router_id, -1) and now_s - self._heard[router_id] < self._params.silent_s:
            return False
        if router_id == self.router_id and self.is_cut:  # nobody could be heard until now
            self._heard = dict.fromkeys(self._heard, now_s)
        self._numbers[router_id], self._heard[router_id] = number, now_s
        return True

    def refresh(self, now_s: float) -> bool:
        """See who is silent and who is gone. Call it about as often as reports are made. Returns whether any router is
        gone since."""
        params = self._params
        for router_id in (self.router_id, *self._met):
            self._heard.setdefault(router_id, now_s)
        self._met = ()
        self.is_cut = len(self._heard) > 1 and now_s - self._heard[self.router_id] > params.silent_s
        if self.is_cut:
            self.silent = tuple(self.others())
            return False
        gone = [router_id for router_id in self.others() if now_s - self._heard[router_id] > params.gone_s]
        for router_id in gone:
            del self._heard[router_id]
            self._numbers.pop(router_id, None)
        self.silent = tuple(r for r in self.others() if now_s - self._heard[r] > params.silent_s)
        return bool(gone)

    def part(self, heard: Mapping[str, Heard]) -> float:
        """The part of a limit that this router may use: together with the others that are heard, or alone while it is
        cut off. `heard`: what each router last reported of the scope."""
        if not self.silent:
            return 1.0
        shares = self._shares(heard)
        return shares[self.router_id] if self.is_cut else 1.0 - sum(shares[router_id] for router_id in self.silent)

    def _shares(self, heard: Mapping[str, Heard]) -> dict[str, float]:
        """The shares of all routers, by the demand that each last reported; their sum is 1. Every router reads the same
        reports, its own among them, so that all find the same shares."""
        asked = {r: _asked_s(heard.get(r), at, self._params.demand_s) for r, at in self._heard.items()}
        total, floor = sum(asked.values()), self._params.floor
        even = 1 / len(asked)
        return {r: floor * even + (1 - floor) * (s / total if total > 0 else even) for r, s in asked.items()}


def _asked_s(heard: Heard | None, at: float, over_s: float) -> float:
    """The demand of a router as of its last report of any scope, in seconds of the limit; less than a hundredth of a
    second is none."""
    if heard is None:
        return 0.0
    asked_s = heard.asked_s * math.exp(-max(at - heard.at, 0.0) / over_s)
    return asked_s if asked_s > 0.01 else 0.0


def running_at(peers: Peers, heard: Mapping[str, Heard]) -> tuple[int, int]:
    """(requests at once, held ones among them) at the other routers, as last reported."""
    known = [h for router_id, h in heard.items() if router_id in peers and router_id != peers.router_id]
    return sum(h.num_running for h in known), sum(h.num_held for h in known)
