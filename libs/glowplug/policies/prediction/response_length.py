"""How long an answer will be, from the lengths of earlier answers to prompts about as long.

PreServe (section 4.2) asks a fine-tuned language model, which reads the prompt. This reads its length alone, learns
while it serves and costs a microsecond: the cold-data mode of an expected response D, and what stands in where no
predictor is trained. Where the true length is known (`RequestArrived.expected_tokens`) it is not asked.

Prompts are put together by powers of two. Each bucket has an exponentially weighted mean, or a quantile found by
stochastic steps; one that has seen few answers leans on the mean of the model.
"""

from dataclasses import dataclass

from glowplug.domain.bounds import OutOfBounds, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthParams:
    default_tokens: int = 200  # of a model that has answered nothing yet
    weight: float = 0.05  # of the newest answer, once there are many
    quantile: float = 0.0  # in (0, 1): that quantile is expected; 0: the mean
    num_to_trust: int = 10  # answers after which a bucket counts for as much as the model

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.quantile >= 1:
            raise OutOfBounds("quantile", f"{self.quantile} is not below 1")


@dataclass(slots=True)
class _Lengths:
    num: int = 0
    tokens: float = 0.0

    def learn(self, tokens: int, params: LengthParams) -> None:
        self.num += 1
        weight = max(params.weight, 1.0 / self.num)
        if not params.quantile or self.num == 1:
            self.tokens += weight * (tokens - self.tokens)
            return
        # Steps in proportion to the estimate: lengths spread over orders of magnitude.
        up = params.quantile if tokens > self.tokens else params.quantile - 1.0
        self.tokens = max(1.0, self.tokens * (1.0 + weight * up))


class ResponseLengths:
    """One model's answers. Memory is one small row per power of two of prompt tokens."""

    def __init__(self, params: LengthParams = LengthParams()) -> None:
        self.params = params
        self._all = _Lengths()
        self._buckets: dict[int, _Lengths] = {}

    def expect(self, prompt_tokens: int, max_tokens: int = 0) -> int:
        """Response tokens, at least 1 and at most `max_tokens` where that is given."""
        expected = self.params.default_tokens if not self._all.num else self._all.tokens
        bucket = self._buckets.get(prompt_tokens.bit_length())
        if bucket is not None:
            share = bucket.num / (bucket.num + self.params.num_to_trust)
            expected += share * (bucket.tokens - expected)
        tokens = max(1, round(expected))
        return min(tokens, max_tokens) if max_tokens > 0 else tokens

    def learn(self, prompt_tokens: int, response_tokens: int) -> None:
        """One whole answer."""
        if response_tokens < 1:
            return
        self._all.learn(response_tokens, self.params)
        self._buckets.setdefault(prompt_tokens.bit_length(), _Lengths()).learn(response_tokens, self.params)
