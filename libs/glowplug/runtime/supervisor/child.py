"""One child process: started, waited for until ready, restarted with backoff, stopped for sure."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from glowplug.runtime.supervisor.output import Output

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
CRASH_LOOP_STARTS, CRASH_LOOP_WINDOW_S = 4, 60.0
READY_POLL_S = 0.05
LIVE_POLL_S = 2.0
TAIL_LINES = 12
_READ_BYTES, _LONGEST_LINE = 65536, 65536
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildState(StrEnum):
    WAITING = "waiting"  # not started yet, or between two starts
    STARTING = "starting"
    READY = "ready"
    CRASH_LOOP = "crash-loop"  # died again and again; still retried at the longest wait
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run one process. `argv` is asked before each start, `is_ready(pid)` polled until it says yes.

    `tier` orders the start: a tier starts when the one below is ready, and stops before it.
    """

    name: str
    argv: Callable[[], Sequence[str]]
    env: Mapping[str, str]
    is_ready: Callable[[int], Awaitable[bool]]
    tier: int = 1
    service: str = ""  # kind of process, e.g. "agent"
    url: str = ""  # its REST address, when it has one
    is_live: Callable[[], Awaitable[bool]] | None = None  # asked while it runs; a process may live and hang


def backoff_s(num_crashes: int, longest_s: float) -> float:
    """Seconds to wait before the start that follows crash number `num_crashes` (1-based) in a row."""
    return float(min(longest_s, FIRST_WAIT_S * 4 ** min(num_crashes - 1, 16)))


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """What the child does between fork and exec: ask the kernel for SIGTERM when its parent dies."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent_pid:  # it died before we asked
                os._exit(1)

    return prepare


@dataclass(eq=False)
class Child:
    """Runs one ChildSpec until `stop`. `on_change` hears of every new state; `tail` holds the last lines it wrote."""

    spec: ChildSpec
    output: Output
    on_change: Callable[["Child"], None]
    longest_wait_s: float = 10.0
    hang_misses: int = 8  # unanswered questions in a row after which a process that hangs is killed; 0: it is left
    live_poll_s: float = LIVE_POLL_S
    state: ChildState = ChildState.WAITING
    pid: int = 0
    num_restarts: int = 0
    ready_at: float = 0.0  # epoch seconds
    exit_reason: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    crash_looping: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"child-{self.spec.name}")

    async def _run(self) -> None:
        crashes: deque[float] = deque(maxlen=CRASH_LOOP_STARTS)
        num_in_a_row = 0
        while not self._stopping:
            started = time.monotonic()
            await self._once()
            if self._stopping:
                break
            self.ready.clear()
            self.num_restarts += 1
            now = time.monotonic()
            num_in_a_row = 1 if now - started > CRASH_LOOP_WINDOW_S / 2 else num_in_a_row + 1
            crashes.append(now)
            looping = len(crashes) == CRASH_LOOP_STARTS and now - crashes[0] < CRASH_LOOP_WINDOW_S
            if looping and not self.crash_looping.is_set():
                self._report_crash_loop()
            self._set(ChildState.CRASH_LOOP if looping else ChildState.WAITING)
            await asyncio.sleep(backoff_s(num_in_a_row, self.longest_wait_s))
        self._set(ChildState.STOPPED)

    async def _once(self) -> None:
        """One life of the process, from start to exit."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv(),
                env=dict(self.spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            self.exit_reason = f"cannot start: {error}"
            self._line(self.exit_reason)
            return
        self._process, self.pid = process, process.pid
        self._set(ChildState.STARTING)
        watch = asyncio.create_task(self._watch_ready(process.pid))
        assert process.stdout is not None
        pump = asyncio.create_task(self._pump(process.stdout))
        code = await process.wait()
        watch.cancel()
        # A grandchild may hold the pipe open; what was written is read, what may come is not waited for.
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(pump, 0.5)
        self.exit_reason = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if not self._stopping:
            self.output.line(self.spec.name, f"[supervisor] ended: {self.exit_reason}; starting it again")

    async def _watch_ready(self, pid: int) -> None:
        while not await self.spec.is_ready(pid):
            await asyncio.sleep(READY_POLL_S)
        self.ready_at = time.time()
        self.crash_looping.clear()
        self.ready.set()
        self._set(ChildState.READY)
        if self.spec.is_live is not None and self.hang_misses:
            await self._watch_live(self.spec.is_live)

    async def _watch_live(self, is_live: Callable[[], Awaitable[bool]]) -> None:
        """Kill a process that has stopped answering: it is started again like one that died."""
        misses = 0
        while misses < self.hang_misses:
            await asyncio.sleep(self.live_poll_s)
            misses = 0 if await is_live() else misses + 1
        if self._stopping:
            return  # it ends, in its own time
        self.output.notice(f"{self.spec.name} hangs: {misses} questions in a row without an answer; killed")
        self.kill()

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line.decode("utf-8", "replace"))
            if len(rest) > _LONGEST_LINE:
                self._line(rest.decode("utf-8", "replace"))
                rest = b""
        if rest:
            self._line(rest.decode("utf-8", "replace"))

    def _line(self, line: str) -> None:
        self.tail.append(line)
        self.output.line(self.spec.name, line)

    def _report_crash_loop(self) -> None:
        self.crash_looping.set()
        if not self.ready_at:
            return  # it never ran: whoever waits for it tells
        self.output.notice(
            f"{self.spec.name} keeps ending ({self.exit_reason}); its last lines:\n"
            + "\n".join(f"    {line}" for line in self.tail)
        )

    def _set(self, state: ChildState) -> None:
        self.state = state
        if state in (ChildState.STOPPED, ChildState.WAITING):
            self.pid = 0
        self.on_change(self)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL to its process group after `grace_s`; returns when it is gone. Idempotent."""
        self._stopping = True
        if self._task is None:
            return
        process = self._process
        if process is None or process.returncode is not None:
            self._task.cancel()
        else:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        done, _ = await asyncio.wait([self._task], timeout=grace_s)
        if not done and process is not None:
            self.output.notice(f"{self.spec.name} did not stop within {grace_s:g} s: killed")
            self.kill()
            await asyncio.wait([self._task], timeout=5)
        self._set(ChildState.STOPPED)

    def kill(self) -> None:
        """SIGKILL to its process group, now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
