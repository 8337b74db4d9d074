"""The walks of ARCHITECTURE.md: the files that a walk names, and those whose functions a run calls."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
_LINK, _SERVICES = "/libs/glowplug/services/", "/services/"


def named(walk: str) -> list[str]:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(f"## {walk}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE)


@contextmanager
def entered(*below: str) -> Iterator[dict[str, None]]:
    """Files in order of first call during the block, as paths below the first matching folder; others do not count."""
    found: dict[str, None] = {}
    folders = [ROOT / folder for folder in below]

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename.replace(_LINK, _SERVICES))
        if event == "call" and (folder := next((f for f in folders if path.is_relative_to(f)), None)):
            found[str(path.relative_to(folder))] = None

    sys.setprofile(enter)
    try:
        yield found
    finally:
        sys.setprofile(None)
