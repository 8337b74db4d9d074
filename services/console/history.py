"""Metrics over time: counts and samples in slots of 10 s, 2 min and 20 min, for the fleet and its models.

Pure. A slot is the sum of slots of the next finer ring. Times to first token are counts in logarithmic buckets,
which add up; a quantile is within `QUANTILE_ERROR` of the true one. Each slot keeps the fleet and its `MAX_MODELS`
busiest models; closed slots are bytes."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from glowplug.domain.errors import BadRequest
from glowplug.events import Event
from glowplug.events.facts import InstanceFailed, InstanceReady, RequestFinished, RouterRequestsFinished
from glowplug.services.console.records import Newest

FLEET: Final = ""
SPANS: Final = {"1h": (10, 360), "24h": (120, 720), "7d": (1200, 504)}  # seconds of a slot, slots
MAX_MODELS: Final = 50  # in a closed slot
MAX_OPEN_MODELS: Final = 1000
MAX_BACK_S: Final = 1200.0  # a larger step back drops the slots of the future
STARTS_REMEMBERED: Final = 4096
MAX_TOKENS: Final = 1 << 32
GROWTH: Final = 1.08
QUANTILE_ERROR: Final = math.sqrt(GROWTH) - 1  # a quantile is the middle of its bucket
LEAST_S, MOST_S = 1e-4, 86_400.0
START_WORDS: Final = {"disk": "from disk", "cached": "from memory", "growth": "prewarmed", "join": "prewarmed"}
STARTS: Final = ("cold", "from disk", "from memory", "wake", "prewarmed", "interrupted", "failed")


class Cell(msgspec.Struct, array_like=True):
    """Figures of one scope in one slot: counts, sums over `num_samples` samples, and buckets of seconds."""

    num_requests: int = 0
    num_warm: int = 0  # requests taken without waiting for a start
    num_cold: int = 0
    num_emulated: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_samples: int = 0  # of the fleet; models are sampled at the same moments
    waiting: int = 0
    waiting_peak: int = 0
    running: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    total_bytes: int = 0
    starts: dict[str, int] = {}
    ttft: dict[int, int] = {}  # bucket -> requests

    def add(self, other: "Cell") -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waiting_peak = max(self.waiting_peak, other.waiting_peak)
        for kind, num in other.starts.items():
            self.starts[kind] = self.starts.get(kind, 0) + num
        for bucket, num in other.ttft.items():
            self.ttft[bucket] = self.ttft.get(bucket, 0) + num

    @property
    def business(self) -> tuple[int, int, int]:
        return self.num_requests, self.waiting + self.running, sum(self.starts.values())


_SUMMED: Final = tuple(name for name in Cell.__struct_fields__ if name not in ("waiting_peak", "starts", "ttft"))
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Cell).decode


class Sample(NamedTuple):
    """The fleet at one moment, waiting and running by model."""

    waiting: Mapping[str, int]
    running: Mapping[str, int]
    used_bytes: int
    reserved_bytes: int
    total_bytes: int


class SavedCell(NamedTuple):
    """`is_open`: not yet part of a coarser slot."""

    width_s: int
    start: int
    scope: str
    is_open: bool
    cell: bytes


class ChartSeries(msgspec.Struct, frozen=True):
    """One line of a chart: a value for each time of the page, None without a measurement."""

    name: str
    values: list[float | None]


class HistoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics over a span. `times`: starts of slots of `step_s` seconds; the last slot is still open."""

    now: float
    span: str
    model: str
    step_s: int
    source: str
    emulated: bool
    times: list[int]
    metrics: dict[str, list[ChartSeries]]
    problem: str = ""


