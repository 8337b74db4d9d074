"""The record that an exchange keeps of its stream, so that another engine can continue it.

Events are kept as they came, and parsed only when their engine is lost or they exceed LOG_BYTES. From then on only
their text is kept (continuation.py), at most TEXT_CHARS over all engines; no other engine can continue a longer answer.
"""

import copy
import time
from typing import Final

from glowplug.controllers.router.messages import Recall
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from glowplug.services.router import continuation_apis, wire
from glowplug.services.router.continuation import Continuation, NotContinuable
from glowplug.services.router.http_request import HttpRequest

# Why a stream leaves its engine, as metrics and traces name it.
LOST: Final = "engine_lost"  # the engine's connection broke, or the engine was silent for too long
ERROR: Final = "engine_error"  # the engine reported in the stream that it failed or was stopped
ENDED: Final = "instance_ended"  # the instance was put to sleep
MOVED: Final = "moved"  # the instance is no longer routed to, although its engine could have continued
DRAINED: Final = "drained"  # the instance drains, and would have ended the stream
GAVE_WAY: Final = "gave_way"  # another request was to have its slot
ENGINE_RUNS: Final = (MOVED, GAVE_WAY)  # the stream was taken from an engine that could have gone on

LOG_BYTES: Final = 64 * 1024  # of one stream's events, kept as they came
TEXT_CHARS: Final = 4 * 1024 * 1024
_MALFORMED: Final = (TypeError, AttributeError, KeyError, ValueError)  # a field is not of its API's type
_TOO_LONG: Final = "it is too long"
_NOT_ITS_API: Final = "its events are not as those of its API"


def why(recall: Recall) -> str:
    """Why a recalled stream leaves its engine."""
    return GAVE_WAY if recall.gives_way else MOVED if recall.moved else ENDED


class Resumption:
    """The resumption of one stream. `num_times` other engines have been asked to continue; `is_waiting` until the last
    of them has sent a byte."""

    def __init__(self, request: HttpRequest, model: Model, api: EngineApi) -> None:
        self._request, self._model, self._api = request, model, api
        self._unread = b""  # bytes sent after the last whole event
        self._part = b""  # the beginning of an event of a later engine
        self._continuation: Continuation | None = None
        self.why_not = ""  # why no other engine can continue the stream
        self.num_times = 0
        self.is_waiting = False
        self.broken_at = 0.0  # monotonic: when the engine was lost
        self.reason = ""  # LOST, ERROR, ENDED, MOVED, DRAINED or GAVE_WAY
        self.body = b""  # of the continuing request

    def read(self, sent: bytes) -> None:
        """Keep the text of events that the first engine sent the client; after the first fault keep nothing."""
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
        """Make the continuing request (`body`), or return the last events of the stream if only those are missing.
        Raises NotContinuable."""
        if self._continuation is None or self.why_not:
            raise NotContinuable(self.why_not)
        if self._unread:
            raise NotContinuable("the client has a part of an event")
        ending = self._continuation.ending()
        try:
            self.body = b"" if ending else self._continuation.request()
        except _MALFORMED as error:
            raise NotContinuable("the request lacks fields of its API") from error
        return ending

    def fork(self) -> "Resumption":
        """Return an independent copy in the present state."""
        made = copy.copy(self)
        made._continuation = self._continuation.fork() if self._continuation is not None else None
        return made

    def lost(self, reason: str) -> None:
        """Note that the engine is lost, so that another one is to be asked with `body`. `reason`: why the stream
        left."""
        self.reason, self.is_waiting, self.broken_at = reason, True, time.monotonic()
        self.num_times += 1
        self._part = b""

    @property
    def target(self) -> bytes:
        """The target of the continuing request."""
        assert self._continuation is not None
        request, path = self._request, self._continuation.path
        return request.target if path == request.path else path

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that the client has; 0 while uncounted."""
        return self._continuation.num_tokens if self._continuation is not None else 0

    @property
    def usage(self) -> tuple[int, int] | None:
        """(prompt tokens, tokens of the whole answer), once a later engine has reported them."""
        return self._continuation.usage if self._continuation is not None else None

    def splice(self, body: bytes, most: int) -> tuple[bytes, str]:
        """Take a part of a later engine's stream: (its whole events rewritten for the client, the engine's failure or
        ""). An event longer than `most` bytes is cut. Raises NotContinuable."""
        body = self._part + body
        end = wire.whole_events(body, most)
        self._part = body[end:]
        events, failure = wire.before_failure(body[:end])
        assert self._continuation is not None
        try:
            rewritten = self._continuation.rewrite(events) if events else b""
        except _MALFORMED as error:
            raise NotContinuable(_NOT_ITS_API) from error
        if self.why_not or self._continuation.num_chars > TEXT_CHARS:  # no other engine could continue
            self.why_not = _TOO_LONG
            self._continuation.forget_text()
        return rewritten, failure
