"""The shape of a payload as data: its fields, their types, and the comment beside each.

Read from the source, so that docs and tests never repeat what the type page already says.
"""

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
