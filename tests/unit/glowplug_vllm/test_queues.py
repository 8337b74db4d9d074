"""A reader of vLLM's queues that waits in the kernel. Lane: fast, no vLLM."""

from glowplug_vllm import queues


class Condition:
    """As vLLM's SpinCondition: it spins for `busy_loop_s` after a message, then waits for a note."""

    def __init__(self, notes: list[bool]) -> None:
        self.poller, self.busy_loop_s = self, 1.0
        self._notes, self.looks, self.waits = notes, list[int](), list[int | None]()

    def poll(self, timeout_ms: int) -> list[object]:
        self.looks.append(timeout_ms)
        return [object()] if self._notes.pop(0) else []

    def wait(self, timeout_ms: int | None) -> None:
        assert self.busy_loop_s == 0.0, "it would spin"
        self.waits.append(timeout_ms)


def test_a_reader_looks_often_until_its_first_note_and_waits_for_the_others() -> None:
    condition, parked = Condition([False, False, True]), queues.parking(Condition.wait)
    for _ in range(5):
        parked(condition, 5000)
    assert condition.looks == [queues.FIRST_LOOKS_MS] * 3, "a note may have been lost before its subscription was there"
    assert condition.waits == [5000, 5000, 5000]
