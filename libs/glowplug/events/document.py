"""Print the page of events, drawn from the type pages: `python -m glowplug.events.document`, or `make docs`."""

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from glowplug.events import commands, facts
from glowplug.events.envelope import COMMANDS
from glowplug.events.subjects import is_telemetry, subject

# The shape of a payload as data: its fields, their types, and the comment beside each.
#
# Read from the source, so that docs and tests never repeat what the type page already says.


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `default` is "" when the field is required; `comment` is the one at the end of its line."""

    name: str
    hint: Any
    default: str
    comment: str


def fields(cls: type[Any]) -> list[Field]:
    """The fields of a dataclass, in order."""
    comments, hints = comments_of(cls), typing.get_type_hints(cls)
    return [Field(f.name, hints[f.name], _default(f), comments.get(f.name, "")) for f in dataclasses.fields(cls)]


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "{}"
    if field.default is dataclasses.MISSING:
        return ""
    if isinstance(field.default, StrEnum):
        return f'"{field.default.value}"'
    if dataclasses.is_dataclass(field.default):
        return f"{type(field.default).__name__}()"
    return f'"{field.default}"' if isinstance(field.default, str) else str(field.default)


def comments_of(cls: type[Any]) -> dict[str, str]:
    """Field name -> the comment that ends its line."""
    source = inspect.getsource(cls)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    named = [(n.target.id, n.lineno) for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return {name: by_line[line] for name, line in named if line in by_line}


def docstring(cls: type[Any]) -> str:
    """The class's own docstring; "" when it has none (dataclasses generate one)."""
    text = inspect.getdoc(cls) or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def elements(hint: Any) -> list[type[Any]]:
    """The classes that a type hint mentions: `tuple[Worker, ...]` -> [Worker]."""
    args = [a for a in typing.get_args(hint) if a is not Ellipsis]
    if not args:
        return [hint] if isinstance(hint, type) else []
    return [cls for arg in args for cls in elements(arg)]


def carried(roots: list[type[Any]]) -> list[type[Any]]:
    """Every dataclass that the roots contain, directly or not, by name; without the roots."""
    found: dict[str, type[Any]] = {}
    queue = list(roots)
    while queue:
        for field in fields(queue.pop()):
            for cls in elements(field.hint):
                if dataclasses.is_dataclass(cls) and cls.__name__ not in found:
                    found[cls.__name__] = cls
                    queue.append(cls)
    return [found[name] for name in sorted(found) if found[name] not in roots]


INTRO = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
NAMES = {"key": "model_key", "name": "tenant_name"}  # field -> its name in a subject


def example(cls: type[Any]) -> Any:
    """Make a value of `cls` whose text fields hold their own names in braces; the checks of `cls` do not run."""
    made = object.__new__(cls)
    required = {field.name: field.hint for field in fields(cls) if not field.default}
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
        out += [f"- **{cls.TYPE}** `{address}`: {' '.join(docstring(cls).split())}"]
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
