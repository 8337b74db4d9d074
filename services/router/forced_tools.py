"""Forced tool calls for llama.cpp, which may answer in prose despite `tool_choice` but keeps to a schema. Pure.

The system message describes the tools, a schema limits the answer to one call, and the client gets it as a tool call.
"""

import re
from typing import Any

import msgspec

from glowplug.domain.errors import BadRequest
from glowplug.services.router import schemas
from glowplug.services.router.continuation import DONE, DONE_EVENT, decode, events
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json

_TOLD = (
    "Answer by calling one of these functions, as a JSON object with its name and its arguments: "
    '{"name": ..., "arguments": {...}}\n'
)
# llama.cpp allows a code fence around an answer, and removes it only from a whole one.
_CALL = re.compile(r'\s*(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*', re.DOTALL)
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")  # of these a text may be a name
_TEXTS, _VALUES = ("description", "title", "examples", "default", "$comment", "$schema"), ("enum", "const")


def can(asked: Any) -> bool:
    choice = asked.tool_choice
    return choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function")


def translate(body: bytes, request_id: str) -> "tuple[bytes, ForcedCall]":
    """Return the engine's body, and the answer's translation. Raises BadRequest where two tools give different
    definitions one name."""
    fields = decode(body)
    choice, tools = fields.pop("tool_choice"), [tool["function"] for tool in fields.pop("tools")]
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        tools = [tool for tool in tools if tool["name"] == name]
    fields.pop("parallel_tool_calls", None)
    fields["messages"] = _told(fields["messages"], tools)
    fields["response_format"] = one_call_of(tools)
    return encode_json(fields), ForcedCall(bool(fields.get("stream")), request_id)


def one_call_of(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `response_format` for one call of `tools` (functions), of the fields that limit it. Definitions move
    to the schema's root, where references look for them. Raises BadRequest."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = _limits(tool.get("parameters") or {"type": "object", "properties": {}})
        for where in _DEFINITIONS:
            for name, found in (parameters.pop(where, None) or {}).items():
                known = definitions.setdefault(where, {})
                if known.setdefault(name, found) != found:
                    raise BadRequest(f"tools: two of them define `{name[:100]}` differently.", param="tools")
        properties = {"name": {"const": tool["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    schema = (calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions
    schemas.check_schema("tools", encode_json(schema))
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}


def _limits(schema: Any) -> Any:
    """Return a copy without texts for the reader, which the system message has."""
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _limits(one) for name, one in value.items()}
        elif key not in _TEXTS:
            found[key] = (
                value if key in _VALUES else list(map(_limits, value)) if type(value) is list else _limits(value)
            )
    return found


def described(tools: list[dict[str, Any]]) -> str:
    return _TOLD + "\n".join(encode_json(tool).decode() for tool in tools)


def said(name: str, arguments: str) -> str:
    """Return an earlier call's text. `arguments`: JSON."""
    return f'{{"name": {encode_json(name).decode()}, "arguments": {arguments}}}'


def result(content: Any) -> str:
    return f"The function's result: {_text(content)}"


def read_call(text: str) -> tuple[str, str, bool]:
    """Return (name, arguments, whether it is whole) of a call or its beginning."""
    begun = _CALL.match(text)
    if begun is None:
        return "", text, False
    name, arguments = decode(f'"{begun[1]}"'), text[begun.end() :]
    try:
        decode(text)
    except msgspec.DecodeError:
        return name, arguments, False
    return name, arguments.rstrip().removesuffix("}").rstrip(), True


def _told(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told = described(tools)
    rest = [_as_text(message) for message in messages]
    if rest and rest[0].get("role") in ("system", "developer") and isinstance(rest[0].get("content"), str):
        return [{"role": "system", "content": f"{rest[0]['content']}\n\n{told}"}, *rest[1:]]
    return [{"role": "system", "content": told}, *rest]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": result(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        return message
    words = [_text(message.get("content"))] if message.get("content") else []
    words += [said(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"role": "assistant", "content": "\n".join(words)}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


class ForcedCall(SameApi):
    """The answer with a forced call, or its beginning where the tokens ran out."""

    def __init__(self, streams: bool, request_id: str) -> None:
        super().__init__(streams)
        self._call_id = f"call_{request_id}"
        self._texts: dict[int, str] = {}

    def events(self, data: bytes) -> bytes:
        out = []
        for _, event in events(data):
            if event == DONE:
                out.append(DONE_EVENT)
                continue
            found = decode(event)
            if isinstance(found, dict) and self._keep(found):
                out.append(b"data: " + encode_json(found) + b"\n\n")
        return b"".join(out)

    def _keep(self, event: dict[str, Any]) -> bool:
        choices = event.get("choices") or []
        for choice in choices:
            delta, index = choice.get("delta") or {}, choice["index"]
            text = delta.pop("content", None)
            self._texts[index] = self._texts.get(index, "") + (text or "")
            if choice.get("finish_reason"):
                call, reason = self._made(self._texts[index], choice["finish_reason"])
                choice["delta"] = {**delta, "tool_calls": [{"index": 0, **call}]}
                choice["finish_reason"] = reason
            elif "role" in delta:
                choice["delta"] = {**delta, "content": None}
        return not choices or any(choice.get("delta") or choice.get("finish_reason") for choice in choices)

    def end(self) -> bytes:
        return b""

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        for choice in found["choices"]:
            message = choice["message"]
            call, choice["finish_reason"] = self._made(message["content"] or "", choice["finish_reason"])
            message |= {"content": None, "tool_calls": [call]}
        return encode_json(found)

    def _made(self, text: str, reason: str) -> tuple[dict[str, Any], str]:
        name, arguments, is_whole = read_call(text)
        function = {"name": name, "arguments": arguments}
        return {"id": self._call_id, "type": "function", "function": function}, "tool_calls" if is_whole else reason
