"""A reader of vLLM's queues that waits in the kernel. Lane: fast, no vLLM."""

import time

from glowplug_vllm import queues


class Condition:
    """Like vLLM's SpinCondition: spins for `busy_loop_s` after a message, then waits."""

    def __init__(self, notes: list[bool]) -> None:
        self.poller, self.busy_loop_s, self.last_read = self, 1.0, time.monotonic()
        self._notes, self.looks, self.waits = notes, list[int](), list[int | None]()

    def poll(self, timeout_ms: int) -> list[object]:
        self.looks.append(timeout_ms)
        return [object()] if self._notes.pop(0) else []

    def wait(self, timeout_ms: int | None) -> None:
        assert time.monotonic() > self.last_read + self.busy_loop_s, "it would spin"
        self.waits.append(timeout_ms)


def test_a_reader_waits_for_a_note_and_looks_by_itself_where_one_is_lost() -> None:
    condition, wait = Condition([False, True, False]), queues.waiting(Condition.wait)
    for timeout_ms in (None, 5000, 1):
        wait(condition, timeout_ms)
    assert condition.looks == [queues.LOOK_MS, queues.LOOK_MS, 1], "a lost note holds it up for no longer"
    assert condition.waits == [0], "vLLM's own code takes the note that came"
    assert condition.busy_loop_s == 1.0


def test_a_reader_that_has_been_idle_waits_as_vllm_has_it() -> None:
    condition, wait = Condition([]), queues.waiting(Condition.wait)
    condition.last_read -= 2.0
    wait(condition, 5000)
    assert condition.waits == [5000] and not condition.looks
