"""The form of golden scripts, as in raft's: blocks of commands, `----`, and all that follows, with an empty line
between. The first block declares. `#` begins a comment."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

SCRIPTS = Path(__file__).parent / "scripts"


class Run(Protocol):
    def run(self, command: str) -> list[str]:
        """Give one command; return the lines of its trace."""
        ...


def played(script: str, begin: Callable[[Sequence[str]], Run]) -> str:
    """Return the script with current traces; `begin` takes the declarations."""
    first, *blocks = _blocks(script)
    run, out = begin(_commands(first)), ["\n".join(first)]
    for block in blocks:
        commands = _commands(block)
        trace = [line for command in commands for line in run.run(command)] or ["nothing"]
        out.append("\n".join([*block, *(["----", *trace] if commands else [])]))
    return "\n\n".join(out) + "\n"


def rewrite(folder: Path, begin: Callable[[Sequence[str]], Run]) -> Iterator[str]:
    """Write the current traces into the folder's scripts; yield the names of those that change."""
    for path in sorted(folder.glob("*.txt")):
        before = path.read_text(encoding="utf-8")
        if (after := played(before, begin)) != before:
            path.write_text(after, encoding="utf-8")
            yield path.relative_to(SCRIPTS).as_posix()


def _commands(block: Sequence[str]) -> list[str]:
    return [line for line in block if line and not line.startswith("#")]


def _blocks(script: str) -> Iterator[list[str]]:
    for block in script.strip().split("\n\n"):
        yield block.split("\n----")[0].split("\n")
