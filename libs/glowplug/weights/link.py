"""A path that bytes take into a node: its rate, declared or measured, what is in flight on it, and who goes first.

HydraServe section 4.2 shares a server's network among fetches; the placer's ledger (policies/placement/links.py) goes
by the rate that is published here.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from glowplug.weights.window import LEAST_BYTES, QUEUE_S

COLD_START = 1_000_000  # the priority from which on an instance waits for the bytes
SERVING = -1  # of bytes that go to other nodes
ACTIVE_S = 0.5  # a class is under way while a byte of it came within so long
TRICKLE_S = 2.0  # a transfer that others go before moves a chunk in so long, so that its reader takes it for alive


class Rank(IntEnum):
    """Of transfers that share the link: those of a lower rank wait while one of a higher rank moves."""

    BACKGROUND = 0  # bytes for other nodes
    PREFETCH = 1
    COLD_START = 2

    @classmethod
    def of(cls, priority: int) -> "Rank":
        return cls.COLD_START if priority >= COLD_START else cls.PREFETCH if priority >= 0 else cls.BACKGROUND


@dataclass(slots=True)
class RateEstimate:
    """What a link carries when it is busy, from what was seen of it. Pure.

    Bytes are counted over windows of `window_s` in which something came all the time; the rate is the 0.9 quantile of
    the newest windows, so that neither a slow source now and then nor one burst decides. It is a lower bound where
    every source is slower than the link. Short transfers, which fill no four windows, say nothing.
    """

    window_s: float = 0.5
    gap_s: float = 0.25  # without a byte: the link was not busy
    num_least: int = 4
    began_at: float = 0.0
    last_at: float = -math.inf
    num_bytes: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=40))

    def moved(self, num_bytes: int, now_s: float) -> None:
        if now_s - self.last_at > self.gap_s:
            self.began_at, self.num_bytes = now_s, 0  # what came now was under way before
        else:
            self.num_bytes += num_bytes
        self.last_at = now_s
        if now_s - self.began_at >= self.window_s:
            self.rates.append(self.num_bytes / (now_s - self.began_at))
            self.began_at, self.num_bytes = now_s, 0

    @property
    def bytes_per_s(self) -> float:
        """In two digits, so that small changes are none; 0.0: not known."""
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
    """Pure. `bytes_per_s` 0 is no limit. The bucket may go into debt, so one large chunk passes and is paid after."""

    bytes_per_s: float
    burst_bytes: float
    level: float = 0.0
    filled_at: float = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next chunk may pass; 0.0 for now."""
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
    """The live link of one node. `bytes_per_s` is its declared rate, 0 where there is none: then nothing limits it, and
    `rate` measures it. Transfers of a lower rank wait while one of a higher rank moves (HydraServe's order: what a
    request waits for goes first). Of one rank those of the highest priority pass first; of equal ones each fetch gets
    an even part of the rate, in however many parts it comes, as Eq. 3-4 of HydraServe count on (start-time fair
    queueing: Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self, link_id: str, bytes_per_s: float = 0.0, burst_s: float = 0.05) -> None:
        self.link_id, self.bytes_per_s = link_id, bytes_per_s
        self.bytes_in_flight = 0  # asked for by transfers and not landed yet
        self.num_transfers = 0
        self.rate = RateEstimate()
        self._bucket = TokenBucket(bytes_per_s, burst_bytes=bytes_per_s * burst_s)
        self._moved_at = dict.fromkeys(Rank, -math.inf)
        self._waiting: list[tuple[int, float, int, int, asyncio.Future[None]]] = []
        self._passed = 0.0  # start tag of the bytes that passed last
        self._next_tag: dict[str, float] = {}  # fetch -> start tag of the bytes that it brings next
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_bytes: int) -> None:
        self.num_transfers += 1
        self.bytes_in_flight += num_bytes

    def end(self, num_bytes_left: int) -> None:
        """A transfer is over; `num_bytes_left` of what it asked for never came."""
        self.num_transfers -= 1
        self.bytes_in_flight -= num_bytes_left

    def window(self, rtt_s: float) -> int:
        """Bytes that one of the transfers under way has on its way at once, over a connection with that round trip
        (window.py). By the declared rate alone, and 0 without one: the kernel decides. A measured rate is a lower
        bound, and would keep a fast source to the rate of a slow one before it."""
        if self.bytes_per_s <= 0:
            return 0
        return max(LEAST_BYTES, int(self.bytes_per_s * (rtt_s + QUEUE_S) / max(1, self.num_transfers)))

    async def take(self, num_bytes: int, priority: int = 0, fetch: str = "", *, is_remote: bool = True) -> None:
        """Account for bytes of a fetch that came, and wait until rate and rank allow them. Those of no fetch pass in
        the order that they came; those of this machine's own disks (`is_remote` False) do not measure the link."""
        self.bytes_in_flight -= num_bytes
        if is_remote:
            self.rate.moved(num_bytes, asyncio.get_running_loop().time())
        await self.wait(num_bytes, priority, fetch)

    async def wait(self, num_bytes: int, priority: int, fetch: str = "") -> None:
        """Until so many bytes of that priority may pass, whichever way they go."""
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
        if len(self._next_tag) > MAX_TAGS:  # who is behind by now begins as if it were new
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
