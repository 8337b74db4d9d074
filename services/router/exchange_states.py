"""The states of an exchange, and the parts that only some of them have; `faults` checks these. Times are monotonic."""

from collections.abc import Iterator
from enum import Enum
from typing import Any

from msgspec import Struct

from glowplug.domain.instance import Instance
from glowplug.services.router.resumption import LOG_BYTES

# Tokens of prompt and answer, whether they are exact, and the prompt's cached ones; -1: unknown.
Counts = tuple[int, int, bool, int]


class ExchangeState(Enum):
    """Parts needed, parts allowed, meaning."""

    WAITING = "", "attempt timer framing", "the controller has it, and it has no byte of an answer"
    ASKED = "attempt", "engine framing", "an instance has it, and has sent no byte of an answer"
    ANSWERING = "attempt answer", "engine framing resumption", "the client gets the answer"
    FLOWING = "attempt answer framing", "engine resumption", "the same, in whole chunks that pass unparsed"
    MOVING = "attempt answer framing resumption moving", "engine", "another instance is asked to take it over"
    BROKEN = "attempt answer framing resumption", "timer", "its stream lost an engine, and the controller has it"
    CONTINUING = "attempt answer framing resumption", "engine", "the next instance has it, and has sent no byte"
    ENDED = "ending", "attempt framing answer resumption", "it is over and reported"


class AnswerKind(Enum):
    """Of an answer: fields of its own, meaning."""

    BODY = "", "it passes as it comes"
    STREAM = "opening kept log", "its events pass whole"
    ERROR = "collected", "an engine's error, translated once it is complete"


class Framing(Enum):
    """Of the client's answer."""

    PLAIN = "plain"  # of known length, or up to the connection's end
    CHUNKED = "chunked"


class Attempt(Struct, eq=False):
    """The latest dispatch. `has_moved`: its instance has another address, and no other engine can continue the
    stream."""

    instance: Instance
    at: float
    is_deserted: bool = False  # its node has left the fleet
    has_moved: bool = False


class Answer(Struct, eq=False):
    """The answer since its first byte. `previous` and `last`: the bytes sent last."""

    __repr__ = object.__repr__  # answers never reach a log
    kind: AnswerKind
    status: int
    first_byte: float
    num_events: int = 0
    previous: bytes = b""
    last: bytes = b""
    counted: Counts | None = None
    opening: bytes = b""  # first bytes of an Anthropic stream, with its prompt's token count
    kept: bytes = b""  # the beginning of an incomplete event
    log: list[bytes] | None = None  # sent events unknown to the resumption; None: none are kept
    log_left: int = LOG_BYTES
    collected: list[bytes] | None = None


class Ending(Struct, eq=False):
    at: float
    status: int
    error_code: str = ""


PARTS = ("attempt", "engine", "timer", "framing", "answer", "resumption", "moving", "ending")
HELD = (ExchangeState.WAITING, ExchangeState.BROKEN)  # by the controller
SENT = (ExchangeState.ASKED, ExchangeState.CONTINUING)  # to an instance, which may still refuse it
PASSING = (ExchangeState.ANSWERING, ExchangeState.FLOWING)  # the engine's bytes, to the client
BETWEEN = (ExchangeState.BROKEN, ExchangeState.CONTINUING)  # two engines


def faults(exchange: Any) -> Iterator[str]:
    state, answer = exchange.state, exchange.answer
    needs, may, _ = (words.split() for words in state.value)
    for part in PARTS:
        is_there = getattr(exchange, part) is not None
        if is_there and part not in needs + may:
            yield f"it is {state.name} and has {part}"
        elif not is_there and part in needs:
            yield f"it is {state.name} without {part}"
    if answer is None:
        return
    kind = answer.kind
    for other in AnswerKind:
        if other is not kind and (found := [name for name in other.value[0].split() if getattr(answer, name)]):
            yield f"its answer is a {kind.name} and has {found}"
    if (answer.collected is not None) is not (kind is AnswerKind.ERROR):
        yield f"its answer is a {kind.name}, and collected: {answer.collected is not None}"
    if kind is not AnswerKind.ERROR and exchange.framing is None:
        yield f"its answer is a {kind.name}, and the client has no head"
    if kind is not AnswerKind.STREAM and state in (ExchangeState.FLOWING, ExchangeState.MOVING, *BETWEEN):
        yield f"it is {state.name} and its answer is a {kind.name}"
    if state is ExchangeState.FLOWING and (
        answer.kept or exchange.num_continued or exchange.framing is not Framing.CHUNKED
    ):
        yield "it is FLOWING, and a chunk cannot pass as it is"
    if state in BETWEEN and (answer.kept or answer.log is not None or not exchange.num_continued):
        yield f"it is {state.name} and has kept the lost engine's events"
