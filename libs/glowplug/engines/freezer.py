"""Stop processes from running until they are thawed: by a cgroup of their own, else SIGSTOP.

A cgroup (version 2) freezes all at once, invisibly; it needs write access below the agent's own, as root or by
delegation. A frozen process can be killed.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

_WAIT_S = 5.0
_POLL_S = 0.002


def own_cgroup(mounts: str, cgroups: str) -> Path | None:
    """Return this process's version 2 cgroup, from its `mounts` and `cgroup` files."""
    points = [fields[1] for line in mounts.splitlines() if len(fields := line.split()) > 2 and fields[2] == "cgroup2"]
    paths = [line.removeprefix("0::") for line in cgroups.splitlines() if line.startswith("0::")]
    return Path(points[0] + paths[0].rstrip("/")) if points and paths else None


def _cgroup_of(pid: int | str) -> Path | None:
    with contextlib.suppress(OSError):
        return own_cgroup(Path("/proc/self/mounts").read_text(), Path(f"/proc/{pid}/cgroup").read_text())
    return None


class Freezer:
    """Freezes one engine's processes, by name, so that another agent can thaw them."""

    def __init__(self, name: str, parent: Path | None = None, pids: Sequence[int] = ()) -> None:
        """`parent`: by default this process's own cgroup. `pids` may be frozen already, even by another agent: then
        their cgroup is used."""
        folder = f"glowplug-{name}"
        found = [cgroup for pid in pids if (cgroup := _cgroup_of(pid)) is not None and cgroup.name == folder]
        parent = parent or _cgroup_of("self")
        self._cgroup = found[0] if found else parent / folder if parent else None

    def freeze(self, pids: Sequence[int]) -> str:
        """Return "cgroup" or "signals", once none of them runs."""
        if self._cgroup is not None:
            try:
                self._cgroup.mkdir(exist_ok=True)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        _write(self._cgroup / "cgroup.procs", str(pid))
                _write(self._cgroup / "cgroup.freeze", "1")
                self._wait_frozen(self._cgroup)
                return "cgroup"
            except OSError:
                self.thaw(pids)  # not writable, or half done
        _signal(pids, signal.SIGSTOP)
        return "signals"

    def thaw(self, pids: Sequence[int]) -> None:
        """Undo either method, idempotently. Removes the cgroup."""
        if self._cgroup is not None and self._cgroup.is_dir():
            with contextlib.suppress(OSError):
                _write(self._cgroup / "cgroup.freeze", "0")
            for pid in pids:
                with contextlib.suppress(OSError):
                    _write(self._cgroup.parent / "cgroup.procs", str(pid))
            self.forget()
        _signal(pids, signal.SIGCONT)

    def forget(self) -> None:
        """Remove the cgroup after its processes are gone."""
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()

    @staticmethod
    def _wait_frozen(cgroup: Path) -> None:
        deadline = time.monotonic() + _WAIT_S
        while "frozen 1" not in (cgroup / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{cgroup} is not frozen after {_WAIT_S:g} s")
            time.sleep(_POLL_S)


def _write(path: Path, text: str) -> None:
    with path.open("r+") as file:
        file.write(text)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
