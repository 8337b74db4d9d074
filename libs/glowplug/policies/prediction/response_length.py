"""The expected length of an answer: from its conversation's text, corrected by this model's answers, or from those
alone.

PreServe (section 4.2) uses a fine-tuned language model. Here the length predicted from the text (length_model.py) is
multiplied by the median ratio of this model's actual to predicted lengths. The other estimate is the length of answers
to prompts about as long (powers of two): an exponentially weighted mean, or a quantile by stochastic steps. The smaller
recent error decides. A known true length (`RequestArrived.expected_tokens`) takes precedence.
"""

import math
from dataclasses import dataclass

from glowplug.domain.bounds import OutOfBounds, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthParams:
    default_tokens: int = 200
    weight: float = 0.05  # of the newest answer
    quantile: float = 0.0  # in (0, 1); 0: the mean, or with a text the median
    num_to_trust: int = 10  # answers at which a bucket counts half

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.quantile >= 1:
            raise OutOfBounds("quantile", f"{self.quantile} is not below 1")


@dataclass(slots=True)
class _Lengths:
    num: int = 0
    tokens: float = 0.0


@dataclass(slots=True)
class _Text:
    num: int = 0
    log_ratio: float = 0.0  # quantile of log(actual / predicted)
    error: float = 0.0  # recent mean error, in tokens
    history_error: float = 0.0  # ... without the text

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
    def __init__(self, params: LengthParams = LengthParams()) -> None:
        self.params = params
        self._all = _Lengths()
        self._buckets: dict[int, _Lengths] = {}
        self._text = _Text()

    def expect(self, prompt_tokens: int, max_tokens: int = 0, text_tokens: int = 0) -> int:
        """Return expected tokens, from 1 to `max_tokens` if given. `text_tokens`: predicted from the text; 0:
        not read."""
        expected = self._of_history(prompt_tokens)
        if text_tokens and self._text.error <= self._text.history_error:
            expected = self._text.expect(text_tokens)
        tokens = max(1, round(expected))
        return min(tokens, max_tokens) if max_tokens > 0 else tokens

    def learn(self, prompt_tokens: int, response_tokens: int, text_tokens: int = 0) -> None:
        if response_tokens < 1:
            return
        if text_tokens:
            self._text.learn(text_tokens, self._of_history(prompt_tokens), response_tokens, self.params)
        bucket = self._buckets.get(prompt_tokens.bit_length())
        if bucket is None:
            bucket = self._buckets[prompt_tokens.bit_length()] = _Lengths()
        quantile = self.params.quantile
        for known in (self._all, bucket):
            known.num += 1
            weight = max(self.params.weight, 1.0 / known.num)
            if not quantile or known.num == 1:
                known.tokens += weight * (response_tokens - known.tokens)
            else:  # proportional steps: lengths spread over orders of magnitude
                up = quantile if response_tokens > known.tokens else quantile - 1.0
                known.tokens = max(1.0, known.tokens * (1.0 + weight * up))

    def _of_history(self, prompt_tokens: int) -> float:
        expected = self.params.default_tokens if not self._all.num else self._all.tokens
        bucket = self._buckets.get(prompt_tokens.bit_length())
        if bucket is not None:
            share = bucket.num / (bucket.num + self.params.num_to_trust)
            expected += share * (bucket.tokens - expected)
        return expected
