"""Write docs/events.md from the type pages: `python -m glowplug.events.document > docs/events.md`."""

import dataclasses
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

from glowplug.events import commands, facts, shapes
from glowplug.events.envelope import COMMANDS
from glowplug.events.subjects import is_telemetry, subject

INTRO = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
NAMES = {"key": "model_key", "name": "tenant_name"}  # field -> its name in a subject


def example(cls: type[Any]) -> Any:
    """Make a value of `cls` whose text fields hold their own names in braces; the checks of `cls` do not run."""
    made = object.__new__(cls)
    required = {field.name: field.hint for field in shapes.fields(cls) if not field.default}
    for field in dataclasses.fields(cls):
        is_required = field.name in required
        object.__setattr__(made, field.name, _filler(field.name, required[field.name]) if is_required else _set(field))
    return made


def _set(field: dataclasses.Field[Any]) -> Any:
    """The default of a field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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


def _payloads(title: str, classes: list[type[Any]]) -> list[str]:
    out = [f"## {title}", ""]
    for cls in classes:
        address = ".".join(subject(example(cls)).split(".")[5:])  # behind the plane and the type
        out += [f"- **{cls.TYPE}** `{address}`: {' '.join(shapes.docstring(cls).split())}"]
    return [*out, ""]


def document() -> str:
    """The whole page as Markdown."""
    stored = [cls for cls in typing.get_args(facts.Fact) if not is_telemetry(cls.TYPE)]
    measured = [cls for cls in typing.get_args(facts.Fact) if is_telemetry(cls.TYPE)]
    asked = [cls for cls in typing.get_args(commands.Command) if cls.TYPE in COMMANDS]
    out = [INTRO, *_payloads("Facts", stored), *_payloads("Telemetry", measured), *_payloads("Commands", asked)]
    return "\n".join(out).rstrip() + "\n"


if __name__ == "__main__":
    print(document(), end="")
