"""Compile the test files of a lane once, before several processes would each do so: python -m tests.compiled LANE

pytest rewrites the asserts of every file that it collects, which takes most of the time of a collection. In a fresh
checkout each process of a lane would do this to all files at the same time as the others.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests import lanes

ROOT = Path(__file__).parents[1]


def stale(lane: str) -> list[Path]:
    """The test files of a lane without a compiled form that is as new as they are, the largest first."""
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name in lanes.BOTH or lanes.lane(name) == lane:
            compiled = [one.stat().st_mtime for one in (path.parent / "__pycache__").glob(f"{path.stem}.*-pytest-*")]
            if max(compiled, default=0.0) < path.stat().st_mtime:
                found.append(path)
    return sorted(found, key=lambda path: -path.stat().st_size)


def main(lane: str) -> None:
    """Collect the stale files with one process for each core. A file's errors are left for its lane to report."""
    num, files = os.cpu_count() or 1, stale(lane)
    shares = [share for share in (files[number::num] for number in range(num)) if share]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "--lane", lane]
    quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for process in [subprocess.Popen([*command, *map(str, share)], **quiet) for share in shares]:  # type: ignore[call-overload]
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
