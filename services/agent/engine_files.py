"""What engines leave on disk: a run directory while they live, and their log. A log has a name for each instance that
its engine has been."""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from glowplug.engines.port import EngineHandle

KEPT_LOGS: Final = 20  # of engines that have ended, the newest; their instances are forgotten in minutes


def keep_newest_logs(folder: Path, living: Iterable[EngineHandle]) -> None:
    in_use = {_inode(Path(handle.log_path)) for handle in living}
    ended: dict[int, list[Path]] = {}
    for path in folder.glob("*.log"):
        if (inode := _inode(path)) not in in_use:
            ended.setdefault(inode, []).append(path)
    newest_first = sorted(ended.values(), key=lambda paths: -_changed_at(paths[0]))
    for path in (path for paths in newest_first[KEPT_LOGS:] for path in paths):
        path.unlink(missing_ok=True)


def remove_run_dirs(root: Path, living: Iterable[EngineHandle]) -> None:
    """Remove those of engines that ended while no agent ran."""
    in_use = {Path(handle.run_dir) for handle in living}
    for folder in set(root.iterdir()) - in_use if root.is_dir() else ():
        shutil.rmtree(folder, ignore_errors=True)


def _inode(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0


def _changed_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
