"""Pauses between tries of something that failed, longer after each failure in a row."""

from typing import Final

MOST_DOUBLINGS: Final = 30  # 2.0 ** 1024 overflows


def backoff_s(num_failed: int, first_s: float, most_s: float) -> float:
    """Seconds until the next try: `first_s` after the first failure, twice as long after each, `most_s` at most."""
    return min(first_s * 2.0 ** min(max(num_failed - 1, 0), MOST_DOUBLINGS), most_s)
