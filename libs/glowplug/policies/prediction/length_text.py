"""What a conversation says of the length of its next answer: numbers, and hashes of words.

PreServe (section 4.2) has a language model read the prompt. A conversation says more: how long its answers have been so
far, which most requests bring with them, and a few words ("continue", "in one sentence", "500 words"). Both cost some
tens of microseconds, whatever the text's length: long texts are read at their two ends.

Nothing of a text can be had back from what is returned here, and none of it is to be logged all the same.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple
from zlib import crc32

CHARS_PER_TOKEN: Final = 4.3  # of English, on average
NUM_BUCKETS: Final = 1 << 18  # of hashed words
FIRST_CHARS, LAST_CHARS = 900, 400  # that are read of the text to be answered
EARLIER_CHARS: Final = 250  # ... of the one before, and of the first
EDGE_CHARS: Final = 100  # ... of each end of the last answer
NUM_EARLIER: Final = 16  # turns that are looked back at
_WORD: Final = re.compile(r"[^\W_]+(?:'[a-z]+)?|[^\w\s]")
_AMOUNT: Final = re.compile(r"\b(\d{1,4})[ -]*(word|char|para|page|sentence|line|min)?")
_TOKENS_OF: Final = {
    "word": 1.3,
    "char": 0.25,
    "para": 80.0,
    "page": 400.0,
    "sentence": 25.0,
    "line": 12.0,
    "min": 150.0,
}
_ASKS: Final = tuple(
    re.compile(pattern).search
    for pattern in (
        r"\bcontinue\b|\bgo on\b|\bkeep going\b|\bmore\b$",
        r"\bshort(er|en)?\b|\bbrief|concise|\bone (word|sentence|line)\b|\bonly\b",
        r"\bdetail|\blong(er)?\b|comprehensive|in.depth|essay|article|blog|story|chapter|report",
        r"\bcode\b|function|script|python|javascript|java\b|html|css|sql|class\b|implement",
        r"\blist\b|ideas|examples|bullet|steps|table",
        r"rewrite|rephrase|translate|paraphrase|improve|proofread|correct",
        r"summar|tl;?dr|key points",
        r"\bwhat is\b|\bwho\b|\bwhen\b|\bwhich\b|\bis it\b|\bare there\b|\bcan you\b",
        r"\bwhy\b|\bhow\b|explain",
        r"\bthank|\bthanks\b|\bok(ay)?\b|\bgreat\b|\bhello\b|\bhi\b|\byes\b|\bno\b",
        r"\berror\b|exception|traceback|bug|fix",
        r"wait|say (only|just)|reply with|respond with|acknowledge|do not|don't",
    )
)
NUM_NUMBERS: Final = 30 + len(_ASKS)
_NONE: Final = -1.0  # of what a conversation does not have yet


class Turn(NamedTuple):
    """One message. `answers`: the model's own."""

    text: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """`numbers`: NUM_NUMBERS of them; `words`: hashes below NUM_BUCKETS, each once."""

    numbers: list[float]
    words: set[int]
    has_answers: bool


def describe(turns: Sequence[Turn]) -> Described:
    """Of a conversation whose last turn is to be answered. Raises ValueError for none."""
    if not turns:
        raise ValueError("a conversation has at least one turn")
    text = turns[-1].text
    if len(text) > FIRST_CHARS + LAST_CHARS:
        read = f"{text[:FIRST_CHARS]} \0 {text[-LAST_CHARS:]}".lower()
    else:
        read = text.lower()
    lately = turns[-NUM_EARLIER - 1 : -1]
    answers = [turn.text for turn in lately if turn.answers]
    asked = [turn.text for turn in lately if not turn.answers]
    numbers = [*_of_text(text, read), float(len(turns)), *_of_answers(answers), *_of_asked(text, asked)]
    numbers.append(_log_tokens(sum(len(turn.text) for turn in turns[-64:])))
    numbers += _of_wishes(read)
    earlier = next((turn.text for turn in turns[:-1] if not turn.answers), "")
    return Described(numbers, _words(read, asked, earlier, answers), bool(answers))


