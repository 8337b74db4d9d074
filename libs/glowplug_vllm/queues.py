"""vLLM's processes wait for one another's messages in the kernel.

A reader of vLLM's queues in shared memory looks again and again for a second after each message, which takes a core
from those that compute; only then it waits for a note of the writer. On CPUs it does so from the first message on.
"""

from typing import Any

FIRST_LOOKS_MS = 1  # until the first note has come: the reader's subscription may be on its way, and notes be lost


def park_readers() -> None:
    """In a process whose forks compute on CPUs."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition, "glowplug_parks"):
        SpinCondition.wait, SpinCondition.glowplug_parks = parking(SpinCondition.wait), True


def parking(wait: Any) -> Any:
    """In the place of `SpinCondition.wait`, which it is given."""

    def parked(condition: Any, timeout_ms: int | None = None) -> None:
        if not getattr(condition, "glowplug_noted", False):
            condition.glowplug_noted = bool(condition.poller.poll(FIRST_LOOKS_MS))
            if not condition.glowplug_noted:
                return  # the queue is looked at, then this is called again
        condition.busy_loop_s = 0.0
        wait(condition, timeout_ms)

    return parked
