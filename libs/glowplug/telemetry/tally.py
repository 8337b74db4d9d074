"""Count on hot paths with many label values, at a fraction of prometheus_client's cost.

An observation is one bisection and two additions; a scrape writes lines straight from the counts. Registered like other
metrics; only `exposition` writes them faster, in pieces.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import cast

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

BYTES_AT_ONCE = 16_000  # between two yields, a fraction of a millisecond


class TallyMetric(Metric):
    """Makes its samples on reading."""

    def __init__(self, family: "Tally") -> None:
        super().__init__(family.name.removesuffix("_total"), family.doc, family.kind)
        self.family = family

    @property
    def samples(self) -> list[Sample]:
        return [Sample(name, dict(labels), value) for name, labels, value in self.family.rows()]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """Ignore the base class's empty list."""


Labels = tuple[tuple[str, str], ...]
Row = tuple[str, Labels, float]


class Tally(Collector):
    """One child per combination of label values; subclasses define a child."""

    kind = "counter"

    def __init__(self, name: str, doc: str, labels: Sequence[str], registry: CollectorRegistry = REGISTRY) -> None:
        self.name, self.doc, self.label_names = name, doc, tuple(labels)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield TallyMetric(self)

    def rows(self) -> Iterable[Row]:
        """Yield (sample name, labels, value)."""
        raise NotImplementedError

    def head(self) -> str:
        return f"# HELP {self.name} {self.doc}\n# TYPE {self.name} {self.kind}\n"

    def lines(self) -> Iterator[str]:
        """Prometheus text, a few lines at a time."""
        yield self.head()
        for name, labels, value in self.rows():
            yield f"{name}{{{_text(labels)}}} {value}\n"

    def pairs(self, values: Sequence[str]) -> Labels:
        return tuple(zip(self.label_names, values, strict=True))


class CountChild:
    """Add to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class TallyCounter(Tally):
    def __init__(self, name: str, doc: str, labels: Sequence[str], registry: CollectorRegistry = REGISTRY) -> None:
        self.children: dict[tuple[str, ...], CountChild] = {}
        super().__init__(name, doc, labels, registry)

    def labels(self, *values: str) -> CountChild:
        child = self.children.get(values)
        if child is None:
            child = self.children[values] = CountChild()
        return child

    def rows(self) -> Iterable[Row]:
        return [(self.name, self.pairs(values), float(child.value)) for values, child in self.children.items()]


class HistogramChild:
    """`counts` by bucket, the last unbounded, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        observe_all(((self, value),))


def observe_all(values: Iterable[tuple[HistogramChild, float]]) -> None:
    for child, value in values:
        child.counts[bisect_left(child.bounds, value)] += 1
        child.total += value


class TallyHistogram(Tally):
    kind = "histogram"

    def __init__(
        self,
        name: str,
        doc: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.bounds = tuple(map(float, buckets))
        self._marks = (*map(repr, self.bounds), "+Inf")
        self.children: dict[tuple[str, ...], HistogramChild] = {}
        super().__init__(name, doc, labels, registry)

    def labels(self, *values: str) -> HistogramChild:
        child = self.children.get(values)
        if child is None:
            child = self.children[values] = HistogramChild(self.bounds)
        return child

    def rows(self) -> Iterator[Row]:
        for values, child in list(self.children.items()):
            labels, num = self.pairs(values), 0
            for mark, count in zip(self._marks, child.counts, strict=True):
                num += count
                yield f"{self.name}_bucket", (*labels, ("le", mark)), float(num)
            yield f"{self.name}_count", labels, float(num)
            yield f"{self.name}_sum", labels, child.total

    def lines(self) -> Iterator[str]:
        name = self.name
        yield self.head()
        for values, child in list(self.children.items()):
            inside, num = _text(self.pairs(values)), 0
            begin, out = f'{name}_bucket{{{inside}{"," if inside else ""}le="', []
            for mark, count in zip(self._marks, child.counts, strict=True):
                num += count
                out.append(f'{begin}{mark}"}} {num}.0\n')
            out.append(f"{name}_count{{{inside}}} {num}.0\n{name}_sum{{{inside}}} {child.total}\n")
            yield "".join(out)


class TallyRows(Tally):
    """Counted elsewhere: at each scrape `read` returns label values and a value, each combination once."""

    def __init__(
        self,
        name: str,
        doc: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[Sequence[str], float]]],
        *,
        kind: str = "counter",
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.kind, self._read = kind, read
        super().__init__(name, doc, labels, registry)

    def rows(self) -> Iterable[Row]:
        return [(self.name, self.pairs(values), float(value)) for values, value in self._read()]


def _text(labels: Labels) -> str:
    return ",".join([f'{label}="{_escaped(text)}"' for label, text in labels])


def _escaped(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text


async def exposition(registry: CollectorRegistry = REGISTRY) -> bytes:
    """Write Prometheus text in pieces, between which the event loop runs other tasks."""
    parts: list[bytes] = []
    for metric in registry.collect():
        if not isinstance(metric, TallyMetric):
            one = cast(CollectorRegistry, SimpleNamespace(collect=lambda metric=metric: [metric]))
            parts.append(generate_latest(one))
            continue
        num_bytes = 0
        for lines in metric.family.lines():
            parts.append(lines.encode())
            num_bytes += len(lines)
            if num_bytes >= BYTES_AT_ONCE:
                num_bytes = 0
                await asyncio.sleep(0)
    return b"".join(parts)
