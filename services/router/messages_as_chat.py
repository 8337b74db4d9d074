"""Anthropic's messages as OpenAI's chats, and the answers back. Pure: bytes in, bytes out.

llama.cpp ignores a message's schema, so structures (`output_config.format`), forced calls (`tool_choice` any or tool)
and a call that may have no other beside it go to it as chats. The emulated engine has chats alone.
"""

from typing import Any

import msgspec

from glowplug.domain.errors import BadRequest
from glowplug.services.router import api_errors, forced_tools, schemas, wire
from glowplug.services.router.continuation import DONE, decode, events
from glowplug.services.router.forced_tools import ForcedCall
from glowplug.services.router.wire import encode_json

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "service_tier")
_NO_CONTENT = ("tool_use", "tool_result", "thinking", "redacted_thinking")  # outside a chat message's content
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {"service_unavailable": "overloaded_error", "server_error": "api_error"}
_ERROR_TYPES |= dict.fromkeys(("requests", "tokens", "insufficient_quota"), "rate_limit_error")


def can(asked: Any) -> bool:
    is_alone = asked.tool_choice is not None and bool(asked.tool_choice.disable_parallel_tool_use)
    has_format = bool(asked.output_format or (asked.output_config or {}).get("format"))
    return _forces(asked) or has_format or (is_alone and bool(asked.tools))


def template_settings(asked: Any) -> dict[str, Any]:
    """Return the chat template's settings for a message's `thinking` and effort."""
    settings = dict[str, Any]()
    if (asked.thinking or {}).get("type") == "disabled":
        settings["enable_thinking"] = False
    if effort := (asked.output_config or {}).get("effort"):
        settings["reasoning_effort"] = effort
    return settings


def _forces(asked: Any) -> bool:
    return asked.tool_choice is not None and asked.tool_choice.type in ("any", "tool")


def translate(body: bytes, asked: Any, request_id: str, prompt_tokens: int) -> "tuple[bytes, MessageAnswer]":
    """Return a chat's body, and its answer's translation. `prompt_tokens`: estimated, for a stream's beginning. Raises
    BadRequest for a wrong structure."""
    fields = decode(body)
    chat = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    chat["messages"] = _messages(fields)
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if form := _format(fields):
        chat["response_format"] = form
    choice = fields.get("tool_choice") or {}
    if fields.get("tools") and choice.get("type") != "none":
        chat["tools"] = [_tool(tool) for tool in fields["tools"]]
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    answer = MessageAnswer(bool(chat.get("stream")), request_id, asked.model, prompt_tokens)
    if not _forces(asked):
        return encode_json(chat), answer
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = named if choice["type"] == "tool" else "required"
    inner, answer.call = forced_tools.translate(encode_json(chat), request_id)
    return inner, answer


