"""Stimuli of a router, and effects for its executor. Times are epoch seconds."""

from dataclasses import dataclass

from glowplug.domain.access import Priority
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.policies.routing.prefix_index import Prefix


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A well-formed request for `name` (a model's name or alias). `ticket` is unique in this router and grows.

    Token counts are 0 when unknown. `expected_tokens`: known answer length, in place of an estimate. `text_tokens`:
    length suggested by the text, weighed against earlier answers; may come later, as TextRead, where no choice depends
    on it (RouterController.chooses). `weight`: of the tenant in its class."""

    ticket: int
    name: str
    request_id: str
    traceparent: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    expected_tokens: int = 0
    text_tokens: int = 0
    tenant: str = ""
    weight: float = 1.0
    priority: Priority = Priority.STANDARD
    key_id: str = ""
    prefix: Prefix = ()  # blocks of its prompt, where a choice may depend on them


@dataclass(frozen=True, slots=True)
class TextRead:
    """The text suggests an answer of `text_tokens`. `teaches`: it was read whatever the outcome. A text read only
    because its answer is long would teach the router to expect long ones."""

    ticket: int
    text_tokens: int
    teaches: bool


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The answer is over, well or badly, or the client has left. `took_s` counts from dispatch; 0 leaves the means
    alone. `cached_tokens`: prompt tokens found in the engine's KV cache; -1: not reported."""

    ticket: int
    took_s: float = 0.0
    response_tokens: int = 0
    cached_tokens: int = -1


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine has read the prompt. Not needed where `tracks_tokens` is False."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HeadDue:
    """The client of a held stream is about to be answered 200: the last chance to reject it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    """The instance sent no byte of an answer. `reached` False: it took no connection, so the request is blameless."""

    ticket: int
    reached: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The engine of a begun stream sends no more: another instance continues after the client's `num_tokens`. `is_lost`
    False: the instance is well. `is_reached`: the engine reported the failure, which may concern this stream alone."""

    ticket: int
    reason: str
    num_tokens: int = 0
    is_lost: bool = True
    is_reached: bool = False


@dataclass(frozen=True, slots=True)
class StreamMoved:
    """A MoveStream succeeded: the other instance has begun with the stream, or takes over from a lost first one."""

    ticket: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A MoveStream failed, and the first instance still answers. `is_refused`: no engine can continue the stream;
    `is_asked`: the other instance was asked and declined; `is_unreachable`: it took no connection, or sleeps."""

    ticket: int
    is_refused: bool = False
    is_asked: bool = False
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The router was asked to stop: hold no new requests, and finish the others."""


@dataclass(frozen=True, slots=True)
class BusRefuses:
    """The bus stores no events, so that no start can be asked for; an empty reason: it stores them again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to `instance` now. `cold`: it waited for a start; `held_s`: time held."""

    ticket: int
    instance: Instance
    held_s: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """Take a request back: its node has left, its engine sleeps (neither closes a connection), or it gives way. Without
    a byte of the answer, let go of it: DispatchFailed. `ended`: a begun answer gets no more bytes; StreamBroken where
    another instance can continue it. `moved`: likewise, but a request stays whose answer has not begun or cannot be
    continued. `gives_way`: the instance is well; a begun stream leaves where it can be continued (StreamBroken, not
    lost), and stays where it cannot (MoveFailed, refused)."""

    ticket: int
    reason: str
    ended: bool = False
    moved: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class MoveStream:
    """Ask `instance` to continue a stream, and leave the present one once it has begun. Outcome StreamMoved or
    MoveFailed; none where the request ends before."""

    ticket: int
    instance: Instance
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request. `eta_s`: expected seconds until dispatch, from measured starts."""

    ticket: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer the request with this error."""

    ticket: int
    error: GlowplugError


EFFECTS: tuple[type, ...] = (Dispatch, Recall, MoveStream, Hold, Reject)  # beside the Publish of every controller
