"""What an exchange keeps of its stream, so that another engine can go on with it, and how far that has come.

The events are kept as they came, and read only when their engine is lost, or when they are more than LOG_BYTES. What is
kept then is their text (continuation.py), at most TEXT_CHARS of it over all engines: a longer answer is its last one's.
"""

import copy
import time
from typing import Final

from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from services.router import continuation_apis, wire
from services.router.continuation import Continuation, NotContinuable
from services.router.http_request import HttpRequest

# Why an engine gives no more of a stream, as metrics and traces name it.
LOST: Final = "engine_lost"  # its connection broke, or it was silent for too long
ERROR: Final = "engine_error"  # it said in the stream that it failed, or that it was made to stop
ENDED: Final = "instance_ended"  # it was put to sleep
MOVED: Final = "moved"  # it could have gone on
DRAINED: Final = "drained"  # its instance drains, and would have ended it

LOG_BYTES: Final = 64 * 1024  # of one stream's events, kept as they came
TEXT_CHARS: Final = 4 * 1024 * 1024
_MALFORMED: Final = (TypeError, AttributeError, KeyError, ValueError)  # a field is of another kind than its API says
_TOO_LONG: Final = "it is too long"
_NOT_ITS_API: Final = "its events are not as those of its API"


class Resumption:
    """Of one stream. `num_times` other engines have been asked to go on; while `is_waiting` the last of these has not
    given one byte."""

    def __init__(self, request: HttpRequest, model: Model, api: EngineApi) -> None:
        self._request, self._model, self._api = request, model, api
        self._unread = b""  # of what was sent, behind the last whole event
        self._part = b""  # of an event of a later engine
        self._continuation: Continuation | None = None
        self.why_not = ""  # no other engine can go on with it
        self.num_times = 0
        self.is_waiting = False
        self.broken_at = 0.0  # monotonic: when the engine was lost
        self.reason = ""  # one of the above
        self.body = b""  # of the request that goes on

    def read(self, sent: bytes) -> None:
        """The client was sent this, of the first engine: its text stays. After the first fault nothing does."""
        if self.why_not:
            return
        data = self._unread + sent
        end = wire.whole_events(data, len(data))
        self._unread = data[end:]
        try:
            if self._continuation is None:
                path, body = self._request.path, self._request.body
                self._continuation = continuation_apis.begin(path, body, self._api, self._model.context_tokens)
            self._continuation.take(data[:end])
            if self._continuation.num_chars > TEXT_CHARS:
                raise NotContinuable(_TOO_LONG)
        except NotContinuable as why:
            self.why_not, self._continuation = str(why), None
        except _MALFORMED:
            self.why_not, self._continuation = _NOT_ITS_API, None

    def prepare(self) -> bytes:
        """Make the request that goes on (`body`), or return the events that end the stream where it lacks no more than
        them. Raises NotContinuable."""
        if self._continuation is None or self.why_not:
            raise NotContinuable(self.why_not)
        if self._unread:
            raise NotContinuable("the client has a part of an event")
        ending = self._continuation.ending()
        try:
            self.body = b"" if ending else self._continuation.request()
        except _MALFORMED as error:
            raise NotContinuable("its request is not as that of its API") from error
        return ending

    def fork(self) -> "Resumption":
        """The same as it is now: what becomes of the one is nothing to the other."""
        made = copy.copy(self)
        made._continuation = self._continuation.fork() if self._continuation is not None else None
        return made

    def lost(self, reason: str) -> None:
        """Its engine is: another is to be asked for `body`."""
        self.reason, self.is_waiting, self.broken_at = reason, True, time.monotonic()
        self.num_times += 1
        self._part = b""

    @property
    def target(self) -> bytes:
        """Of the request that goes on."""
        assert self._continuation is not None
        request, path = self._request, self._continuation.path
        return request.target if path == request.path else path

    @property
    def num_tokens(self) -> int:
        """Of the answer, sent to the client; 0 where nobody has counted."""
        return self._continuation.num_tokens if self._continuation is not None else 0

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the whole answer, once a later engine has said."""
        return self._continuation.usage if self._continuation is not None else None

    def splice(self, body: bytes, most: int) -> tuple[bytes, str]:
        """Part of what a later engine gives: the whole events in it, as the client gets them, and what the engine says
        where it fails. An event is longer than `most` bytes in no answer. Raises NotContinuable."""
        body = self._part + body
        end = wire.whole_events(body, most)
        self._part = body[end:]
        events, failure = wire.before_failure(body[:end])
        assert self._continuation is not None
        try:
            rewritten = self._continuation.rewrite(events) if events else b""
        except _MALFORMED as error:
            raise NotContinuable(_NOT_ITS_API) from error
        if self.why_not or self._continuation.num_chars > TEXT_CHARS:  # the answer goes on, and is its last engine's
            self.why_not = _TOO_LONG
            self._continuation.forget_text()
        return rewritten, failure
