"""Links with shared bandwidth: max-min fair within a priority, higher priorities first.

The tightest of a transfer's links bounds its rate. Rates change only when transfers start or end, so one event per
change is exact. HydraServe section 4.2 shares a link in equal parts (Eq. 3-4); here an ended transfer's bandwidth goes
to the others at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from glowplug_lab.simulator.kernel import Kernel, Timer


@dataclass(slots=True, eq=False)
class Link:
    name: str
    bytes_per_s: float
    transfers: "dict[Transfer, None]" = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"link {self.name}: {self.bytes_per_s} bytes/s")


@dataclass(slots=True, eq=False)
class Transfer:
    """`left_bytes` is as of `since_s`; `priority` 0 goes before 1."""

    name: str
    num_bytes: float
    links: tuple[Link, ...]
    priority: int
    done: Callable[[], None]
    left_bytes: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    timer: Timer | None = None

    def left_at(self, now_s: float) -> float:
        return max(0.0, self.left_bytes - self.rate * (now_s - self.since_s))


class Links:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def start(
        self, name: str, num_bytes: float, links: Iterable[Link], done: Callable[[], None], *, priority: int = 0
    ) -> Transfer:
        """Send `num_bytes`, then call `done()`. Takes no time without links.

        Raises ValueError for negative bytes.
        """
        if not num_bytes >= 0:
            raise ValueError(f"transfer {name}: {num_bytes} bytes")
        transfer = Transfer(name, num_bytes, tuple(links), priority, done, num_bytes, since_s=self.kernel.now_s)
        if not transfer.links or num_bytes == 0:
            transfer.left_bytes = 0.0
            transfer.timer = self.kernel.after(0.0, done)
            return transfer
        for link in transfer.links:
            link.transfers[transfer] = None
        self._share(transfer)
        return transfer

    def hurry(self, transfer: Transfer, priority: int = 0) -> None:
        """Ignores ended transfers."""
        if transfer.links and transfer.priority != priority:
            transfer.priority = priority
            self._share(transfer)

    def stop(self, transfer: Transfer) -> float:
        """Return the bytes that had arrived."""
        left = transfer.left_at(self.kernel.now_s)
        if transfer.timer is not None:
            transfer.timer.cancel()
        self._remove(transfer)
        return transfer.num_bytes - left

    def _finish(self, transfer: Transfer) -> None:
        transfer.left_bytes, transfer.rate, transfer.since_s = 0.0, 0.0, self.kernel.now_s
        self._remove(transfer)
        transfer.done()

    def _remove(self, transfer: Transfer) -> None:
        neighbours = [t for link in transfer.links for t in link.transfers if t is not transfer]
        for link in transfer.links:
            link.transfers.pop(transfer, None)
        transfer.links = ()
        if neighbours:
            self._share(*neighbours)

    def _share(self, *touched: Transfer) -> None:
        transfers, links = _component(touched)
        rates = _max_min(transfers, links)
        now_s = self.kernel.now_s
        for transfer, rate in zip(transfers, rates, strict=True):
            if rate == transfer.rate and transfer.timer is not None:
                continue
            transfer.left_bytes, transfer.since_s, transfer.rate = transfer.left_at(now_s), now_s, rate
            if transfer.timer is not None:
                transfer.timer.cancel()
            transfer.timer = self.kernel.after(transfer.left_bytes / rate, self._finish, transfer) if rate > 0 else None


def _component(touched: Iterable[Transfer]) -> tuple[list[Transfer], list[Link]]:
    transfers: dict[Transfer, None] = dict.fromkeys(touched)
    links: dict[Link, None] = {}
    todo = list(transfers)
    while todo:
        for link in todo.pop().links:
            if link not in links:
                links[link] = None
                fresh = [t for t in link.transfers if t not in transfers]
                transfers.update(dict.fromkeys(fresh))
                todo += fresh
    return list(transfers), list(links)


def _max_min(transfers: list[Transfer], links: list[Link]) -> list[float]:
    """Each priority gets the rest of those before it."""
    left = {link: link.bytes_per_s for link in links}
    rates: dict[Transfer, float] = {}
    for priority in sorted({t.priority for t in transfers}):
        open_ = [t for t in transfers if t.priority == priority]
        while open_:
            users: dict[Link, int] = {}
            for transfer in open_:
                for link in transfer.links:
                    users[link] = users.get(link, 0) + 1
            tightest = min(users, key=lambda link: left[link] / users[link])
            share = left[tightest] / users[tightest]
            fixed = [t for t in open_ if tightest in t.links]
            for transfer in fixed:
                rates[transfer] = share
                for link in transfer.links:
                    left[link] = max(0.0, left[link] - share)
            open_ = [t for t in open_ if tightest not in t.links]
    return [rates[t] for t in transfers]
