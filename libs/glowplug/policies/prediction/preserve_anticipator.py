"""The load anticipator: the fill of an instance's KV cache over its coming steps.

Paper: PreServe section 4.3.1. A request with P prompt tokens and an expected response of D tokens that has been
prefilled at step s adds (P + i) / M to the fraction U used at step s + i, for i in [0, D), where M is the instance's KV
capacity in tokens. A request that ends early is removed; one that outlives its expectation is extended by 0.2 D, again
and again.

Departures:
- The paper's map is an array of the next L iterations that every request walks. Here the sum of the ramps, linear
  between begins and ends, is kept by its changes: an update costs O(log n), a look ahead one visit per change. Steps
  are the engine's own (erratum E33).
- The paper updates the map after the prefill, so a burst is routed on a stale one. Here `add` at dispatch keeps a
  provisional ramp until `begin` after the prefill (erratum E34).

Option `answers`: a ramp's length is drawn from actual lengths of such answers, and redrawn among those as long once it
outlives its draw, so that the sum is the expected load.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from glowplug.policies.prediction.answer_lengths import AnswerLengths

# T_mem is MEMORY_RATIO of fleet/throughput.py; these constants of section 4.3 serve routing and scaling.
NUM_STEPS = 100  # l
OVERLOAD_RATIO = 0.95  # of the KV cache
OVERLOAD_SHARE = 0.1  # of steps too full, for an overload (section 4.3.2)
_GOLDEN: Final = 0.6180339887498949

Key = int | str


class _Ramp(Struct, eq=False):
    start: int
    end: int  # first step without the request
    prompt: int
    expected: int
    length: int  # response tokens counted on


@dataclass(slots=True, eq=False)
class LookAhead:
    """The coming load of one instance. Steps only grow; `M` is `kv_tokens`."""

    kv_tokens: int
    extend_ratio: float = 0.2
    answers: AnswerLengths | None = None  # actual lengths; None: as expected (the paper)
    now_step: int = 0
    ramps: dict[Key, _Ramp] = field(default_factory=dict)
    _end_sum: int = 0
    _constant: int = 0  # sum of prompt - start at now_step; the ramps' sum is this + count x step
    _count: int = 0
    _steps: list[int] = field(default_factory=list)  # sorted steps of begins and ends: the turns
    _constants: list[int] = field(default_factory=list)  # change of the constant, by turn ...
    _counts: list[int] = field(default_factory=list)  # ... and of the count
    _ends: list[tuple[int, Key]] = field(default_factory=list)
    _num_drawn: int = 0

    def __post_init__(self) -> None:
        if self.kv_tokens < 1 or not self.extend_ratio > 0:
            raise ValueError(f"a KV cache of {self.kv_tokens} tokens, extension by {self.extend_ratio}")

    def __len__(self) -> int:
        return len(self.ramps)

    def age(self, request_id: Key) -> int:
        ramp = self.ramps.get(request_id)
        return 0 if ramp is None else self.now_step - ramp.start

    @property
    def tokens_left(self) -> int:
        return self._end_sum - len(self.ramps) * self.now_step

    def tokens_left_within(self, num_steps: int) -> int:
        end = self.now_step + num_steps
        tokens = len(self.ramps) * num_steps
        for turn, count in zip(self._steps, self._counts, strict=True):
            if turn >= end:
                break
            tokens += count * (end - turn)  # `-count` requests end at this turn
        return tokens

    def at_most(self, num_steps: int) -> int:
        """Return an upper bound of the cached tokens over the next steps, at constant cost."""
        return self._constant + self._count * (self.now_step + num_steps - 1)

    def add(self, request_id: Key, prompt_tokens: int, expected_tokens: int) -> None:
        if request_id in self.ramps:
            self.end(request_id)
        expected = max(1, expected_tokens)
        length = expected if self.answers is None else self.answers.draw(expected, self._share())
        ramp = _Ramp(self.now_step, self.now_step + length, prompt_tokens, expected, length)
        self.ramps[request_id] = ramp
        self._end_sum += ramp.end
        self._constant += ramp.prompt - ramp.start
        self._count += 1
        self._turn(ramp.end, ramp.start - ramp.prompt, -1)
        heapq.heappush(self._ends, (ramp.end, request_id))

    def begin(self, request_id: Key) -> None:
        ramp = self.ramps.get(request_id)
        if ramp is None or ramp.start == self.now_step:
            return
        self._turn(ramp.end, ramp.prompt - ramp.start, 1)
        self._constant += ramp.start - self.now_step
        self._end_sum -= ramp.end
        ramp.start = self.now_step
        ramp.end = self.now_step + ramp.length
        self._end_sum += ramp.end
        self._turn(ramp.end, ramp.start - ramp.prompt, -1)
        heapq.heappush(self._ends, (ramp.end, request_id))

    def expect(self, request_id: Key, expected_tokens: int) -> None:
        ramp = self.ramps.get(request_id)
        if ramp is None:
            return
        ramp.expected = max(1, expected_tokens)
        end = ramp.start + ramp.expected
        later = end if self.answers is None and end > self.now_step else self._later(ramp, end)
        self._turn(ramp.end, ramp.prompt - ramp.start, 1)
        self._end_sum += later - ramp.end
        ramp.end, ramp.length = later, ramp.expected if self.answers is None else later - ramp.start
        self._turn(later, ramp.start - ramp.prompt, -1)
        heapq.heappush(self._ends, (later, request_id))

    def end(self, request_id: Key) -> None:
        ramp = self.ramps.pop(request_id, None)
        if ramp is None:
            return
        self._turn(ramp.end, ramp.prompt - ramp.start, 1)
        self._constant -= ramp.prompt - ramp.start
        self._count -= 1
        self._end_sum -= ramp.end
        if not self.ramps:
            self._ends.clear()

    def advance(self, step: int) -> None:
        if step < self.now_step:
            return
        self.now_step = step
        if num_over := bisect_right(self._steps, step):
            self._constant += sum(self._constants[:num_over])
            self._count += sum(self._counts[:num_over])
            del self._steps[:num_over], self._constants[:num_over], self._counts[:num_over]
        ends, ramps = self._ends, self.ramps
        while ends and ends[0][0] <= step:
            end, request_id = ends[0]
            ramp = ramps.get(request_id)
            if ramp is None or ramp.end != end:
                heapq.heappop(ends)
                continue
            later = self._later(ramp, end)
            self._constant += ramp.prompt - ramp.start  # undo its counted end
            self._count += 1
            self._turn(later, ramp.start - ramp.prompt, -1)
            self._end_sum += later - end
            ramp.end = later
            heapq.heapreplace(ends, (later, request_id))

    def tokens(self, step: int) -> int:
        num_turns = bisect_right(self._steps, step)
        constant = self._constant + sum(self._constants[:num_turns])
        count = self._count + sum(self._counts[:num_turns])
        return constant + count * max(step, self.now_step)

    def peak_ratio(self, num_steps: int, prompt_tokens: int = 0, expected_tokens: int = 0) -> float:
        """Return the highest U over the next steps, with one more such request if given."""
        first, last = self.now_step, self.now_step + num_steps - 1
        ends = first + expected_tokens
        end_of_it = min(ends - 1, last)
        newcomer = prompt_tokens - first  # it adds this plus the step
        peak, constant, count, at = 0, self._constant, self._count, first
        for turn, constant_more, count_more in zip(self._steps, self._constants, self._counts, strict=True):
            if turn > last:
                break
            # Between two turns the sum only grows.
            here = constant + count * (turn - 1)
            if turn <= ends:
                here += newcomer + turn - 1
            elif at < ends:
                here = max(here, constant + count * end_of_it + newcomer + end_of_it)
            if here > peak:
                peak = here
            constant += constant_more
            count += count_more
            at = turn
            most = constant + count * last  # an upper bound of the rest
            if at < ends:
                most += newcomer + end_of_it
            if most <= peak:
                return peak / self.kv_tokens
        here = constant + count * last + (newcomer + last if last < ends else 0)
        if at < ends:
            here = max(here, constant + count * end_of_it + newcomer + end_of_it)
        return max(peak, here) / self.kv_tokens

    def num_steps_above(self, ratio: float, num_steps: int) -> int:
        limit, last = ratio * self.kv_tokens, self.now_step + num_steps - 1
        if self._constant + self._count * last <= limit:
            return 0
        constant, count, at, above = self._constant, self._count, self.now_step, 0
        for number, turn in enumerate((*self._steps[: bisect_right(self._steps, last)], last + 1)):
            if turn > at:
                if count > 0:
                    begins = max(at, math.floor((limit - constant) / count) + 1)
                    above += max(0, turn - begins)
                at = turn
            if turn <= last:
                constant += self._constants[number]
                count += self._counts[number]
                if constant + count * last <= limit:
                    break
        return above

    def _later(self, ramp: _Ramp, end: int) -> int:
        if self.answers is not None:
            return ramp.start + self.answers.draw(ramp.expected, self._share(), self.now_step - ramp.start)
        more = max(1, math.ceil(self.extend_ratio * ramp.expected))
        return end + more * (1 + (self.now_step - end) // more)

    def _share(self) -> float:
        """Return evenly spread shares (multiples of the golden section)."""
        self._num_drawn += 1
        return self._num_drawn * _GOLDEN % 1.0

    def _turn(self, step: int, constant: int, count: int) -> None:
        """Change constant and count from `step` on."""
        if step <= self.now_step:
            self._constant += constant
            self._count += count
            return
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            self._constants.insert(at, constant)
            self._counts.insert(at, count)
            return
        self._constants[at] += constant
        self._counts[at] += count
        if self._constants[at] == self._counts[at] == 0:
            del self._steps[at], self._constants[at], self._counts[at]
