"""The budget: the counts of each path when they were last written, in budget.json beside this file, with the commit."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.budget.count import Count

FILE: Final = Path(__file__).with_name("budget.json")
SLACK: Final = 1.05
NUM_NAMED: Final = 5  # files named for an excess


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one path."""

    commit: str
    num_calls: int
    num_bytes: int
    calls: Counter[str]

    def excess(self, count: Count) -> str:
        """Describe the excess and the files that cause it; "" within the budget."""
        over = []
        if count.num_calls > self.num_calls * SLACK:
            over.append(f"{count.num_calls} calls of Python functions; {self.num_calls} at {self.commit}")
        if count.num_bytes > self.num_bytes * SLACK:
            over.append(f"{count.num_bytes} bytes at once; {self.num_bytes} at {self.commit}")
        if not over:
            return ""
        more = (count.calls - self.calls).most_common(NUM_NAMED)
        return "; ".join(over) + ". More calls in " + (", ".join(f"{name} (+{num})" for name, num in more) or "none")


def read(path: Path = FILE) -> dict[str, Budget]:
    rows = json.loads(path.read_text())
    return {
        name: Budget(row["commit"], row["calls"], row["bytes"], Counter(row["files"])) for name, row in rows.items()
    }


def write(counts: dict[str, Count], commit: str, path: Path = FILE) -> None:
    """Make these counts the budget; paths that were not counted keep theirs."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    for name, count in counts.items():
        files = dict(sorted(count.calls.items()))
        rows[name] = {"commit": commit, "calls": count.num_calls, "bytes": count.num_bytes, "files": files}
    path.write_text(json.dumps(rows, indent=1) + "\n")
