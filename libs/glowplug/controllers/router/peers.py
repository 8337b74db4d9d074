"""What the other routers run at the same engines, as they last said.

Each router decides alone and knows of the others half a second late. Two rules keep them apart: an engine is full when
all of us together fill it, and each of us may have its fair share of it all the same, so that a router with a long
queue cannot keep the others waiting for ever. Between two reports an engine may be sent more than it takes at once, by
at most what the others' shares and their arrivals come to; it queues them itself.
"""

from collections.abc import Mapping

from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events.facts import RouterLoadReported
from glowplug.fleet.demand import LoadReports

AGE_S = 3.0  # a router silent for longer is taken to run nothing


class Peers:
    """`router_id` is ours: our own reports come back to us and are passed over."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._reports = LoadReports()
        self._by_router: dict[str, tuple[float, Mapping[str, ModelLoad]]] = {}
        self._in_flight: dict[str, int] = {}  # instance_id -> requests of all others
        self._outlooks: dict[str, Outlook] = {}  # instance_id -> what all others see ahead of it, added up
        self._sharers: dict[str, int] = {}  # model_key -> others with requests for it, held or running
        self.touched: set[str] = set()  # models of which others may have told something new with the last report

    def take(self, report: RouterLoadReported, now_s: float) -> bool:
        """False when it is our own."""
        if report.router_id == self._router_id:
            return False
        self._by_router[report.router_id] = (now_s, self._reports.take(report))
        self._sum()
        return True

    def expire(self, now_s: float) -> bool:
        """Forget routers that have gone silent. True when there was one."""
        silent = [router_id for router_id, (at, _) in self._by_router.items() if not 0 <= now_s - at <= AGE_S]
        for router_id in silent:
            del self._by_router[router_id]
            self._reports.forget(router_id)
        if silent:
            self._sum()
        return bool(silent)

    def _sum(self) -> None:
        in_flight: dict[str, int] = {}
        sharers: dict[str, int] = {}
        outlooks: dict[str, Outlook] = {}
        for _, loads in self._by_router.values():
            for key, load in loads.items():
                if load.num_waiting or load.num_in_flight:
                    sharers[key] = sharers.get(key, 0) + 1
                for instance_id, count in load.in_flight_by_instance.items():
                    in_flight[instance_id] = in_flight.get(instance_id, 0) + count
                for instance_id, outlook in load.outlook_by_instance.items():
                    known = outlooks.get(instance_id)
                    outlooks[instance_id] = outlook if known is None else known.joined(outlook)
        self.touched = self._sharers.keys() | sharers.keys()
        self._in_flight, self._sharers, self._outlooks = in_flight, sharers, outlooks

    def ahead(self, instance_id: str) -> Outlook | None:
        """What the others have sent there and expect of it; None when nobody looks ahead."""
        return self._outlooks.get(instance_id)

    def seen(self, model_key: str, instance_id: str, own: int, max_concurrency: int) -> int:
        """How full that instance is to us, who run `own` requests there: the sum, but below full while we have not
        had our share."""
        others = self._in_flight.get(instance_id, 0)
        if not others:
            return own
        share = max(1, max_concurrency // (1 + self._sharers.get(model_key, 0)))
        return own + others if own >= share else min(own + others, max_concurrency - 1)
