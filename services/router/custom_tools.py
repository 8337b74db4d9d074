"""Custom tools of chats, which take a text, as functions with one argument; and their calls back. Pure.

No engine has them. Those with a grammar are left out: nothing here would hold a call to it.
"""

from typing import Any, Final

from glowplug.services.router.continuation import DONE, DONE_EVENT, decode, events
from glowplug.services.router.request_shapes import ChatAsked, CustomCalled, CustomTool
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json

PARAMETERS: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
KIND: Final = "custom"


def can(asked: ChatAsked) -> bool:
    if any(isinstance(tool, CustomTool) for tool in asked.tools or ()):
        return True
    return any(isinstance(call, CustomCalled) for message in asked.messages for call in message.tool_calls or ())


def is_free(form: Any) -> bool:
    """Return whether a tool of this format takes any text."""
    return not isinstance(form, dict) or form.get("type", "text") == "text"


def translate(body: bytes) -> "tuple[bytes, CustomCalls, list[str]]":
    """Return a chat's body with functions alone, its answer's translation, and the kinds of tools left out."""
    fields = decode(body)
    given = fields.get("tools") or []
    kept = [tool for tool in given if tool["type"] != KIND or is_free(tool[KIND].get("format"))]
    names = {tool[KIND]["name"] for tool in kept if tool["type"] == KIND}
    fields["tools"] = [_function(tool) for tool in kept]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and isinstance(named := choice.get(KIND), dict):
        fields["tool_choice"] = {"type": "function", "function": named}
    if not kept:
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            fields.pop(name, None)
    for message in fields["messages"]:
        if message.get("tool_calls"):
            message["tool_calls"] = [_as_function(call) for call in message["tool_calls"]]
    dropped = [KIND] if len(kept) < len(given) else []
    return encode_json(fields), CustomCalls(bool(fields.get("stream")), names), dropped


def said(text: str) -> str:
    """Return a call's arguments."""
    return encode_json({"input": text}).decode()


def heard(arguments: str) -> str:
    """Return a call's text; the arguments themselves where a model did not keep to their form."""
    try:
        found = decode(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != KIND:
        return tool
    function = {name: tool[KIND][name] for name in ("name", "description") if tool[KIND].get(name)}
    return {"type": "function", "function": function | {"parameters": PARAMETERS}}


def _as_function(call: dict[str, Any]) -> dict[str, Any]:
    if call["type"] != KIND:
        return call
    function = {"name": call[KIND]["name"], "arguments": said(call[KIND]["input"])}
    return {**{name: value for name, value in call.items() if name != KIND}, "type": "function", "function": function}


class CustomCalls(SameApi):
    """The answer's calls of the tools `names`; a stream has each in one piece, at its choice's end."""

    def __init__(self, streams: bool, names: set[str]) -> None:
        super().__init__(streams)
        self._names = names
        self._held: dict[tuple[int, int], dict[str, Any]] = {}  # by choice and call

    def events(self, data: bytes) -> bytes:
        out = []
        for _, event in events(data):
            if event == DONE:
                out.append(DONE_EVENT)
                continue
            found = decode(event)
            if isinstance(found, dict):
                for choice in found.get("choices") or ():
                    self._hold(choice)
            out.append(b"data: " + encode_json(found) + b"\n\n")
        return b"".join(out)

    def _hold(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"] = choice.get("delta") or {}
        passed = []
        for call in delta.pop("tool_calls", None) or ():
            where, function = (choice["index"], call.get("index", 0)), call.get("function") or {}
            if function.get("name") in self._names:
                self._held[where] = {"index": where[1], "id": call.get("id"), "function": {**function, "arguments": ""}}
            if where in self._held:
                self._held[where]["function"]["arguments"] += function.get("arguments") or ""
            else:
                passed.append(call)
        if choice.get("finish_reason"):
            ended = [where for where in self._held if where[0] == choice["index"]]
            passed += [_as_custom(self._held.pop(where)) for where in ended]
        if passed:
            delta["tool_calls"] = passed

    def end(self) -> bytes:
        return b""

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        for choice in found["choices"]:
            message = choice["message"]
            if calls := message.get("tool_calls"):
                is_ours = [call["function"]["name"] in self._names for call in calls]
                message["tool_calls"] = [
                    _as_custom(call) if ours else call for call, ours in zip(calls, is_ours, strict=True)
                ]
        return encode_json(found)


def _as_custom(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    rest = {name: value for name, value in call.items() if name not in ("type", "function")}
    return {**rest, "type": KIND, KIND: {"name": function["name"], "input": heard(function["arguments"])}}
