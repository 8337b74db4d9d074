"""Let vLLM's processes wait for messages without a busy core.

A reader of vLLM's shared-memory queues polls for a second after each message, which takes a core from those that
compute, and only then waits for the writer's note. Notes can be lost (the writer's socket holds one, and looks once
a millisecond whether it has gone), so a reader here waits for one from the start, and looks every `LOOK_MS`."""

import time
from typing import Any

LOOK_MS = 2


def wait_in_kernel() -> None:
    """Patch vLLM's queues, for a process whose forks compute on CPUs."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition, "glowplug_waits"):
        SpinCondition.wait, SpinCondition.glowplug_waits = waiting(SpinCondition.wait), True


def waiting(wait: Any) -> Any:
    """Wrap `SpinCondition.wait`."""

    def bounded(condition: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > condition.last_read + condition.busy_loop_s:
            wait(condition, timeout_ms)
        elif condition.poller.poll(LOOK_MS if timeout_ms is None else min(LOOK_MS, timeout_ms)):
            busy_loop_s, condition.busy_loop_s = condition.busy_loop_s, 0.0  # vLLM's own code takes the message
            try:
                wait(condition, 0)
            finally:
                condition.busy_loop_s = busy_loop_s

    return bounded
