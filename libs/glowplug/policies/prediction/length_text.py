"""Features of a conversation that predict its next answer's length: numbers, and hashes of words.

PreServe (section 4.2) has a language model read the prompt. A conversation also has the lengths of earlier answers and
a few telling words ("continue", "in one sentence", "500 words"). Both cost some tens of microseconds at any length:
long texts are read at their two ends.

No text can be recovered from these features; do not log them all the same.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple
from zlib import crc32

CHARS_PER_TOKEN: Final = 4.3
NUM_BUCKETS: Final = 1 << 20  # of hashed words; a power of two
FIRST_CHARS, LAST_CHARS = 900, 400  # of the text to be answered
EARLIER_CHARS: Final = 250  # ... of the one before, and of the first
EDGE_CHARS: Final = 100  # ... of each end of the last answer
NUM_EARLIER: Final = 16  # earlier turns considered
NUM_ALIKE: Final = 6  # earlier texts compared with this one's beginning
MAX_TURNS: Final = 64  # most turns that count
_ASCII_WORD: Final = re.compile(rb"[a-z0-9]+(?:'[a-z]+)?|[^\w\s]")
_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_]+(?:'[a-z]+)?|[^\w\s]")
# The lookbehind follows the first digit: twice as fast.
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
SPELLED: Final = {
    b"one": 1, b"two": 2, b"three": 3, b"four": 4, b"five": 5, b"six": 6, b"seven": 7, b"eight": 8, b"nine": 9,
    b"ten": 10, b"twelve": 12, b"fifteen": 15, b"twenty": 20, b"thirty": 30, b"fifty": 50, b"hundred": 100,
}  # fmt: skip
STEM: Final = 5  # letters that determine a word's kinds
EDGE_WORDS: Final = 90  # at each end
_KINDS: Final = tuple(
    frozenset(word[:STEM].encode() for word in words.split())
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
KINDS_OF: Final = {
    stem: tuple(at for at, kind in enumerate(_KINDS) if stem in kind) for stem in frozenset[bytes]().union(*_KINDS)
}
NUM_KINDS: Final = len(_KINDS)
NUM_NUMBERS: Final = 37 + NUM_KINDS
_NONE: Final = -1.0  # a feature that a conversation lacks
TEXT, BEGIN, END, _SCRIPT = (crc32(place) for place in (b"text", b"begin", b"end", b"script"))
_BEFORE, _AT_FIRST, _ANSWER, _ANSWERED = (crc32(place) for place in (b"before", b"first", b"answer", b"answered"))
BUCKET: Final = NUM_BUCKETS - 1
FIRST: Final = 0x5BD1E995 & BUCKET


class Turn(NamedTuple):
    """One message. `answers`: by the model."""

    text: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """NUM_NUMBERS `numbers`; hashes below NUM_BUCKETS, `words` of the text to be answered and `around` of
    those before."""

    numbers: list[float]
    words: set[int]
    around: set[int]
    has_answers: bool


class WordCounts(NamedTuple):
    """Word counts of the text to be answered. `kinds`: stems of each kind in the two ends."""

    num: int
    num_unique: int
    spelled: int  # the largest amount spelled out
    kinds: Sequence[float]


class Signs(NamedTuple):
    newlines: int
    fences: int
    questions: int
    spaces: int
    quotes: int
    paragraphs: int

    @classmethod
    def of(cls, text: str) -> "Signs":
        return cls(*[text.count(sign) for sign in ("\n", "```", "?", " ", '"', "\n\n")])


@dataclass(frozen=True, slots=True)
class Read:
    """The parts that are read. `read`: of the text to be answered, in lower case; `lately`: the turns before; `answers`
    and `asked`: their texts."""

    turns: Sequence[Turn]
    read: str
    lately: Sequence[Turn]
    answers: list[str]
    asked: list[str]

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Read":
        """Raises ValueError without turns."""
        if not turns:
            raise ValueError("a conversation has at least one turn")
        text = turns[-1].text
        if len(text) > FIRST_CHARS + LAST_CHARS:
            text = f"{text[:FIRST_CHARS]} \0 {text[-LAST_CHARS:]}"
        lately = turns[-NUM_EARLIER - 1 : -1]
        answers = [turn.text for turn in lately if turn.answers]
        asked = [turn.text for turn in lately if not turn.answers]
        return cls(turns, text.lower(), lately, answers, asked)

    def around(self) -> list[tuple[int, str]]:
        found = []
        if self.asked:
            first = next(turn.text for turn in self.turns[:-1] if not turn.answers)
            found = [(_BEFORE, self.asked[-1][:EARLIER_CHARS]), (_AT_FIRST, first[:EARLIER_CHARS])]
        if self.answers:
            found += [(_ANSWER, self.answers[-1][:EDGE_CHARS]), (_ANSWERED, self.answers[-1][-EDGE_CHARS:])]
        return [(seed, text.lower()) for seed, text in found]

    def numbers(self, counted: WordCounts, signs: Signs) -> list[float]:
        turns, text = self.turns, self.turns[-1].text
        numbers = [
            *_of_text(text, self.read, counted, signs),
            float(min(MAX_TURNS, len(turns))),
            *_of_answers(self.answers),
        ]
        numbers += _of_asked(text, self.asked)
        numbers.append(_of_alike(text, self.lately))
        numbers.append(_log_tokens(sum([len(turn.text) for turn in turns[-MAX_TURNS:]])))
        numbers += _of_amounts(self.read)
        numbers.append(math.log1p(counted.spelled))
        numbers += counted.kinds
        return numbers


def describe(turns: Sequence[Turn]) -> Described:
    """Describe a conversation whose last turn is to be answered. Raises ValueError without turns."""
    read = Read.of(turns)
    mine = _split(read.read)
    around = {crc32(word, seed) & BUCKET for seed, text in read.around() for word in _split(text)}
    has_answers = bool(read.answers)
    return Described(
        read.numbers(_count(mine), Signs.of(turns[-1].text)),
        _words(read.read, mine, not has_answers),
        around,
        has_answers,
    )


def _split(read: str) -> list[bytes]:
    if read.isascii():
        return _ASCII_WORD.findall(read.encode("ascii"))
    return [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(read)]


def _log_tokens(num_chars: float) -> float:
    return math.log1p(num_chars / CHARS_PER_TOKEN)


def _of_text(text: str, read: str, counted: WordCounts, signs: Signs) -> list[float]:
    end = text[-3:].rstrip()
    return [
        _log_tokens(len(text)),
        math.log1p(signs.newlines),
        float(signs.fences),
        float(signs.questions),
        float(end.endswith("?")),
        float(end.endswith(":")),
        math.log1p(signs.spaces),
        0.0 if text.isascii() else _foreign(read),
        float(text[:1].islower()),
        math.log1p(read.count("(") + read.count("{") + read.count(";") + read.count("=")),
        math.log1p(signs.quotes),
        math.log1p(signs.paragraphs),
        math.log1p(counted.num),
        counted.num_unique / max(1, counted.num),
    ]


def _foreign(text: str) -> float:
    return len(text.encode("utf-8", "surrogatepass")) / max(1, len(text)) - 1.0


def _of_answers(answers: Sequence[str]) -> list[float]:
    if not answers:
        return [_NONE] * 14
    logs = [_log_tokens(len(answer)) for answer in answers]
    ordered, last = sorted(logs), answers[-1]
    weight = mean = 0.0
    for one in logs:
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
    if text[:64] == other[:64]:
        return min(64, len(text), len(other))
    return next(at for at in range(65) if text[at : at + 1] != other[at : at + 1])


def _of_alike(text: str, lately: Sequence[Turn]) -> float:
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


def _of_amounts(read: str) -> list[float]:
    tokens, items = _NONE, -1
    for digits, thousand, unit in _AMOUNT.findall(read):
        amount = int(digits.replace(",", "")) * (1000 if thousand else 1)
        if unit:
            tokens = max(tokens, math.log1p(amount * _TOKENS_OF[unit]))
        elif items < amount < 200:
            items = amount
    return [tokens, math.log1p(items + 1)]


def _count(mine: Sequence[bytes]) -> WordCounts:
    edges = mine if len(mine) <= 2 * EDGE_WORDS else [*mine[:EDGE_WORDS], *mine[-EDGE_WORDS:]]
    spelled = max((SPELLED[word] for word in SPELLED.keys() & set(edges)), default=0)
    stems = {word[:STEM] for word in edges}
    kinds = [0.0] * NUM_KINDS
    for stem in KINDS_OF.keys() & stems:
        for kind in KINDS_OF[stem]:
            kinds[kind] += 1.0
    return WordCounts(len(mine), len(set(mine)), spelled, kinds)


def _words(read: str, mine: Sequence[bytes], is_first: bool) -> set[int]:
    hashes = {word: crc32(word, TEXT) & BUCKET for word in mine}
    found = set(hashes.values())
    if is_first:
        found.update([one ^ FIRST for one in found])
    single = [hashes[word] for word in mine]
    found.update([(one * 31 + next_one * 17) & BUCKET for one, next_one in pairwise(single)])
    found.update([crc32(word, BEGIN) & BUCKET for word in mine[:3]])
    found.update([crc32(word, END) & BUCKET for word in mine[-3:]])
    if len(mine) >= 3:
        found.add(crc32(b" ".join(mine[:3])) & BUCKET)
    if not read.isascii():
        found.update([(_SCRIPT + block) & BUCKET for block in {ord(char) >> 7 for char in read[:FIRST_CHARS]}])
    return found
