"""Prompts sent no faster than the answers under way bear.

Ours, not a paper's. An engine reads every prompt it has before it goes on with its answers (vLLM's default scheduler).
A burst sent at once is read in one go, and who got a first token early in it waits for all the rest before the second:
on the mixed fleet that missed the objective for tokens of the short answers, whatever the GPU (simulated). Held here
for part of that objective, the engine takes a step between two readings, and nothing is read later for it than it would
have been behind the others. Instances that other routers send to, too, are paced by each for itself.

Where one prompt takes longer than `LONG` stretches no pace helps the answers, and prompts go as they come: held one by
one, they cost HydraServe's workload two points of its TTFT attainment (simulated).

Where first tokens are not told (answers that are no streams) nobody knows when a prompt has been read: nothing is held
while fewer than `MOSTLY` of the answers tell, and nothing for longer than `PATIENCE` times the reading it waits for.
"""

from dataclasses import dataclass

WEIGHT = 0.2  # of the newest answer
MOSTLY = 0.9
PATIENCE = 4.0
LONG = 4.0


@dataclass(slots=True)
class Reading:
    """What one instance has been sent and has not read."""

    num_prompts: int = 0
    num_tokens: int = 0
    since_s: float = 0.0  # when it began to have any
    token_s: float = 0.0  # seconds a token of a prompt takes; 0: not known
    tells: float = 0.0  # share of its answers that told their first token

    def sent(self, prompt_tokens: int, now_s: float) -> int:
        """A prompt goes there. Returns the tokens to read up to its end."""
        if not self.num_prompts:
            self.since_s = now_s
        self.num_prompts += 1
        self.num_tokens += prompt_tokens
        return self.num_tokens

    def read(self, prompt_tokens: int) -> None:
        """It has been read, or is there no more."""
        self.num_prompts -= 1
        self.num_tokens -= prompt_tokens

    def told(self, took_s: float, num_tokens: int) -> None:
        """A first token came so long after its prompt was sent, with so many to read until then."""
        newest = took_s / max(1, num_tokens)
        self.token_s += WEIGHT * (newest - self.token_s) if self.token_s else newest

    def answered(self, was_told: bool) -> None:
        """An answer is whole."""
        self.tells += WEIGHT * (was_told - self.tells) if self.tells else float(was_told)

    def would_stall(self, now_s: float, longest_s: float) -> bool:
        """Whether one more prompt like those makes it read for longer than that without a step for its answers."""
        if not self.num_prompts or not self.token_s or self.tells < MOSTLY:
            return False
        each_s = self.num_tokens / self.num_prompts * self.token_s
        if each_s > LONG * longest_s:
            return False
        left_s = self.num_tokens * self.token_s + each_s
        read_s = now_s - self.since_s
        return longest_s < read_s + left_s and read_s < PATIENCE * max(longest_s, left_s)
