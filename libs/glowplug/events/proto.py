"""Write proto/ from the event classes, and number their new fields: `python -m glowplug.events.proto proto`."""

import dataclasses
import sys
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from glowplug import domain
from glowplug.events import commands, document, envelope, facts
from glowplug.events.subjects import ROOT, is_telemetry

# A message is a class, with its comments. Its fields have the numbers of the lock file.

LOCK = "numbers.lock"
ABOUT_LOCK = """\
# Written by `python -m glowplug.events.proto proto`. Every field so far: message, field, number, and `reserved`
# if the class no longer has it.
"""
FOLDER = ROOT.replace(".", "/")
VALUES, SHARED = ("google/protobuf/struct.proto",), (f"{FOLDER}/domain.proto", f"{FOLDER}/options.proto")
HEAD = f"""\
// Written by `python -m glowplug.events.proto proto` from libs/{{source}}: change the classes, not this file.
// Times are epoch seconds, sizes bytes; an enumeration travels as one of its words.
syntax = "proto3";

package {ROOT};

"""
PLAIN = {str: "string", int: "int64", float: "double", bool: "bool"}
Numbers = dict[tuple[str, str], tuple[int, bool]]  # message and field -> number, whether it is reserved


def written(lock: str) -> dict[str, str]:
    """Return the text of each file below proto/ by its path, the next lock file among them."""
    files = (
        (facts, SHARED, get_args(facts.Fact)),
        (commands, SHARED, get_args(commands.Command)),
        (domain, VALUES, document.carried(list(envelope.PAYLOADS.values()))),
        (envelope, VALUES, [envelope.Event]),
    )
    fields = {cls.__name__: [f.name for f in dataclasses.fields(cls)] for _, _, classes in files for cls in classes}
    numbers = numbered(parse(lock), fields)
    rows = sorted((message, number, name, mark) for (message, name), (number, mark) in numbers.items())
    lines = [f"{message} {name} {number}{' reserved' * mark}\n" for message, number, name, mark in rows]
    out = {LOCK: "".join([ABOUT_LOCK, *lines])}
    for module, imports, classes in files:
        source = module.__name__.replace(".", "/")
        head = HEAD.format(source=source) + "".join(f'import "{path}";\n' for path in imports)
        out[f"{FOLDER}/{Path(source).name}.proto"] = "\n".join([head, *(_message(cls, numbers) for cls in classes)])
    return out


def parse(lock: str) -> Numbers:
    rows = [line.split() for line in lock.splitlines() if line[:1] != "#"]
    return {(message, name): (int(number), bool(mark)) for message, name, number, *mark in rows}


def numbered(before: Numbers, messages: Mapping[str, Iterable[str]]) -> Numbers:
    """Give the next number of its message to each new field, and reserve those of fields that are gone. Raises
    ValueError for a field whose name is reserved."""
    numbers: Numbers = {key: (number, True) for key, (number, _) in before.items()}
    for message, names in messages.items():
        for name in names:
            last = max((number for (other, _), (number, _) in numbers.items() if other == message), default=0)
            number, is_reserved = before.get((message, name), (last + 1, False))
            if is_reserved:
                raise ValueError(f"{message}.{name} is reserved: an older process may mean another field by it")
            numbers[message, name] = number, False
    return numbers


def _message(cls: type[Any], numbers: Numbers) -> str:
    fields = {field.name: field for field in document.fields(cls)}
    out = [*(f"// {line}".rstrip() for line in document.docstring(cls).splitlines()), f"message {cls.__name__} {{"]
    if kind := getattr(cls, "TYPE", ""):
        plane = "cmd" if kind in envelope.COMMANDS else "tel" if is_telemetry(kind) else "evt"
        out += [f'  option (event_type) = "{kind}";', f'  option (plane) = "{plane}";', ""]
    for number, name in sorted((n, name) for (message, name), (n, _) in numbers.items() if message == cls.__name__):
        out += [_field(fields[name], number) if name in fields else f'  reserved {number};\n  reserved "{name}";']
    return "\n".join([*out, "}\n"])


def _field(field: document.Field, number: int) -> str:
    enums = [cls for cls in document.elements(field.hint) if issubclass(cls, StrEnum)]
    words = ["one of: " + ", ".join(member.value or '""' for member in cls) for cls in enums]
    comment = "; ".join(filter(None, [*words, field.comment]))
    return f"  {type_of(field.hint)} {field.name} = {number};{comment and ' // '}{comment}"


def type_of(hint: Any) -> str:
    origin, args = typing.get_origin(hint), get_args(hint)
    if origin is tuple:
        return f"repeated {type_of(args[0])}"
    if origin is Mapping and args[1] is not Any:
        return f"map<{type_of(args[0])}, {type_of(args[1])}>"
    if origin is UnionType:
        return "google.protobuf.Value"
    if origin is Mapping or hint is Any:
        return "google.protobuf.Struct"
    if dataclasses.is_dataclass(hint):
        return typing.cast(type[Any], hint).__name__
    return PLAIN[str if issubclass(hint, StrEnum) else hint]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path, text in written((folder / LOCK).read_text()).items():
        (folder / path).write_text(text)
