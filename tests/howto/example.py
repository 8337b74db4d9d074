"""The worked example of a docs/extend page, applied to a copy of the tree, and its commands.

`python -m tests.howto.example` names every block that no longer fits; `python -m tests.howto.example
docs/extend/policy.md FOLDER` writes the tree with the example.
"""

import difflib
import filecmp
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.house.tree import files
from tests.howto.blocks import ROOT, Block, Page, expected, read
from tests.howto.sandbox import PageFailed, sandbox

FOLDER = "docs/extend/"
LINK = "libs/glowplug/services"
COPIED = ("libs/", "services/", "deploy/", "proto/", "docs/", "scenarios/", "tests/")  # and top-level files
MOST_FILES = 4  # by hand; files written by a command say so
WRITTEN = re.compile(r"\b(?:Written|Made) by `?python ")
GOLDEN = "tests/golden/scripts/"
BETWEEN = "@@"  # a line of its own between two places of a file
NEAR_LINES = 2


@dataclass(frozen=True)
class Hunk:
    old: tuple[str, ...]
    new: tuple[str, ...]


def is_example(page: Page) -> bool:
    return page.path.startswith(FOLDER) and any(block.path for block in page.blocks)


def made_by(page: Page) -> frozenset[str]:
    return frozenset(block.path for block in page.blocks if is_new(block))


def is_new(block: Block) -> bool:
    return bool(block.path) and block.language != "diff"


def hunks(block: Block) -> list[Hunk]:
    found: list[Hunk] = []
    old: list[str] = []
    new: list[str] = []
    for row in [*block.text.splitlines(), BETWEEN]:
        if row == BETWEEN:
            found.append(Hunk(tuple(old), tuple(new)))
            old, new = [], []
        elif row[:1] not in ("", " ", "+", "-"):
            raise PageFailed(f"{block.where}: a line of a diff begins with a blank, + or -, not as {row!r}")
        else:
            old += [row[1:]] if row[:1] != "+" else []
            new += [row[1:]] if row[:1] != "-" else []
    return found


def applied(page: Page, content: Callable[[str], str | None]) -> dict[str, str]:
    """Path -> new text. `content` gives the present text, None if missing. Raises PageFailed for a block that does not
    fit."""
    after: dict[str, str] = {}
    for block in page.blocks:
        if not block.path:
            continue
        now = after.get(block.path, content(block.path))
        if is_new(block):
            if now is not None:
                raise PageFailed(f"{block.where}: {block.path} exists; a file that exists is changed by a diff")
            after[block.path] = block.text
        elif now is None:
            raise PageFailed(f"{block.where}: there is no {block.path} to change")
        else:
            after[block.path] = _changed(block, now)
    return after


def _changed(block: Block, text: str) -> str:
    rows = text.splitlines()
    for hunk in hunks(block):
        size = len(hunk.old)
        at = [i for i in range(len(rows) - size + 1) if tuple(rows[i : i + size]) == hunk.old]
        if len(at) != 1 or not size:
            shown = "\n".join(f"    {row}" for row in hunk.old) or "    (no line that is there already)"
            where = f"{block.where}: {block.path} holds these lines {len(at)} times, not once:\n{shown}"
            raise PageFailed(f"{where}\n{_nearest(hunk, rows)}")
        rows[at[0] : at[0] + size] = hunk.new
    return "\n".join(rows) + "\n"


def _nearest(hunk: Hunk, rows: list[str]) -> str:
    gone = [row for row in hunk.old if row not in rows]
    near = {row: difflib.get_close_matches(row, rows, NEAR_LINES, 0.5) for row in gone}
    return "\n".join(f"  no such line: {row.strip()}\n  nearest: {found}" for row, found in near.items())


def copied(work: Path) -> None:
    """Copy the tree with its compiled parts, as a repository: tests ask git for its files."""
    for name in files():
        if "/" in name and not name.startswith(COPIED):
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, work / name)
        if name.endswith(".py") and (compiled := Path(cache_from_source(str(ROOT / name)))).exists():
            there = Path(cache_from_source(str(work / name)))
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(compiled, there)
    (work / LINK).symlink_to((ROOT / LINK).readlink())
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)


def touched(work: Path) -> set[str]:
    asked = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    there = set(subprocess.run(asked, cwd=work, capture_output=True, check=True, text=True).stdout.split("\0")) - {
        "",
        LINK,
    }
    gone = {name for name in files() if "/" not in name or name.startswith(COPIED)} - there
    return gone | {n for n in there if not (ROOT / n).exists() or not filecmp.cmp(ROOT / n, work / n)}


def write(page: Page, work: Path) -> None:
    for name, text in applied(page, content_in(work)).items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)


def content_in(folder: Path) -> Callable[[str], str | None]:
    return lambda name: (folder / name).read_text() if (folder / name).exists() else None


def run_example(page: Page, here: frozenset[str] = frozenset()) -> int:
    """Return the number of blocks run. Raises PageFailed also if more than MOST_FILES files change by hand, or ruff
    complains."""
    num_run, by_hand = 0, {block.path for block in page.blocks if block.path}
    if len(by_hand) > MOST_FILES:
        raise PageFailed(f"{page.path} changes {len(by_hand)} files, and may change {MOST_FILES}: {sorted(by_hand)}")
    with sandbox(copied, imports=True) as box:
        write(page, box.work)
        for block in page.blocks:
            if "file" in block.words:
                box.write(block)
            if block.language == "sh" and block.needs <= here:
                box.run(block, expected(page, block))
                num_run += 1
        changed = touched(box.work)
        if left := sorted(name for name in changed - by_hand if not _is_written(name, box.work)):
            raise PageFailed(f"{page.path}: its commands change what no block names and no command writes: {left}")
        python = sorted(name for name in changed if name.endswith(".py"))
        for words in (["check"], ["format", "--check"]) if python else ():
            ruff = [sys.executable, "-m", "ruff", *words, *python]
            done = subprocess.run(ruff, cwd=box.work, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PageFailed(f"{page.path}: ruff {words[0]} says\n{done.stdout}{done.stderr}")
    return num_run


def _is_written(name: str, work: Path) -> bool:
    if not (work / name).exists():
        return False
    return name.startswith(GOLDEN) or bool(WRITTEN.search("\n".join((work / name).read_text().splitlines()[:5])))


def main(arguments: list[str]) -> int:
    if arguments:
        work = Path(arguments[1])
        work.mkdir()
        copied(work)
        write(read(arguments[0]), work)
        return 0
    num_wrong = 0
    for page in (read(name) for name in files() if name.startswith(FOLDER) and name.endswith(".md")):
        try:
            applied(page, content_in(ROOT))
        except PageFailed as error:
            num_wrong += 1
            print(error)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