def _format(fields: dict[str, Any]) -> dict[str, Any]:
    form, param = (fields.get("output_config") or {}).get("format"), "output_config.format"
    if not form:
        form, param = fields.get("output_format"), "output_format"
    if not form:
        return {}
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise BadRequest(f'{param}: {{"type": "json_schema", "schema": {{...}}}} is expected.', param=param)
    schemas.check_schema(f"{param}.schema", encode_json(form["schema"]))
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object", "properties": {}}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """A call's result becomes a message of its own."""
    made = [{"role": "system", "content": _content(fields["system"], "")}] if fields.get("system") else []
    for turn in fields["messages"]:
        content = turn["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
        thoughts = "".join(block.get("thinking") or "" for block in blocks if block["type"] == "thinking")
        rest = [block for block in blocks if block["type"] not in _NO_CONTENT]
        made += [
            {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content") or "")}
            for block in blocks
            if block["type"] == "tool_result"
        ]
        if rest or calls or thoughts:
            message = {"role": turn["role"], "content": _content(rest)}
            message |= {"tool_calls": calls} if calls else {}
            made.append(message | ({"reasoning_content": thoughts} if thoughts else {}))
    return made


def _content(content: Any, between: str = "\n") -> Any:
    if isinstance(content, str):
        return content
    if all(block["type"] == "text" for block in content):
        return between.join(block.get("text") or "" for block in content)
    return [_part(block) for block in content]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source") or {}
    if block["type"] != "image":
        return {"type": block["type"], "text": block.get("text")}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name") or "", "arguments": encode_json(block.get("input") or {}).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


class MessageAnswer:
    """`call`: a forced call's translation, applied first."""

    nothing = b":\n\n"
    counts: tuple[int, int] | None = None
    counts_all = False

    def __init__(self, streams: bool, request_id: str, model: str, prompt_tokens: int) -> None:
        self.streams = streams
        self.headers = wire.EVENT_STREAM_HEADERS if streams else wire.JSON_HEADERS
        self.call: ForcedCall | None = None
        self._id, self._model, self._prompt_tokens = request_id, model, prompt_tokens
        self._has_begun = self._has_ended = False
        self._open = ""  # the open block's type, and a call's number
        self._index = -1
        self._reason = ""
        self._usage: dict[str, Any] = {}

    def began(self, queue_s: float) -> None:
        """Anthropic's API does not report the time in the queue."""

    def events(self, data: bytes) -> bytes:
        if self.call is not None:
            data = self.call.events(data)
        return b"".join(self.end() if event == DONE else self._pieces(decode(event)) for _, event in events(data))

    def _pieces(self, chunk: Any) -> bytes:
        if not isinstance(chunk, dict):
            return b""
        out = [self._begin()]
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._reason = choice.get("finish_reason") or self._reason
            delta = choice.get("delta") or {}
            if thoughts := delta.get("reasoning_content"):
                piece = {"type": "thinking_delta", "thinking": thoughts}
                out.append(self._piece("thinking", {"thinking": "", "signature": ""}, piece))
            if text := delta.get("content"):
                out.append(self._piece("text", {"text": ""}, {"type": "text_delta", "text": text}))
            out += [self._call_piece(call) for call in delta.get("tool_calls") or ()]
        return b"".join(out)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return wire.message_start(f"msg_{self._id}", self._model, self._prompt_tokens)

    def _call_id(self, number: int) -> str:
        return f"toolu_{self._id}_{number}"

    def _call_piece(self, call: dict[str, Any]) -> bytes:
        number, function = call.get("index", 0), call.get("function") or {}
        head: dict[str, Any] = {"id": self._call_id(number), "name": function.get("name"), "input": {}}
        delta = {"type": "input_json_delta", "partial_json": function.get("arguments") or ""}
        return self._piece(f"tool_use {number}", head, delta)

    def _piece(self, block: str, head: dict[str, Any], delta: dict[str, Any]) -> bytes:
        out = b""
        if self._open != block:
            out = self._close()
            self._open, self._index = block, self._index + 1
            begun = {"type": block.partition(" ")[0]} | head
            out += _event("content_block_start", index=self._index, content_block=begun)
        return out + _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        return _event("content_block_stop", index=self._index) if self._open else b""

    def end(self) -> bytes:
        """Return the last events, once: at the engine's, for a client must not wait until the engine closes."""
        if self._has_ended:
            return b""
        self._has_ended = True
        delta = {"stop_reason": _STOP_REASONS.get(self._reason, "end_turn"), "stop_sequence": None}
        ended = _event("message_delta", delta=delta, usage=self._told()) + _event("message_stop")
        return self._begin() + self._close() + ended

    def _told(self) -> dict[str, int]:
        return {
            "input_tokens": int(self._usage.get("prompt_tokens") or 0),
            "output_tokens": int(self._usage.get("completion_tokens") or 0),
        }

    def whole(self, answer: bytes) -> bytes:
        found = decode(self.call.whole(answer) if self.call is not None else answer)
        (choice,) = found["choices"]
        said, content = choice["message"], list[dict[str, Any]]()
        if said.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
        if said.get("content"):
            content.append({"type": "text", "text": said["content"]})
        for number, call in enumerate(said.get("tool_calls") or ()):
            function = call["function"]
            made = {"id": self._call_id(number), "name": function["name"], "input": _input(function["arguments"])}
            content.append({"type": "tool_use"} | made)
        self._usage = found.get("usage") or {}
        message: dict[str, Any] = {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }
        reason = _STOP_REASONS.get(choice["finish_reason"], "end_turn")
        message |= {"content": content, "stop_reason": reason, "stop_sequence": None, "usage": self._told()}
        return encode_json(message)

    def error(self, error: bytes) -> bytes:
        return anthropic_error(error)

    def error_event(self, error: bytes) -> bytes:
        return b"" if self._has_ended else api_errors.event(wire.MESSAGES, self.error(error))


def anthropic_error(error: bytes) -> bytes:
    """Return OpenAI's error in Anthropic's shape."""
    found = decode(error)["error"]
    kind = found.get("type")
    return encode_json(
        {"type": "error", "error": {"type": _ERROR_TYPES.get(kind, kind), "message": found.get("message")}}
    )


def _event(kind: str, **fields: Any) -> bytes:
    return wire.named_event({"type": kind, **fields})


def _input(arguments: str) -> Any:
    """Empty where the tokens ran out within the arguments."""
    try:
        return decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
