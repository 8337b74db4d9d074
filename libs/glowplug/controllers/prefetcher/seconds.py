"""What a miss costs on this node: seconds to bring weights into host memory, as measured, else by the link's pace.

This is P of mCache Eq. 1. The paper profiles it offline per model; here every whole fetch is a measurement.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsParams:
    newest: float = 0.5  # share of the newest measurement in the average
    bytes_per_s: float = 1e9  # of a source that was never read
    max_digests: int = 4096


@dataclass(slots=True)
class _Seen:
    seconds: float
    num_bytes: int
    source: str


class FetchSeconds:
    """Per digest an average of its own fetches; for one never fetched whole, its bytes at the pace of all fetches."""

    def __init__(self, params: SecondsParams = SecondsParams()) -> None:
        self._params = params
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._pace: dict[str, float] = {}  # source -> seconds a byte

    def measured(self, digest: str, num_bytes: int, seconds: float, source: str) -> None:
        """One whole fetch, from nothing. What took no time at all tells nothing."""
        if num_bytes <= 0 or not seconds > 0:
            return
        share = self._params.newest
        seen = self._seen.pop(digest, None)
        known = seen.seconds if seen and seen.num_bytes == num_bytes and seen.source == source else seconds
        self._seen[digest] = _Seen(share * seconds + (1 - share) * known, num_bytes, source)
        while len(self._seen) > self._params.max_digests:
            self._seen.popitem(last=False)
        pace = seconds / num_bytes
        self._pace[source] = share * pace + (1 - share) * self._pace.get(source, pace)

    def expected(self, digest: str, num_bytes: int) -> float:
        """Seconds to bring `num_bytes` of `digest` in again."""
        seen = self._seen.get(digest)
        if seen is not None and num_bytes == seen.num_bytes:
            return seen.seconds
        if seen is not None:
            return num_bytes * self._pace[seen.source]
        if not self._pace:
            return num_bytes / self._params.bytes_per_s
        return num_bytes * sum(self._pace.values()) / len(self._pace)
