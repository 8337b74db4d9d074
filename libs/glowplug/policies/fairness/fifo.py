"""First come, first served: the baseline."""

from collections.abc import Iterator

from glowplug.policies.fairness.port import Claim, Discipline


class Fifo:
    may_recall = False

    def __init__(self) -> None:
        self._waiting: dict[int, Claim] = {}
        self._running: dict[int, Claim] = {}

    def hold(self, claim: Claim, now_s: float) -> None:
        is_last = claim.ticket > next(reversed(self._waiting), 0)
        self._waiting[claim.ticket] = claim
        if not is_last:
            self._waiting = dict(sorted(self._waiting.items()))

    def remove(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)

    def next(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        return next(iter(self._waiting), None)

    def goes_at_once(self, tenant: str, prompt_tokens: int, num_instances: int, now_s: float) -> bool:
        return True

    def recall(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        return None

    def stays(self, ticket: int) -> None:
        pass

    def read(self, ticket: int, now_s: float) -> None:
        pass

    def sent(self, claim: Claim, now_s: float) -> None:
        self.remove(claim.ticket)
        self._running[claim.ticket] = claim

    def left(self, ticket: int, response_tokens: int, now_s: float, *, comes_back: bool) -> None:
        self._running.pop(ticket, None)

    def before(self, ticket: int) -> Iterator[int]:
        return iter(())

    def order(self, now_s: float) -> list[int]:
        return list(self._waiting)

    def is_shared(self, now_s: float) -> bool:
        here = (*self._waiting.values(), *self._running.values())
        return len({(claim.tenant, claim.priority) for claim in here}) > 1


def fifo() -> Discipline:
    return Fifo()
