"""The mean of a level over the last seconds, weighted by time, in a few numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """A level that is known whenever somebody looks, and held in between. `marks` are (when, integral so far), oldest
    first, `grain_s` apart; the last one is where `value` began to count."""

    value: float = 0.0
    marks: tuple[tuple[float, float], ...] = ()

    def seen(self, now_s: float, value: float, span_s: float, grain_s: float) -> "Level":
        """The level is `value` from `now_s` on. What is older than `span_s` is forgotten."""
        if not self.marks:
            return Level(value, ((now_s, 0.0),))
        at, total = self.marks[-1]
        here = (now_s, total + self.value * max(0.0, now_s - at))
        kept = self.marks
        if len(kept) > 1 and now_s - kept[-2][0] < grain_s:
            kept = kept[:-1]
        first = 0
        while first + 1 < len(kept) and kept[first + 1][0] <= now_s - span_s:
            first += 1
        return Level(value, (*kept[first:], here))

    def mean(self, now_s: float, span_s: float) -> float:
        """Over the last `span_s`, or over what is known of them; the level itself while that is no time at all."""
        at, total = self.marks[-1]
        total += self.value * max(0.0, now_s - at)
        begin = max(now_s - span_s, self.marks[0][0])
        if now_s - begin <= 0:
            return self.value
        return (total - self._integral(begin)) / (now_s - begin)

    def _integral(self, at_s: float) -> float:
        """Up to `at_s`, straight between marks."""
        before = self.marks[0]
        for mark in self.marks:
            if mark[0] >= at_s:
                width = mark[0] - before[0]
                return before[1] + (mark[1] - before[1]) * ((at_s - before[0]) / width if width > 0 else 0.0)
            before = mark
        return before[1] + self.value * (at_s - before[0])
