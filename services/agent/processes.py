"""Engine processes in the kernel's view: ports, exits, memory, orphans.

An engine that exceeds its grant and overhead of host memory is ended before the machine runs out. The agent polls,
as cgroups need a delegation that few machines give, RLIMIT_AS counts mapped weights, and RLIMIT_DATA fails an
allocation inside an engine. Orphans belong to an agent that died between a start and its record."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from glowplug.controllers.agent.messages import EngineOverLimit
from glowplug.domain.address import PortRange
from glowplug.domain.errors import EngineFailed
from glowplug.domain.hardware import Devices
from glowplug.domain.model import Model
from glowplug.engines.port import EngineHandle
from glowplug.engines.process import anonymous_bytes, group_members, kill_group, started_at
from glowplug.memory.discovery import EMULATED, HOST, HardwareUnavailable, cuda_bytes

log = logging.getLogger(__name__)
LIMIT = "host_bytes_limit"  # in a handle's data; may be missing
MIB = 1 << 20
EXIT_POLL_S = 0.1  # without a pidfd
REAP_S = 2.0


class EnginePorts:
    """Give out ports of a range in turn, so that a start after a conflict gets another one."""

    def __init__(self, host: str, ports: PortRange | None) -> None:
        self._host, self._range = host, ports
        self._next = ports.first if ports else 0
        self._launching: dict[str, int] = {}

    def take(self, instance_id: str, held: Iterable[int]) -> int:
        """Return a free port, none of living engines (`held`); 0 without a range. Raises EngineFailed if none is
        free."""
        if self._range is None:
            return 0
        used = {*held, *self._launching.values()}
        first, size = self._range.first, len(self._range)
        for step in range(size):
            port = first + (self._next - first + step) % size
            if port not in used and self._is_free(port):
                self._next = port + 1
                self._launching[instance_id] = port
                return port
        raise EngineFailed(f"no free port in GLOWPLUG_ENGINE_PORTS={self._range}: {len(used)} are in use by engines")

    def settled(self, instance_id: str) -> None:
        self._launching.pop(instance_id, None)

    def _is_free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self._host, port))
                sock.listen(1)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise EngineFailed(f"engines cannot listen on {self._host}: {error.strerror}") from error
                return False
        return True


def limit_bytes(model: Model, devices: Devices, overhead_bytes: int) -> int:
    """Return grant plus overhead; on an emulated GPU no grant is real."""
    granted = 0 if devices.kind == EMULATED else max(devices.num_bytes, model.memory_bytes)
    return granted + overhead_bytes


def private_bytes(leaders: Collection[int]) -> dict[int, int]:
    """Return unshared bytes of each process group by its leader's pid. Mapped weights are shared."""
    used = dict.fromkeys(leaders, 0)
    for pid in psutil.pids() if used else ():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            leader = os.getpgid(pid)
            if leader in used:
                memory = psutil.Process(pid).memory_info()
                used[leader] += memory.rss - getattr(memory, "shared", 0)  # Linux only
    return used


def bytes_kept(handle: EngineHandle) -> int:
    """Return GPU bytes held; on host memory, anonymous bytes. -1 if unknown."""
    if handle.devices.kind == EMULATED:
        return -1
    members = group_members(handle.pid, handle.pid_started_at)
    if handle.devices.kind == HOST:
        return sum(map(anonymous_bytes, members))
    try:
        return cuda_bytes(members)
    except HardwareUnavailable as error:
        log.warning("the agent cannot see how much GPU memory %s still holds: %s", handle.instance_id, error)
        return -1


class MemoryWatch:
    def __init__(
        self,
        handles: Callable[[], Mapping[str, EngineHandle]],
        is_alive: Callable[[EngineHandle], bool],
        put: Callable[[Any], Awaitable[None]],
        read: Callable[[Collection[int]], Mapping[int, int]] = private_bytes,
    ) -> None:
        self._handles, self._is_alive, self._put, self._read = handles, is_alive, put, read
        self._reported: set[tuple[int, float]] = set()

    async def run(self, every_s: float) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("the agent could not read the memory use of its engines")
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Report each engine over its limit once; the controller has it killed."""
        limited = {i: handle for i, handle in self._handles().items() if LIMIT in handle.data}
        if not limited:
            self._reported.clear()
            return
        used = await asyncio.to_thread(self._read, {handle.pid for handle in limited.values()})
        self._reported &= {(handle.pid, handle.pid_started_at) for handle in limited.values()}
        for instance_id, handle in limited.items():
            identity, limit = (handle.pid, handle.pid_started_at), int(handle.data[LIMIT])
            over = used.get(handle.pid, 0) > limit and identity not in self._reported
            if over and self._is_alive(handle):
                self._reported.add(identity)
                num_mib = used[handle.pid] // MIB
                reason = (
                    f"the engine took {num_mib} MiB of host memory, more than its limit of {limit // MIB} MiB "
                    "(its grant and GLOWPLUG_ENGINE_OVERHEAD_BYTES); it was ended"
                )
                log.error("the agent ends the engine of %s: %s", instance_id, reason)
                await self._put(EngineOverLimit(instance_id, reason))


async def until_exit(handle: EngineHandle, is_alive: Callable[[EngineHandle], bool]) -> None:
    """Wait until the process, child or not, is gone: by pidfd or polling."""
    try:
        fd = os.pidfd_open(handle.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while is_alive(handle):
            await asyncio.sleep(EXIT_POLL_S)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        if is_alive(handle):  # asked after pidfd_open: the pid cannot have been reused since
            loop.add_reader(fd, ended.set)
            await ended.wait()
            loop.remove_reader(fd)
            is_alive(handle)  # reaps our child
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def kill_orphans(run_root: Path, known_pids: Collection[int]) -> list[int]:
    """SIGKILL process groups below `run_root` without a known leader. Return the leaders' pids."""
    known = set(known_pids)
    leaders = {leader for leader in _leaders(run_root) if leader not in known}
    for leader in sorted(leaders):
        log.warning("no record has the engine that runs in %s: the agent kills pid %s", run_root, leader)
        kill_group(leader, started_at(leader) or 0.0)
    return sorted(leaders)


def _leaders(run_root: Path) -> Iterator[int]:
    root = f"{run_root}{os.sep}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            places = [f"{process.cwd()}{os.sep}", *process.cmdline()]
            if any(place.startswith(root) for place in places):
                yield os.getpgid(process.pid)


async def reap_strays() -> None:
    """Reap adopted children (agent as process 1), and engines whose first thread ended before their last one, which
    their driver could not wait for. A zombie is reaped at the second look, so that a waiter comes first."""
    seen: set[int] = set()
    while True:
        await asyncio.sleep(REAP_S)
        zombies = zombie_children()
        for pid in zombies & seen:
            _reap(pid)
        seen = zombies


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def zombie_children() -> set[int]:
    found = set()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
    return found
