"""An engine with continuous batching, iteration by iteration, without visiting every iteration.

Each boundary between two steps works as in vLLM's default scheduler: prompts that fit are prefilled together, before
anybody decodes on; else everybody running emits one token; when the KV cache cannot take one more token of everybody,
the sequence admitted last gives its tokens back and is computed again later.

Between two boundaries at which any of this changes, all decode steps have the same members, so their total time has a
closed form (`StepCosts.decode_s`) and one event stands for them all. A newcomer cuts the span at the next boundary,
just where it would have been seen. `stepping=True` visits every step; the results are the same up to rounding, and a
test holds that.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain

from glowplug.simulator.costs import StepCosts


class State(IntEnum):
    """Where a sequence is."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    ABORTED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside an engine. `num_emitted` tokens of `output_tokens` are out; times are seconds, -1 unset."""

    key: int
    prompt_tokens: int
    output_tokens: int
    pace: float = 1.0  # its prompt takes so many times as long as the costs say, beside whatever slows the engine
    num_emitted: int = 0
    num_preempted: int = 0
    submitted_at: float = -1.0
    first_token_at: float = -1.0
    finished_at: float = -1.0
    state: State = State.NEW
    base: int = 0  # its context at a step of its engine is base + step
    finish_step: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            tokens = f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens"
            raise ValueError(f"sequence {self.key}: {tokens}, at least 1 each")


class What(IntEnum):
    """What happened to a sequence."""

    FIRST_TOKEN = 0
    FINISHED = 1
    PREEMPTED = 2


Outcome = tuple[What, Sequence, float]  # what, to whom, when (seconds)


