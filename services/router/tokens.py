"""Token counts from the end of an answer, without parsing the answer."""

import re

_USAGE = (
    re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)'),
    re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)'),
)
_TIMINGS = (re.compile(rb'"prompt_n"\s*:\s*(\d+)'), re.compile(rb'"predicted_n"\s*:\s*(\d+)'))
# Of Anthropic's usage, which counts what was read from a cache and written to one apart from the rest of the prompt.
_BESIDE = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"cache_n"\s*:\s*(\d+)')  # prompt tokens llama.cpp did not have to read again
TAIL_BYTES = 4096


def count(tail: bytes, num_events: int) -> tuple[int, int, bool]:
    """(prompt tokens, response tokens, exact) from the last bytes of an answer (and the first of a stream whose prompt
    is counted there): its `usage`, else llama.cpp's `timings`; when it has neither, one token per SSE event, which is
    not exact. What is said last counts."""
    if b'"usage"' in tail and (found := _find(_USAGE, tail)):
        return found[0] + _beside(tail), found[1], True
    if b'"timings"' in tail and (found := _find(_TIMINGS, tail)):
        cached = _CACHED.search(tail)
        return found[0] + (int(cached[1]) if cached else 0), found[1], True
    return 0, num_events, False


def _beside(tail: bytes) -> int:
    """Prompt tokens that Anthropic's usage counts apart. It may be said twice, at the beginning and at the end."""
    if b'_input_tokens"' not in tail:
        return 0
    last = {match[0].partition(b":")[0]: int(match[1]) for match in _BESIDE.finditer(tail)}
    return sum(last.values())


def _find(patterns: tuple[re.Pattern[bytes], re.Pattern[bytes]], tail: bytes) -> tuple[int, int] | None:
    prompt, response = (pattern.findall(tail) for pattern in patterns)
    if not prompt and not response:
        return None
    return int(prompt[-1]) if prompt else 0, int(response[-1]) if response else 0
