"""An engine with continuous batching, exact per iteration without visiting each.

Boundaries between steps work as in vLLM's default scheduler: fitting prompts are prefilled together before any
decoding; otherwise each running sequence emits one token. When the KV cache lacks room for that, the last admitted
sequence is preempted and recomputed later.

Decode steps with the same members have a closed-form total time (`StepCosts.decode_s`), so one event covers a span,
which a new sequence ends at the next boundary. `stepping=True` visits every step; a test holds the results equal up to
rounding.

With `block_tokens` the cache keeps prompts and skips known beginnings (vLLM's automatic prefix caching); with `slots`
it keeps each slot's last sequence instead, as llama.cpp does (policies/routing/prefix_index.py).

With `chunk_tokens` it works as vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py): a step decodes one token per
running sequence and reads pieces of prompts in order of admission, `chunk_tokens` in all, decodes included; with
several requests, at most `long_prefill_tokens` of each. A step costs the larger constant once, and both variable parts.
A sequence whose client leaves is dropped at its end.

The emulated engine runs this model by the wall clock (emulated/engine.py).
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain

from glowplug.policies.routing.prefix_index import SIMILARITY, PrefixIndex, Slots, num_alike
from glowplug_lab.simulator.costs import StepCosts


class State(IntEnum):
    NEW = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    ABORTED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """Times are seconds, -1 unset."""

    key: int
    prompt_tokens: int
    output_tokens: int
    pace: float = 1.0  # factor on its prefill time
    prefix: tuple[int, ...] = ()  # prompt blocks
    cached_tokens: int = 0  # of the prompt, cached at admission: not computed
    num_emitted: int = 0
    num_preempted: int = 0
    num_read: int = 0  # in earlier pieces
    submitted_at: float = -1.0
    first_token_at: float = -1.0
    finished_at: float = -1.0
    state: State = State.NEW
    base: int = 0  # context at a step is base + step
    finish_step: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            tokens = f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens"
            raise ValueError(f"sequence {self.key}: {tokens}, at least 1 each")


class What(IntEnum):
    FIRST_TOKEN = 0
    FINISHED = 1
    PREEMPTED = 2


Outcome = tuple[What, Sequence, float]  # kind, sequence, seconds


class _Span(IntEnum):
    IDLE = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    kv_tokens: int
    max_sequences: int = 256
    max_prefill_tokens: int = 2048
    chunk_tokens: int = 0  # per step with decoding; 0: whole prompts, no decoding
    long_prefill_tokens: int = 0  # per prompt, beside others; 0: no limit
    block_tokens: int = 0  # per block of the prefix cache; 0: none
    slots: bool = False  # cache each slot's last sequence, not blocks


class BatchEngine:
    """Time only moves forward; call `advance` at or after `next_at_s`."""

    def __init__(self, costs: StepCosts, limits: EngineLimits, *, stepping: bool = False, first_s: float = 0.0) -> None:
        self.costs, self.limits, self.stepping = costs, limits, stepping
        self._first_s = first_s  # beyond its costs
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in order of admission
        self.num_steps = 0  # before the present span
        self.next_at_s = math.inf
        self._span, self._start_s, self._planned = _Span.IDLE, 0.0, 0
        self._batch: list[Sequence] = []
        self._pieces: list[tuple[Sequence, int]] = []  # with the tokens to read
        self._context = 0  # KV tokens at the start of the span
        self._finish: list[tuple[int, int, float, Sequence]] = []  # keys may recur
        self._aborted: list[Sequence] = []
        self._slowdown = self._next_slowdown = 1.0
        self._next_costs = costs
        self._done: list[Outcome] = []
        self._cache = PrefixIndex()
        self._slots = Slots(limits.max_sequences)

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Raises ValueError for a sequence that could never fit."""
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
        """Drop a sequence at the next boundary, without an outcome."""
        self._catch_up(now_s)
        if sequence.state is State.RUNNING:
            self._aborted.append(sequence)
            self._cut(now_s)
        elif sequence.state is not State.WAITING:
            return
        elif sequence not in self._batch:  # others leave when prefill ends
            self.waiting.remove(sequence)
        sequence.state = State.ABORTED

    def num_emitted(self, sequence: Sequence, now_s: float) -> int:
        """Includes the last whole step."""
        self._catch_up(now_s)
        if sequence.state is not State.RUNNING:
            return sequence.num_emitted
        return sequence.output_tokens - (sequence.finish_step - self.num_steps - self._whole_steps(now_s))

    def slow_down(self, ratio: float, now_s: float) -> None:
        """`ratio` stretches steps from the next boundary on."""
        if not ratio > 0:
            raise ValueError(f"a slowdown of {ratio}")
        self._catch_up(now_s)
        if ratio != self._next_slowdown:
            self._next_slowdown = ratio
            self._cut(now_s)

    def limit_kv(self, kv_tokens: int, now_s: float) -> int:
        """Limit the KV cache (WarmServe section 4.1), never below present use or one sequence's need. Returns the new
        capacity in tokens."""
        self._catch_up(now_s)
        self.limits = replace(self.limits, kv_tokens=max(kv_tokens, self._least_kv(now_s)))
        self._cut(now_s)
        return self.limits.kv_tokens

    def _least_kv(self, now_s: float) -> int:
        longest = max((s.prompt_tokens + s.output_tokens for s in self.sequences()), default=0)
        return max(longest, self.kv_tokens_used(now_s) + len(self.running))

    def reshape(self, costs: StepCosts, limits: EngineLimits, now_s: float) -> None:
        """Apply at the next boundary. Sequences above `max_sequences` run to their end; the cache never shrinks below
        present use."""
        self._catch_up(now_s)
        self._slots.num_slots = limits.max_sequences
        self._next_costs, self.limits = costs, replace(limits, kv_tokens=max(limits.kv_tokens, self._least_kv(now_s)))
        if self._span is _Span.IDLE:
            self.costs = costs
        self._cut(now_s)

    def recompute(self, now_s: float) -> None:
        """Drop the step under way and the whole KV cache, and compute all again."""
        self._catch_up(now_s)
        self._decoded(self._whole_steps(now_s), now_s)
        self._drop_aborted()
        for sequence in reversed(self._batch):
            self._slots.free(sequence.key)
            if sequence.state is not State.ABORTED:
                self.waiting.appendleft(sequence)
        self._batch = []
        while self.running:
            self._push_back(now_s)
        self._begin(now_s)

    def kv_tokens_read(self) -> dict[Sequence, int]:
        """At the last boundary."""
        reading = {sequence: sequence.num_read for sequence in self._batch}
        return {sequence: sequence.base + self.num_steps for sequence in self.running.values()} | reading

    def sequences(self) -> Iterator[Sequence]:
        return chain(self.running.values(), self._batch, self.waiting)

    def advance(self, now_s: float) -> list[Outcome]:
        """Return outcomes since the last call, in order of time."""
        self._catch_up(now_s)
        done, self._done = self._done, []
        return done

    def kv_tokens_used(self, now_s: float) -> int:
        if self._span is _Span.PREFILL:
            return self._context + self._num_reserved()
        return self._context + len(self.running) * self._whole_steps(now_s)

    @property
    def num_reading(self) -> int:
        """Tokens of pieces in the step under way."""
        return sum(num for _, num in self._pieces)

    @property
    def due_at_s(self) -> float:
        """When `advance` has an outcome; -inf if now."""
        return -math.inf if self._done else self.next_at_s

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.waiting) + len(self._batch)

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
        num_tokens, num_tokens2 = self._cut_pieces(now_s) if self.limits.chunk_tokens else self._admit()
        if self._batch:
            self._span = _Span.PREFILL
            pace = sum(sequence.pace for sequence in self._batch) / len(self._batch)
            took_s = self.costs.prefill_s(num_tokens, num_tokens2) * pace
            if self.limits.chunk_tokens and self.running:
                took_s += self.costs.decode_s(len(self.running), self._context)
                took_s -= min(self.costs.prefill_base_s * pace, self.costs.decode_base_s)
            self.next_at_s = now_s + self._slowdown * took_s + self._first_s
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
        """Return the batch's tokens and the sum of squared lengths."""
        limits, num_held, num_tokens, num_tokens2 = self.limits, 0, 0, 0
        while self.waiting and len(self.running) + len(self._batch) < limits.max_sequences:
            size = self.waiting[0].prompt_tokens + self.waiting[0].num_emitted
            if self._batch and num_tokens + size > limits.max_prefill_tokens:
                break
            others = len(self.running) + len(self._batch)  # one more token each in the next step
            if self._context + num_held + size + others + 1 > limits.kv_tokens:
                break
            sequence = self.waiting.popleft()
            self._batch.append(sequence)
            num_held += size
            if limits.block_tokens and sequence.prefix:
                self._look_up(sequence)
            num_tokens += size - sequence.cached_tokens
            num_tokens2 += size * size - sequence.cached_tokens**2
        return num_tokens, num_tokens2

    def _look_up(self, sequence: Sequence) -> None:
        """Keep the blocks of prompts, not of answers; running requests take no room from others' blocks."""
        size = self.limits.block_tokens
        if self.limits.slots:
            least = SIMILARITY * sequence.prompt_tokens / size
            num_held = num_alike(self._slots.take(sequence.key, sequence.prefix, least), sequence.prefix)
        else:
            num_held = self._cache.num_held("", sequence.prefix)
            self._cache.add("", sequence.prefix, self.limits.kv_tokens // size)
        sequence.cached_tokens = min(sequence.prompt_tokens - 1, size * num_held)

    def _cut_pieces(self, now_s: float) -> tuple[int, int]:
        """Return the next step's tokens and the growth of squared lengths."""
        limits = self.limits
        for sequence in self._batch:
            if sequence.state is State.ABORTED:
                self._slots.free(sequence.key)
        self._batch = [sequence for sequence in self._batch if sequence.state is not State.ABORTED]
        self._preempt(now_s)
        budget = max(1, limits.chunk_tokens - len(self.running))
        most = (limits.long_prefill_tokens if self.num_sequences > 1 else 0) or limits.chunk_tokens
        while self.waiting and len(self.running) + len(self._batch) < limits.max_sequences:
            if sum(min(_unread(sequence), most) for sequence in self._batch) >= budget:
                break
            size = self.waiting[0].prompt_tokens + self.waiting[0].num_emitted
            others = len(self.running) + len(self._batch)  # one more token each in the next step
            if self._context + self._num_reserved() + size + others + 1 > limits.kv_tokens:
                break
            sequence = self.waiting.popleft()
            if limits.block_tokens and sequence.prefix:
                self._look_up(sequence)
            sequence.num_read = sequence.cached_tokens
            self._batch.append(sequence)
        left, num_tokens2, self._pieces = budget, 0, []
        for sequence in self._batch:
            num = min(_unread(sequence), left, most)
            left -= num
            num_tokens2 += num * (num + 2 * sequence.num_read)
            self._pieces.append((sequence, num))
        return budget - left, num_tokens2

    def _num_reserved(self) -> int:
        return sum(sequence.prompt_tokens + sequence.num_emitted for sequence in self._batch)

    def _preempt(self, now_s: float) -> None:
        while self.limits.kv_tokens - self._context - self._num_reserved() < len(self.running):
            self._push_back(now_s)

    def _push_back(self, now_s: float) -> None:
        _, victim = self.running.popitem()
        self._context -= victim.base + self.num_steps
        victim.num_emitted = victim.output_tokens - (victim.finish_step - self.num_steps)
        victim.num_preempted += 1
        victim.state = State.WAITING
        self._slots.free(victim.key)
        self.waiting.appendleft(victim)
        self._done.append((What.PREEMPTED, victim, now_s))

    def _soonest_finish(self) -> int:
        while True:
            step, _, _, sequence = self._finish[0]
            if sequence.state is State.RUNNING and sequence.finish_step == step:
                return step
            heapq.heappop(self._finish)

    def _end_prefill(self, end_s: float) -> None:
        batch, self._batch = self._batch, []
        if self.limits.chunk_tokens:
            self._decoded(1, end_s)
            for sequence, num in self._pieces:
                sequence.num_read += num
            self._batch = [sequence for sequence in batch if _unread(sequence)]
            batch = [sequence for sequence in batch if not _unread(sequence)]
        for sequence in batch:
            if sequence.state is State.ABORTED:
                self._slots.free(sequence.key)
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
            heapq.heappush(self._finish, (sequence.finish_step, sequence.key, sequence.submitted_at, sequence))
        self._drop_aborted()

    def _end_decode(self, end_s: float) -> None:
        self._decoded(self._planned, end_s)
        self._drop_aborted()

    def _decoded(self, num_steps: int, end_s: float) -> None:
        self.num_steps += num_steps
        self._context += num_steps * len(self.running)
        while self._finish and self._finish[0][0] <= self.num_steps:
            step, _, _, sequence = heapq.heappop(self._finish)
            if sequence.state is State.RUNNING and sequence.finish_step == step:
                self._leave(sequence)
                self._finished(sequence, end_s)

    def _finished(self, sequence: Sequence, end_s: float) -> None:
        sequence.num_emitted = sequence.output_tokens
        sequence.finished_at, sequence.state = end_s, State.FINISHED
        self._slots.free(sequence.key)
        self._done.append((What.FINISHED, sequence, end_s))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.key]
        self._context -= sequence.base + self.num_steps

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            self._leave(sequence)
            self._slots.free(sequence.key)
        self._aborted.clear()

    def _whole_steps(self, now_s: float) -> int:
        if self._span is not _Span.DECODE:
            return 0
        elapsed = (now_s - self._start_s) / self._slowdown
        num, context = len(self.running), self._context
        steps = self.costs.decode_steps(num, context, elapsed)
        if steps and self.costs.decode_s(num, context, steps) > elapsed:
            steps -= 1
        return min(steps, self._planned)

    def _cut(self, now_s: float) -> None:
        if self._span is not _Span.DECODE:
            return
        num = len(self.running)
        steps = max(1, self.costs.decode_steps(num, self._context, (now_s - self._start_s) / self._slowdown))
        if steps < self._planned:
            self._planned = steps
            self.next_at_s = self._start_s + self._slowdown * self.costs.decode_s(num, self._context, steps)


def _unread(sequence: Sequence) -> int:
    return sequence.prompt_tokens + sequence.num_emitted - sequence.num_read
