"""Run a child process: start, await readiness, restart with backoff, stop for sure."""

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

from glowplug.runtime.supervisor.output import LogFile, Output

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
CRASH_LOOP_STARTS, CRASH_LOOP_WINDOW_S = 4, 60.0
MOST_START_TIMEOUTS = 16  # longest start, relative to the first limit
# Readiness polls: 50 ms apart, later a tenth of the time waited, at most half a second: asking a dozen services twenty
# times a second takes a tenth of a core from their starts.
READY_POLL_S, READY_POLL_SHARE, READY_POLL_MAX_S = 0.05, 0.1, 0.5
LIVE_POLL_S = 2.0
FOLLOW_S = 0.25  # between reads of its log for the terminal
FAILING_POLLS = 2  # in a row, before a failing process is reported and restarted
RESTART_GRACE_S = 5.0  # SIGTERM to SIGKILL, if it still answers
TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildState(StrEnum):
    WAITING = "waiting"  # for its first or next start
    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"  # answers without working; see `problem`
    CRASH_LOOP = "crash-loop"  # died repeatedly; retried at the longest wait
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run a process. `argv` is called before each start, `is_ready(pid)` polled until true.

    `problem` is polled later: why it answers without working, or "". It is restarted if `restart_helps` at that moment.
    """

    name: str
    argv: Callable[[], Sequence[str]]
    env: Mapping[str, str]
    is_ready: Callable[[int], Awaitable[bool]]
    service: str = ""  # kind, e.g. "agent"
    url: str = ""  # REST, if any
    is_live: Callable[[], Awaitable[bool]] | None = None  # a living process may hang
    problem: Callable[[], Awaitable[str]] | None = None
    restart_helps: Callable[[], bool] | None = None


def backoff_s(num_crashes: int, longest_s: float) -> float:
    """Wait before the start after crash `num_crashes` (1-based) in a row."""
    return float(min(longest_s, FIRST_WAIT_S * 4 ** min(num_crashes - 1, 16)))


def start_limit_s(num_unanswered: int, first_s: float) -> float:
    """Limit of a start without an answer, after `num_unanswered` such starts: twice the last, for a machine too busy
    for `first_s`. 0: no limit."""
    return first_s * min(1 << min(num_unanswered, 16), MOST_START_TIMEOUTS)


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Between fork and exec, ask the kernel for SIGTERM at the parent's death."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent_pid:  # already dead
                os._exit(1)

    return prepare


@dataclass(eq=False)
class Child:
    """Runs a ChildSpec until `stop`. `on_change` gets every state; `tail`: last lines."""

    spec: ChildSpec
    output: Output
    on_change: Callable[["Child"], None]
    longest_wait_s: float = 10.0
    hang_misses: int = 8  # unanswered polls before a kill; 0: never
    live_poll_s: float = LIVE_POLL_S
    start_timeout_s: float = 60.0  # limit of an unanswered first start; 0: none
    state: ChildState = ChildState.WAITING
    pid: int = 0
    num_restarts: int = 0
    ready_at: float = 0.0  # epoch seconds
    exit_reason: str = ""
    problem: str = ""  # why it answers without working, or ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    crash_looping: asyncio.Event = field(default_factory=asyncio.Event)
    _log: LogFile = field(init=False)
    _stopping: bool = False
    _ended_for: str = ""  # why we ended it
    _num_unanswered: int = 0  # given-up starts in a row
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._log = self.output.log_file(self.spec.name)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"child-{self.spec.name}")

    async def _run(self) -> None:
        following = asyncio.create_task(self._follow())
        try:
            await self._live_on()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self._read_log()
        self._set(ChildState.STOPPED)

    async def _live_on(self) -> None:
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

    async def _once(self) -> None:
        log_fd = self._log.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv(),
                env=dict(self.spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            self.exit_reason = f"cannot start: {error}"
            self._say(self.exit_reason)
            return
        finally:
            os.close(log_fd)
        self._process, self.pid = process, process.pid
        self._ended_for = ""
        self._set(ChildState.STARTING)
        watch = asyncio.create_task(self._watch(process.pid))
        code = await process.wait()
        watch.cancel()
        self._read_log()
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self.exit_reason = f"{ended} ({self._ended_for})" if self._ended_for else ended
        self.problem = ""
        if not self._stopping:
            self._say(f"[supervisor] ended: {self.exit_reason}; starting it again")

    async def _watch(self, pid: int) -> None:
        """Ask a process about readiness, life and work. Errors of asking are reported, not held against it, and it is
        asked again."""
        is_reported = False
        while True:
            try:
                await self._end(await self._until_it_must_end(pid))
                return
            except Exception as error:
                if not is_reported:
                    log.exception("the supervisor cannot check on %s", self.spec.name)
                    why = f"{type(error).__name__} {error}"
                    self.output.notice(f"the supervisor cannot check on {self.spec.name} and lets it run: {why}")
                is_reported = True
            await asyncio.sleep(self.live_poll_s)

    async def _until_it_must_end(self, pid: int) -> str:
        if self.state is ChildState.STARTING:
            limit_s = start_limit_s(self._num_unanswered, self.start_timeout_s)
            if not await self._becomes_ready(pid, limit_s):
                self._num_unanswered += 1
                return f"no answer within {limit_s:g} s of its start"
            self._num_unanswered = 0
            self.ready_at = time.time()
            self.crash_looping.clear()
            self.ready.set()
            self._set(ChildState.READY)
        return await self._until_it_fails()

    async def _becomes_ready(self, pid: int, limit_s: float) -> bool:
        """Return False if nothing answered for `limit_s` (0: for ever). An unready process that answers knows its
        obstacle; a restart would not help."""
        began_at = answered_at = asked_at = time.monotonic()
        while not await self.spec.is_ready(pid):
            now = time.monotonic()
            if self.spec.is_live is not None and now - asked_at >= self.live_poll_s:
                asked_at = now
                answered_at = now if await self.spec.is_live() else answered_at
            if limit_s and now - answered_at > limit_s:
                return False
            wait_s = min(READY_POLL_SHARE * (now - began_at), READY_POLL_MAX_S)
            await asyncio.sleep(max(wait_s, READY_POLL_S))
        return True

    async def _until_it_fails(self) -> str:
        misses = failing = 0
        while True:
            await asyncio.sleep(self.live_poll_s)
            if self.spec.is_live is not None:
                misses = 0 if await self.spec.is_live() else misses + 1
            if misses:
                if misses == self.hang_misses:
                    return f"it hangs: {misses} health checks in a row without an answer"
                continue
            problem = await self.spec.problem() if self.spec.problem is not None else ""
            failing = failing + 1 if problem else 0
            if problem and failing < FAILING_POLLS:
                continue
            self._tell(problem)
            if problem and self.spec.restart_helps is not None and self.spec.restart_helps():
                return problem

    def _tell(self, problem: str) -> None:
        if bool(problem) != bool(self.problem):
            self.output.notice(f"{self.spec.name}: {problem}" if problem else f"{self.spec.name} works again")
            self.problem = problem
            self._set(ChildState.FAILING if problem else ChildState.READY)
        self.problem = problem

    async def _end(self, reason: str) -> None:
        process = self._process
        if self._stopping or process is None:
            return  # it is ending
        self._ended_for = reason
        self.output.notice(f"the supervisor restarts {self.spec.name}: {reason}")
        if self.problem:  # it answers, so let it close its files
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.sleep(RESTART_GRACE_S)
        self.kill()

    async def _follow(self) -> None:
        while True:
            self._read_log(ended=False)
            await asyncio.sleep(FOLLOW_S)

    def _read_log(self, *, ended: bool = True) -> None:
        """Read its new lines; an unreadable log does not harm it."""
        try:
            while lines := self._log.poll():
                self._shown(lines)
        except OSError as error:
            log.debug("the log of %s cannot be read: %s", self.spec.name, error)
        if ended:
            self._shown(self._log.rest())

    def _shown(self, lines: list[str]) -> None:
        for line in lines:
            self.tail.append(line)
            self.output.line(self.spec.name, line)

    def _say(self, line: str) -> None:
        self.output.write(self._log, line)
        self._read_log()

    def _report_crash_loop(self) -> None:
        self.crash_looping.set()
        if not self.ready_at:
            return
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
        """SIGTERM, then SIGKILL to its group after `grace_s`; returns when gone. Idempotent."""
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
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
