"""Lines and bars as SVG: the same numbers give the same bytes, on any machine, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 78
COLOURS = ("#3b6fb6", "#d1603d", "#4a9d6e", "#8a5fb0", "#b99a2d", "#5f6b76", "#c25b8e", "#3f9ea8")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.t{font-size:14px;font-weight:600}"
    ".g{stroke:#d8dee4;stroke-width:1}.bg{fill:#fff}"
)


def _num(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def _under(at: float, label: str) -> str:
    return f'<text x="{_num(at)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high`, linear or logarithmic, onto pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [10.0**e for e in exponents if self.low <= 10.0**e <= self.high * 1.0001]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4 or 1.0))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _scale(values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool) -> Axis:
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        return Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9), start, end, True)
    low = min(0.0, low) if from_zero else low
    return Axis(low, high if high > low else low + 1.0, start, end)


def _frame(title: str, x_label: str, y_label: str, names: Sequence[str], body: list[str], y: Axis) -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)} (simulated)</title><style>{STYLE}</style>",
        f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="t" x="{LEFT}" y="22">{escape(title)} (simulated)</text>',
    ]
    for value in y.ticks():
        at = _num(y.at(value))
        out.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{_num(y.at(value) + 4)}" text-anchor="end">{_tick(value)}</text>')
    out += body
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 40}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )
    at_x, at_y = float(LEFT), HEIGHT - 22
    for n, name in enumerate(names):
        wide = 22 + 6.6 * len(name)
        if at_x + wide > WIDTH and at_y < HEIGHT - 10:
            at_x, at_y = float(LEFT), HEIGHT - 7
        out.append(f'<rect x="{_num(at_x)}" y="{at_y - 9}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/>')
        out.append(f'<text x="{_num(at_x + 14)}" y="{at_y}">{escape(name)}</text>')
        at_x += wide
    return "\n".join([*out, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves through points; `steps` holds each value until the next point."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False
    steps: bool = False

    def svg(self) -> str:
        points = [p for curve in self.series.values() for p in curve]
        x = _scale([p[0] for p in points], LEFT, WIDTH - RIGHT, log=self.log_x, from_zero=False)
        y = _scale([p[1] for p in points], HEIGHT - BOTTOM, TOP, log=self.log_y, from_zero=True)
        body = [_under(x.at(value), _tick(value)) for value in x.ticks()]
        for n, curve in enumerate(self.series.values()):
            path, last = [], None
            for px, py in curve:
                if self.steps and last is not None:
                    path.append(f"{_num(x.at(px))},{_num(y.at(last))}")
                path.append(f"{_num(x.at(px))},{_num(y.at(py))}")
                last = py
            colour = COLOURS[n % len(COLOURS)]
            body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{" ".join(path)}"/>')
        return _frame(self.title, self.x_label, self.y_label, list(self.series), body, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Groups of bars side by side; each series has one value per group (nan: no bar)."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]
    log_y: bool = False

    def svg(self) -> str:
        values = [v for column in self.series.values() for v in column]
        y = _scale(values, HEIGHT - BOTTOM, TOP, log=self.log_y, from_zero=True)
        body, wide = [], (WIDTH - RIGHT - LEFT) / max(1, len(self.groups))
        bar = wide * 0.8 / max(1, len(self.series))
        for g, group in enumerate(self.groups):
            left = LEFT + g * wide
            body.append(_under(left + wide / 2, group))
            for n, column in enumerate(self.series.values()):
                if not math.isfinite(column[g]):
                    continue
                top, floor = y.at(column[g]), y.at(y.low if self.log_y else 0.0)
                where = f'x="{_num(left + wide * 0.1 + n * bar)}" y="{_num(min(top, floor))}"'
                size = f'width="{_num(bar * 0.92)}" height="{_num(abs(floor - top))}"'
                body.append(f'<rect {where} {size} fill="{COLOURS[n % len(COLOURS)]}"/>')
        return _frame(self.title, self.x_label, self.y_label, list(self.series), body, y)


def read(data: Mapping[str, Any]) -> Lines | Bars:
    """Read a picture from a result file, where null is nan."""
    kind: type[Lines] | type[Bars] = Lines if data["kind"] == "Lines" else Bars
    given = {name: value for name, value in data.items() if name != "kind"}
    if kind is Bars:
        given["series"] = {
            name: [math.nan if value is None else value for value in column] for name, column in given["series"].items()
        }
    return kind(**given)


def day(title: str, y_label: str, outcome: Mapping[str, Sequence[tuple[float, float]]]) -> Lines:
    """The actual and the forecast values, as (hour, value), over one day."""
    series = {name: outcome[name] for name in ("came", "forecast")}
    return Lines(title=title, x_label="hour of the day", y_label=y_label, series=series)
