"""Read files named by a person, safely: pipes, devices, dead network mounts, huge files."""

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class NoAnswer(OSError):
    """The file system's answer is late; its thread waits on, and ends with the process."""


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Raises OSError, with the reason in `strerror`: no such file, no regular file (a pipe or device may never end),
    larger than `max_bytes`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"larger than {max_bytes} bytes")
    return content


class PatientReader:
    """Runs file system calls in daemon threads, one at a time per name, so that a dead mount holds one thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stuck: dict[str, threading.Thread] = {}

    def is_waiting(self, name: str) -> bool:
        """Whether an abandoned call still has no answer."""
        thread = self._stuck.get(name)
        return thread is not None and thread.is_alive()

    async def run(self, name: str, work: Callable[[], T], timeout_s: float = 0.0) -> T:
        """Raises NoAnswer after the time limit, and at once while an earlier call of that name has not ended."""
        timeout_s = timeout_s or self._timeout_s
        if self.is_waiting(name):
            raise NoAnswer(0, "the file system still does not answer")
        self._stuck.pop(name, None)
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting cancels nothing

        def body() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised again where the caller waits
                done.set_exception(error)

        # No pool: a process's end waits for a pool's threads, and these may never return.
        thread = threading.Thread(target=body, name=f"file {name}", daemon=True)
        thread.start()
        outcome = asyncio.wrap_future(done)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(outcome)
        except TimeoutError as error:
            if outcome.done():  # raised by `work`, or a tie with the timeout
                return outcome.result()
            self._stuck[name] = thread
            outcome.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise NoAnswer(0, f"the file system has not answered within {timeout_s:g} s") from error
