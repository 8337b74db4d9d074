"""Writes docs/events.md from the type pages: `python -m glowplug.events.document > docs/events.md`."""

import dataclasses
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

from glowplug.events import commands, facts, shapes
from glowplug.events.envelope import COMMANDS, PAYLOADS, Event
from glowplug.events.subjects import is_telemetry, subject

INTRO = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
NAMES = {"key": "model_key"}  # what a field is called in a subject


def example(cls: type[Any]) -> Any:
    """A value of `cls` whose text fields hold their own names in braces."""
    return cls(**{f.name: _filler(f.name, f.hint) for f in shapes.fields(cls) if not f.default})


def _filler(name: str, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return (_filler(name, args[0]),)
    if origin is not None:
        return {}
    if dataclasses.is_dataclass(hint):
        return example(typing.cast(type[Any], hint))
    if issubclass(hint, StrEnum):
        return next(iter(hint))
    return f"{{{NAMES.get(name, name)}}}" if hint is str else hint()


def _table(cls: type[Any]) -> list[str]:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for f in shapes.fields(cls):
        default = f"`{f.default}`" if f.default else "required"
        rows.append(f"| `{f.name}` | {shapes.spell(f.hint)} | {default} | {f.comment.replace('|', '/')} |")
    return rows


def _section(title: str, cls: type[Any], *lines: str) -> list[str]:
    text = shapes.docstring(cls)
    return [f"### {title}", "", *lines, *([*text.splitlines(), ""] if text else []), *_table(cls), ""]


def _payloads(title: str, classes: list[type[Any]]) -> list[str]:
    out = [f"## {title}", ""]
    for cls in classes:
        out += _section(f"{cls.TYPE}", cls, f"`{cls.__name__}` on `{subject(example(cls))}`", "")
    return out


def document() -> str:
    """The whole page."""
    roots = list(PAYLOADS.values())
    stored = [cls for cls in typing.get_args(facts.Fact) if not is_telemetry(cls.TYPE)]
    measured = [cls for cls in typing.get_args(facts.Fact) if is_telemetry(cls.TYPE)]
    asked = [cls for cls in typing.get_args(commands.Command) if cls.TYPE in COMMANDS]
    out = [INTRO, "## The envelope", "", *shapes.docstring(Event).splitlines(), "", *_table(Event), ""]
    out += _payloads("Facts", stored) + _payloads("Telemetry", measured) + _payloads("Commands", asked)
    out += ["## Shapes", ""]
    for cls in shapes.carried(roots):
        out += _section(cls.__name__, cls, f"`libs/{shapes.home(cls)}`", "")
    return "\n".join(out).rstrip() + "\n"


if __name__ == "__main__":
    print(document(), end="")
