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
NUM_BUCKETS: Final = 1 << 20  # of hashed words; a power of two
FIRST_CHARS, LAST_CHARS = 900, 400  # that are read of the text to be answered
EARLIER_CHARS: Final = 250  # ... of the one before, and of the first
EDGE_CHARS: Final = 100  # ... of each end of the last answer
NUM_EARLIER: Final = 16  # turns that are looked back at
NUM_ALIKE: Final = 6  # earlier texts that may begin as this one does
MAX_TURNS: Final = 64  # that count
_ASCII_WORD: Final = re.compile(rb"[a-z0-9]+(?:'[a-z]+)?|[^\w\s]")
_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_]+(?:'[a-z]+)?|[^\w\s]")
# Looks back after the first digit: a pattern that begins with a digit is searched for twice as fast.
_AMOUNT: Final = re.compile(r"(\d(?<!\w\d)[\d,]{0,6})[ -]*(k\b)?[ -]*(word|char|para|page|sentence|line|min)?")
_TOKENS_OF: Final = {
    "word": 1.3,
    "char": 0.25,
    "para": 80.0,
    "page": 400.0,
    "sentence": 25.0,
    "line": 12.0,
    "min": 150.0,
}
_SPELLED: Final = {
    b"one": 1, b"two": 2, b"three": 3, b"four": 4, b"five": 5, b"six": 6, b"seven": 7, b"eight": 8, b"nine": 9,
    b"ten": 10, b"twelve": 12, b"fifteen": 15, b"twenty": 20, b"thirty": 30, b"fifty": 50, b"hundred": 100,
}  # fmt: skip
_STEM: Final = 5  # letters by which a word's kind is known
_EDGE_WORDS: Final = 90  # of each end of a text that are asked for their kind
_KINDS: Final = tuple(
    frozenset(word[:_STEM].encode() for word in words.split())
    for words in (
        "continue next more proceed resume keep another again",
        "short brief concise only single just succinct quick tldr simple",
        "detail long comprehensive depth thorough elaborate extensive expand deep",
        "essay article blog report chapter paper book section",
        "story poem song lyric scene dialogue character novel fiction rap joke",
        "email letter message mail reply cover",
        "code function script program implement class method module component",
        "python java javascript typescript html css sql react php rust bash node api c",
        "list ideas example bullet steps suggest recommend top questions options",
        "table csv json xml yaml format markdown column row",
        "rewrite rephrase paraphrase improve proofread correct edit grammar revise",
        "translate translation english spanish french german chinese japanese korean portuguese italian russian",
        "summary summarize summarise key points outline tl extract",
        "what which who when where whose",
        "is are does do can could would should did was will",
        "why how explain describe difference compare understand",
        "thank ok okay great hello hi hey yes no good nice cool sure",
        "error exception traceback bug fix fails issue wrong doesn't undefined",
        "wait acknowledge don't understood ready respond until confirm",
        "act pretend imagine role assume want i'll persona expert",
        "plan strategy business market schedule agenda lesson course proposal campaign",
        "seo keyword fluent outrank heading h1 h2 meta unique",
        "title headline slogan tagline caption tweet hashtag names description prompt",
        "calculate solve equation prove sum formula probability math number",
        "game terminal linux console simulate player command",
    )
)
_KINDS_OF: Final = {
    stem: tuple(at for at, kind in enumerate(_KINDS) if stem in kind) for stem in frozenset[bytes]().union(*_KINDS)
}
NUM_NUMBERS: Final = 37 + len(_KINDS)
_NONE: Final = -1.0  # of what a conversation does not have yet
_TEXT, _BEGIN, _END, _SCRIPT = (crc32(place) for place in (b"text", b"begin", b"end", b"script"))
_BUCKET: Final = NUM_BUCKETS - 1  # the bits of a hash that count
_FIRST: Final = 0x5BD1E995 & _BUCKET  # what words of a conversation's first text have in their hashes once more


class Turn(NamedTuple):
    """One message. `answers`: the model's own."""

    text: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """`numbers`: NUM_NUMBERS of them; `words` of the text to be answered, `around` of those before it: hashes below
    NUM_BUCKETS, each once."""

    numbers: list[float]
    words: set[int]
    around: set[int]
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
    mine = _split(read)
    lately = turns[-NUM_EARLIER - 1 : -1]
    answers = [turn.text for turn in lately if turn.answers]
    asked = [turn.text for turn in lately if not turn.answers]
    numbers = [*_of_text(text, read, mine), float(min(MAX_TURNS, len(turns))), *_of_answers(answers)]
    numbers += _of_asked(text, asked)
    numbers.append(_of_alike(text, lately))
    numbers.append(_log_tokens(sum(len(turn.text) for turn in turns[-MAX_TURNS:])))
    numbers += _of_wishes(read, mine)
    first = next((turn.text for turn in turns[:-1] if not turn.answers), "")
    around = _around(asked, first, answers)
    return Described(numbers, _words(read, mine, not answers), around, bool(answers))


def _split(read: str) -> list[bytes]:
    """The words and signs of a text in small letters. Chinese, Japanese and Korean signs are words each."""
    if read.isascii():
        return _ASCII_WORD.findall(read.encode("ascii"))
    return [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(read)]


def _log_tokens(num_chars: float) -> float:
    return math.log1p(num_chars / CHARS_PER_TOKEN)


def _of_text(text: str, read: str, mine: Sequence[bytes]) -> list[float]:
    end = text[-3:].rstrip()
    return [
        _log_tokens(len(text)),
        math.log1p(text.count("\n")),
        float(text.count("```")),
        float(text.count("?")),
        float(end.endswith("?")),
        float(end.endswith(":")),
        math.log1p(text.count(" ")),
        0.0 if text.isascii() else _foreign(read),
        float(text[:1].islower()),
        math.log1p(read.count("(") + read.count("{") + read.count(";") + read.count("=")),
        math.log1p(text.count('"')),
        math.log1p(text.count("\n\n")),
        math.log1p(len(mine)),
        len(set(mine)) / max(1, len(mine)),
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
    before = asked[-1]
    shared = _num_shared(text, before) / max(1, min(64, len(text), len(before)))
    return [_log_tokens(len(before)), shared, _log_tokens(len(asked[0]))]


def _num_shared(text: str, other: str) -> int:
    """Characters, of the first 64, that both begin with."""
    if text[:64] == other[:64]:
        return min(64, len(text), len(other))
    return next(at for at in range(65) if text[at : at + 1] != other[at : at + 1])


def _of_alike(text: str, lately: Sequence[Turn]) -> float:
    """The answer to the earlier text that begins most as this one does; only the last ones count."""
    best, found, looked_at = 3, _NONE, 0
    for asked, answer in zip(lately[-2::-1], lately[:0:-1], strict=True):
        if asked.answers or not answer.answers:
            continue
        looked_at += 1
        if looked_at > NUM_ALIKE:
            break
        shared = _num_shared(text, asked.text) if text[:4] == asked.text[:4] else 0
        if shared > best:
            best, found = shared, _log_tokens(len(answer.text))
    return found


def _of_wishes(read: str, mine: Sequence[bytes]) -> list[float]:
    """Amounts that are asked for, and what kind of answer."""
    tokens, items = _NONE, -1
    for digits, thousand, unit in _AMOUNT.findall(read):
        amount = int(digits.replace(",", "")) * (1000 if thousand else 1)
        if unit:
            tokens = max(tokens, math.log1p(amount * _TOKENS_OF[unit]))
        elif items < amount < 200:
            items = amount
    edges = mine if len(mine) <= 2 * _EDGE_WORDS else [*mine[:_EDGE_WORDS], *mine[-_EDGE_WORDS:]]
    spelled = max((_SPELLED[word] for word in _SPELLED.keys() & set(edges)), default=0)
    stems = {word[:_STEM] for word in edges}
    kinds = [0.0] * len(_KINDS)
    for stem in _KINDS_OF.keys() & stems:
        for kind in _KINDS_OF[stem]:
            kinds[kind] += 1.0
    return [tokens, math.log1p(items + 1), math.log1p(spelled), *kinds]


def _words(read: str, mine: Sequence[bytes], is_first: bool) -> set[int]:
    """Single words and pairs of the text to be answered, and its first and last ones once more. What a word is of goes
    into its hash."""
    hashes = {word: crc32(word, _TEXT) & _BUCKET for word in mine}
    found = set(hashes.values())
    if is_first:
        found.update([one ^ _FIRST for one in found])
    single = [hashes[word] for word in mine]
    found.update([(one * 31 + next_one * 17) & _BUCKET for one, next_one in pairwise(single)])
    found.update([crc32(word, _BEGIN) & _BUCKET for word in mine[:3]])
    found.update([crc32(word, _END) & _BUCKET for word in mine[-3:]])
    if len(mine) >= 3:
        found.add(crc32(b" ".join(mine[:3])) & _BUCKET)
    if not read.isascii():
        found.update([(_SCRIPT + block) & _BUCKET for block in {ord(char) >> 7 for char in read[:FIRST_CHARS]}])
    return found


def _around(asked: Sequence[str], first: str, answers: Sequence[str]) -> set[int]:
    """Single words of the texts before."""
    found: set[int] = set()
    around = [(b"before", asked[-1][:EARLIER_CHARS]), (b"first", first[:EARLIER_CHARS])] if asked else []
    if answers:
        around += [(b"answer", answers[-1][:EDGE_CHARS]), (b"answered", answers[-1][-EDGE_CHARS:])]
    for place, text in around:
        seed = crc32(place)
        found.update([crc32(word, seed) & _BUCKET for word in _split(text.lower())])
    return found
