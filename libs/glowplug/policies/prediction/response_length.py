"""How long an answer will be: from its conversation's text, corrected by this model's answers, or from those alone.

PreServe (section 4.2) asks a fine-tuned language model, which reads the prompt. Here what the text says
(length_model.py) is multiplied by the median ratio of this model's answers to what their texts said, which serving
teaches: models differ in how much they say. Beside it stand the lengths of earlier answers to prompts about as long;
they need no text and no training. Of the two, the one that was less far off lately is believed; before any answer the
text is. Where the true length is known (`RequestArrived.expected_tokens`) neither is asked.

Prompts are put together by powers of two. Each bucket has an exponentially weighted mean, or a quantile found by
stochastic steps; one that has seen few answers leans on the mean of the model.
"""

import math
from dataclasses import dataclass

from glowplug.domain.bounds import OutOfBounds, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthParams:
    default_tokens: int = 200  # of a model that has answered nothing yet
    weight: float = 0.05  # of the newest answer, once there are many
    quantile: float = 0.0  # in (0, 1): that quantile is expected; 0: the mean, of a text's answer the median
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


@dataclass(slots=True)
class _Text:
    """What this model's texts say, beside what its answers were."""

    num: int = 0
    log_ratio: float = 0.0  # of the actual length over the one that the text said: that quantile of it
    error: float = 0.0  # of late, in tokens
    history_error: float = 0.0  # ... of what was expected without the text

    def expect(self, text_tokens: int) -> float:
        return text_tokens * math.exp(self.log_ratio)

    def learn(self, text_tokens: int, history_tokens: float, tokens: int, params: LengthParams) -> None:
        self.num += 1
        weight = max(params.weight, 1.0 / self.num)
        self.error += weight * (abs(self.expect(text_tokens) - tokens) - self.error)
        self.history_error += weight * (abs(history_tokens - tokens) - self.history_error)
        quantile = params.quantile or 0.5
        is_longer = tokens > self.expect(text_tokens)
        self.log_ratio += weight * (quantile if is_longer else quantile - 1.0)


class ResponseLengths:
    """One model's answers. Memory is one small row per power of two of prompt tokens."""

    def __init__(self, params: LengthParams = LengthParams()) -> None:
        self.params = params
        self._all = _Lengths()
        self._buckets: dict[int, _Lengths] = {}
        self._text = _Text()

    def expect(self, prompt_tokens: int, max_tokens: int = 0, text_tokens: int = 0) -> int:
        """Response tokens, at least 1 and at most `max_tokens` where that is given. `text_tokens`: what the text says;
        0: it was not read."""
        expected = self._of_history(prompt_tokens)
        if text_tokens and self._text.error <= self._text.history_error:
            expected = self._text.expect(text_tokens)
        tokens = max(1, round(expected))
        return min(tokens, max_tokens) if max_tokens > 0 else tokens

    @property
    def text_ratio(self) -> float:
        """By what the length that a text says is multiplied: the median ratio of this model's answers to it."""
        return math.exp(self._text.log_ratio)

    def learn(self, prompt_tokens: int, response_tokens: int, text_tokens: int = 0) -> None:
        """One whole answer, and what its text had said."""
        if response_tokens < 1:
            return
        if text_tokens:
            self._text.learn(text_tokens, self._of_history(prompt_tokens), response_tokens, self.params)
        self._all.learn(response_tokens, self.params)
        self._buckets.setdefault(prompt_tokens.bit_length(), _Lengths()).learn(response_tokens, self.params)

    def _of_history(self, prompt_tokens: int) -> float:
        expected = self.params.default_tokens if not self._all.num else self._all.tokens
        bucket = self._buckets.get(prompt_tokens.bit_length())
        if bucket is not None:
            share = bucket.num / (bucket.num + self.params.num_to_trust)
            expected += share * (bucket.tokens - expected)
        return expected
