"""A node's links: their rates, fetches over the network card, and whether one more would make another late.

Paper: HydraServe section 4.2. B is the link's bandwidth, N the fetches on it, T the time, T' the last change; S_i the
bytes fetch i still wants and D_i the moment it must have them:

    S_i <= B / (N + 1) (D_i - T)     for every fetch, if one more comes              (3)
    S_i' = S_i - B / N (T - T')      at every start and end; below 0 it is done       (4)

Departures: Eq. 3 checks the fetches under way; here the newcomer must be in time too (erratum E17, `check_newcomer`).
Eq. 4 shares the link equally up to the next notified change; the simulator's fluid links compute real ends (erratum
E18). A fetch without a waiting request (`is_background`: the rest of a pipeline's model) uses the others' rest and
delays none: prefetchers let urgent bytes pass first. PCIe is not accounted for, as in the paper, nor are nodes' disks
(docs/adr/0019).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from glowplug.domain.hardware import CachedWeights, Node
from glowplug.domain.model import Model
from glowplug.fleet.start_times import StartKind, StartTimes

_LEAST_S = 1e-6  # least divisor of a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    fetch_id: str
    left_bytes: float
    deadline_at: float  # seconds on the clock of `now_s`
    is_background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLedger:
    """The fetches of one server's link, as of `since_s`."""

    bytes_per_s: float
    since_s: float = 0.0
    fetches: tuple[Fetch, ...] = ()

    def share(self) -> float:
        """Return bytes a second for one more fetch (erratum E16)."""
        return self.bytes_per_s / (len(self.urgent) + 1)

    @property
    def urgent(self) -> tuple[Fetch, ...]:
        return tuple(fetch for fetch in self.fetches if not fetch.is_background)


def settle(ledger: LinkLedger, now_s: float) -> LinkLedger:
    """Advance to `now_s` (Eq. 4); never backwards."""
    elapsed = now_s - ledger.since_s
    if elapsed == 0:
        return ledger
    if elapsed < 0 or not ledger.fetches:
        return replace(ledger, since_s=max(now_s, ledger.since_s))
    moving = ledger.urgent or ledger.fetches
    each, standing = ledger.bytes_per_s / len(moving) * elapsed, len(moving) < len(ledger.fetches)
    kept = tuple(
        f if standing and f.is_background else replace(f, left_bytes=f.left_bytes - each)
        for f in ledger.fetches
        if (standing and f.is_background) or f.left_bytes > each
    )
    return replace(ledger, since_s=now_s, fetches=kept)


def admits(
    ledger: LinkLedger, num_bytes: float, deadline_at: float, now_s: float, *, check_newcomer: bool = True
) -> bool:
    """Return whether a fetch of `num_bytes` due at `deadline_at` may join without making any late (Eq. 3)."""
    ledger = settle(ledger, now_s)
    share = ledger.share()
    if any(f.left_bytes > share * (f.deadline_at - now_s) for f in ledger.urgent):
        return False
    return not check_newcomer or num_bytes <= share * (deadline_at - now_s)


def begin(ledger: LinkLedger, fetch: Fetch, now_s: float) -> LinkLedger:
    ledger = settle(ledger, now_s)
    return replace(ledger, fetches=(*(f for f in ledger.fetches if f.fetch_id != fetch.fetch_id), fetch))


def finish(ledger: LinkLedger, fetch_id: str, now_s: float) -> LinkLedger:
    ledger = settle(ledger, now_s)
    return replace(ledger, fetches=tuple(f for f in ledger.fetches if f.fetch_id != fetch_id))


def network_rate(node: Node, model: Model, times: StartTimes) -> float:
    """Return bytes a second: declared or measured, else from past fetches."""
    if declared := _declared(node, "/nic"):
        return declared
    fetch_s = times.predict(model, StartKind.COLD, gpu_kind_of(node)).fetch_s
    return model.fetch_bytes / max(fetch_s, _LEAST_S)


def disk_rate(node: Node, model: Model, times: StartTimes) -> float:
    """Return bytes a second: measured by the prefetcher, else from past starts."""
    if node.disk_bytes_per_s:
        return node.disk_bytes_per_s
    fetch_s = times.predict(model, StartKind.DISK, gpu_kind_of(node)).fetch_s
    return model.fetch_bytes / max(fetch_s, _LEAST_S)


def pcie_rate(node: Node, model: Model, times: StartTimes) -> float:
    """Return bytes a second to each GPU: from past starts, else declared, else the prior."""
    took = times.predict(model, StartKind.CACHED, gpu_kind_of(node), declared_pcie(node))
    return model.weights_bytes / model.num_gpus / max(took.load_s, _LEAST_S)


def declared_pcie(node: Node) -> float:
    """Return the declared PCIe rate; 0 if none, as on an unlimited live node."""
    return _declared(node, "/pcie")


def gpu_kind_of(node: Node) -> str:
    """Return the kind of the node's GPUs, all alike; "" without any."""
    return node.gpus[0].kind if node.gpus else ""


def link_of(node: Node, model: Model, times: StartTimes, known: LinkLedger | None, now_s: float) -> LinkLedger:
    rate = network_rate(node, model, times)
    if known is None:
        return LinkLedger(bytes_per_s=rate, since_s=now_s)
    return known if known.bytes_per_s == rate else replace(known, bytes_per_s=rate)


def _declared(node: Node, kind: str) -> float:
    return next((link.bytes_per_s for link in node.links if link.link_id.endswith(kind)), 0.0)


def has_weights(node: Node, model: Model) -> bool:
    """Return whether host memory has the current weights, whichever model brought them, or none are to be fetched."""
    return not model.weights.uri or _are_among(node.cached, model)


def has_copy_on_disk(node: Node, model: Model) -> bool:
    """Return whether the disk has a whole copy of the current weights."""
    return bool(model.weights.uri) and _are_among(node.on_disk, model)


def _are_among(there: Iterable[CachedWeights], model: Model) -> bool:
    digest = model.weights.digest
    return any(one.digest == digest for one in there)


def found_at(node: Node, model: Model) -> StartKind:
    if has_weights(node, model):
        return StartKind.CACHED
    return StartKind.DISK if has_copy_on_disk(node, model) else StartKind.COLD
