"""Who is fetching over a server's network link, and whether one more would make any of them late.

Paper: HydraServe section 4.2. B is the link's bandwidth, N the fetches on it, T the time, T' the last change; S_i the
bytes fetch i still wants and D_i the moment it must have them:

    S_i <= B / (N + 1) (D_i - T)     for every fetch, if one more comes              (3)
    S_i' = S_i - B / N (T - T')      at every start and end; below 0 it is done       (4)

Departures: Eq. 3 asks those that are there; the newcomer must be in time too (erratum E17, `check_newcomer`). Eq. 4
shares in equal parts up to the next change it hears of; the simulator's links are fluid and find when one really ends
(erratum E18). PCIe is not accounted for, as in the paper.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One cold start's bytes over one link."""

    fetch_id: str
    left_bytes: float
    deadline_at: float  # seconds on the clock of `now_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLedger:
    """The fetches of one server's link, as of `since_s`."""

    bytes_per_s: float
    since_s: float = 0.0
    fetches: tuple[Fetch, ...] = ()

    def share(self) -> float:
        """Bytes a second that one more fetch would get (erratum E16)."""
        return self.bytes_per_s / (len(self.fetches) + 1)


def settle(ledger: LinkLedger, now_s: float) -> LinkLedger:
    """The ledger as of `now_s` (Eq. 4). Time that runs backwards changes nothing."""
    elapsed = now_s - ledger.since_s
    if elapsed == 0:
        return ledger
    if elapsed < 0 or not ledger.fetches:
        return replace(ledger, since_s=max(now_s, ledger.since_s))
    each = ledger.bytes_per_s / len(ledger.fetches) * elapsed
    kept = tuple(replace(f, left_bytes=f.left_bytes - each) for f in ledger.fetches if f.left_bytes > each)
    return replace(ledger, since_s=now_s, fetches=kept)


def admits(
    ledger: LinkLedger, num_bytes: float, deadline_at: float, now_s: float, *, check_newcomer: bool = True
) -> bool:
    """Whether a fetch of `num_bytes` due at `deadline_at` may join and nobody is late for it (Eq. 3)."""
    ledger = settle(ledger, now_s)
    share = ledger.share()
    if any(f.left_bytes > share * (f.deadline_at - now_s) for f in ledger.fetches):
        return False
    return not check_newcomer or num_bytes <= share * (deadline_at - now_s)


def begin(ledger: LinkLedger, fetch: Fetch, now_s: float) -> LinkLedger:
    """The ledger with one more fetch."""
    ledger = settle(ledger, now_s)
    return replace(ledger, fetches=(*(f for f in ledger.fetches if f.fetch_id != fetch.fetch_id), fetch))


def finish(ledger: LinkLedger, fetch_id: str, now_s: float) -> LinkLedger:
    """The ledger without that fetch, whether it ended well or not."""
    ledger = settle(ledger, now_s)
    return replace(ledger, fetches=tuple(f for f in ledger.fetches if f.fetch_id != fetch_id))
