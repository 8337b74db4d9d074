"""Phrase the reasons of decisions."""

from collections.abc import Sequence

STATE_WORDS = {"swapped_out": "asleep"}  # shown to people
MOST_NAMED = 3  # of a list; others are counted
OUTDATED = "its model has been declared anew since its start"


def counted(num: int, noun: str) -> str:
    """'no request', '1 request', '2 requests'."""
    return f"{num or 'no'} {noun}" if num <= 1 else f"{num} {noun}s"


def doing(num: int, noun: str, verb: str) -> str:
    """'no request waits', '1 request waits', '2 requests wait'. `verb`: third person."""
    return f"{counted(num, noun)} {verb if num <= 1 else verb.removesuffix('s')}"


def listed(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c', 'a, b, c and 2 more'."""
    shown, more = list(names[:MOST_NAMED]), len(names) - MOST_NAMED
    if more > 0:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""
