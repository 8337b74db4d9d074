"""An exchange's record of its stream, for a continuation by another engine.

Events are parsed only at the loss of their engine or beyond LOG_BYTES, into text of at most TEXT_CHARS; a longer answer
cannot be continued.
"""

import copy
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from glowplug.controllers.router.messages import Recall
from glowplug.domain.model import Model
from glowplug.engines.apis import CHAT, COMPLETIONS, MESSAGES, EngineApi
from glowplug.services.router import wire
from glowplug.services.router.continuation import DONE_EVENT, Continuation, NotContinuable, decode
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.wire import encode_json

# Fields of a chat that a completion shares, or that do not affect the answer; a chat with others continues by text.
_PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", *_PENALTIES}
_LENGTH = {"max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"}
_OF_BOTH = {
    "model",
    "stream",
    "stream_options",
    "user",
    "skip_special_tokens",
    "return_token_ids",
    *_SAMPLING,
    *_LENGTH,
}
_OF_CHATS = {"messages", "max_completion_tokens", "metadata", "store", "service_tier", "safety_identifier"}
_SEVERAL = "several answers were asked for"
_AT_ITS_END = "its end was under way"


def begin(path: bytes, body: bytes, api: EngineApi, context_tokens: int) -> Continuation:
    """Start the continuation of an answer. Raises NotContinuable."""
    kind = _KINDS.get(path.decode())
    if kind is None or path.decode() not in api.continues:
        raise NotContinuable("its engine cannot continue an answer on this path")
    return kind(decode(body), api, context_tokens)