def _log_tokens(num_chars: float) -> float:
    return math.log1p(num_chars / CHARS_PER_TOKEN)


def _of_text(text: str, read: str) -> list[float]:
    return [
        _log_tokens(len(text)),
        math.log1p(text.count("\n")),
        float(text.count("```")),
        float(text.count("?")),
        float(text[-3:].rstrip().endswith("?")),
        math.log1p(text.count(" ")),
        0.0 if text.isascii() else _foreign(read),
        float(text[:1].islower()),
        math.log1p(read.count("(") + read.count("{") + read.count(";") + read.count("=")),
    ]


def _foreign(text: str) -> float:
    """Bytes beyond one for each character."""
    return len(text.encode("utf-8", "surrogatepass")) / max(1, len(text)) - 1.0


def _of_answers(answers: Sequence[str]) -> list[float]:
    if not answers:
        return [_NONE] * 14
    logs = [_log_tokens(len(answer)) for answer in answers]
    ordered, last = sorted(logs), answers[-1]
    weight = mean = 0.0
    for one in logs:  # exponentially weighted, the newest most
        weight, mean = weight * 0.6 + 1.0, mean * 0.6 + one
    end = last[-60:].rstrip()
    return [
        logs[-1],
        logs[-2] if len(logs) > 1 else _NONE,
        logs[-3] if len(logs) > 2 else _NONE,
        sum(logs) / len(logs),
        ordered[-1],
        ordered[0],
        ordered[len(ordered) // 2],
        mean / weight,
        _log_tokens(sum(map(len, answers[-3:])) / len(answers[-3:])),
        float(last.count("```")),
        math.log1p(last.count("\n")),
        float(end[-1:] in '.!?`:)"'),
        0.0 if last.isascii() else _foreign(last[-200:]),
        float(end.endswith("?")),
    ]


def _of_asked(text: str, asked: Sequence[str]) -> list[float]:
    if not asked:
        return [_NONE] * 3
    before, same = asked[-1], 0
    for mine, theirs in zip(text[:64], before[:64], strict=False):
        if mine != theirs:
            break
        same += 1
    shared = same / max(1, min(64, len(text), len(before)))
    return [_log_tokens(len(before)), shared, _log_tokens(len(asked[0]))]


def _of_wishes(read: str) -> list[float]:
    """Amounts that are asked for, and what kind of answer."""
    tokens, items = _NONE, -1
    for digits, unit in _AMOUNT.findall(read):
        if unit:
            tokens = max(tokens, math.log1p(int(digits) * _TOKENS_OF[unit]))
        elif items < int(digits) < 200:
            items = int(digits)
    edges = read[:400] + read[-200:]
    return [tokens, math.log1p(items + 1), *(float(asks(edges) is not None) for asks in _ASKS)]


def _words(read: str, asked: Sequence[str], first: str, answers: Sequence[str]) -> set[int]:
    """Single words and pairs of the text to be answered, its first and last ones once more, and words around it. What
    a word is of goes into its hash."""
    mine = [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(read)]
    of_text = crc32(b"text")
    single = [crc32(word, of_text) for word in mine]
    found = set(single)
    found.update(one * 31 + next_one * 17 for one, next_one in pairwise(single))
    for place, words in ((b"begin", mine[:3]), (b"end", mine[-3:])):
        seed = crc32(place)
        found.update(crc32(word, seed) for word in words)
    if len(mine) >= 3:
        found.add(crc32(b" ".join(mine[:3])))
    around = [(b"before", asked[-1][:EARLIER_CHARS]), (b"first", first[:EARLIER_CHARS])] if asked else []
    if answers:
        around += [(b"answer", answers[-1][:EDGE_CHARS]), (b"answered", answers[-1][-EDGE_CHARS:])]
    for place, text in around:
        seed = crc32(place)
        found.update(crc32(word.encode("utf-8", "surrogatepass"), seed) for word in _WORD.findall(text.lower()))
    return {number % NUM_BUCKETS for number in found}
