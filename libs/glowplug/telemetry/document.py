"""Writes docs/metrics.md from semconv.py: `python -m glowplug.telemetry.document > docs/metrics.md`."""

import re
from dataclasses import dataclass
from pathlib import Path

from glowplug.telemetry import semconv

INTRO = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
_LINE = re.compile(r'^(?P<name>[A-Z0-9_]+) = "(?P<value>[^"]+)"(?:  # (?P<comment>.*))?$')


@dataclass(frozen=True, slots=True)
class Name:
    """One line of semconv.py: the section it stands in, its constant, its value and the comment beside it."""

    section: str
    constant: str
    value: str
    comment: str


def names() -> list[Name]:
    """Every name of semconv.py, in order."""
    found, section = [], ""
    for line in Path(semconv.__file__).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        elif match := _LINE.match(line):
            found.append(Name(section, match["name"], match["value"], match["comment"] or ""))
    return found


def kind(value: str) -> str:
    """What a metric of this name is: its ending says."""
    if value.endswith("_timestamp_seconds"):
        return "gauge"
    return "counter" if value.endswith("_total") else "histogram" if value.endswith("_seconds") else "gauge"


def labels(name: Name) -> tuple[str, ...]:
    """The labels of a metric: what its comment says before the semicolon."""
    return tuple(label.strip() for label in name.comment.partition(";")[0].split(",") if label.strip())


def document() -> str:
    """The whole page."""
    out, section = [INTRO], ""
    for name in names():
        if not name.section:
            continue
        is_metric = name.section.startswith("Metrics:")
        if name.section != section:
            section = name.section
            out += ["", f"## {section.removeprefix('Metrics: ').capitalize() if is_metric else section}", ""]
            columns = ("name", "kind", "labels") if is_metric else ("name", "meaning")
            out += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        cells = [f"`{name.value}`", *([kind(name.value)] if is_metric else []), name.comment]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    print(document(), end="")