class _Chunks(Continuation):
    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        super().__init__(asked, api, context_tokens)
        if (asked.get("n") or 1) > 1 or (asked.get("best_of") or 1) > 1:
            raise NotContinuable(_SEVERAL)
        self._head: dict[str, Any] = {}  # id, created and so on
        self._wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._has_usage = False
        self._prompt_ids: list[int] = []
        self._ids: list[int] = []  # of sent text
        self._unshown: list[int] = []  # ids whose text has not come
        self._all_have_ids = True
        self._seam_chars = 0

    def ending(self) -> bytes:
        return DONE_EVENT if self.is_finished and (self._has_usage or not self._wants_usage) else b""

    def request(self) -> bytes:
        self._unshown.clear()
        self._seam_chars = len(self.text)
        body = decode(super().request())
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if self._api.token_ids:
            body["return_token_ids"] = True
        return encode_json(body)

    def _has_schema(self) -> bool:
        return bool((self._asked.get("response_format") or {}).get("type", "text") != "text")

    @property
    def _known_ids(self) -> list[int]:
        """All token ids, or none. With stop strings text lags behind its tokens, and only text tells the client's
        position."""
        if not (self._prompt_ids and self._ids and self._all_have_ids) or self._asked.get("stop"):
            return []
        return self._prompt_ids + self._ids

    def _take(self, event: dict[str, Any]) -> None:
        if not self._head and "choices" in event:
            kept = ("id", "created", "model", "system_fingerprint", "object")
            self._head = {name: event[name] for name in kept if name in event}
        self._take_prompt_ids(event)
        self._has_usage = self._has_usage or bool(event.get("usage") and not event.get("choices"))
        for choice in event.get("choices") or ():
            self._take_choice(choice)

    def _take_prompt_ids(self, holder: Mapping[str, Any]) -> None:
        ids = holder.get("prompt_token_ids")
        if isinstance(ids, list) and not self._prompt_ids:
            self._prompt_ids = ids

    def _take_choice(self, choice: dict[str, Any]) -> None:
        if choice.get("index"):
            raise NotContinuable(_SEVERAL)
        self._take_prompt_ids(choice)
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._unshown += ids
        if text := self._text_of(choice):
            self._all_have_ids = self._all_have_ids and bool(self._unshown)
            self._sent(text, len(self._unshown) or 1)
            self._ids += self._unshown
            self._unshown.clear()
        self.is_finished = self.is_finished or bool(choice.get("finish_reason"))

    def _rewritten(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if "choices" not in event:
            return event or None  # an error
        usage = event.get("usage")
        if not self._head:  # only comments were sent
            self._take({**event, "choices": [], "usage": None})
        choices = [made for choice in event["choices"] or () if (made := self._rewritten_choice(choice)) is not None]
        event.pop("timings", None)  # llama.cpp's, of this engine alone
        event.pop("prompt_token_ids", None)
        if usage:
            event["usage"] = self._summed(usage, "prompt_tokens", "completion_tokens")
        if not choices and not (usage and self._wants_usage and not self._has_usage):
            return None
        self._has_usage = self._has_usage or bool(usage and not choices)
        return {**event, **self._head, "choices": choices}

    def _rewritten_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        if self._only_tail and self._text_of(choice):
            self._set_text(choice, "")
        was_finished = self.is_finished
        shows = self._shows(choice)
        self._take_choice(choice)
        reason = choice.get("finish_reason")
        if was_finished or not (shows or reason):
            return None
        if reason and self._only_tail:
            choice["finish_reason"] = "length"
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [self._seam_chars + offset for offset in logprobs["text_offset"]]
        choice.pop("prompt_token_ids", None)
        return choice

    def _text_of(self, choice: dict[str, Any]) -> str:
        raise NotImplementedError

    def _set_text(self, choice: dict[str, Any], text: str) -> None:
        raise NotImplementedError

    def _shows(self, choice: dict[str, Any]) -> bool:
        return bool(self._text_of(choice))


class _Completion(_Chunks):
    path = COMPLETIONS.encode()

    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        super().__init__(asked, api, context_tokens)
        if asked.get("echo"):
            raise NotContinuable("its prompt was asked for in the answer (echo)")
        if asked.get("suffix"):
            raise NotContinuable("it fills in a text (suffix)")

    def _go_on(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if self._known_ids:
            body["prompt"] = self._known_ids
        elif isinstance(prompt, str):
            body["prompt"] = prompt + self.text
        elif self._api.mixed_prompts and all(isinstance(one, int) for one in prompt):
            body["prompt"] = [*prompt, self.text]
        else:
            raise NotContinuable("the request has more than one prompt")
        if body.get("max_tokens") is None and self._api.completion_tokens:
            body["max_tokens"] = self._api.completion_tokens

    def _text_of(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""

    def _set_text(self, choice: dict[str, Any], text: str) -> None:
        choice["text"] = text


class _Chat(_Chunks):
    """A chat, continued as a completion of its tokens where they are known."""

    MAX_TOKENS: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        super().__init__(asked, api, context_tokens)
        self.path = CHAT.encode()
        self._has_role = False

    def _go_on(self, body: dict[str, Any]) -> None:
        ids = self._known_ids
        if ids and all(name in _OF_BOTH or name in _OF_CHATS or value is None for name, value in body.items()):
            most = body.get("max_completion_tokens") or body.get("max_tokens")
            left = self._context_tokens - len(ids)
            for name in [name for name in body if name not in _OF_BOTH]:
                del body[name]
            body["prompt"] = ids
            body["max_tokens"] = most or self.num_tokens + max(left, 1)
            self.path = COMPLETIONS.encode()
            return
        self.path = CHAT.encode()
        prefills = self._api.prefills or bool(body.get("continue_final_message"))
        body["messages"] = self._with_answer(body.get("messages"), prefills=prefills)
        body["add_generation_prompt"], body["continue_final_message"] = False, True

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._has_role = self._has_role or "role" in delta
        if delta.get("tool_calls") or delta.get("function_call"):
            self._why_not = "it is calling a tool"
        elif delta.get("reasoning_content") or delta.get("reasoning"):
            self._why_not = "it began with reasoning"
        super()._take_choice(choice)

    def _rewritten_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        if "delta" not in choice:
            choice["delta"] = {"content": choice.pop("text", "")} if choice.get("text") else {}
            choice.pop("text", None)
        elif self._has_role:
            choice["delta"].pop("role", None)
        return super()._rewritten_choice(choice)

    def _shows(self, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta") or {}
        return any(value for name, value in delta.items() if not (self._only_tail and name == "content"))

    def _text_of(self, choice: dict[str, Any]) -> str:
        return (choice.get("delta") or {}).get("content") or ""

    def _set_text(self, choice: dict[str, Any], text: str) -> None:
        choice["delta"]["content"] = text


class _Messages(Continuation):
    """A message of Anthropic's API: it always extends a final assistant message."""

    path = MESSAGES.encode()

    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        super().__init__(asked, api, context_tokens)
        self._has_start = False
        self._has_block = False

    def ending(self) -> bytes:
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n' if self.is_finished else b""

    def _has_schema(self) -> bool:
        in_config = (self._asked.get("output_config") or {}).get("format")  # its effort is not a structure
        return bool(self._asked.get("output_format") or in_config)

    def _go_on(self, body: dict[str, Any]) -> None:
        if (body.get("thinking") or {}).get("type") not in (None, "disabled"):
            raise NotContinuable("it may think")
        body["messages"] = self._with_answer(body.get("messages"), prefills=True)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._has_start = True
        elif kind == "content_block_start":
            if (event.get("content_block") or {}).get("type") != "text":
                self._why_not = "it is calling a tool or reasoning"
            self._has_block = True
        elif kind == "content_block_delta":
            self._sent((event.get("delta") or {}).get("text") or "")
        elif kind == "content_block_stop":
            self._why_not = self._why_not or _AT_ITS_END
        elif kind == "message_delta":
            self.is_finished = True

    def _rewritten(self, event: dict[str, Any]) -> dict[str, Any] | None:
        kind = event.get("type")
        if kind == "message_start" and self._has_start:
            return None
        if kind == "content_block_start" and self._has_block and not event.get("index"):
            return None
        if kind == "content_block_delta" and self._only_tail:
            return None
        if kind == "message_delta":
            event["usage"] = self._summed(event.get("usage") or {}, "input_tokens", "output_tokens")
            if self._only_tail:
                event["delta"] = {**(event.get("delta") or {}), "stop_reason": "max_tokens", "stop_sequence": None}
        self._take(event)
        return event or None


_KINDS: dict[str, type[Continuation]] = {
    CHAT: _Chat,
    COMPLETIONS: _Completion,
    MESSAGES: _Messages,
}


# Reasons for leaving an engine, in metrics and traces.
LOST: Final = "engine_lost"  # a broken connection, or too long a silence
ERROR: Final = "engine_error"  # reported in the stream
ENDED: Final = "instance_ended"  # the instance went to sleep
MOVED: Final = "moved"  # the instance lost its route, although its engine could have continued
DRAINED: Final = "drained"  # the instance drains, and would have ended the stream
GAVE_WAY: Final = "gave_way"  # another request needed its slot
ENGINE_RUNS: Final = (MOVED, GAVE_WAY)  # the engine could have gone on

LOG_BYTES: Final = 64 * 1024
TEXT_CHARS: Final = 4 * 1024 * 1024
_MALFORMED: Final = (TypeError, AttributeError, KeyError, ValueError)  # a field has a wrong type
_TOO_LONG: Final = "it is too long"
_NOT_ITS_API: Final = "its events do not match its API"


def why(recall: Recall) -> str:
    return GAVE_WAY if recall.gives_way else MOVED if recall.moved else ENDED


class Resumption:
    """The resumption of one stream."""

    def __init__(self, request: HttpRequest, model: Model, api: EngineApi) -> None:
        self._request, self._model, self._api = request, model, api
        self._unread = b""  # sent after the last whole event
        self._part = b""
        self._continuation: Continuation | None = None
        self.why_not = ""
        self.broken_at = 0.0  # monotonic
        self.reason = ""
        self.body = b""

    def read(self, sent: bytes) -> None:
        """Keep the text of sent events; nothing after the first fault."""
        if self.why_not:
            return
        data = self._unread + sent
        end = wire.whole_events(data, len(data))
        self._unread = data[end:]
        try:
            if self._continuation is None:
                path, body = self._request.path, self._request.body
                self._continuation = begin(path, body, self._api, self._model.context_tokens)
            self._continuation.take(data[:end])
            if self._continuation.num_chars > TEXT_CHARS:
                raise NotContinuable(_TOO_LONG)
        except NotContinuable as why:
            self.why_not, self._continuation = str(why), None
        except _MALFORMED:
            self.why_not, self._continuation = _NOT_ITS_API, None

    def prepare(self) -> bytes:
        """Make the continuing request (`body`), or return the last events if only those are missing. Raises
        NotContinuable."""
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
        made = copy.copy(self)
        made._continuation = self._continuation.fork() if self._continuation is not None else None
        return made

    def lost(self, reason: str) -> None:
        self.reason, self.broken_at, self._part = reason, time.monotonic(), b""

    @property
    def target(self) -> bytes:
        assert self._continuation is not None
        request, path = self._request, self._continuation.path
        return request.target if path == request.path else path

    @property
    def num_tokens(self) -> int:
        """Tokens at the client; 0 while uncounted."""
        return self._continuation.num_tokens if self._continuation is not None else 0

    @property
    def usage(self) -> tuple[int, int] | None:
        """(prompt tokens, tokens of the whole answer), if a later engine has reported them."""
        return self._continuation.usage if self._continuation is not None else None

    def splice(self, body: bytes, most: int) -> tuple[bytes, str]:
        """Return (events rewritten for the client, the engine's failure or ""); events beyond `most` bytes are cut.
        Raises NotContinuable."""
        body = self._part + body
        end = wire.whole_events(body, most)
        self._part = body[end:]
        events, failure = wire.before_failure(body[:end])
        assert self._continuation is not None
        try:
            rewritten = self._continuation.rewrite(events) if events else b""
        except _MALFORMED as error:
            raise NotContinuable(_NOT_ITS_API) from error
        if self.why_not or self._continuation.num_chars > TEXT_CHARS:
            self.why_not = _TOO_LONG
            self._continuation.forget_text()
        return rewritten, failure
