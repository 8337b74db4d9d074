"""The fenced blocks of a docs page and their words, explained in docs/testing.md."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS = frozenset({"docker", "kubernetes", "gpu", "vllm", "root", "internet", "minutes", "incident", "person", "nginx"})
SHELLS = frozenset({"sh", "bash", "shell", "console", "shell-session", "zsh", "shellsession"})
SETTINGS = {"sh": {"needs", "background", "exits"}, "text": set[str]()}
OTHER = {"file"}  # words of any other language
_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^`\n]*)$", re.MULTILINE)
_FENCE = re.compile(rf"{_OPENING.pattern}\n(?P<body>.*?)^ *(?P=fence)[`~]* *$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"^`(?P<path>[\w.-]+(?:/[\w.-]+)*)`[^\n]*\n\s*\Z", re.MULTILINE)
_FLEET = re.compile(r"^<!-- *fleet:(.*?)-->", re.MULTILINE)


class BadFence(ValueError):
    """A fence has words that docs/testing.md does not know."""


@dataclass(frozen=True)
class Block:
    """One fence: `words` follow the language; `line` is 1-based."""

    page: str
    line: int
    language: str
    words: dict[str, str]
    text: str
    follows: bool = False  # only empty lines separate it from the last
    path: str = ""  # of a worked example's file (example.py)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(word for word in self.words.get("needs", "").split(",") if word)

    @property
    def exit_code(self) -> int:
        return int(self.words.get("exits", "0"))

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def check(self) -> None:
        if unknown := set(self.words) - SETTINGS.get(self.language, OTHER):
            raise BadFence(f"{self.where}: a {self.language} fence knows no {sorted(unknown)}")
        if "needs" in self.words and (not self.needs or self.needs - NEEDS):
            raise BadFence(f"{self.where}: needs={self.words['needs']}: one or more of {', '.join(sorted(NEEDS))}")
        if not self.words.get("exits", "0").isdecimal():
            raise BadFence(f"{self.where}: exits={self.words['exits']} is not a number")
        if self.language in SHELLS - {"sh"}:
            raise BadFence(f"{self.where}: commands stand in `sh` fences, not in {self.language}")


@dataclass(frozen=True)
class Page:
    """`fleet` holds the request in its comment; None: no fleet."""

    path: str
    blocks: tuple[Block, ...] = ()
    fleet: dict[str, str] | None = None

    @property
    def commands(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.language == "sh")

    @property
    def runs(self) -> bool:
        return any(not block.needs for block in self.commands)


def words_of(info: str) -> tuple[str, dict[str, str]]:
    language, *rest = info.split() or [""]
    return language, {word.partition("=")[0]: word.partition("=")[2] for word in rest}


def parse(path: str, text: str) -> Page:
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
    return parse(path, (ROOT / path).read_text(encoding="utf-8"))


def expected(page: Page, block: Block) -> str:
    index = page.blocks.index(block) + 1
    after = page.blocks[index] if index < len(page.blocks) else None
    return after.text if after is not None and after.language == "text" and after.follows else ""


def shows(wanted: str, output: str) -> str:
    """ "" when the lines of `wanted` appear in order in `output`, else the first missing one.

    `...` matches anything inside a line, or on its own any lines (others may come between too).
    """
    rows = iter(output.splitlines())
    for line in wanted.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = ""
        for word in line.split():
            # Blanks match any number; beside a lone `...` also none.
            gap = r"\s*" if word == "..." or pattern.endswith((".*", r"\s*")) or not pattern else r"\s+"
            pattern += gap + ".*".join(re.escape(part) for part in word.split("..."))
        if not any(re.fullmatch(rf"\s*{pattern}\s*", row) for row in rows):
            return line
    return ""
