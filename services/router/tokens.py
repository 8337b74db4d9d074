"""Token counts from the end of an answer, without parsing the answer."""

import re

_USAGE = (
    re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)'),
    re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)'),
)
_TIMINGS = (re.compile(rb'"prompt_n"\s*:\s*(\d+)'), re.compile(rb'"predicted_n"\s*:\s*(\d+)'))
_CACHED = re.compile(rb'"cache_n"\s*:\s*(\d+)')  # prompt tokens llama.cpp did not have to read again
TAIL_BYTES = 4096


def count(tail: bytes, num_events: int) -> tuple[int, int, bool]:
    """(prompt tokens, response tokens, exact) from the last bytes of an answer: OpenAI's `usage`, else llama.cpp's
    `timings`; when it has neither, one token per SSE event, which is not exact."""
    if b'"usage"' in tail and (found := _find(_USAGE, tail)):
        return *found, True
    if b'"timings"' in tail and (found := _find(_TIMINGS, tail)):
        cached = _CACHED.search(tail, max(len(tail) - TAIL_BYTES, 0))
        return found[0] + (int(cached[1]) if cached else 0), found[1], True
    return 0, num_events, False


def _find(patterns: tuple[re.Pattern[bytes], re.Pattern[bytes]], tail: bytes) -> tuple[int, int] | None:
    start = max(len(tail) - TAIL_BYTES, 0)
    prompt, response = (pattern.search(tail, start) for pattern in patterns)
    if prompt is None and response is None:
        return None
    return int(prompt[1]) if prompt else 0, int(response[1]) if response else 0
