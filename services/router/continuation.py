"""A streamed answer that outlives its engine: what the client has been sent of it, the request with which another
engine goes on, and that engine's events as the client gets them.

Pure: bytes in, bytes out. The client's stream stays one: one id, one `created`, one role, no token twice and none
left out, and a usage that counts the prompt once and the tokens of all engines. An engine goes on in one of two ways:

by text     the answer so far is the last message of a chat, open-ended (`continue_final_message`), or the end of the
            prompt of a completion. The usual tokenizers split a text that is cut between two tokens as it was
            generated, so that the next engine reads the same tokens.
by tokens   vLLM says the tokens of prompt and answer (`return_token_ids`); they are the prompt of a completion, and
            nothing is tokenized again.

These are computed again, as a batch, which rounds otherwise than one by one: a greedy answer is the one that it would
have been but where two next tokens are nearly as likely. What the sampler keeps is lost: a seed begins anew, so a
sampled answer goes on with other draws from the same distribution, and vLLM counts presence and frequency penalties
from the seam on. Engines hold back text that may become a stop string, so none spans the seam. Where the engine says
no ids, tokens are counted by events: an event is a token, except where a character takes several. What cannot be
continued raises NotContinuable: several answers at once, tool calls, reasoning, and structured output (but where
EngineApi.continues_schemas says that it can).
"""

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from glowplug.engines.apis import EngineApi
from services.router.wire import encode_json

decode = msgspec.json.decode
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class NotContinuable(Exception):
    """Why no other engine can go on with an answer, to be read behind "the answer cannot be continued: "."""


def events(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, data) of each whole SSE event; comments are left out."""
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
    """One streamed answer across engines. `take` what the first engine's client was sent; then for each further engine
    `request`, and `rewrite` its events."""

    MAX_TOKENS: ClassVar[tuple[str, ...]] = ("max_tokens",)
    path: bytes  # of the request that goes on

    def __init__(self, asked: dict[str, Any], api: EngineApi, context_tokens: int) -> None:
        self._asked, self._api, self._context_tokens = asked, api, context_tokens
        self._parts: list[str] = []
        self.num_chars = 0  # of the text that is kept
        self.num_tokens = 0  # of the answer, sent to the client
        self.is_finished = False  # the client knows why the answer ended; what follows is its tail
        self.usage: tuple[int, int] | None = None  # tokens of prompt and answer, once the last engine has said
        self._why_not = ""  # what is under way and cannot be continued
        self._before = 0  # tokens of the engines before
        self._only_tail = False  # this engine is asked for the end of the stream alone: a token of it is no part

    @property
    def text(self) -> str:
        """The answer so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def fork(self) -> "Continuation":
        """The same as it is now, with lists and sets of its own."""
        made = copy.copy(self)
        for name, value in vars(made).items():
            if isinstance(value, list | set):
                setattr(made, name, copy.copy(value))
        return made

    def forget_text(self) -> None:
        """No further engine will go on with it: what the last one gives is rewritten, not kept."""
        self._parts, self.num_chars = [], 0

    def take(self, data: bytes) -> None:
        """Whole events that the client was sent as they are. Raises NotContinuable."""
        for _, event in events(data):
            if event != DONE:
                self._take(self._object(event))

    def ending(self) -> bytes:
        """The events that end an answer which lacks nothing else; b"" where an engine has to go on."""
        return b""

    def request(self) -> bytes:
        """The body of the request that goes on, for `path`. Raises NotContinuable."""
        body = dict(self._asked)
        self._before = self.num_tokens
        if self._parts or self.is_finished or self._why_not:
            if self._why_not:
                raise NotContinuable(self._why_not)
            if self._has_schema() and not self._api.continues_schemas:
                raise NotContinuable("a structure was asked for, which another engine would begin anew")
            self._go_on(body)
        self._limit(body)
        return encode_json(body)

    def _limit(self, body: dict[str, Any]) -> None:
        """Leave it as many tokens as the client's bounds do. One is the least that engines take."""
        bounds = [name for name in self.MAX_TOKENS if isinstance(body.get(name), int)]
        self._only_tail = self.is_finished or any(body[name] <= self.num_tokens for name in bounds)
        for name in bounds:
            body[name] = 1 if self._only_tail else body[name] - self.num_tokens
        if self._only_tail and not bounds:
            body[self.MAX_TOKENS[-1]] = 1
        if isinstance(body.get("min_tokens"), int):
            body["min_tokens"] = max(body["min_tokens"] - self.num_tokens, 0)

    def rewrite(self, data: bytes) -> bytes:
        """Whole events of a later engine, as the client gets them. Raises NotContinuable."""
        out = []
        for name, event in events(data):
            if event == DONE:
                out.append(DONE_EVENT)
            elif (made := self._rewritten(self._object(event))) is not None:
                out.append((b"event: %b\n" % name if name else b"") + b"data: " + encode_json(made) + b"\n\n")
        return b"".join(out)

    # -- what each API has of its own ---------------------------------------------------------------------------

    def _take(self, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def _rewritten(self, event: dict[str, Any]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _go_on(self, body: dict[str, Any]) -> None:
        """Change a copy of the client's body so that it goes on behind what has been sent."""
        raise NotImplementedError

    def _has_schema(self) -> bool:
        """Whether the answer's structure was asked for."""
        raise NotImplementedError

    # -- for all ------------------------------------------------------------------------------------------------

    @staticmethod
    def _object(event: bytes) -> dict[str, Any]:
        try:
            found = decode(event)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotContinuable(f"an event of it is no JSON: {error}") from error
        return found if isinstance(found, dict) else {}  # llama.cpp begins some streams with `null`

    def _sent(self, text: str, num_tokens: int = 1) -> None:
        if text:
            self._parts.append(text)
            self.num_chars += len(text)
            self.num_tokens += num_tokens

    def _summed(self, usage: dict[str, Any], prompt: str, answer: str) -> dict[str, Any]:
        """An engine's usage as that of the whole answer: what it read of the answer so far is no prompt."""
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
        """Messages of a chat, and the answer so far behind them. `prefills`: a last message of the assistant's is one
        that the answer goes on with."""
        messages = list(messages or ())
        last = messages[-1] if messages else None
        if not (prefills and isinstance(last, dict) and last.get("role") == "assistant"):
            return [*messages, {"role": "assistant", "content": self.text}]
        if not isinstance(last.get("content"), str):
            raise NotContinuable("it goes on with a message that is no plain text")
        return [*messages[:-1], {**last, "content": last["content"] + self.text}]
