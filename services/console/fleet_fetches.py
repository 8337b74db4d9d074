"""Weights on their way into nodes, from what prefetchers say of their progress."""

from dataclasses import dataclass
from typing import Final

from glowplug.events.facts import WeightsFetched, WeightsFetchFailed, WeightsProgressed
from services.console.fleet_rows import FetchRow

STALLED_S: Final = 3.0  # without a report the rate is 0
FORGOTTEN_S: Final = 60.0  # without a report the fetch is taken as over
NEWEST: Final = 0.5  # weight of the newest sample of a rate


@dataclass(slots=True)
class _Fetch:
    model_key: str
    num_bytes_done: int
    num_bytes: int
    reported_at: float
    bytes_per_s: float = 0.0


class Fetches:
    """By node. Every change names the node whose row shows it."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, _Fetch]] = {}  # node id -> digest -> fetch

    def progress(self, report: WeightsProgressed, now_s: float) -> None:
        here = self._by_node.setdefault(report.node_id, {})
        known = here.get(report.digest)
        if known is None or report.num_bytes_done < known.num_bytes_done:  # new, or begun again
            here[report.digest] = _Fetch(report.model_key, report.num_bytes_done, report.num_bytes, now_s)
            return
        took_s = now_s - known.reported_at
        if took_s > 0:
            rate = (report.num_bytes_done - known.num_bytes_done) / took_s
            old = known.bytes_per_s
            known.bytes_per_s = rate if not old else old + NEWEST * (rate - old)
            known.reported_at = now_s
        known.num_bytes_done, known.num_bytes = report.num_bytes_done, report.num_bytes

    def end(self, fact: WeightsFetched | WeightsFetchFailed) -> None:
        here = self._by_node.get(fact.node_id)
        if here is not None:
            here.pop(fact.digest, None)
            if not here:
                del self._by_node[fact.node_id]

    def refresh(self, now_s: float) -> set[str]:
        """Nodes with a fetch that has stalled or been forgotten."""
        touched = set()
        for node_id, here in list(self._by_node.items()):
            for digest, fetch in list(here.items()):
                silent_s = now_s - fetch.reported_at
                if silent_s >= FORGOTTEN_S:
                    del here[digest]
                elif silent_s < STALLED_S or not fetch.bytes_per_s:
                    continue
                else:
                    fetch.bytes_per_s = 0.0
                touched.add(node_id)
            if not here:
                del self._by_node[node_id]
        return touched

    def rows(self, node_id: str) -> tuple[FetchRow, ...]:
        here = self._by_node.get(node_id)
        if not here:
            return ()
        return tuple(
            FetchRow(
                digest=digest,
                model_key=fetch.model_key,
                num_bytes_done=fetch.num_bytes_done,
                num_bytes=fetch.num_bytes,
                bytes_per_s=round(fetch.bytes_per_s),
            )
            for digest, fetch in here.items()
        )
