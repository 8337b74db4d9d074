"""A path of bytes into a node: its rate, its bytes in flight, and its priorities.

HydraServe section 4.2 shares a server's network among fetches; the placer's ledger (policies/placement/links.py) uses
the rate published here.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from glowplug.weights.window import LEAST_BYTES, QUEUE_S

COLD_START = 1_000_000  # least priority with a waiting instance
SERVING = -1  # bytes for other nodes
ACTIVE_S = 0.5  # a class is active this long after its last byte
TRICKLE_S = 2.0  # longest wait of an outranked transfer per chunk, so that its reader takes it for alive


class Rank(IntEnum):
    """Transfers of a lower rank wait while one of a higher rank moves."""

    BACKGROUND = 0
    PREFETCH = 1
    COLD_START = 2

    @classmethod
    def of(cls, priority: int) -> "Rank":
        return cls.COLD_START if priority >= COLD_START else cls.PREFETCH if priority >= 0 else cls.BACKGROUND


@dataclass(slots=True)
class RateEstimate:
    """A busy link's rate. Pure.

    Bytes are counted over windows of `window_s` of steady arrival; the rate is the 0.9 quantile of the newest, so that
    neither one slow source nor one burst decides. A lower bound where every source is slower than the link. Transfers
    shorter than four windows are ignored.
    """

    window_s: float = 0.5
    gap_s: float = 0.25
    num_least: int = 4
    began_at: float = 0.0
    last_at: float = -math.inf
    num_bytes: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))

    def moved(self, num_bytes: int, now_s: float) -> None:
        if now_s - self.last_at > self.gap_s:
            self.began_at, self.num_bytes = now_s, 0
        else:
            self.num_bytes += num_bytes
        self.last_at = now_s
        if now_s - self.began_at >= self.window_s:
            self.rates.append(self.num_bytes / (now_s - self.began_at))
            self.began_at, self.num_bytes = now_s, 0

    @property
    def bytes_per_s(self) -> float:
        """Two digits, to hide small changes; 0.0: unknown."""
        if len(self.rates) < self.num_least:
            return 0.0
        rate = sorted(self.rates)[int(0.9 * (len(self.rates) - 1))]
        if rate <= 0:
            return 0.0
        unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
        return round(rate / unit) * unit


MAX_TAGS = 64


@dataclass(slots=True)
class TokenBucket:
    """Pure. `bytes_per_s` 0 is no limit. May go into debt, so one large chunk passes and is paid after."""

    bytes_per_s: float
    burst_bytes: float
    level: float = 0.0
    filled_at: float = 0.0

    def wait_s(self, now_s: float) -> float:
        if self.bytes_per_s <= 0:
            return 0.0
        earned = max(0.0, now_s - self.filled_at) * self.bytes_per_s
        self.level = min(self.burst_bytes, self.level + earned)
        self.filled_at = max(now_s, self.filled_at)
        return max(0.0, -self.level / self.bytes_per_s)

    def spend(self, num_bytes: int) -> None:
        if self.bytes_per_s > 0:
            self.level -= num_bytes


class LinkMeter:
    """`bytes_per_s` is the declared rate, 0 for none: then it is unlimited, and `rate` measures it. Transfers of a
    lower rank wait while one of a higher rank moves (HydraServe's order: bytes that a request waits for go
    first). Within a rank, higher priorities pass first; at equal ones each fetch gets an even part of the rate,
    as Eq. 3-4 of HydraServe assume (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self, link_id: str, bytes_per_s: float = 0.0, burst_s: float = 0.05) -> None:
        self.link_id, self.bytes_per_s = link_id, bytes_per_s
        self.bytes_in_flight = 0  # requested by transfers, not landed yet
        self.num_transfers = 0
        self.rate = RateEstimate()
        self._bucket = TokenBucket(bytes_per_s, burst_bytes=bytes_per_s * burst_s)
        self._moved_at = dict.fromkeys(Rank, -math.inf)
        self._waiting: list[tuple[int, float, int, int, asyncio.Future[None]]] = []
        self._passed = 0.0
        self._next_tag: dict[str, float] = {}  # fetch -> start tag of its next bytes
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_bytes: int) -> None:
        self.num_transfers += 1
        self.bytes_in_flight += num_bytes

    def end(self, num_bytes_left: int) -> None:
        """End a transfer; `num_bytes_left` of its request never came."""
        self.num_transfers -= 1
        self.bytes_in_flight -= num_bytes_left

    def window(self, rtt_s: float) -> int:
        """Return bytes, for one running transfer's connection with that round trip (window.py); 0 without a declared
        rate: the kernel decides. A measured rate is a lower bound, and would hold a fast source to the rate of a
        slow one before it."""
        if self.bytes_per_s <= 0:
            return 0
        return max(LEAST_BYTES, int(self.bytes_per_s * (rtt_s + QUEUE_S) / max(1, self.num_transfers)))

    async def take(self, num_bytes: int, priority: int = 0, fetch: str = "", *, is_remote: bool = True) -> None:
        """Account for bytes, and wait until rate and rank allow them. Without a fetch they pass in order of arrival;
        those of local disks (`is_remote` False) do not measure the link."""
        self.bytes_in_flight -= num_bytes
        if is_remote:
            self.rate.moved(num_bytes, asyncio.get_running_loop().time())
        await self.wait(num_bytes, priority, fetch)

    async def wait(self, num_bytes: int, priority: int, fetch: str = "") -> None:
        """Wait for rate and rank, in either direction."""
        loop, rank = asyncio.get_running_loop(), Rank.of(priority)
        self._moved_at[rank] = began_at = loop.time()
        while self._is_outranked(rank, loop.time()) and loop.time() - began_at < TRICKLE_S:
            await asyncio.sleep(ACTIVE_S / 10)
        if self.bytes_per_s <= 0:
            return
        future: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (-priority, self._tag(fetch, num_bytes), next(self._order), num_bytes, future))
        self._pump()
        await future

    def _is_outranked(self, rank: Rank, now_s: float) -> bool:
        return any(now_s - moved_at < ACTIVE_S for other, moved_at in self._moved_at.items() if other > rank)

    def _tag(self, fetch: str, num_bytes: int) -> float:
        tag = max(self._passed, self._next_tag.get(fetch, 0.0))
        if fetch:
            self._next_tag[fetch] = tag + num_bytes
        if len(self._next_tag) > MAX_TAGS:  # fetches behind by now restart as new
            self._next_tag = {name: tag for name, tag in self._next_tag.items() if tag > self._passed}
        return tag

    def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            if (wait_s := self._bucket.wait_s(loop.time())) > 0:
                self._timer = loop.call_later(wait_s, self._pump)
                return
            _, tag, _, num_bytes, future = heapq.heappop(self._waiting)
            if not future.done():
                self._passed = max(self._passed, tag)
                self._bucket.spend(num_bytes)
                future.set_result(None)
