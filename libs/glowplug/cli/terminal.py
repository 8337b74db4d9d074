"""Text on a terminal. All that a command prints goes through `say`, since most of it came from somewhere else: model
names, ids, events, log lines, answers of models, files.

A control character moves the cursor, hides text or asks the terminal to do things; an override of the writing direction
shows text in another order than it has. Both are printed as what they are, `\\x1b` or `\\u202e`. JSON needs none of it:
ours is ASCII, with every control character escaped.
"""

import sys
from typing import Final

import typer

_KEPT: Final = "\n\t"
_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0))  # C0, DEL and C1
# Marks, embeddings, overrides and isolates of the writing direction; line and paragraph separators; tags, not seen.
_DIRECTIONS: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080))
_SURROGATES: Final = range(0xD800, 0xE000)  # lone ones cannot be written at all


def _shown(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_TABLE: Final = {code: _shown(code) for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES) if chr(code) not in _KEPT}
_IN_LINE: Final = _TABLE | {ord(kept): repr(kept)[1:-1] for kept in _KEPT}


def safe(text: str) -> str:
    """`text` without what a terminal obeys; its lines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_TABLE)


def in_line(value: object) -> str:
    """A value as part of one line: a name with a line end in it begins no line of its own."""
    return str(value).translate(_IN_LINE)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print, to stderr with `err`, with a line end but for `nl`."""
    typer.echo(safe(text), err=err, nl=nl)


def clear() -> None:
    """Begin at the top of an empty screen, where there is one."""
    if sys.stdout.isatty():
        typer.echo("\x1b[2J\x1b[H", nl=False)
