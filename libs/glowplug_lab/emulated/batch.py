"""Choose the sequences of an engine step: continuous batching over paged KV memory, in vLLM's V1 order. Pure.

Running sequences come first, each with a token (decode) or the next piece of its prompt; then the waiting queue, within
seats, step budget and blocks. A decode without a free block preempts the youngest running sequence.
"""

from collections import deque
from dataclasses import dataclass, field

from glowplug_lab.emulated.profiles import Profile

BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` tokens have KV; `num_generated` went to the client."""

    sequence_id: str
    num_prompt: int
    num_wanted: int
    num_computed: int = 0
    num_generated: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0

    @property
    def num_known(self) -> int:
        return self.num_prompt + self.num_generated

    @property
    def is_decoding(self) -> bool:
        return self.num_generated > 0 and self.num_computed == self.num_known - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    pieces: dict[Sequence, int]
    seconds: float
    num_prefill_tokens: int


@dataclass(slots=True, kw_only=True)
class Batch:
    """Invariant: `num_used_blocks` is the sum over running sequences, never above the total."""

    profile: Profile
    num_blocks: int
    max_running: int
    max_step_tokens: int = 2048
    long_prefill_tokens: int = 0  # with other requests; 0: no limit
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    num_used_blocks: int = 0
    num_preemptions: int = 0
    admitting: bool = True

    @property
    def kv_usage_ratio(self) -> float:
        return self.num_used_blocks / self.num_blocks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ignores unknown sequences."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self) -> Step | None:
        """Take blocks for the next step; `commit` follows when its time has passed."""
        pieces: dict[Sequence, int] = {}
        budget = self.max_step_tokens
        preempted_before = self.num_preemptions
        most = (self.long_prefill_tokens if len(self.running) + len(self.waiting) > 1 else 0) or budget
        for sequence in list(self.running):
            if sequence not in self.running or budget == 0:
                continue
            piece = min(sequence.num_known - sequence.num_computed, budget, most)
            if self._grow(sequence, piece):
                pieces[sequence] = piece
                budget -= piece
        pieces = {sequence: piece for sequence, piece in pieces.items() if sequence in self.running}
        can_admit = self.admitting and self.num_preemptions == preempted_before
        while can_admit and self.waiting and budget and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            piece = min(sequence.num_known, budget, most)
            if not self._take(sequence, _blocks(sequence.num_known + 1)):  # whole prompt: no starvation
                break
            self.running.append(self.waiting.popleft())
            pieces[sequence] = piece
            budget -= piece
        return self._cost(pieces) if pieces else None

    def commit(self, step: Step) -> list[Sequence]:
        """Return the sequences that got a token, in running order."""
        emitted = []
        for sequence, piece in step.pieces.items():
            if sequence not in self.running:
                continue
            sequence.num_computed += piece
            if sequence.num_computed == sequence.num_known:
                sequence.num_generated += 1
                emitted.append(sequence)
        return emitted

    def _cost(self, pieces: dict[Sequence, int]) -> Step:
        decoding = [sequence for sequence in pieces if sequence.is_decoding]
        prefill = {sequence: piece for sequence, piece in pieces.items() if not sequence.is_decoding}
        tok = sum(prefill.values())
        sq = sum((s.num_computed + piece) ** 2 - s.num_computed**2 for s, piece in prefill.items())
        ctx = sum(sequence.num_known for sequence in decoding)
        seconds = self.profile.step_s(tok=tok, sq=sq, num_decoding=len(decoding), ctx=ctx)
        return Step(pieces=pieces, seconds=seconds, num_prefill_tokens=tok)

    def _grow(self, sequence: Sequence, piece: int) -> bool:
        """Preempts the youngest as needed."""
        needed = _blocks(sequence.num_computed + piece)
        while not self._take(sequence, needed):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, num_blocks: int) -> bool:
        more = max(0, num_blocks - sequence.num_blocks)
        if more > self.num_blocks - self.num_used_blocks:
            return False
        sequence.num_blocks += more
        self.num_used_blocks += more
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.num_used_blocks -= sequence.num_blocks
        sequence.num_blocks = 0


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)
