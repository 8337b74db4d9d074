"""A streamed answer that outlives its engine. Pure: bytes in, bytes out.

The client sees one stream: one id, one `created`, one role, no token twice or left out, and one usage for all engines.
An engine continues in one of two ways:

by text     the answer so far is a chat's last, open-ended message (`continue_final_message`), or the end of a
            completion's prompt; the usual tokenizers split it as it was generated.
by tokens   vLLM returns the token ids of prompt and answer (`return_token_ids`), which become a completion's prompt.

The next engine computes these tokens as one batch, with other rounding than in decoding: a greedy answer comes out the
same except where two next tokens are almost equally likely. The sampler's state is lost: a seed starts over, a sampled
answer goes on with other draws from the same distribution, and vLLM counts presence and frequency penalties from the
seam on. Engines hold back text that may become a stop string, so none spans the seam. Without ids an event counts as a
token, although some characters take several. Not continuable: several answers at once, tool calls, reasoning, and
structured output (unless EngineApi.continues_schemas).
"""

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from glowplug.engines.apis import EngineApi
from glowplug.services.router.wire import encode_json

decode = msgspec.json.decode
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class NotContinuable(Exception):
    """No other engine can continue the answer; the message completes "the answer cannot be continued: "."""


def events(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, data) of each SSE event."""
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        name, found = b"", []
        for line in block.split(b"\n"):
            if line.startswith(b"data:"):
                found.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                name = line[6:].strip()
        if found:
            yield name, b"\n".join(found)


class Continuation:
    """One streamed answer across engines: `take` the first one's events, then make each later one's `request` and
    `rewrite` its events."""

    MAX_TOKENS: ClassVar[tuple[str, ...]] = ("max_tokens",)
    path: bytes

    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        self._asked, self._api, self._context_tokens = asked, api, context_tokens
        self._parts: list[str] = []
        self.num_chars = 0
        self.num_tokens = 0  # at the client
        self.is_finished = False  # only the end of the stream is missing
        self.usage: tuple[int, int] | None = None  # tokens of prompt and answer, by the last engine
        self._why_not = ""  # an obstacle in the present part
        self._before = 0  # tokens from earlier engines
        self._only_tail = False  # this engine only ends the stream: its one token is dropped

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def fork(self) -> "Continuation":
        made = copy.copy(self)
        for name, value in vars(made).items():
            if isinstance(value, list | set):
                setattr(made, name, copy.copy(value))
        return made

    def forget_text(self) -> None:
        self._parts, self.num_chars = [], 0

    def take(self, data: bytes) -> None:
        """Take events sent unchanged. Raises NotContinuable."""
        for _, event in events(data):
            if event != DONE:
                self._take(self._object(event))

    def ending(self) -> bytes:
        """Return the last events of an otherwise complete answer, else b""."""
        return b""

    def request(self) -> bytes:
        """Return the continuing request's body. Raises NotContinuable."""
        body = dict(self._asked)
        self._before = self.num_tokens
        if self._parts or self.is_finished or self._why_not:
            if self._why_not:
                raise NotContinuable(self._why_not)
            if self._has_schema() and not self._api.continues_schemas:
                raise NotContinuable("it asks for structured output, which another engine would start over")
            self._go_on(body)
        self._limit(body)
        return encode_json(body)

    def _limit(self, body: dict[str, Any]) -> None:
        """Engines take no limit below 1."""
        bounds = [name for name in self.MAX_TOKENS if isinstance(body.get(name), int)]
        self._only_tail = self.is_finished or any(body[name] <= self.num_tokens for name in bounds)
        for name in bounds:
            body[name] = 1 if self._only_tail else body[name] - self.num_tokens
        if self._only_tail and not bounds:
            body[self.MAX_TOKENS[-1]] = 1
        if isinstance(body.get("min_tokens"), int):
            body["min_tokens"] = max(body["min_tokens"] - self.num_tokens, 0)

    def rewrite(self, data: bytes) -> bytes:
        """Rewrite a later engine's events. Raises NotContinuable."""
        out = []
        for name, event in events(data):
            if event == DONE:
                out.append(DONE_EVENT)
            elif (made := self._rewritten(self._object(event))) is not None:
                out.append((b"event: %b\n" % name if name else b"") + b"data: " + encode_json(made) + b"\n\n")
        return b"".join(out)

    # -- by API -------------------------------------------------------------------------------------------------

    def _take(self, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def _rewritten(self, event: dict[str, Any]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _go_on(self, body: dict[str, Any]) -> None:
        """Change `body`, a copy of the client's, to continue after the sent part."""
        raise NotImplementedError

    def _has_schema(self) -> bool:
        raise NotImplementedError

    # -- common -------------------------------------------------------------------------------------------------

    @staticmethod
    def _object(event: bytes) -> dict[str, Any]:
        try:
            found = decode(event)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotContinuable(f"an event of the stream is not JSON: {error}") from error
        return found if isinstance(found, dict) else {}  # llama.cpp begins some streams with `null`

    def _sent(self, text: str, num_tokens: int = 1) -> None:
        if text:
            self._parts.append(text)
            self.num_chars += len(text)
            self.num_tokens += num_tokens

    def _summed(self, usage: dict[str, Any], prompt: str, answer: str) -> dict[str, Any]:
        """Earlier parts of the answer are not a prompt."""
        made = dict(usage)
        if isinstance(usage.get(answer), int):
            made[answer] = self._before + (0 if self._only_tail else usage[answer])
        if isinstance(usage.get(prompt), int):
            made[prompt] = max(usage[prompt] - self._before, 0)
            if isinstance(usage.get("total_tokens"), int):
                made["total_tokens"] = made[prompt] + made.get(answer, 0)
            self.usage = (made[prompt], made.get(answer, 0))
        return made

    def _with_answer(self, messages: Any, *, prefills: bool) -> list[Any]:
        """`prefills`: the answer extends a final assistant message. Raises NotContinuable."""
        messages = list(messages or ())
        last = messages[-1] if messages else None
        if not (prefills and isinstance(last, dict) and last.get("role") == "assistant"):
            return [*messages, {"role": "assistant", "content": self.text}]
        if not isinstance(last.get("content"), str):
            raise NotContinuable("the last message of the request is not plain text")
        return [*messages[:-1], {**last, "content": last["content"] + self.text}]
