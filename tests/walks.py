"""The walks of ARCHITECTURE.md: the files that one of them names, and those that a run has entered."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]


def named(walk: str) -> list[str]:
    """The files of this section, as it numbers them."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(f"## {walk}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE)


@contextmanager
def entered(*below: str) -> Iterator[dict[str, None]]:
    """The files in which a function is called meanwhile, in the order of the first call, as paths below the first of
    these folders that they are in; others do not count."""
    found: dict[str, None] = {}
    folders = [ROOT / folder for folder in below]

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (folder := next((f for f in folders if path.is_relative_to(f)), None)):
            found[str(path.relative_to(folder))] = None

    sys.setprofile(enter)
    try:
        yield found
    finally:
        sys.setprofile(None)
