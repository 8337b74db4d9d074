"""Outcomes kept on disk, each with a digest of the code that made it: a rerun computes only what has changed."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from bench.papers.experiment import Outcome

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / ".cache"  # git ignores it
UNION_FILES = ("union.py", "union_plan.py")


@cache
def digest(reads: tuple[str, ...]) -> str:
    """The code (or scenarios) under these files and folders of the repository, as 16 hex digits. Files of the union
    count only when they are named themselves: other rows do not run it."""
    hashed = hashlib.sha256()
    for name in reads:
        path = ROOT / name
        if not path.exists():
            raise FileNotFoundError(f"an experiment reads {name}, which is not there")
        within = (file for file in sorted(path.rglob("*.py")) if file.name not in UNION_FILES)
        for file in within if path.is_dir() else [path]:
            hashed.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def _file(experiment_id: str, case: str, seed: int, quick: bool) -> Path:
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in case)
    return KEPT / experiment_id / f"{name}-{seed}{'-quick' if quick else ''}.json"


def load(experiment_id: str, case: str, seed: int, quick: bool, reads: Sequence[str], *, stale: bool) -> Outcome | None:
    """The kept outcome, or None when there is none or (unless `stale`) the code has changed since."""
    file = _file(experiment_id, case, seed, quick)
    if not file.exists():
        return None
    kept = json.loads(file.read_text(encoding="utf-8"))
    if not stale and kept["digest"] != digest(tuple(reads)):
        return None
    outcome: Outcome = kept["outcome"]
    return outcome


def took_s(experiment_id: str, case: str, seeds: Iterable[int], quick: bool) -> float:
    """How long the case took when it was last computed, seconds, whatever the code was then; inf when nobody knows."""
    for seed in seeds:
        file = _file(experiment_id, case, seed, quick)
        if file.exists():
            return float(json.loads(file.read_text(encoding="utf-8")).get("took_s", math.inf))
    return math.inf


def store(
    experiment_id: str, case: str, seed: int, quick: bool, made_by: str, outcome: Outcome, seconds: float
) -> None:
    """Keep one outcome, with the digest of the code as it was when the run began, and the seconds it took."""
    file = _file(experiment_id, case, seed, quick)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(
        json.dumps({"digest": made_by, "took_s": round(seconds, 2), "outcome": outcome}), encoding="utf-8"
    )
    partial.replace(file)
