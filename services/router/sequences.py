"""One usage for all sequences of a request, as in OpenAI's API: each prompt once, and every answer. Pure.

llama.cpp makes a sequence of each of `n` answers and each prompt, and reports its tokens at the end of its stream; so
the request goes to it as a stream.
"""

from typing import Any

import msgspec

from glowplug.services.router import logprobs
from glowplug.services.router.continuation import DONE, DONE_EVENT, decode, events
from glowplug.services.router.request_body import num_texts
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json


def num_sequences(asked: Any) -> int:
    """Return the number of answers to a chat or a completion."""
    prompt = getattr(asked, "prompt", None)
    return (num_texts(prompt) if prompt is not None else 1) * _num_per_prompt(asked)


def _num_per_prompt(asked: Any) -> int:
    return max(asked.n or 1, asked.n_cmpl or 1)


def translate(body: bytes, asked: Any) -> "tuple[bytes, Sequences]":
    fields = decode(body, type=dict[str, msgspec.Raw])
    options = asked.stream_options
    wants_usage = bool(options and options.include_usage)
    fields |= {"stream": msgspec.Raw(b"true"), "stream_options": msgspec.Raw(b'{"include_usage":true}')}
    form = logprobs.Form(asked) if logprobs.can(asked) else None
    if form is not None:
        fields |= logprobs.more(asked)
    return encode_json(fields), Sequences(bool(asked.stream), wants_usage, _num_per_prompt(asked), form)


class Sequences(SameApi):
    counts_all = True

    def __init__(self, streams: bool, wants_usage: bool, per_prompt: int, form: logprobs.Form | None = None) -> None:
        super().__init__(streams)
        self._form = form  # of log-probabilities; None: the engine's
        self._wants_usage, self._per_prompt = wants_usage, per_prompt
        self._prompts: dict[int, int] = {}  # tokens, by the prompt's number
        self._cached = 0
        self._num_made = 0
        self._last: dict[str, Any] = {}  # besides choices and usage
        self._choices: dict[int, dict[str, Any]] = {}

    def events(self, data: bytes) -> bytes:
        """The last event has the usage of all sequences."""
        out = []
        for _, event in events(data):
            if event == DONE:
                self.counts = sum(self._prompts.values()), self._num_made
                if self.streams:
                    out.append(self._usage_event() + DONE_EVENT)
                continue
            found = decode(event)
            if not isinstance(found, dict):
                continue
            if self._form is not None:
                self._form.give(found)
            choices, usage = found.get("choices") or [], found.pop("usage", None)
            self._count(choices, usage)
            self._last = {key: value for key, value in found.items() if key not in ("choices", "timings")}
            if not self.streams:
                for choice in choices:
                    self._take(choice)
            elif choices:
                out.append(
                    b"data: " + (event if usage is None and self._form is None else encode_json(found)) + b"\n\n"
                )
        return b"".join(out)

    def _count(self, choices: list[dict[str, Any]], usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        number = choices[0]["index"] // self._per_prompt if choices else 0  # a chat has one prompt
        self._prompts[number] = max(self._prompts.get(number, 0), int(usage.get("prompt_tokens") or 0))
        self._num_made += int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        self._cached = max(self._cached, int(details.get("cached_tokens") or 0))

    def _usage(self) -> dict[str, Any]:
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_made,
            "total_tokens": prompt + self._num_made,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def _usage_event(self) -> bytes:
        if not self._wants_usage:
            return b""
        return b"data: " + encode_json({**self._last, "choices": [], "usage": self._usage()}) + b"\n\n"

    def _take(self, part: dict[str, Any]) -> None:
        index = part["index"]
        made = self._choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
        made["finish_reason"] = part.get("finish_reason") or made["finish_reason"]
        if (given := part.get("logprobs")) is not None:
            kept = made["logprobs"] = made["logprobs"] or {}
            for name, value in given.items():
                kept[name] = kept.get(name, []) + value if isinstance(value, list) else value
        if "text" in part:
            made["text"] = made.get("text", "") + part["text"]
            return
        message = made.setdefault("message", {"role": "assistant", "content": None})
        delta = part.get("delta") or {}
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            add_call(message.setdefault("tool_calls", []), call)

    def end(self) -> bytes:
        if self.streams:
            return b""
        kind = {"chat.completion.chunk": "chat.completion"}.get(self._last.get("object", ""), "text_completion")
        choices = [self._choices[index] for index in sorted(self._choices)]
        return encode_json({**self._last, "object": kind, "choices": choices, "usage": self._usage()})

    def whole(self, answer: bytes) -> bytes:
        """The engine did not stream, although asked to."""
        return answer


def add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a piece of a tool call: the name comes once, the arguments in pieces."""
    index = part.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
