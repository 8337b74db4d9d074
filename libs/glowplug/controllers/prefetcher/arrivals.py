"""Number of requests that came for each model, from the counters that routers report. Batch is left out, as in
forecasts: no weights are fetched ahead for it."""

from glowplug.events.facts import RouterLoadReported

ROUTER_KEPT_S = 3600.0  # a router silent for longer is forgotten


class Arrivals:
    """Counters of each router, which grow from its start on, so that the report after a lost one makes up for it."""

    def __init__(self) -> None:
        self._counted: dict[str, dict[str, int]] = {}  # router_id -> model_key -> num_urgent_arrived
        self._reported_at: dict[str, float] = {}
        self._whole: set[str] = set()  # routers that have reported all their models at once

    def take(self, report: RouterLoadReported, now_s: float) -> dict[str, int]:
        """Requests that came since the router's last report, by model_key; only models with news. A router's first
        report adds nothing, nor does a counter that began anew; a model that it reports for the first time adds all."""
        counted = self._counted.setdefault(report.router_id, {})
        first = 0 if report.router_id in self._whole else None
        found = {}
        for key, load in report.loads.items():
            before = counted.get(key, first)
            num_arrived = load.num_urgent_arrived
            if num_arrived == before:
                continue
            counted[key] = num_arrived
            if before is not None and num_arrived > before:
                found[key] = num_arrived - before
        self._reported_at[report.router_id] = now_s
        if report.num_parts == 1:
            self._whole.add(report.router_id)
        return found

    def expire(self, now_s: float) -> None:
        """Forget routers that have been silent for long."""
        for router_id in [key for key, at in self._reported_at.items() if now_s - at > ROUTER_KEPT_S]:
            del self._reported_at[router_id], self._counted[router_id]
            self._whole.discard(router_id)
