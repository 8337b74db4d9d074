"""Ends an engine that takes more host memory than its grant and its overhead, before the machine has none left.

The agent looks; the kernel enforces nothing: cgroups need a delegation that few machines give, RLIMIT_AS counts mapped
weights, and RLIMIT_DATA makes an allocation fail somewhere inside an engine, without a reason.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import psutil

from glowplug.controllers.agent.messages import EngineOverLimit
from glowplug.engines.port import EngineHandle, LaunchRequest
from glowplug.memory.discovery import EMULATED

log = logging.getLogger(__name__)
LIMIT = "host_bytes_limit"  # in a handle's data; absent where an agent without this watch has started the engine
MIB = 1 << 20


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
                log.exception("the memory of engines could not be looked at")
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Report each engine over its limit, once: the controller has it killed."""
        limited = {i: handle for i, handle in self._handles().items() if LIMIT in handle.data}
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
