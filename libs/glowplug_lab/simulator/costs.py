"""Time of an engine step: affine in tokens, sequences and context, fitted to published profiles.

Least squares over measured profiles of each model and GPU, for batch x length <= 2048 tokens (2-11 % mean error). `tok`
tokens and `sq` squared prompt lengths of a prefill batch, `batch` sequences and `ctx` tokens of context of a decode
step:

    prefill_s = base + per_token tok + per_token2 sq          decode_s = base + per_sequence batch + per_context ctx
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    prefill_base_s: float
    prefill_s_per_token: float
    prefill_s_per_token2: float = 0.0
    decode_base_s: float
    decode_s_per_sequence: float = 0.0
    decode_s_per_context: float = 0.0
    num_stages: int = 1  # they prefill different prompts at once

    def prefill_s(self, num_tokens: int, num_tokens2: int) -> float:
        """`num_tokens2`: sum of the prompts' squared lengths.

        On s stages, n equal prompts, each a micro-batch, take (s + n - 1) / (s n) of their time one after the other; a
        single one takes as long as on one GPU.
        """
        per_token = self.prefill_s_per_token * num_tokens + self.prefill_s_per_token2 * num_tokens2
        if self.num_stages > 1 and num_tokens:
            longest = min(1.0, num_tokens2 / (num_tokens * num_tokens))  # 1/n for equal prompts
            per_token *= (1 + (self.num_stages - 1) * longest) / self.num_stages
        return self.prefill_base_s + per_token

    def decode_s(self, num_sequences: int, num_context: int, num_steps: int = 1) -> float:
        """Each sequence grows by one token per step."""
        first = (
            self.decode_base_s + self.decode_s_per_sequence * num_sequences + self.decode_s_per_context * num_context
        )
        growth = self.decode_s_per_context * num_sequences
        return num_steps * first + growth * (num_steps * (num_steps - 1) / 2)

    def decode_steps(self, num_sequences: int, num_context: int, elapsed_s: float) -> int:
        """The fewest whole steps that take at least `elapsed_s`."""
        if elapsed_s <= 0:
            return 0
        first = self.decode_s(num_sequences, num_context)
        half = self.decode_s_per_context * num_sequences / 2
        if half > 0:
            b = first - half
            guess = math.ceil((math.sqrt(b * b + 4 * half * elapsed_s) - b) / (2 * half))
        else:
            guess = math.ceil(elapsed_s / first)
        while guess > 0 and self.decode_s(num_sequences, num_context, guess - 1) >= elapsed_s:
            guess -= 1
        while self.decode_s(num_sequences, num_context, guess) < elapsed_s:
            guess += 1
        return guess

    def scaled(self, ratio: float) -> "StepCosts":
        terms = {one.name: getattr(self, one.name) * ratio for one in fields(self) if one.name != "num_stages"}
        return replace(self, **terms)

    def pipelined(self, num_stages: int, hop_s: float) -> "StepCosts":
        """The costs over `num_stages` GPUs with nothing else on them (HydraServe Eq. 2, w = s).

        A token takes `num_stages` hops, the first token one fewer (erratum E13). Stages work on different
        micro-batches, so terms that grow with the batch are divided by `num_stages`.
        """
        if num_stages == 1:
            return self
        return replace(
            self,
            prefill_base_s=self.prefill_base_s + hop_s * (num_stages - 1),
            decode_base_s=self.decode_base_s + hop_s * num_stages,
            decode_s_per_sequence=self.decode_s_per_sequence / num_stages,
            decode_s_per_context=self.decode_s_per_context / num_stages,
            num_stages=num_stages,
        )

    @classmethod
    def of_ms(cls, prefill: tuple[float, float, float], decode: tuple[float, float, float]) -> "StepCosts":
        """Milliseconds. `prefill`: base, per token, per token squared; `decode`: base, per sequence, per token of
        context."""
        (base, token, token2), (step, sequence, context) = (
            [term / 1e3 for term in terms] for terms in (prefill, decode)
        )
        return cls(
            prefill_base_s=base, prefill_s_per_token=token, prefill_s_per_token2=token2,
            decode_base_s=step, decode_s_per_sequence=sequence, decode_s_per_context=context,
        )  # fmt: skip


FITTED_MS: Final = {
    ("llama-2-7b", "a10"): ((17.5, 0.1968, 5.2e-6), (32.1, 0.231, 1.04e-3)),
    ("llama-2-7b", "a100"): ((7.5, 0.0686, 1.1e-6), (11.8, 0.154, 4.6e-4)),
    ("llama-2-7b", "h800"): ((7.3, 0.0207, 0.0), (9.1, 0.110, 0.0)),
    ("llama-2-13b", "a100"): ((15.4, 0.1193, 0.0), (20.4, 0.196, 3.0e-4)),
    ("llama-2-13b", "h100"): ((8.6, 0.0380, 0.0), (12.9, 0.096, 0.0)),
    ("qwen2.5-7b", "a10"): ((19.1, 0.2016, 8.9e-6), (33.9, 0.160, 0.0)),
    ("qwen2.5-7b", "a100"): ((8.2, 0.0570, 0.0), (12.2, 0.117, 3.3e-4)),
    ("qwen2.5-7b", "h100"): ((6.7, 0.0199, 0.0), (9.1, 0.071, 0.0)),
}
"""(model, GPU) at tensor parallelism 1 -> prefill and decode, as `StepCosts.of_ms` takes them."""
FITTED: Final = {profile: StepCosts.of_ms(*terms) for profile, terms in FITTED_MS.items()}
