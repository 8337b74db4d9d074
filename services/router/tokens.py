"""Token counts from the end of an answer, without parsing the answer."""

import re

_COMPLETION = re.compile(rb'"(?:completion_tokens|predicted_n|output_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|prompt_n|input_tokens)"\s*:\s*(\d+)')
TAIL_BYTES = 4096


def count(tail: bytes, num_events: int) -> tuple[int, int, bool]:
    """(prompt tokens, response tokens, exact) from the last bytes of an answer: OpenAI's `usage` or llama.cpp's
    `timings` when it is there, else one token per SSE event, which is not exact."""
    if b'"usage"' in tail or b'"timings"' in tail:
        tail = tail[-TAIL_BYTES:]
        prompt, completion = _PROMPT.search(tail), _COMPLETION.search(tail)
        if prompt or completion:
            return int(prompt[1]) if prompt else 0, int(completion[1]) if completion else 0, True
    return 0, num_events, False
