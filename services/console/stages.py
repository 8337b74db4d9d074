"""Where the time of one request went: queue, decide, fetch, launch, load, warmup, prefill, decode.

Stages overlap (an engine launches while its weights are fetched), so each has two figures: how long it took, and the
share of the whole that is its own. The shares are a partition of the request: of stages side by side, the one that ends
last has the moment, for that is the one that was waited for.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from glowplug.domain.instance import PhaseName
from glowplug.services.console.spans import Span

REQUEST, HOLD, GENERATE = "router.request", "router.hold", "engine.generate"
FIRST_TOKEN = "first token"
QUEUE, PREFILL, DECODE, ANSWER, OTHER = "queue", "prefill", "decode", "answer", "other"
COLD = tuple(phase.value for phase in PhaseName)
ORDER = (QUEUE, *COLD, PREFILL, DECODE, ANSWER, OTHER)
MAX_STRETCHES = 256  # of one trace; a client may put many starts under its own
_Stretch = tuple[str, int, int]  # stage, from, to (epoch nanoseconds)


class Stage(msgspec.Struct, frozen=True):
    """One stage. `own_s` is its share of the whole, `seconds` how long it went on (with others beside it)."""

    name: str
    seconds: float
    own_s: float


def stages(spans: Sequence[Span], phases: Iterable[tuple[str, int, int]]) -> list[Stage]:
    """Stages of the first request in a trace, in their order; empty when it has none. `phases`: name, from, to.

    What no stage covers is "other": the router itself, the network, spans that never came.
    """
    request = min((s for s in spans if s.name == REQUEST), key=lambda s: (s.start_ns, s.span_id), default=None)
    if request is None or request.end_ns <= request.start_ns:
        return []
    begin, end = request.start_ns, request.end_ns
    found = [*_stretches(spans, request), *phases]
    inside = [(name, max(a, begin), min(b, end)) for name, a, b in found]
    inside = [stretch for stretch in inside if stretch[1] < stretch[2]][:MAX_STRETCHES]
    own = _partition(inside, begin, end)
    return [
        Stage(name, _covered(inside, name) if name != OTHER else own[OTHER] / 1e9, own.get(name, 0) / 1e9)
        for name in ORDER
        if name in own or any(stretch[0] == name for stretch in inside)
    ]


def _stretches(spans: Sequence[Span], request: Span) -> Iterator[_Stretch]:
    """The queue; prefill and decode, cut at the first token, or "answer" for both where it was not seen."""
    for span in (span for span in spans if span.parent_id == request.span_id):
        if span.name == HOLD:
            yield (QUEUE, span.start_ns, span.end_ns)
        elif span.name == GENERATE:
            first = next((event.time_ns for event in span.events if event.name == FIRST_TOKEN), 0)
            if first:
                yield (PREFILL, span.start_ns, first)
            yield (DECODE if first else ANSWER, first or span.start_ns, span.end_ns)


def _partition(stretches: Sequence[_Stretch], begin: int, end: int) -> dict[str, int]:
    """Nanoseconds of each stage's own. What holds a queued request has the moment before the queue itself."""
    cuts = sorted({begin, end, *(at for _, a, b in stretches for at in (a, b))})
    own: dict[str, int] = {}
    for a, b in itertools.pairwise(cuts):
        here = [s for s in stretches if s[1] <= a and s[2] >= b]
        name = max(here, key=_waited_for)[0] if here else OTHER
        own[name] = own.get(name, 0) + b - a
    return own


def _waited_for(stretch: _Stretch) -> tuple[bool, int, int]:
    name, _, end = stretch
    return (name != QUEUE, end, ORDER.index(name) if name in ORDER else 0)


def _covered(stretches: Sequence[_Stretch], name: str) -> float:
    """Seconds during which at least one stretch of this stage goes on."""
    total = reached = 0
    for _, a, b in sorted(s for s in stretches if s[0] == name):
        total += max(0, b - max(a, reached))
        reached = max(reached, b)
    return total / 1e9
