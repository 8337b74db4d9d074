"""The load anticipator: how full an instance's KV cache will be over its coming steps.

Paper: PreServe section 4.3.1. A request with P prompt tokens and an expected response of D tokens that has been
prefilled at step s adds (P + i) / M to the fraction U used at step s + i, for i in [0, D), where M is the instance's KV
capacity in tokens. When a request ends early its remaining part is removed; one that does not end as expected is
extended by another 0.2 D, again and again.

Departures:
- The paper's map is an array of the next L iterations that every request walks. A request is a ramp, so the sum of all
  is linear between the steps at which one begins or ends: two numbers change there, and nothing in between. An update
  costs O(log n), a look ahead one visit per change within it. Steps are the engine's own (erratum E33).
- The paper updates the map after the prefill, so that a burst is routed on one stale map. `add` at dispatch and `begin`
  after the prefill keep a provisional ramp meanwhile (erratum E34).

Option: `answers`. A ramp is as long as a draw from the actual lengths of such answers, and one that outlives its draw
is drawn anew among the answers that came as far. So each running request's ramp is a draw of what it may still add, and
the sum of all ramps is the expected load, at the price of one ramp each.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

from glowplug.policies.prediction.answer_lengths import AnswerLengths

# T_mem is MEMORY_RATIO of fleet/throughput.py; these constants of section 4.3 are shared by routing and scaling.
NUM_STEPS = 100  # l: engine steps looked ahead
OVERLOAD_RATIO = 0.95  # share of the KV cache above which a step is too full
OVERLOAD_SHARE = 0.1  # share of steps too full above which an instance is overloaded (section 4.3.2)
_GOLDEN: Final = 0.6180339887498949

Key = int | str  # id of a request


@dataclass(slots=True)
class _Ramp:
    start: int  # step
    end: int  # the first step at which the request should be gone
    prompt: int
    expected: int  # response tokens as predicted
    length: int  # response tokens counted on


@dataclass(slots=True, eq=False)
class LookAhead:
    """The coming load of one instance. Steps only grow; `M` is `kv_tokens`."""

    kv_tokens: int
    extend_ratio: float = 0.2
    answers: AnswerLengths | None = None  # actual lengths; None: as expected (the paper)
    now_step: int = 0
    _ramps: dict[Key, _Ramp] = field(default_factory=dict)
    _end_sum: int = 0  # sum of the ramps' ends
    _constant: int = 0  # sum of prompt - start of the ramps at now_step; their sum there is this + count x step
    _count: int = 0
    _steps: list[int] = field(default_factory=list)  # sorted steps at which ramps begin or end: the turns
    _constants: list[int] = field(default_factory=list)  # by turn: the change of the constant ...
    _counts: list[int] = field(default_factory=list)  # ... and that of the count
    _ends: list[tuple[int, Key]] = field(default_factory=list)
    _num_drawn: int = 0

    def __post_init__(self) -> None:
        if self.kv_tokens < 1 or not self.extend_ratio > 0:
            raise ValueError(f"a KV cache of {self.kv_tokens} tokens, extension by {self.extend_ratio}")

    def __len__(self) -> int:
        return len(self._ramps)

    def age(self, request_id: Key) -> int:
        """Steps since the request's ramp began; 0 for an unknown one."""
        ramp = self._ramps.get(request_id)
        return 0 if ramp is None else self.now_step - ramp.start

    @property
    def tokens_left(self) -> int:
        """Response tokens still expected of all requests here."""
        return self._end_sum - len(self._ramps) * self.now_step

    def tokens_left_within(self, num_steps: int) -> int:
        """Response tokens expected in the next `num_steps` steps."""
        end = self.now_step + num_steps
        tokens = len(self._ramps) * num_steps
        for turn, count in zip(self._steps, self._counts, strict=True):
            if turn >= end:
                break
            tokens += count * (end - turn)  # `-count` requests end at this turn
        return tokens

    def at_most(self, num_steps: int) -> int:
        """An upper bound of the tokens in the cache at any of the next `num_steps` steps, at constant cost."""
        return self._constant + self._count * (self.now_step + num_steps - 1)

    def add(self, request_id: Key, prompt_tokens: int, expected_tokens: int) -> None:
        """Add a request sent to the instance. Its ramp begins now; a request already present begins anew."""
        if request_id in self._ramps:
            self.end(request_id)
        expected = max(1, expected_tokens)
        length = expected if self.answers is None else self.answers.draw(expected, self._share())
        ramp = _Ramp(self.now_step, self.now_step + length, prompt_tokens, expected, length)
        self._ramps[request_id] = ramp
        self._end_sum += ramp.end
        self._constant += ramp.prompt - ramp.start
        self._count += 1
        self._turn(ramp.end, ramp.start - ramp.prompt, -1)
        heapq.heappush(self._ends, (ramp.end, request_id))

    def begin(self, request_id: Key) -> None:
        """Restart a request's provisional ramp now that it has been prefilled. Unknown ids are ignored."""
        ramp = self._ramps.get(request_id)
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
        """Move the end of a request's ramp to a new expected length of its answer. Unknown ids are ignored."""
        ramp = self._ramps.get(request_id)
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
        """Remove a request that has ended, early or not."""
        ramp = self._ramps.pop(request_id, None)
        if ramp is None:
            return
        self._turn(ramp.end, ramp.prompt - ramp.start, 1)
        self._constant -= ramp.prompt - ramp.start
        self._count -= 1
        self._end_sum -= ramp.end
        if not self._ramps:
            self._ends.clear()

    def advance(self, step: int) -> None:
        """Advance to `step`, up to which the engine has run. Requests that should have ended by then are extended."""
        if step < self.now_step:
            return
        self.now_step = step
        if num_over := bisect_right(self._steps, step):
            self._constant += sum(self._constants[:num_over])
            self._count += sum(self._counts[:num_over])
            del self._steps[:num_over], self._constants[:num_over], self._counts[:num_over]
        ends, ramps = self._ends, self._ramps
        while ends and ends[0][0] <= step:
            end, request_id = ends[0]
            ramp = ramps.get(request_id)
            if ramp is None or ramp.end != end:
                heapq.heappop(ends)
                continue
            later = self._later(ramp, end)
            self._constant += ramp.prompt - ramp.start  # its end has been counted already; undo that
            self._count += 1
            self._turn(later, ramp.start - ramp.prompt, -1)
            self._end_sum += later - end
            ramp.end = later
            heapq.heapreplace(ends, (later, request_id))

    def tokens(self, step: int) -> int:
        """Tokens expected in the cache at `step`, which is not before now."""
        num_turns = bisect_right(self._steps, step)
        constant = self._constant + sum(self._constants[:num_turns])
        count = self._count + sum(self._counts[:num_turns])
        return constant + count * max(step, self.now_step)

    def peak_ratio(self, num_steps: int, prompt_tokens: int = 0, expected_tokens: int = 0) -> float:
        """The highest U over the next `num_steps` steps, with one more such request if one is given."""
        first, last = self.now_step, self.now_step + num_steps - 1
        ends = first + expected_tokens  # the newcomer's ramp covers [first, ends)
        end_of_it = min(ends - 1, last)
        newcomer = prompt_tokens - first  # it adds this plus the step
        peak, constant, count, at = 0, self._constant, self._count, first
        for turn, constant_more, count_more in zip(self._steps, self._constants, self._counts, strict=True):
            if turn > last:
                break
            # Between two turns the sum only grows, so its highest is the last step before one.
            here = constant + count * (turn - 1)
            if turn <= ends:
                here += newcomer + turn - 1
            elif at < ends:  # the newcomer ends in between
                here = max(here, constant + count * end_of_it + newcomer + end_of_it)
            if here > peak:
                peak = here
            constant += constant_more
            count += count_more
            at = turn
            most = constant + count * last  # turns only take away, so this is the most that can still come
            if at < ends:
                most += newcomer + end_of_it
            if most <= peak:
                return peak / self.kv_tokens
        here = constant + count * last + (newcomer + last if last < ends else 0)
        if at < ends:
            here = max(here, constant + count * end_of_it + newcomer + end_of_it)
        return max(peak, here) / self.kv_tokens

    def num_steps_above(self, ratio: float, num_steps: int) -> int:
        """Number of the next `num_steps` steps that have U above `ratio`, as the scaler asks."""
        limit, last = ratio * self.kv_tokens, self.now_step + num_steps - 1
        if self._constant + self._count * last <= limit:  # even if no request ends, U stays below
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
        """The step after now at which a request should end that did not end at `end` as expected."""
        if self.answers is not None:
            return ramp.start + self.answers.draw(ramp.expected, self._share(), self.now_step - ramp.start)
        more = max(1, math.ceil(self.extend_ratio * ramp.expected))
        return end + more * (1 + (self.now_step - end) // more)

    def _share(self) -> float:
        """The next of a series of evenly spread shares (multiples of the golden section)."""
        self._num_drawn += 1
        return self._num_drawn * _GOLDEN % 1.0

    def _turn(self, step: int, constant: int, count: int) -> None:
        """Add a change of constant and count from `step` on. One in the past takes effect at once."""
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
