"""Print the page of metrics, drawn from semconv.py: `python -m glowplug.telemetry.document`, or `make docs`."""

import re
from dataclasses import dataclass
from pathlib import Path

from glowplug.telemetry import semconv

INTRO = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
_LINE = re.compile(r'^(?P<name>[A-Z0-9_]+) = "(?P<value>[^"]+)"(?:  # (?P<comment>.*))?$')


@dataclass(frozen=True, slots=True)
class Name:
    """A line of semconv.py: section, constant, value, comment."""

    section: str
    constant: str
    value: str
    comment: str


def names() -> list[Name]:
    found, section = [], ""
    for line in Path(semconv.__file__).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        elif match := _LINE.match(line):
            found.append(Name(section, match["name"], match["value"], match["comment"] or ""))
    return found


def kind(value: str) -> str:
    if value.endswith("_timestamp_seconds"):
        return "gauge"
    return "counter" if value.endswith("_total") else "histogram" if value.endswith("_seconds") else "gauge"


def labels(name: Name) -> tuple[str, ...]:
    """Its comment up to the semicolon."""
    return tuple(label.strip() for label in name.comment.partition(";")[0].split(",") if label.strip())


def document() -> str:
    """Return the Markdown page: by section, metrics that need no explanation, then a line for each other name."""
    out, sections = [INTRO], dict[str, list[Name]]()
    for name in names():
        if name.section:
            sections.setdefault(name.section, []).append(name)
    for section, found in sections.items():
        is_metric = section.startswith("Metrics:")
        out += ["", f"## {section.removeprefix('Metrics: ').capitalize() if is_metric else section}", ""]
        plain = [name for name in found if not _meaning(name)]
        out += [f"- {', '.join(map(_named, plain))}"] if plain and is_metric else []
        out += [f"- {_named(name)}: {_meaning(name)}" for name in found if _meaning(name)]
    return "\n".join(out).replace("\n\n\n", "\n\n") + "\n"


def _named(name: Name) -> str:
    given = labels(name) if name.section.startswith("Metrics:") else ()
    return f"`{name.value}`" + (f" ({', '.join(given)})" if given else "")


def _meaning(name: Name) -> str:
    return name.comment.partition("; ")[2] if name.section.startswith("Metrics:") else name.comment


if __name__ == "__main__":
    print(document(), end="")
