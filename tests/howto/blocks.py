"""The fenced blocks of a page of the docs, and the words a fence may carry. docs/testing.md tells what they mean."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS = frozenset({"docker", "kubernetes", "gpu", "vllm", "root", "internet", "minutes", "incident", "person", "nginx"})
SHELLS = frozenset({"sh", "bash", "shell", "console", "shell-session", "zsh", "shellsession"})
SETTINGS = {"sh": {"needs", "background", "exits"}, "text": set[str]()}
OTHER = {"file"}  # words of every other language
_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^`\n]*)$", re.MULTILINE)
_FENCE = re.compile(rf"{_OPENING.pattern}\n(?P<body>.*?)^ *(?P=fence)[`~]* *$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"^`(?P<path>[\w.-]+(?:/[\w.-]+)*)`[^\n]*\n\s*\Z", re.MULTILINE)  # the last line before a fence
_FLEET = re.compile(r"^<!-- *fleet:(.*?)-->", re.MULTILINE)


class BadFence(ValueError):
    """A fence says something docs/testing.md does not know."""


@dataclass(frozen=True)
class Block:
    """One fence: `language`, the words behind it, the text in it, and the 1-based line it starts at."""

    page: str
    line: int
    language: str
    words: dict[str, str]
    text: str
    follows: bool = False  # nothing but empty lines stands between it and the fence before
    path: str = ""  # of the file that it adds or changes, in a worked example (example.py)

    @property
    def needs(self) -> frozenset[str]:
        """What must be there to run it."""
        return frozenset(word for word in self.words.get("needs", "").split(",") if word)

    @property
    def exit_code(self) -> int:
        return int(self.words.get("exits", "0"))

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def check(self) -> None:
        """Raises BadFence."""
        if unknown := set(self.words) - SETTINGS.get(self.language, OTHER):
            raise BadFence(f"{self.where}: a {self.language} fence knows no {sorted(unknown)}")
        if "needs" in self.words and (not self.needs or self.needs - NEEDS):
            raise BadFence(f"{self.where}: needs={self.words['needs']}: one or more of {', '.join(sorted(NEEDS))}")
        if not self.words.get("exits", "0").isdecimal():
            raise BadFence(f"{self.where}: exits={self.words['exits']} is no number")
        if self.language in SHELLS - {"sh"}:
            raise BadFence(f"{self.where}: commands stand in `sh` fences, not in {self.language}")


@dataclass(frozen=True)
class Page:
    """A page with its blocks in order. `fleet` holds what its comment asks for; None: it starts without a fleet."""

    path: str
    blocks: tuple[Block, ...] = ()
    fleet: dict[str, str] | None = None

    @property
    def commands(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.language == "sh")

    @property
    def runs(self) -> bool:
        """Whether any of its commands is run."""
        return any(not block.needs for block in self.commands)


def words_of(info: str) -> tuple[str, dict[str, str]]:
    """'sh needs=gpu background' -> ('sh', {'needs': 'gpu', 'background': ''})."""
    language, *rest = info.split() or [""]
    return language, {word.partition("=")[0]: word.partition("=")[2] for word in rest}


def parse(path: str, text: str) -> Page:
    """Raises BadFence."""
    blocks: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        language, words = words_of(match["info"])
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        follows = bool(blocks) and not text[end : match.start()].strip()
        named = None if language in SHELLS | {"text"} else _PATH.search(text[end : match.start()])
        file = named["path"] if named else ""
        blocks.append(Block(path, _line_at(match.start(), text), language, words, body, follows, file))
        end = match.end()
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    if unclosed := _OPENING.search(prose):
        raise BadFence(f"{path}:{_line_at(unclosed.start(), prose)}: the fence has no end")
    for block in blocks:
        block.check()
    asked = _FLEET.search(text)
    return Page(path, tuple(blocks), words_of("fleet " + asked[1])[1] if asked else None)


def _line_at(position: int, text: str) -> int:
    return text.count("\n", 0, position) + 1


def read(path: str) -> Page:
    """One page of the checkout, by its path from the root."""
    return parse(path, (ROOT / path).read_text(encoding="utf-8"))


def expected(page: Page, block: Block) -> str:
    """The `text` fence that stands directly behind `block`, "" without one."""
    index = page.blocks.index(block) + 1
    after = page.blocks[index] if index < len(page.blocks) else None
    return after.text if after is not None and after.language == "text" and after.follows else ""


def shows(wanted: str, output: str) -> str:
    """ "" when the lines of `wanted` come in this order in `output`, else the first line that does not.

    `...` stands for anything inside a line; a line of its own for any lines (which may come between others too).
    """
    rows = iter(output.splitlines())
    for line in wanted.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = ""
        for word in line.split():
            # Blanks between words are as many as there are; beside a lone `...` there may be none.
            gap = r"\s*" if word == "..." or pattern.endswith((".*", r"\s*")) or not pattern else r"\s+"
            pattern += gap + ".*".join(re.escape(part) for part in word.split("..."))
        if not any(re.fullmatch(rf"\s*{pattern}\s*", row) for row in rows):
            return line
    return ""
