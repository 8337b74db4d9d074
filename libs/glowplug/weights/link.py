"""A path that bytes take into a node: its rate, what is in flight on it, and who goes first.

HydraServe section 4.2 shares a server's network among fetches; the roadmap's ledger reads these objects.
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass

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
    """The live link of one node. Of waiting bytes those of the highest priority pass first; of equal ones each fetch
    gets an even part of the rate, in however many parts it comes, as Eq. 3-4 of HydraServe count on (start-time fair
    queueing: Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self, link_id: str, bytes_per_s: float = 0.0, burst_s: float = 0.05) -> None:
        self.link_id, self.bytes_per_s = link_id, bytes_per_s
        self.bytes_in_flight = 0  # asked for by transfers and not landed yet
        self.num_transfers = 0
        self.num_bytes_total = 0
        self._bucket = TokenBucket(bytes_per_s, burst_bytes=bytes_per_s * burst_s)
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

    async def take(self, num_bytes: int, priority: int = 0, fetch: str = "") -> None:
        """Account for bytes of a fetch that came, and wait until the rate allows them. Those of no fetch pass in the
        order that they came."""
        self.bytes_in_flight -= num_bytes
        self.num_bytes_total += num_bytes
        if self.bytes_per_s <= 0:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, self._tag(fetch, num_bytes), next(self._order), num_bytes, future))
        self._pump()
        await future

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
