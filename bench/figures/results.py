"""Results of benchmarks as data, bench/figures/results/NAME.json, and whether the measured code has changed since."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of one result file. `taken_over`: no run wrote it. The page printed these figures before there were
    results; `commit` is the commit that the page named, or that added the figure to the page."""

    name: str
    commit: str  # with "-dirty" appended if the sources had been changed
    date: str
    machine: str
    load: str  # before and after the run
    command: str
    figures: Mapping[str, str]  # as printed
    taken_over: bool = False


def memory_gib() -> str:
    """The memory of this machine by the kernel's count; "unknown" if it does not tell."""
    path = Path("/proc/meminfo")
    first = path.read_text(encoding="utf-8").split("\n")[0].split() if path.exists() else []
    return f"{int(first[1]) / 2**20:.0f} GiB" if len(first) > 1 else "unknown"


def save(result: Result, folder: Path = FOLDER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> Result:
    """Read one result file. Raises ValueError if a field is missing or unknown."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if odd := set(data) ^ {one.name for one in fields(Result)}:
        raise ValueError(f"{path.name} has missing or unknown fields: {', '.join(sorted(odd))}")
    return Result(**data)


def saved(folder: Path = FOLDER) -> dict[str, Result]:
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """The output of a git command, or None if it fails: without git, without a history, or for an unknown commit."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_changed(commit: str, sources: Sequence[str], root: Path = ROOT) -> bool | None:
    """Return whether these files differ from a commit, uncommitted changes included. None if git does not know the
    commit, as in a shallow clone or an unpacked archive."""
    if commit.endswith("-dirty"):
        return True
    if git("cat-file", "-e", f"{commit}^{{commit}}", root=root) is None:
        return None
    changed = git("diff", "--name-only", commit, "--", *sources, root=root)
    return None if changed is None else bool(changed)
