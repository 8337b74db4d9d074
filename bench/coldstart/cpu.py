"""CPU seconds of a played fleet's processes, by what they do: beside load they say more than seconds that passed."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Of each process so far: (its namespace, what it is) by process id, and its seconds."""

    of: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    seconds: Mapping[int, float] = field(default_factory=dict)

    def since(self, earlier: "CpuSeconds") -> dict[str, float]:
        """Spent since then, of processes that live: "prefetchers", "agents" and "the rest" of the fleet, "registry"
        (this process), and the engines by node, "engine node-1": processes that were begun since then."""
        spent: Counter[str] = Counter()
        for pid, (pod, what) in self.of.items():
            name = what if pid in earlier.seconds else f"engine {pod}"
            spent[name] += self.seconds[pid] - earlier.seconds.get(pid, 0.0)
        return dict(spent)


def cpu_now(namespaces: Mapping[str, str]) -> CpuSeconds:
    """Of the processes in these network namespaces (pod -> namespace), and of this one."""
    pods = {Path("/run/netns", name).stat().st_ino: pod for pod, name in namespaces.items()}
    of, seconds = {}, {}
    own = psutil.Process().pid
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            pod = pods.get(Path(f"/proc/{process.pid}/ns/net").stat().st_ino, "")
            if not pod and process.pid != own:
                continue
            times = process.cpu_times()
            of[process.pid] = pod, "registry" if process.pid == own else _what(process.cmdline())
            seconds[process.pid] = times.user + times.system
    return CpuSeconds(of, seconds)


def _what(argv: list[str]) -> str:
    known = {"services.prefetcher": "prefetchers", "services.agent": "agents"}
    return next((name for word, name in known.items() if word in argv), "the rest")
