"""The load anticipator: how full an instance's KV cache will be over its coming steps.

Paper: PreServe section 4.3.1. A request with P prompt tokens and an expected response of D tokens that has been
prefilled at step s adds (P + i) / M to the fraction U used at step s + i, for i in [0, D), where M is the instance's KV
capacity in tokens. One that ends early takes the rest of that away; one that does not end is expected to go on for
another 0.2 D, again and again.

Departures:
- The paper's map is an array of the next L iterations that every request walks. A request is a ramp, so the sum of all
  is linear between the steps at which one begins or ends: two numbers change there, and nothing in between. An update
  costs O(log n), a look ahead one visit per change within it. Steps are the engine's own (erratum E33).
- The paper updates the map after the prefill, so that a burst is routed on one stale map. `add` at dispatch and `begin`
  after the prefill keep a provisional ramp meanwhile (erratum E34).

Option: `answers`. A ramp is as long as a draw of how long such answers turned out to be, and one that goes on beyond it
is drawn anew among those that came as far. So the ramp of whatever runs is drawn from what it may still bring, and the
sum of all is what is to be expected, at the price of one ramp each.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

from glowplug.policies.prediction.answer_lengths import AnswerLengths

MEMORY_RATIO = 0.8  # T_mem; these four are constants of section 4.3 that routing and scaling share
NUM_STEPS = 100  # l: engine steps looked ahead
OVERLOAD_RATIO = 0.95  # of the KV cache: above it a step is too full
OVERLOAD_SHARE = 0.1  # of the steps: an instance with more of them too full is overloaded (section 4.3.2)
_GOLDEN: Final = 0.6180339887498949

Key = int | str  # what a request is called here


@dataclass(slots=True)
class _Ramp:
    start: int  # step
    end: int  # the first step it is not expected at
    prompt: int
    expected: int  # response tokens as predicted
    length: int  # those counted on


@dataclass(slots=True, eq=False)
class LookAhead:
    """One instance's coming load. Steps only grow; `M` is `kv_tokens`."""

    kv_tokens: int
    extend_ratio: float = 0.2
    answers: AnswerLengths | None = None  # how long they turn out to be; None: as expected (the paper)
    now_step: int = 0
    _ramps: dict[Key, _Ramp] = field(default_factory=dict)
    _end_sum: int = 0  # of the ramps' ends
    _constant: int = 0  # sum of prompt - start of the ramps at now_step; their sum there is this + count x step
    _count: int = 0
    _steps: list[int] = field(default_factory=list)  # at which ramps begin or end: the turns, sorted
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
        """Steps that have passed since its ramp began; 0 of an unknown one."""
        ramp = self._ramps.get(request_id)
        return 0 if ramp is None else self.now_step - ramp.start

    @property
    def tokens_left(self) -> int:
        """Response tokens still expected of everybody here."""
        return self._end_sum - len(self._ramps) * self.now_step

    def tokens_left_within(self, num_steps: int) -> int:
        """Response tokens expected in the next `num_steps` steps."""
        end = self.now_step + num_steps
        tokens = len(self._ramps) * num_steps
        for turn, count in zip(self._steps, self._counts, strict=True):
            if turn >= end:
                break
            tokens += count * (end - turn)  # so many fewer go on from there
        return tokens

    def at_most(self, num_steps: int) -> int:
        """A bound of the tokens in the cache at any of the next `num_steps` steps, without looking at each."""
        return self._constant + self._count * (self.now_step + num_steps - 1)

    def add(self, request_id: Key, prompt_tokens: int, expected_tokens: int) -> None:
        """A request was sent here. Its ramp begins now; one already there begins anew."""
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
        """It has been prefilled: what was provisional begins now. Unknown ids are none of ours."""
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

    def end(self, request_id: Key) -> None:
        """It has ended, early or not: nothing more is expected of it."""
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
        """The engine has done its steps up to `step`. Who should have ended by then is expected for another while."""
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
            if self.answers is None:
                more = max(1, math.ceil(self.extend_ratio * ramp.expected))
                later = end + more * (1 + (step - end) // more)
            else:
                later = ramp.start + self.answers.draw(ramp.expected, self._share(), step - ramp.start)
            self._constant += ramp.prompt - ramp.start  # its end has been counted, and is put right
            self._count += 1
            self._turn(later, ramp.start - ramp.prompt, -1)
            self._end_sum += later - end
            ramp.end = later
            heapq.heapreplace(ends, (later, request_id))

    def tokens(self, step: int) -> int:
        """Tokens expected in the cache at `step`, from now on."""
        num_turns = bisect_right(self._steps, step)
        constant = self._constant + sum(self._constants[:num_turns])
        count = self._count + sum(self._counts[:num_turns])
        return constant + count * max(step, self.now_step)

    def peak_ratio(self, num_steps: int, prompt_tokens: int = 0, expected_tokens: int = 0) -> float:
        """The highest U over the next `num_steps` steps, with one more such request if it is given."""
        first, last = self.now_step, self.now_step + num_steps - 1
        ends = first + expected_tokens  # the newcomer's ramp covers [first, ends)
        end_of_it = min(ends - 1, last)
        newcomer = prompt_tokens - first  # it adds this and the step
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
        """How many of the next `num_steps` steps have U above `ratio` (the scaler's question)."""
        limit, last = ratio * self.kv_tokens, self.now_step + num_steps - 1
        if self._constant + self._count * last <= limit:  # nobody ends, and still it is not
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

    def _share(self) -> float:
        """The next of shares that are spread evenly (multiples of the golden section)."""
        self._num_drawn += 1
        return self._num_drawn * _GOLDEN % 1.0

    def _turn(self, step: int, constant: int, count: int) -> None:
        """From `step` on, add these. One in the past has been counted already and is put right at once."""
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