class Ring:
    def __init__(self, width_s: int, num_slots: int) -> None:
        self.width_s, self.num_slots = width_s, num_slots
        self.closed: dict[int, dict[str, bytes]] = {}
        self.open_at: int | None = None
        self.open: dict[str, Cell] = {}
        self.unsaved: set[int] = set()  # closed slots missing on disk

    def start_of(self, at_s: float) -> int:
        return int(at_s // self.width_s) * self.width_s

    def oldest(self, at_s: float) -> int:
        return self.start_of(at_s) - (self.num_slots - 1) * self.width_s

    def close(self) -> int:
        assert self.open_at is not None
        busiest = sorted(self.open, key=lambda key: (key == FLEET, self.open[key].business, key), reverse=True)
        for scope in busiest[MAX_MODELS + 1 :]:
            del self.open[scope]
        start, self.open_at = self.open_at, None
        self.closed[start] = {scope: _encode(cell) for scope, cell in self.open.items()}
        while (first := next(iter(self.closed))) < self.oldest(start):
            del self.closed[first]
            self.unsaved.discard(first)
        self.unsaved.add(start)
        return start

    def forget_after(self, now_s: float) -> None:
        for start in [start for start in self.closed if start > now_s]:
            del self.closed[start]
            self.unsaved.discard(start)
        if self.open_at is not None and self.open_at > now_s:
            self.open_at, self.open = None, {}


class History:
    def __init__(self, spans: Mapping[str, tuple[int, int]] = SPANS) -> None:
        self.rings = {span: Ring(*shape) for span, shape in spans.items()}
        self._levels = list(self.rings.values())
        self._starts: Newest[tuple[str, float], None] = Newest(STARTS_REMEMBERED)  # instance id, ended at

    def take(self, event: Event, now_s: float) -> None:
        match event.data:
            case RouterRequestsFinished(requests=requests):
                for fact in requests:
                    for cell in self._cells(fact.model_key, now_s):
                        _count(cell, fact)
            case InstanceReady(instance=instance) | InstanceFailed(instance=instance):
                is_ready = isinstance(event.data, InstanceReady)
                if instance.replica or instance.part_of or (instance.ready_at and not is_ready):
                    return  # no start that serves, or already counted
                key = (instance.instance_id, instance.ready_at or instance.changed_at)
                if key in self._starts:
                    return
                self._starts.put(key, None)
                kind = instance.start_kind or "cold" if is_ready else "failed"
                for cell in self._cells(instance.model_key, now_s):
                    word = START_WORDS.get(kind, kind)
                    cell.starts[word] = cell.starts.get(word, 0) + 1
                    cell.num_emulated += instance.emulated

    def sample(self, sample: Sample, now_s: float) -> None:
        self._advance(now_s)
        fleet = self._cell(FLEET)
        assert fleet is not None
        fleet.num_samples += 1
        fleet.used_bytes += sample.used_bytes
        fleet.reserved_bytes += sample.reserved_bytes
        fleet.total_bytes += sample.total_bytes
        for scope in (FLEET, *sorted(sample.waiting.keys() | sample.running.keys())):
            if (cell := self._cell(scope)) is None:
                continue
            waiting = sample.waiting.get(scope, 0) if scope else sum(sample.waiting.values())
            cell.waiting += waiting
            cell.waiting_peak = max(cell.waiting_peak, waiting)
            cell.running += sample.running.get(scope, 0) if scope else sum(sample.running.values())

    def page(self, span: str, model: str, metrics: Iterable[str], now_s: float) -> HistoryPage:
        """Return metrics of the fleet (`model` "") or of one model over the span that ends now. Raises BadRequest."""
        if span not in self.rings:
            raise BadRequest(f"span: {span[:32]!r} is not one of {', '.join(self.rings)}", param="span")
        ring = self.rings[span]
        first = ring.oldest(now_s)
        times = [first + i * ring.width_s for i in range(ring.num_slots)]
        slots = [self._slot(span, start, model) for start in times]
        seconds = [max(1.0, min(ring.width_s, now_s - start)) for start in times]
        return HistoryPage(
            now=now_s,
            span=span,
            model=model,
            step_s=ring.width_s,
            source="console",
            emulated=any(slot and slot[1].num_emulated for slot in slots),
            times=times,
            metrics={name: METRICS[name](slots, seconds) for name in known_metrics(metrics, model)},
        )

    def changes(self) -> tuple[list[tuple[int, int]], list[SavedCell]]:
        """Return slots (width_s, start) changed since the last call, and the cells that replace theirs on disk."""
        slots, rows = [], []
        for ring in self._levels:
            for start in sorted(ring.unsaved):
                slots.append((ring.width_s, start))
                rows += [SavedCell(ring.width_s, start, scope, False, raw) for scope, raw in ring.closed[start].items()]
            ring.unsaved.clear()
            if ring.open_at is not None:
                slots.append((ring.width_s, ring.open_at))
                rows += [
                    SavedCell(ring.width_s, ring.open_at, key, True, _encode(cell)) for key, cell in ring.open.items()
                ]
        return slots, rows

    def not_saved(self, slots: Iterable[tuple[int, int]]) -> None:
        for ring in self._levels:
            ring.unsaved.update(start for width_s, start in slots if width_s == ring.width_s and start in ring.closed)

    def restore(self, rows: Iterable[SavedCell], now_s: float) -> None:
        """Restore rows of an earlier process, before any other call; rows too old, of the future or unreadable are
        skipped."""
        by_width = {ring.width_s: ring for ring in self._levels}
        for row in rows:
            ring = by_width.get(row.width_s)
            kept = self._levels[-1] if row.is_open else ring
            if ring is None or kept is None or not kept.oldest(now_s) <= row.start <= now_s:
                continue
            try:
                cell = _decode(row.cell)
            except msgspec.MsgspecError:
                continue
            if row.is_open:
                ring.open_at = row.start
                ring.open[row.scope] = cell
            else:
                ring.closed.setdefault(row.start, {})[row.scope] = bytes(row.cell)

    @property
    def bounds(self) -> dict[int, tuple[int, int]]:
        """Return width -> starts of the oldest and newest slot."""
        found = {}
        for ring in self._levels:
            starts = [*ring.closed, *(() if ring.open_at is None else (ring.open_at,))]
            if starts:
                found[ring.width_s] = (min(starts), max(starts))
        return found

    def _cells(self, model_key: str, now_s: float) -> Iterator[Cell]:
        self._advance(now_s)
        for scope in dict.fromkeys((FLEET, model_key)):
            if (cell := self._cell(scope)) is not None:
                yield cell

    def _cell(self, scope: str) -> Cell | None:
        """None: too many models."""
        cells = self._levels[0].open
        if scope not in cells:
            if scope and len(cells) > MAX_OPEN_MODELS:
                return None
            cells[scope] = Cell()
        return cells[scope]

    def _advance(self, now_s: float) -> None:
        """After a small step back of the clock the open slot is filled on."""
        finest = self._levels[0]
        start = finest.start_of(now_s)
        newest = max((ring.open_at or 0 for ring in self._levels), default=0)
        if start < newest and newest - now_s > MAX_BACK_S:
            for ring in self._levels:
                ring.forget_after(now_s)
            newest = 0
        if finest.open_at is None:
            finest.open_at = max(start, newest)
        elif start > finest.open_at:
            self._close(0)
            finest.open_at = start

    def _close(self, level: int) -> None:
        ring = self._levels[level]
        start = ring.close()
        cells, ring.open = ring.open, {}
        if level + 1 == len(self._levels):
            return
        above = self._levels[level + 1]
        at = above.start_of(start)
        if above.open_at is not None and above.open_at != at:
            self._close(level + 1)
        above.open_at = at
        for scope, cell in cells.items():
            if scope in above.open:
                above.open[scope].add(cell)
            else:
                above.open[scope] = cell

    def _slot(self, span: str, start: int, model: str) -> tuple[Cell, Cell] | None:
        """Return the cells (fleet, model) of one slot; None without a measurement."""
        ring = self.rings[span]
        closed = ring.closed.get(start, {})
        found: dict[str, Cell] = {}
        for scope in dict.fromkeys((FLEET, model)):
            raw = closed.get(scope)
            cell = _decode(raw) if raw is not None else None
            for finer in self._levels[: self._levels.index(ring) + 1]:
                if finer.open_at is not None and ring.start_of(finer.open_at) == start and scope in finer.open:
                    cell = cell or Cell()
                    cell.add(finer.open[scope])
            if cell is not None:
                found[scope] = cell
        if FLEET not in found:
            return None
        return found[FLEET], found.get(model, Cell())


Slots = list[tuple[Cell, Cell] | None]


def _count(cell: Cell, fact: RequestFinished) -> None:
    cell.num_requests += 1
    cell.num_cold += fact.cold
    cell.num_warm += bool(fact.instance_id and not fact.cold)
    cell.num_emulated += fact.emulated
    cell.prompt_tokens += min(max(fact.prompt_tokens, 0), MAX_TOKENS)
    cell.response_tokens += min(max(fact.response_tokens, 0), MAX_TOKENS)
    if fact.first_token_s > 0:
        bucket = bucket_of(fact.first_token_s)
        cell.ttft[bucket] = cell.ttft.get(bucket, 0) + 1


def bucket_of(seconds: float) -> int:
    """Return the n of the bucket [GROWTH ** n, GROWTH ** (n + 1))."""
    return math.floor(math.log(min(max(seconds, LEAST_S), MOST_S)) / math.log(GROWTH))


def quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the quantile by nearest rank; None without counts."""
    left = max(1, math.ceil(share * sum(buckets.values())))
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return float(GROWTH ** (bucket + 0.5))
    return None


def known_metrics(names: Iterable[str], model: str) -> list[str]:
    """Return the requested metrics once each, or all of the scope by default. Raises BadRequest."""
    asked = list(dict.fromkeys(names)) or [name for name in METRICS if not (model and name == "gpu")]
    if unknown := [name for name in asked if name not in METRICS]:
        raise BadRequest(f"metric: {unknown[0][:80]!r} is not one of {', '.join(METRICS)}", param="metric")
    if model and "gpu" in asked:
        raise BadRequest("the bytes of GPUs are kept for the whole fleet, not by model", param="metric")
    return asked


def _lines(slots: Slots, **values: Callable[[Cell, Cell], float | None]) -> list[ChartSeries]:
    return [ChartSeries(name, [None if slot is None else of(*slot) for slot in slots]) for name, of in values.items()]


def _tokens(slots: Slots, seconds: list[float]) -> list[ChartSeries]:
    def rates(tokens: Callable[[Cell], int]) -> list[float | None]:
        pairs = zip(slots, seconds, strict=True)
        return [None if slot is None else round(tokens(slot[1]) / length_s, 3) for slot, length_s in pairs]

    return [
        ChartSeries("prompt", rates(lambda cell: cell.prompt_tokens)),
        ChartSeries("response", rates(lambda cell: cell.response_tokens)),
    ]


def _ttft(slots: Slots, _: list[float]) -> list[ChartSeries]:
    return _lines(
        slots,
        p50=lambda _, cell: quantile(cell.ttft, 0.5),
        p95=lambda _, cell: quantile(cell.ttft, 0.95),
        p99=lambda _, cell: quantile(cell.ttft, 0.99),
    )


def _mean(total: int, fleet: Cell) -> float | None:
    return round(total / fleet.num_samples, 3) if fleet.num_samples else None


def _queue(slots: Slots, _: list[float]) -> list[ChartSeries]:
    return _lines(
        slots,
        waiting=lambda fleet, cell: _mean(cell.waiting, fleet),
        peak=lambda fleet, cell: cell.waiting_peak if fleet.num_samples else None,
        running=lambda fleet, cell: _mean(cell.running, fleet),
    )


def _gpu(slots: Slots, _: list[float]) -> list[ChartSeries]:
    return _lines(
        slots,
        used=lambda fleet, _: _mean(fleet.used_bytes, fleet),
        reserved=lambda fleet, _: _mean(fleet.reserved_bytes, fleet),
        capacity=lambda fleet, _: _mean(fleet.total_bytes, fleet),
    )


def _starts(slots: Slots, _: list[float]) -> list[ChartSeries]:
    total: defaultdict[str, int] = defaultdict(int)
    for slot in slots:
        for kind, num in slot[1].starts.items() if slot else ():
            total[kind] += num
    names = [name for name in STARTS if total[name] or name == STARTS[0]]
    return [
        ChartSeries(name, [None if slot is None else slot[1].starts.get(name, 0) for slot in slots]) for name in names
    ]


def _hits(slots: Slots, _: list[float]) -> list[ChartSeries]:
    def share(_: Cell, cell: Cell) -> float | None:
        num = cell.num_warm + cell.num_cold
        return round(cell.num_warm / num, 4) if num else None

    return _lines(slots, warm=share)


METRICS: Final[dict[str, Callable[[Slots, list[float]], list[ChartSeries]]]] = {
    "tokens": _tokens,
    "ttft": _ttft,
    "queue": _queue,
    "gpu": _gpu,
    "starts": _starts,
    "hits": _hits,
}
