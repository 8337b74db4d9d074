"""What a router is notified of (stimuli) and what it asks of its executor (effects). Times are epoch seconds."""

from dataclasses import dataclass

from glowplug.domain.access import Priority
from glowplug.domain.instance import Instance
from glowplug.policies.routing.prefix_index import Prefix


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A well-formed request for `name` (a model's name or alias). `ticket` is unique in this router and grows.

    Token counts are 0 when they are not known. `expected_tokens`: the length of the answer where known beforehand,
    used instead of the router's estimate. `text_tokens`: the length that the request's text suggests, weighed against
    earlier answers; where no choice depends on it (RouterController.chooses), it may come later, as TextRead.
    `tenant`: whose request it is, with its `weight` beside other tenants of its class."""

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
    prefix: Prefix = ()  # blocks of its prompt, where a choice may depend on them (RouterController.chooses)


@dataclass(frozen=True, slots=True)
class TextRead:
    """The text of a dispatched request suggests an answer of `text_tokens` tokens. `teaches`: the text was read
    whatever became of the request, so the router may compare the model's answers with their texts. A text read only
    because its answer is long must not teach, or the router would expect every answer to be long."""

    ticket: int
    text_tokens: int
    teaches: bool


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The engine's answer is over, well or badly. `took_s` counts from dispatch; 0 leaves the means alone.
    `cached_tokens`: of its prompt, those that the engine had in its KV cache, as it says; -1: it does not."""

    ticket: int
    took_s: float = 0.0
    response_tokens: int = 0
    cached_tokens: int = -1


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine's answer has begun: the prompt has been read. Not needed where `tracks_tokens` is False."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HeadDue:
    """The client of a held stream is about to be answered 200, after which no other status can be sent. A request that
    is not rejected now gets this head, and is held until it is dispatched or its time is over."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client closed its connection, whether its request was held or running."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    """The instance sent no byte of an answer. `reached` False: it took no connection, so the request is blameless."""

    ticket: int
    reached: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The engine of a stream that has begun sends no more: another instance is to continue after the `num_tokens` that
    the client has. `is_lost` False: the instance is well, and the stream was taken from it. `is_reached`: the engine
    reported its failure in the stream; it may concern this stream alone, so others are still sent there."""

    ticket: int
    reason: str
    num_tokens: int = 0
    is_lost: bool = True
    is_reached: bool = False


@dataclass(frozen=True, slots=True)
class StreamMoved:
    """A MoveStream succeeded: the other instance has begun with the stream, or is to begin because the first one is
    lost. The client has `num_tokens`."""

    ticket: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A MoveStream failed, and the first instance still answers the stream. `is_refused`: no engine can continue the
    stream; `is_asked`: the other instance was asked and did not take the stream; `is_unreachable`: the other instance
    took no connection, or sleeps."""

    ticket: int
    is_refused: bool = False
    is_asked: bool = False
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The router was asked to stop: it holds no new requests and finishes those it has."""


@dataclass(frozen=True, slots=True)
class BusRefuses:
    """The bus stores no events, so that no start can be asked for; an empty reason: it stores them again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to `instance` now. `cold`: a start was waited for; `held_s`: how long the request was held."""

    ticket: int
    instance: Instance
    held_s: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """Take a request back from an instance: its node has left or its engine was put to sleep (neither closes a
    connection), or the request gives way to another one. Where not one byte of the answer has come, let go of the
    request; outcome DispatchFailed. `ended`: no more comes of an answer that has begun; outcome StreamBroken where
    another instance can continue it. `moved`: likewise, but a request stays whose answer no other instance can continue
    or has not begun. `gives_way`: the instance is well. A stream that has begun leaves where its answer can be
    continued (StreamBroken, not lost), and stays where it cannot (MoveFailed, refused)."""

    ticket: int
    reason: str
    ended: bool = False
    moved: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class MoveStream:
    """Ask `instance` to continue a stream, and leave the stream's present instance once the new one has begun. Outcome
    StreamMoved or MoveFailed; none where the request ends before."""

    ticket: int
    instance: Instance
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request. `eta_s`: seconds until it should be sent on, from measured starts."""

    ticket: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer the request with this error. `retry_after_s` 0 means none to give."""

    ticket: int
    status: int
    error_type: str
    code: str
    message: str
    retry_after_s: float = 0.0


EFFECTS: tuple[type, ...] = (Dispatch, Recall, MoveStream, Hold, Reject)  # beside the Publish of every controller
