"""One process per engine: its own session, a log file, an identity that outlives the agent, and a sure end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

POLL_S = 0.01
_GROUP_POLL_S = 0.05  # each poll reads the whole process table
HIGHEST_PID = 2**31 - 1  # 0, -1 and below mean groups, or every process, to the kernel
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


_OURS = ("GLOWPLUG_", "AWS_", "GOOGLE_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def engine_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without our settings and credentials, plus `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return {**kept, **extra}


def spawn(argv: Sequence[str], *, cwd: Path, log_path: Path, env: Mapping[str, str]) -> int:
    """Start `argv` as leader of a new session, outputs appended to `log_path`; return its pid."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            list(argv), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return process.pid


def started_at(pid: int) -> float | None:
    """Return seconds since boot on Linux (immune to clock changes), else epoch. None when there is no such process
    or it is a zombie."""
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        except psutil.NoSuchProcess:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZX" else int(fields[19]) / _CLOCK_TICKS


def is_alive(pid: int, pid_started_at: float) -> bool:
    """Compare pid and start time. Reaps a dead child."""
    if not 0 < pid <= HIGHEST_PID:
        return False
    started = started_at(pid)
    if started is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return False
    return abs(started - pid_started_at) < 0.02


def group_members(pid: int, pid_started_at: float) -> list[int]:
    """Return the group's living processes; empty when the pid was reused."""
    if not 0 < pid <= HIGHEST_PID:
        return []
    leader = started_at(pid)
    if leader is not None and abs(leader - pid_started_at) >= 0.02:
        return []
    members = []
    for candidate in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(candidate) == pid:
                started = started_at(candidate)
                if started is not None and started >= pid_started_at - 0.02:
                    members.append(candidate)
    return members


def anonymous_bytes(pid: int) -> int:
    """Count private memory without a file, pages shared with forks in part; not mapped weights, which the node's
    cache counts. 0 when the process is gone or not ours."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0


def kill_group(pid: int, pid_started_at: float) -> None:
    for member in group_members(pid, pid_started_at):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


async def stop_group(pid: int, pid_started_at: float, grace_s: float, *, waits_for_group: bool = False) -> None:
    """SIGTERM to the leader, SIGKILL to the rest after `grace_s`, which waits for the leader, or for every member."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    if grace_s > 0 and is_alive(pid, pid_started_at):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        lives, poll_s = (group_members, _GROUP_POLL_S) if waits_for_group else (is_alive, POLL_S)
        while loop.time() < deadline and lives(pid, pid_started_at):
            await asyncio.sleep(poll_s)
    kill_group(pid, pid_started_at)
    killed_by = loop.time() + 10.0  # a large process takes time to free
    while (is_alive(pid, pid_started_at) or group_members(pid, pid_started_at)) and loop.time() < killed_by:
        await asyncio.sleep(POLL_S)


def log_tail(path: Path, num_lines: int = 12, num_bytes: int = 16_384) -> str:
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - num_bytes))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(deque((line for line in lines if line.strip()), maxlen=num_lines))
