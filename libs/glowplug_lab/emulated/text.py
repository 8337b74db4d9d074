"""Words, counts and vectors that depend only on their input."""

import math
import random
import zlib
from collections.abc import Iterator

LABEL = "[emulated]"
_BYTES_PER_TOKEN = 4
_SENTENCES = (
    "the model speaks of light and slow water while a small engine wakes warms and waits for one more word "
    "each token takes its turn on a quiet clock and nothing here was thought only timed"
)
_WORDS = tuple(_SENTENCES.split())


def token_ids(text: str) -> list[int]:
    """One id per four bytes: not a tokenizer."""
    raw = text.encode("utf-8", "surrogatepass")
    return [zlib.crc32(raw[i : i + _BYTES_PER_TOKEN]) % 32_000 for i in range(0, len(raw), _BYTES_PER_TOKEN)]


def count_tokens(text: str) -> int:
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN))


def natural_length(prompt: str, seed: int) -> int:
    """16 to 256, by prompt and seed."""
    return 16 + zlib.crc32(prompt.encode("utf-8", "surrogatepass"), seed & 0xFFFFFFFF) % 241


def answer_tokens(prompt: str, seed: int, echo: bool = False) -> Iterator[str]:
    yield LABEL
    if echo:
        for word in prompt.split():
            yield f" {word}"
    state = zlib.crc32(prompt.encode("utf-8", "surrogatepass"), seed & 0xFFFFFFFF)
    while True:
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        yield f" {_WORDS[(state >> 8) % len(_WORDS)]}"


def num_begun(prompt: str, seed: int, begun: str, echo: bool = False) -> int:
    """Tokens of the answer in `begun`, or 0."""
    num_tokens, length = 0, 0
    for token in answer_tokens(prompt, seed, echo):
        if length == len(begun):
            return num_tokens
        if not begun.startswith(token, length):
            return 0
        num_tokens, length = num_tokens + 1, length + len(token)
    raise AssertionError("tokens are endless")


def embedding(text: str, num_dimensions: int) -> list[float]:
    draw = random.Random(zlib.crc32(text.encode("utf-8", "surrogatepass")))
    vector = [draw.gauss(0.0, 1.0) for _ in range(num_dimensions)]
    norm = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / norm for value in vector]
