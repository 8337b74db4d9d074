"""Keep outcomes on disk, each with a digest of the code that made it, so that a rerun computes only outdated ones."""

import ast
import hashlib
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.papers.experiment import Outcome

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = ROOT / "build" / "papers"  # git ignores it
UNION_FILES = ("union.py", "union_plan.py")
CODE = ("libs", "scenarios", "bench/papers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One outcome with its origin. `load`: the load average before and after, the higher."""

    digest: str
    took_s: float
    outcome: Outcome
    commit: str
    date: str  # with the time of day, UTC
    machine: str
    load: float


@cache
def commit() -> str:
    """The commit of the running code, 12 digits, with "-dirty" appended if its files have been changed since."""
    told = [_git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--", *CODE)]
    return told[0] + ("-dirty" if told[1] else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@cache
def machine() -> str:
    """ "2 cores, Intel(R) Xeon(R) CPU, Python 3.11.2"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    kind = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores, {kind}, Python {platform.python_version()}"


@cache
def digest(reads: tuple[str, ...]) -> str:
    """The code (or scenarios) under these files and folders of the repository, as 16 hex digits. Files of the union
    count only when named themselves, since other rows do not run them. Raises FileNotFoundError."""
    hashed = hashlib.sha256()
    for name in reads:
        path = ROOT / name
        if not path.exists():
            raise FileNotFoundError(f"an experiment reads {name}, which is not there")
        within = (file for file in sorted(path.rglob("*.py")) if file.name not in UNION_FILES)
        for file in within if path.is_dir() else [path]:
            hashed.update(str(file.relative_to(ROOT)).encode() + b"\0" + _decides(file) + b"\0")
    return hashed.hexdigest()[:16]


@cache
def _decides(file: Path) -> bytes:
    """The parts of a file that can decide an outcome: code without comments and docstrings, and a row's own file also
    without its judges, its lists of cases and its prose (strings of several lines)."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_bytes())
    if file.is_relative_to(HERE):
        tree.body = [node for node in tree.body if not _reads_only(getattr(node, "name", ""))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
            node
        ):
            node.body = node.body[1:]
        elif file.is_relative_to(HERE) and isinstance(node, ast.Constant) and "\n" in str(node.value):
            node.value = ""
    return _shape(tree).encode()


def _shape(value: Any) -> str:
    """A syntax tree as text that is the same in every Python, unlike `ast.dump`."""
    if isinstance(value, ast.AST):
        inner = (f"{name}={_shape(one)}" for name, one in ast.iter_fields(value) if one is not None and one != [])
        return f"{type(value).__name__}({','.join(inner)})"
    return f"[{','.join(map(_shape, value))}]" if isinstance(value, list) else repr(value)


def _reads_only(function: str) -> bool:
    """Whether it is a judge, which only reads outcomes, or a list of cases, which decides none."""
    return function.startswith("judge") or function.endswith("cases")


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _file(experiment_id: str, case: str, seed: int, quick: bool) -> Path:
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in case)
    return KEPT / experiment_id / f"{name}-{seed}{'-quick' if quick else ''}.json"


def load(experiment_id: str, case: str, seed: int, quick: bool, reads: Sequence[str], *, stale: bool) -> Kept | None:
    """The kept outcome; None if there is none or (unless `stale`) the code has changed since."""
    file = _file(experiment_id, case, seed, quick)
    if not file.exists():
        return None
    kept = Kept(**json.loads(file.read_text(encoding="utf-8")))
    return kept if stale or kept.digest == digest(tuple(reads)) else None


def took_s(experiment_id: str, case: str, seeds: Iterable[int], quick: bool) -> float:
    """The seconds that the case took when it was last computed, by any version of the code; inf if unknown."""
    for seed in seeds:
        file = _file(experiment_id, case, seed, quick)
        if file.exists():
            return float(json.loads(file.read_text(encoding="utf-8")).get("took_s", math.inf))
    return math.inf


def made(made_by: str, outcome: Outcome, seconds: float, load_before: float) -> Kept:
    """A new outcome, with the digest of the code from the beginning of the run."""
    return Kept(
        digest=made_by,
        took_s=round(seconds, 2),
        outcome=outcome,
        commit=commit(),
        date=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        machine=machine(),
        load=round(max(load_before, os.getloadavg()[0]), 2),
    )


def store(experiment_id: str, case: str, seed: int, quick: bool, kept: Kept) -> None:
    file = _file(experiment_id, case, seed, quick)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(asdict(kept)), encoding="utf-8")
    partial.replace(file)
