"""vLLM's processes wait for one another's messages without taking a core.

A reader of vLLM's queues in shared memory looks again and again for a second after each message, which takes a core
from those that compute: the first stage of a pipeline would do so for as long as the others have the token. Only then
it waits for a note of the writer. Notes can be lost (the writer's socket holds one, and looks once a millisecond
whether it has gone), so a reader here waits for one from the first message on, and looks by itself every `LOOK_MS`.
"""

import time
from typing import Any

LOOK_MS = 2


def wait_in_kernel() -> None:
    """In a process whose forks compute on CPUs."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition, "glowplug_waits"):
        SpinCondition.wait, SpinCondition.glowplug_waits = waiting(SpinCondition.wait), True


def waiting(wait: Any) -> Any:
    """In the place of `SpinCondition.wait`, which it is given."""

    def bounded(condition: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > condition.last_read + condition.busy_loop_s:
            wait(condition, timeout_ms)
        elif condition.poller.poll(LOOK_MS if timeout_ms is None else min(LOOK_MS, timeout_ms)):
            busy_loop_s, condition.busy_loop_s = condition.busy_loop_s, 0.0  # what has come is taken by vLLM's own code
            try:
                wait(condition, 0)
            finally:
                condition.busy_loop_s = busy_loop_s

    return bounded
