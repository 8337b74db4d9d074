"""The processes of engines, as the kernel knows them: their ports, their end, their memory, and those without a record.

An engine that takes more host memory than its grant and its overhead is ended before the machine has none left. The
agent looks; the kernel enforces nothing: cgroups need a delegation that few machines give, RLIMIT_AS counts mapped
weights, and RLIMIT_DATA makes an allocation fail somewhere inside an engine, without a reason. Processes that no record
names are those of an agent that died between starting one and writing it down.
"""

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
from glowplug.engines.port import EngineHandle, LaunchRequest
from glowplug.engines.process import anonymous_bytes, group_members, kill_group, started_at
from glowplug.memory.discovery import EMULATED, HOST, HardwareUnavailable, cuda_bytes

log = logging.getLogger(__name__)
LIMIT = "host_bytes_limit"  # in a handle's data; absent where an agent without this watch has started the engine
MIB = 1 << 20
EXIT_POLL_S = 0.1  # where the kernel cannot tell of a process's end
REAP_S = 2.0  # between two looks for ended children that nobody waits for


class EnginePorts:
    """Gives out free ports one after another, of a range that is open to the routers, where an agent has one: after a
    start that failed over a taken port the next one gets another.

    A range belongs to one agent of an address: an engine binds its port seconds after it was handed out.
    """

    def __init__(self, host: str, ports: PortRange | None) -> None:
        self._host, self._range = host, ports
        self._next = ports.first if ports else 0
        self._launching: dict[str, int] = {}

    def take(self, instance_id: str, held: Iterable[int]) -> int:
        """A port nobody listens on, none of `held` (those of engines that live); 0 without a range.

        Raises EngineFailed when there is none.
        """
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
        """The launch of that instance is over: its handle keeps the port, or nobody does."""
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


def limit_bytes(request: LaunchRequest, overhead_bytes: int) -> int:
    """Host memory that an engine may take: its grant, of which nothing is real on an emulated GPU, and its overhead."""
    granted = 0 if request.gpu_kind == EMULATED else max(request.num_bytes, request.model.memory_bytes)
    return granted + overhead_bytes


def private_bytes(leaders: Collection[int]) -> dict[int, int]:
    """Memory of each process group that nobody shares (weights that are mapped from host memory are), in bytes by the
    pid of its leader. One pass over the machine's processes."""
    used = dict.fromkeys(leaders, 0)
    for pid in psutil.pids() if used else ():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            leader = os.getpgid(pid)
            if leader in used:
                memory = psutil.Process(pid).memory_info()
                used[leader] += memory.rss - getattr(memory, "shared", 0)  # not known outside Linux
    return used


def bytes_kept(handle: EngineHandle, gpu_kind: str) -> int:
    """GPU memory that the processes of an engine hold now, as the device says; on host memory, what no file stands
    behind. -1 where nothing can say so."""
    if gpu_kind == EMULATED:
        return -1
    members = group_members(handle.pid, handle.pid_started_at)
    if gpu_kind == HOST:
        return sum(map(anonymous_bytes, members))
    try:
        return cuda_bytes(members)
    except HardwareUnavailable as error:
        log.warning("the agent cannot see how much GPU memory %s still holds: %s", handle.instance_id, error)
        return -1


class MemoryWatch:
    """Looks at every engine whose handle has a limit; `read` says what each uses."""

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
        """For ever."""
        while True:
            try:
                await self.look()
            except Exception:  # without it an engine could take the machine's memory
                log.exception("the agent could not read the memory use of its engines")
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Report each engine over its limit, once: the controller has it killed."""
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
                log.error("%s: %s", instance_id, reason)
                await self._put(EngineOverLimit(instance_id, reason))


async def until_exit(handle: EngineHandle, is_alive: Callable[[EngineHandle], bool]) -> None:
    """Return when that process is gone, whether or not it is a child of ours: by pidfd where the kernel has it, else by
    asking every EXIT_POLL_S."""
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
        if is_alive(handle):  # asked after the pidfd is open: the pid cannot have gone to another process since
            loop.add_reader(fd, ended.set)
            await ended.wait()
            loop.remove_reader(fd)
            is_alive(handle)  # reaps it when it was our child
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def kill_orphans(run_root: Path, known_pids: Collection[int]) -> list[int]:
    """SIGKILL every process group that works under `run_root` and has no known leader. Returns the leaders' pids."""
    known = set(known_pids)
    leaders = {leader for leader in _leaders(run_root) if leader not in known}
    for leader in sorted(leaders):
        log.warning("no record names the engine that runs under %s: the agent kills pid %s", run_root, leader)
        kill_group(leader, started_at(leader) or 0.0)
    return sorted(leaders)


def _leaders(run_root: Path) -> Iterator[int]:
    """Group leaders of our own user's processes whose directory or arguments lie under `run_root`."""
    root = f"{run_root}{os.sep}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            places = [f"{process.cwd()}{os.sep}", *process.cmdline()]
            if any(place.startswith(root) for place in places):
                yield os.getpgid(process.pid)


async def reap_strays() -> None:
    """For ever: wait for ended children nobody waits for. Those are children that lost their parent, where the agent is
    process 1, and engines whose first thread ended before their last one, so that the driver that stopped them saw them
    gone and could not wait. A zombie is taken at the second look: whoever started it and waits learns its end first."""
    seen: set[int] = set()
    while True:
        await asyncio.sleep(REAP_S)
        zombies = zombie_children()
        for pid in zombies & seen:
            _reap(pid)
        seen = zombies


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # whoever waits for it has been quicker
        os.waitpid(pid, os.WNOHANG)


def zombie_children() -> set[int]:
    """Ended children of this process that nobody has waited for."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
    return found
