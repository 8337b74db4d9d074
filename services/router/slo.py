"""Which requests kept the service levels their model sets.

A level counts each request that the fleet owed an answer: those that ended well and those that failed or were refused
for want of room (429, 5xx). What the client got wrong (other 4xx) is left out, and so is a client that left, unless
it had waited past its TTFT already.
"""

from dataclasses import dataclass

from glowplug.domain.model import Slo

TTFT, TPOT = "ttft", "tpot"
CLIENT_LEFT = 499


@dataclass(slots=True)
class Count:
    """Of one model and level."""

    num: int = 0
    num_missed: int = 0


class SloBook:
    """(model_key, level) -> Count. Grows with the models that set a level, and forgets none: counters only grow."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = {}

    def judge(self, model_key: str, slo: Slo, status: int, *, e2e_s: float, ttft_s: float, tpot_s: float) -> None:
        """Take one ended request. `ttft_s` and `tpot_s` are below 0 where there was no such thing."""
        if slo.ttft_s:
            waited_s = e2e_s if ttft_s < 0 else ttft_s
            if status < 400 or _is_ours(status) or (status == CLIENT_LEFT and waited_s > slo.ttft_s):
                self._take(model_key, TTFT, _is_ours(status) or waited_s > slo.ttft_s)
        if slo.tpot_s and (tpot_s >= 0 or _is_ours(status)) and status != CLIENT_LEFT:
            self._take(model_key, TPOT, _is_ours(status) or tpot_s > slo.tpot_s)

    def expect(self, model_key: str, slo: Slo) -> None:
        """Count from 0, so that the first miss is seen as an increase."""
        for level, is_set in ((TTFT, slo.ttft_s), (TPOT, slo.tpot_s)):
            if is_set:
                self.counts.setdefault((model_key, level), Count())

    def _take(self, model_key: str, level: str, is_missed: bool) -> None:
        count = self.counts.get((model_key, level))
        if count is None:
            count = self.counts[model_key, level] = Count()
        count.num += 1
        count.num_missed += is_missed


def _is_ours(status: int) -> bool:
    """Failed or refused by the fleet."""
    return status == 429 or status >= 500
