"""What a router tells of its load, and how it is put together again.

A report of up to `max_models` models is whole each time. Past that a report names the models that have something to
say (load, or another one than told last), and the whole comes in parts every `whole_every_s`: with thousands of models
no message is near the bus's limit, and a reader that missed one is right again soon.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported

ONLY_CHANGES = 0  # num_parts of a report that is no part of a whole


class LoadReporter:
    """One router's reports."""

    def __init__(self, router_id: str, *, max_models: int = 500, whole_every_s: float = 2.0) -> None:
        self._router_id, self._max_models, self._whole_every_s = router_id, max_models, whole_every_s
        self._told: Mapping[str, ModelLoad] = {}
        self._whole_at = float("-inf")

    def reports(self, loads: Mapping[str, ModelLoad], now_s: float) -> list[RouterLoadReported]:
        """What to send now of `loads`, which is whole; nothing when there is nothing to say."""
        if len(loads) <= self._max_models:
            self._told, self._whole_at = loads, now_s
            return [RouterLoadReported(router_id=self._router_id, loads=loads)]
        is_whole = not 0 <= now_s - self._whole_at < self._whole_every_s
        said = loads if is_whole else {k: load for k, load in loads.items() if self._has_news(k, load)}
        if is_whole:
            self._whole_at = now_s
        self._told = loads
        keys = list(said)
        slices = [keys[i : i + self._max_models] for i in range(0, len(keys), self._max_models)] or [[]]
        return [
            RouterLoadReported(
                router_id=self._router_id,
                loads={key: said[key] for key in part},
                part=number if is_whole else 0,
                num_parts=len(slices) if is_whole else ONLY_CHANGES,
            )
            for number, part in enumerate(slices)
        ]

    def _has_news(self, key: str, load: ModelLoad) -> bool:
        return bool(load.num_waiting or load.num_in_flight) or self._told.get(key) != load


@dataclass(slots=True)
class _Known:
    loads: dict[str, ModelLoad] = field(default_factory=dict)
    is_whole: bool = False
    seen: set[str] | None = None  # models of the parts so far, while they come without a gap
    next_part: int = 0


class LoadReports:
    """The loads of each router as its reports tell them, whole once one whole has been heard."""

    def __init__(self) -> None:
        self._by_router: dict[str, _Known] = {}

    def take(self, report: RouterLoadReported) -> Mapping[str, ModelLoad]:
        """The router's loads as known now. The same mapping each time; it changes with the next report."""
        known = self._by_router.setdefault(report.router_id, _Known())
        if report.num_parts == 1:
            known.loads.clear()
        known.loads.update(report.loads)
        if report.num_parts != ONLY_CHANGES:
            self._count(known, report)
        return known.loads

    def is_whole(self, router_id: str) -> bool:
        """Whether every model that router has ever reported is known."""
        known = self._by_router.get(router_id)
        return known is not None and known.is_whole

    def forget(self, router_id: str) -> None:
        """A router that is no more."""
        self._by_router.pop(router_id, None)

    def _count(self, known: _Known, report: RouterLoadReported) -> None:
        """Of a whole without a gap, models in none of its parts are gone."""
        if report.part == 0:
            known.seen = set()
        elif report.part != known.next_part:
            known.seen = None
        known.next_part = report.part + 1
        if known.seen is None:
            return
        known.seen |= report.loads.keys()
        if known.next_part == report.num_parts:
            for key in [key for key in known.loads if key not in known.seen]:
                del known.loads[key]
            known.is_whole, known.seen = True, None
