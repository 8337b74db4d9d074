"""What a router is notified of (stimuli) and what it asks of its executor (effects). Times are epoch seconds."""

from dataclasses import dataclass

from glowplug.domain.instance import Instance


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A well-formed request for `name` (a model's name or alias). `ticket` is unique in this router and grows.

    Token counts are 0 when they are not known. `expected_tokens` is how long the answer will be, where somebody knows:
    it takes the place of what the router would expect; `text_tokens`, what its text says of that, is weighed against
    earlier answers."""

    ticket: int
    name: str
    request_id: str
    traceparent: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    expected_tokens: int = 0
    text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The engine's answer is over, well or badly. `took_s` counts from dispatch; 0 leaves the averages alone."""

    ticket: int
    took_s: float = 0.0
    response_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine's answer has begun: the prompt has been read. Not needed where `tracks_tokens` is False."""

    ticket: int


@dataclass(frozen=True, slots=True)
class HeadDue:
    """A held stream is about to be answered 200, after which no other status can be sent. Unless it is rejected now it
    gets its head, and stays until it is dispatched or its time is over."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client closed its connection, whether its request was held or running."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    """The instance gave not one byte of an answer. `reached` False: not even a connection, the request is blameless."""

    ticket: int
    reached: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """A stream has begun and gets no more of its engine: another instance is to go on behind the `num_tokens` that its
    client has. `is_lost` False: the instance is well, and the stream was taken from it. `is_reached`: the engine said
    in the stream that it failed, which may be about this one alone: others are still sent there."""

    ticket: int
    reason: str
    num_tokens: int = 0
    is_lost: bool = True
    is_reached: bool = False


@dataclass(frozen=True, slots=True)
class StreamMoved:
    """A MoveStream is over well: the other instance has begun with the stream, or is to, since the first one is lost.
    Its client has `num_tokens`."""

    ticket: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A MoveStream is over, and its first instance answers the stream still. `is_refused`: no engine can go on with it;
    `is_asked`: the other one was asked and did not take it; `is_unreachable`: there was not even a connection, or it
    sleeps."""

    ticket: int
    is_refused: bool = False
    is_asked: bool = False
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """This router is asked to stop: nothing new is held, what is here finishes."""


@dataclass(frozen=True, slots=True)
class BusRefuses:
    """The bus answers and stores nothing, so that no start can be asked for; an empty reason: it stores again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to `instance` now. `cold` says it was held for a start; `held_s` how long it was held."""

    ticket: int
    instance: Instance
    held_s: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """Its node has left, or its engine was put to sleep: neither closes a connection. When not one byte of an answer
    has come, let go of it; outcome DispatchFailed. `ended`: nothing more comes of an answer that has begun; outcome
    StreamBroken where another instance can go on with it. `moved`: likewise, but what no other can go on with stays,
    and so does what has not begun."""

    ticket: int
    reason: str
    ended: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class MoveStream:
    """Ask `instance` to go on with a stream, and leave the one that answers it once that has begun. Outcome StreamMoved
    or MoveFailed; none where the request ends before."""

    ticket: int
    instance: Instance
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request; `eta_s` is when it should go on, from starts measured before."""

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
