"""Weigh the tree: `make weight` prints the current table beside that of tests/weight.txt.

The table holds each number rounded up a little. To raise one, run `make weight ARGS=--write` in a commit of its own
that says why. tests/house holds it, and asks for the same where a package has lost a twentieth of its lines, so that
the table follows down. `prose` counts words of docstrings and comments per 100 lines of code; `what` counts that word
per 1,000 of them, which tells a translation from English.
"""

import argparse
import ast
import functools
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from docs import configuration
from tests.house.tree import ROOT, files, nodes, text

LABORATORY = "libs/glowplug_lab"
HELD = ROOT / "tests/weight.txt"
GENERATED = ("libs/glowplug/events/_pb/",)
OURS = re.compile(r"(libs/glowplug/\w+(?=/)|libs/\w+(?=/)|services/\w+(?=/)|tests|bench|deploy|docs)/")
CODE = (".py", ".js", ".css", ".html", ".sh")
MARKS = re.compile(r"#\s*(?:noqa|type: ignore|pragma|fmt:|ruff:|!)[^#]*")
JS_COMMENT = re.compile(r"/\*.*?\*/|(?<![:\"'])//[^\n]*", re.DOTALL)
WORD = re.compile(r"[A-Za-z][\w'-]*")
AIMS = {"prose": 110.0, "what": 3.0}
FALLEN = 0.95  # of the held lines
STEPS = {"lines": 100, "prose": 1, "what": 0.5, "count": 1, "words": 100}  # for rounding up
HEAD = """\
# Held by tests/house: no number may rise. `make weight` prints it, ARGS=--write writes it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    lines: int = 0
    words: int = 0
    whats: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        return Weight(lines=self.lines + other.lines, words=self.words + other.words, whats=self.whats + other.whats)

    def row(self) -> dict[str, float]:
        return {
            "lines": self.lines,
            "prose": round(100 * self.words / max(self.lines, 1), 1),
            "what": round(1000 * self.whats / max(self.words, 1), 1),
        }


def of_python(path: str) -> str:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [ast.get_docstring(node, clean=False) or "" for node in nodes(path) if isinstance(node, owners)]
    found = tokenize.generate_tokens(io.StringIO(text(path)).readline)
    comments = [MARKS.sub("", token.string) for token in found if token.type == tokenize.COMMENT]
    return "\n".join([*docs, *comments])


def weigh(path: str) -> Weight:
    said = text(path)
    prose = of_python(path) if path.endswith(".py") else "\n".join(JS_COMMENT.findall(said))
    words = WORD.findall(prose)
    return Weight(lines=said.count("\n"), words=len(words), whats=sum(word.lower() == "what" for word in words))


def _is_left_out(path: str) -> bool:
    return path.startswith(GENERATED) or (ROOT / path).is_symlink()


def table() -> dict[str, dict[str, float]]:
    """Package -> its numbers; then libs and services without the laboratory, and the whole tree's counts."""
    found: dict[str, Weight] = {}
    for path in files():
        if path.endswith(CODE) and not _is_left_out(path) and (part := OURS.match(path)):
            found[part[1]] = found.get(part[1], Weight()) + weigh(path)
    product = functools.reduce(Weight.__add__, (w for name, w in found.items() if "/" in name and name != LABORATORY))
    pages = sum(len(text(path).split()) for path in files() if path.endswith(".md"))
    return {
        **{name: weight.row() for name, weight in sorted(found.items())},
        "the product": product.row(),
        "settings": {"count": settings()},
        "Markdown": {"words": pages},
    }


def settings() -> int:
    return sum(len(configuration.own(cls)) for cls in configuration.classes().values())


def render(rows: dict[str, dict[str, float]]) -> str:
    lines = (
        f"{name:<26}" + "".join(f"  {key} {value:>8,}" for key, value in row.items()) for name, row in rows.items()
    )
    return HEAD + "\n".join(line.rstrip() for line in lines) + "\n"


def ceilings(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {k: math.ceil(v / STEPS[k]) * STEPS[k] for k, v in row.items()} for name, row in rows.items()}


def read(said: str) -> dict[str, dict[str, float]]:
    found = (re.match(r"(.*?)\s{2,}(.*)", line) for line in said.splitlines() if line and not line.startswith("#"))
    return {
        row[1]: {
            key: float(value) if "." in value else int(value.replace(",", ""))
            for key, value in re.findall(r"([a-z]+)\s+([\d.,]+)", row[2])
        }
        for row in found
        if row
    }


def excess(now: dict[str, dict[str, float]], held: dict[str, dict[str, float]]) -> Iterable[str]:
    """Above the held value, or far below the held lines. A density under its aim may vary."""
    for name, row in now.items():
        for key, value in row.items():
            was = held.get(name, {}).get(key, 0)
            if value > max(was, AIMS.get(key, 0)) or (key == "lines" and value < FALLEN * was - STEPS[key]):
                yield f"{name}: {key} {value:,}, held at {was:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to tests/weight.txt")
    now = table()
    if parser.parse_args().write:
        HELD.write_text(render(ceilings(now)))
    sys.stdout.write(render(now))
    more = list(excess(now, read(HELD.read_text())))
    print("".join(f"\nnot as held: {line}" for line in more), end="\n" if more else "")
    return int(bool(more))


if __name__ == "__main__":
    sys.exit(main())
