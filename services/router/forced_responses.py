"""Forced tool calls in OpenAI's responses API, as in chats (forced_tools.py). Pure: bytes in, bytes out."""

from typing import Any

from glowplug.services.router import api_errors
from glowplug.services.router.continuation import decode, events
from glowplug.services.router.forced_tools import described, one_call_of, read_call, result, said
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json, named_event

PATH = b"/v1/responses"
_ECHOED = ("instructions", "metadata", "parallel_tool_calls", "tool_choice", "tools", "temperature", "top_p")


def can(asked: Any) -> bool:
    """Return whether a response demands a call of any of its functions, or of a named one."""
    choice = asked.tool_choice
    if isinstance(choice, dict):
        return choice.get("type") == "function"
    return choice == "required" and all(tool.type == "function" for tool in asked.tools)


def translate(body: bytes, request_id: str, created_at: int) -> "tuple[bytes, ForcedResponse]":
    """Return the engine's body, and the answer's translation. `created_at`: epoch seconds, if the engine gives none.
    Raises BadRequest as forced_tools does."""
    fields = decode(body)
    echo = {name: fields.get(name) for name in _ECHOED} | {"model": fields["model"], "created_at": created_at}
    choice, tools = fields.pop("tool_choice"), fields.pop("tools")
    if isinstance(choice, dict):
        tools = [tool for tool in tools if tool.get("name") == choice.get("name")]
    for name in ("parallel_tool_calls", "text"):  # the answer is one call
        fields.pop(name, None)
    told = described([{name: tool[name] for name in tool if name not in ("type", "strict")} for tool in tools])
    before = fields.get("instructions")
    fields["instructions"] = f"{before}\n\n{told}" if before else told
    if isinstance(fields.get("input"), list):
        fields["input"] = [_as_text(item) for item in fields["input"]]
    fields["response_format"] = one_call_of(tools)
    return encode_json(fields), ForcedResponse(bool(fields.get("stream")), request_id, echo)


def _as_text(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type")
    if kind == "function_call":
        part = {"type": "output_text", "text": said(item.get("name", ""), item.get("arguments") or "{}")}
        return {"type": "message", "role": "assistant", "content": [part]}
    if kind == "function_call_output":
        return {"role": "user", "content": result(item.get("output"))}
    return item


class ForcedResponse(SameApi):
    """The answer with a forced call, and fields that OpenAI's clients need and llama.cpp omits. `echo`: the request's
    fields that a response repeats."""

    def __init__(self, streams: bool, request_id: str, echo: dict[str, Any]) -> None:
        super().__init__(streams)
        self._item_id, self._call_id = f"fc_{request_id}", f"call_{request_id}"
        self._echo = {**echo, "parallel_tool_calls": False, "error": None, "incomplete_details": None, "output": []}
        self._text = ""
        self._num_items = 0  # before the call: reasoning
        self._num_events = 0
        self._failed = b""  # the error that ended the stream

    def events(self, data: bytes) -> bytes:
        return b"".join(self._event(found) for _, event in events(data) if isinstance(found := decode(event), dict))

    def _event(self, event: dict[str, Any]) -> bytes:
        kind = str(event.get("type", ""))
        if kind == "error":
            self._failed = encode_json({"error": event.get("error") or event})
        elif kind in ("response.created", "response.in_progress"):
            return self._made(kind, response=self._echo | event["response"])
        elif kind == "response.output_text.delta":
            self._text += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            return self._last(event["response"])
        elif kind.startswith("response.reasoning") or (event.get("item") or {}).get("type") == "reasoning":
            index = self._num_items
            self._num_items += kind == "response.output_item.done"
            return self._made(**event | {"kind": kind, "output_index": index})
        return b""

    def _made(self, kind: str, **fields: Any) -> bytes:
        event = fields | {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return named_event(event)

    def _last(self, response: dict[str, Any]) -> bytes:
        ended = self._answer(response, self._text)
        *_, item = ended["output"]
        where = {"item_id": item["id"], "output_index": self._num_items}
        begun = item | {"arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        return b"".join(
            (
                self._made("response.output_item.added", output_index=self._num_items, item=begun),
                self._made(f"{arguments}.delta", **where, delta=item["arguments"]),
                self._made(f"{arguments}.done", **where, name=item["name"], arguments=item["arguments"]),
                self._made("response.output_item.done", output_index=self._num_items, item=item),
                self._made(f"response.{ended['status']}", response=ended),
            )
        )

    def _answer(self, response: dict[str, Any], text: str) -> dict[str, Any]:
        name, arguments, is_whole = read_call(text)
        call = {"type": "function_call", "id": self._item_id, "call_id": self._call_id, "name": name}
        status = "completed" if is_whole else "incomplete"
        before = [item for item in response.get("output") or () if item.get("type") != "message"]
        made = self._echo | response
        made |= {"status": status, "output": [*before, {**call, "arguments": arguments, "status": status}]}
        if not is_whole:
            made |= {"incomplete_details": {"reason": "max_output_tokens"}, "completed_at": None}
        return made

    def end(self) -> bytes:
        return self.error_event(self._failed) if self._failed else b""

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        messages = [item for item in found["output"] if item.get("type") == "message"]
        return encode_json(self._answer(found, "".join(p["text"] for item in messages for p in item["content"])))

    def error_event(self, error: bytes) -> bytes:
        return api_errors.event(PATH, self._failed or error)