class _Span(IntEnum):
    IDLE = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Bounds of one engine: tokens of KV cache, sequences at once, tokens prefilled in one step."""

    kv_tokens: int
    max_sequences: int = 256
    max_prefill_tokens: int = 2048


class BatchEngine:
    """One engine. Time only moves forward; call `advance` at `next_at_s`, or later."""

    def __init__(self, costs: StepCosts, limits: EngineLimits, *, stepping: bool = False, first_s: float = 0.0) -> None:
        self.costs, self.limits, self.stepping = costs, limits, stepping
        self._first_s = first_s  # what its first prefill takes beyond its costs
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in the order they were admitted
        self.num_steps = 0  # decode steps done, up to the present span
        self.next_at_s = math.inf
        self._span, self._start_s, self._planned = _Span.IDLE, 0.0, 0
        self._batch: list[Sequence] = []
        self._context = 0  # tokens in the KV cache at the start of the span
        self._finish: list[tuple[int, int, Sequence]] = []
        self._aborted: list[Sequence] = []
        self._slowdown = self._next_slowdown = 1.0
        self._next_costs = costs
        self._done: list[Outcome] = []

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Queue one sequence. Raises ValueError when it could never fit the KV cache."""
        whole = sequence.prompt_tokens + sequence.output_tokens
        if whole > self.limits.kv_tokens:
            raise ValueError(f"sequence {sequence.key}: {whole} tokens, the KV cache holds {self.limits.kv_tokens}")
        self._catch_up(now_s)
        sequence.submitted_at, sequence.state = now_s, State.WAITING
        could_be_next = not self.waiting and len(self.running) < self.limits.max_sequences
        self.waiting.append(sequence)
        if self._span is _Span.IDLE:
            self._begin(now_s)
        elif could_be_next:
            self._cut(now_s)

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """Its client has left: it is gone at the next boundary, and nothing is said of it."""
        self._catch_up(now_s)
        if sequence.state is State.RUNNING:
            self._aborted.append(sequence)
            self._cut(now_s)
        elif sequence.state is not State.WAITING:
            return
        elif sequence not in self._batch:  # those leave when their prefill ends
            self.waiting.remove(sequence)
        sequence.state = State.ABORTED

    def slow_down(self, ratio: float, now_s: float) -> None:
        """From the next boundary on every step takes `ratio` times as long (somebody else uses the GPU too)."""
        if not ratio > 0:
            raise ValueError(f"a slowdown of {ratio}")
        self._catch_up(now_s)
        if ratio != self._next_slowdown:
            self._next_slowdown = ratio
            self._cut(now_s)

    def limit_kv(self, kv_tokens: int, now_s: float) -> int:
        """From now on the KV cache holds `kv_tokens` (WarmServe section 4.1), or what is in use or one sequence needs,
        if that is more. Returns what it holds."""
        self._catch_up(now_s)
        self.limits = replace(self.limits, kv_tokens=max(kv_tokens, self._least_kv(now_s)))
        self._cut(now_s)
        return self.limits.kv_tokens

    def _least_kv(self, now_s: float) -> int:
        """What is in use after the step under way, and what the longest sequence needs to end at all."""
        longest = max((s.prompt_tokens + s.output_tokens for s in self.sequences()), default=0)
        return max(longest, self.kv_tokens_used(now_s) + len(self.running))

    def reshape(self, costs: StepCosts, limits: EngineLimits, now_s: float) -> None:
        """Go on with other costs and limits from the next boundary on: nothing that runs is lost. Sequences above the
        new `max_sequences` run to their end, and a cache that is fuller than the new one shrinks no further."""
        self._catch_up(now_s)
        self._next_costs, self.limits = costs, replace(limits, kv_tokens=max(limits.kv_tokens, self._least_kv(now_s)))
        if self._span is _Span.IDLE:
            self.costs = costs
        self._cut(now_s)

    def sequences(self) -> Iterator[Sequence]:
        """Everyone inside: running, in prefill, waiting."""
        return chain(self.running.values(), self._batch, self.waiting)

    def advance(self, now_s: float) -> list[Outcome]:
        """Everything that happened up to `now_s`, in order of time."""
        self._catch_up(now_s)
        done, self._done = self._done, []
        return done

    def kv_tokens_used(self, now_s: float) -> int:
        """Tokens in the KV cache after the last whole step before `now_s`."""
        if self._span is _Span.PREFILL:
            return self._context + sum(s.prompt_tokens + s.num_emitted for s in self._batch)
        return self._context + len(self.running) * self._whole_steps(now_s)

    @property
    def due_at_s(self) -> float:
        """When `advance` has something to tell: at once, when it has already."""
        return -math.inf if self._done else self.next_at_s

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.waiting) + len(self._batch)

    # spans

    def _catch_up(self, now_s: float) -> None:
        while self.next_at_s <= now_s:
            end_s = self.next_at_s
            if self._span is _Span.PREFILL:
                self._end_prefill(end_s)
            else:
                self._end_decode(end_s)
            self._begin(end_s)

    def _begin(self, now_s: float) -> None:
        self._slowdown, self.costs = self._next_slowdown, self._next_costs
        self._start_s = now_s
        num_tokens, num_tokens2 = self._admit()
        if self._batch:
            self._span = _Span.PREFILL
            pace = sum(sequence.pace for sequence in self._batch) / len(self._batch)
            took_s = self._slowdown * self.costs.prefill_s(num_tokens, num_tokens2) * pace
            self.next_at_s = now_s + took_s + self._first_s
            self._first_s = 0.0
        elif self.running:
            self._preempt(now_s)
            num = len(self.running)
            steps_that_fit = (self.limits.kv_tokens - self._context) // num
            self._span = _Span.DECODE
            self._planned = 1 if self.stepping else min(self._soonest_finish() - self.num_steps, steps_that_fit)
            self.next_at_s = now_s + self._slowdown * self.costs.decode_s(num, self._context, self._planned)
        else:
            self._span, self.next_at_s = _Span.IDLE, math.inf

    def _admit(self) -> tuple[int, int]:
        """Move who fits from the queue into the prefill batch. Returns its tokens and their squares."""
        limits, num_tokens, num_tokens2 = self.limits, 0, 0
        while self.waiting and len(self.running) + len(self._batch) < limits.max_sequences:
            size = self.waiting[0].prompt_tokens + self.waiting[0].num_emitted
            if self._batch and num_tokens + size > limits.max_prefill_tokens:
                break
            others = len(self.running) + len(self._batch)  # each of them needs one more token in the next step
            if self._context + num_tokens + size + others + 1 > limits.kv_tokens:
                break
            self._batch.append(self.waiting.popleft())
            num_tokens += size
            num_tokens2 += size * size
        return num_tokens, num_tokens2

    def _preempt(self, now_s: float) -> None:
        while self.limits.kv_tokens - self._context < len(self.running):
            _, victim = self.running.popitem()
            self._context -= victim.base + self.num_steps
            victim.num_emitted = victim.output_tokens - (victim.finish_step - self.num_steps)
            victim.num_preempted += 1
            victim.state = State.WAITING
            self.waiting.appendleft(victim)
            self._done.append((What.PREEMPTED, victim, now_s))

    def _soonest_finish(self) -> int:
        while True:
            step, _, sequence = self._finish[0]
            if sequence.state is State.RUNNING and sequence.finish_step == step:
                return step
            heapq.heappop(self._finish)

    def _end_prefill(self, end_s: float) -> None:
        batch, self._batch = self._batch, []
        for sequence in batch:
            if sequence.state is State.ABORTED:
                continue
            size = sequence.prompt_tokens + sequence.num_emitted
            sequence.num_emitted += 1
            if sequence.first_token_at < 0:
                sequence.first_token_at = end_s
                self._done.append((What.FIRST_TOKEN, sequence, end_s))
            left = sequence.output_tokens - sequence.num_emitted
            if left == 0:
                self._finished(sequence, end_s)
                continue
            sequence.state = State.RUNNING
            sequence.base = size - self.num_steps
            sequence.finish_step = self.num_steps + left
            self._context += size
            self.running[sequence.key] = sequence
            heapq.heappush(self._finish, (sequence.finish_step, sequence.key, sequence))
        self._drop_aborted()

    def _end_decode(self, end_s: float) -> None:
        self.num_steps += self._planned
        self._context += self._planned * len(self.running)
        while self._finish and self._finish[0][0] <= self.num_steps:
            step, _, sequence = heapq.heappop(self._finish)
            if sequence.state is State.RUNNING and sequence.finish_step == step:
                self._leave(sequence)
                self._finished(sequence, end_s)
        self._drop_aborted()

    def _finished(self, sequence: Sequence, end_s: float) -> None:
        sequence.num_emitted = sequence.output_tokens
        sequence.finished_at, sequence.state = end_s, State.FINISHED
        self._done.append((What.FINISHED, sequence, end_s))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self._context -= sequence.base + self.num_steps

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            self._leave(sequence)
        self._aborted.clear()

    def _whole_steps(self, now_s: float) -> int:
        """Decode steps of this span that have ended by `now_s`."""
        if self._span is not _Span.DECODE:
            return 0
        elapsed = (now_s - self._start_s) / self._slowdown
        num, context = len(self.running), self._context
        steps = self.costs.decode_steps(num, context, elapsed)
        if steps and self.costs.decode_s(num, context, steps) > elapsed:
            steps -= 1
        return min(steps, self._planned)

    def _cut(self, now_s: float) -> None:
        """End the present decode span at the boundary after `now_s`, or before the cache overflows."""
        if self._span is not _Span.DECODE:
            return
        num = len(self.running)
        steps = max(1, self.costs.decode_steps(num, self._context, (now_s - self._start_s) / self._slowdown))
        if steps < self._planned:
            self._planned = steps
            self.next_at_s = self._start_s + self._slowdown * self.costs.decode_s(num, self._context, steps)
