"""OpenAI's responses as chats, and the answers back, compactions too. Pure: bytes in, bytes out.

Engines answer responses each in their own way, or not at all; all of them answer chats. So the router owns the envelope
and the events: https://www.openresponses.org/specification, and the models of OpenAI's SDKs.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.services.router import custom_tools, forced_tools, wire
from glowplug.services.router.continuation import DONE, decode, events
from glowplug.services.router.forced_tools import ForcedCall
from glowplug.services.router.request_shapes import ResponseAsked
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json, named_event

# A chat has these too; unknown fields go on to the engine like those of a chat.
_SAME = ("model", "stream", "temperature", "top_p", "user", "parallel_tool_calls", "service_tier")
_OF_RESPONSES = frozenset(ResponseAsked.__struct_fields__) - {*_SAME}
_NOT_HERE = ("messages", "n", "n_cmpl", "stream_options", "logprobs")  # of chats; they would change the answer's form
_TEXTS = ("text", "input_text", "output_text", "refusal")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_RESULTS = ("function_call_output", "custom_tool_call_output")
# Calls of tools that OpenAI runs, in a conversation that began there.
_FOREIGN = ("_call", "_call_output", "_list_tools", "_approval_request", "_approval_response")
_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_COMPACTIONS = ("compaction", "compaction_summary")
_SUMMARIZE = (
    "Summarize our conversation so far, so that you can go on from your summary alone: what I want, what was decided "
    "and done, names, numbers and file paths, and what is left to do. Answer with the summary only."
)
_SUMMARY_HEAD = "A summary of the conversation before:\n\n"
_WITH_LOGPROBS = "message.output_text.logprobs"


def translate(
    body: bytes, request_id: str, created_at: int, clock: Callable[[], float], *, forces: bool
) -> "tuple[bytes, ResponseAnswer, list[str]]":
    """Return a chat's body, its answer's translation, and the kinds of tools and items left out. `created_at`: epoch
    seconds, as from `clock`. `forces`: a forced call is left to forced_tools. Raises BadRequest."""
    fields = decode(body)
    dropped: list[str] = []
    given = [tool for tool in fields.get("tools") or () if _is_ours(tool, dropped)]
    tools, choice = _chosen(_by_chat_name(given), fields.get("tool_choice") or "auto")
    chat = {name: value for name, value in fields.items() if name not in _OF_RESPONSES and name not in _NOT_HERE}
    chat["messages"] = _messages(fields, dropped)
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = fields["max_output_tokens"]
    if form := _format(fields):
        chat["response_format"] = form
    for name, part, field in (("reasoning_effort", "reasoning", "effort"), ("verbosity", "text", "verbosity")):
        if (value := (fields.get(part) or {}).get(field)) is not None:
            chat[name] = value
    if fields.get("top_logprobs") or _WITH_LOGPROBS in (fields.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs") or 1}  # llama.cpp gives none for 0
    if tools:
        chat["tools"] = [{"type": "function", "function": tool.function} for tool in tools.values()]
        chat["tool_choice"] = choice
    else:
        chat.pop("parallel_tool_calls", None)
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    envelope = _envelope(fields, given, f"resp_{request_id}", created_at)
    answer = ResponseAnswer(bool(chat.get("stream")), envelope, request_id, tools, clock)
    inner = encode_json(chat)
    if forces and tools and choice not in ("auto", "none"):
        inner, answer.call = forced_tools.translate(inner, request_id)
    return inner, answer, sorted(set(dropped))


def compact(
    body: bytes, request_id: str, created_at: int, most_tokens: int
) -> "tuple[bytes, CompactAnswer, list[str]]":
    """Return the body of a chat that summarizes the conversation in at most `most_tokens`, its answer's translation,
    and the kinds of items left out. Raises BadRequest."""
    fields = decode(body)
    dropped: list[str] = []
    messages = _messages(fields, dropped)
    chat = {name: fields[name] for name in ("model", "user", "service_tier") if name in fields}
    chat |= {"messages": [*messages, {"role": "user", "content": _SUMMARIZE}], "max_tokens": most_tokens}
    said = [one["content"] for one in messages if one["role"] == "user" and isinstance(one["content"], str)]
    return encode_json(chat), CompactAnswer(said, request_id, created_at), sorted(set(dropped))


# -- the request ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool that the client runs. `function`: as a chat's, under its own name."""

    kind: str  # function or custom
    name: str
    namespace: str
    function: dict[str, Any]


def _is_ours(tool: Mapping[str, Any], dropped: list[str]) -> bool:
    """Return whether the client runs the tool. Nothing here would hold a custom call to a grammar."""
    kind = tool["type"]
    is_custom = kind == "custom" and tool.get("name") and custom_tools.is_free(tool.get("format"))
    if is_custom or kind in ("function", "namespace"):
        return True
    dropped.append(kind)
    return False


def _by_chat_name(given: list[dict[str, Any]]) -> dict[str, _Tool]:
    found: dict[str, _Tool] = {}
    for tool in given:
        inner = tool.get("tools") if tool["type"] == "namespace" else [tool]
        space = tool.get("name") or "" if tool["type"] == "namespace" else ""
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                name = _chat_name(space, one["name"])
                function = {key: one[key] for key in ("description", "parameters", "strict") if one.get(key)}
                if one.get("type") == "custom":
                    function["parameters"] = custom_tools.PARAMETERS
                found[name] = _Tool(one.get("type") or "function", one["name"], space, {"name": name} | function)
    return found


def _chat_name(namespace: Any, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _chosen(tools: dict[str, _Tool], choice: Any) -> tuple[dict[str, _Tool], Any]:
    """Return the allowed tools, and a chat's choice among them."""
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise _nothing_to_call("tools")
        return tools, choice
    if choice.get("type") == "allowed_tools":
        names = {tool.get("name") for tool in choice.get("tools") or () if isinstance(tool, dict)}
        tools = {name: tool for name, tool in tools.items() if tool.name in names}
        is_forced = choice.get("mode") == "required"
        if is_forced and not tools:
            raise _nothing_to_call("tool_choice")
        return tools, "required" if is_forced else "auto"
    if choice.get("type") not in ("function", "custom"):
        raise _nothing_to_call("tool_choice")
    return tools, {"type": "function", "function": {"name": choice.get("name")}}


def _nothing_to_call(param: str) -> BadRequest:
    return BadRequest(f"{param}: a call is demanded, and only tools that the client runs can be called.", param=param)


def _format(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    form = (fields.get("text") or {}).get("format") or {}
    if form.get("type", "text") == "text":
        return None
    if form["type"] == "json_object":
        return {"type": "json_object"}
    if form.get("schema") is None:
        raise BadRequest("text.format.schema is missing.", param="text.format.schema")
    asked = {name: form[name] for name in ("description", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": {"name": form.get("name") or "response"} | asked}


def _messages(fields: Mapping[str, Any], dropped: list[str]) -> list[dict[str, Any]]:
    """Reasoning, text and calls in a row are one message of the assistant, and the first instructions one of the
    system, as chat templates expect."""
    given, instructions = fields.get("input") or "", fields.get("instructions")
    made = [{"role": "system", "content": instructions}] if instructions else list[dict[str, Any]]()
    called = set[Any]()
    for i, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        kind, where = item.get("type") or "message", f"input[{i}]"
        last = made[-1] if made and made[-1]["role"] == "assistant" else None
        if kind == "message":
            _add_message(made, last, item, where)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            thoughts = "".join(part.get("text") or "" for part in parts if isinstance(part, dict))
            if thoughts:
                made.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
        elif kind in _CALLS:
            turn = last if last is not None else _added(made, {"role": "assistant", "content": None})
            turn.setdefault("tool_calls", []).append(_call(item, kind, where))
            called.add(item["call_id"])
        elif kind in _RESULTS:
            if item.get("call_id") not in called:
                text = f"{where}.call_id: no call before it has the id `{str(item.get('call_id'))[:100]}`."
                raise BadRequest(text, param=f"{where}.call_id")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _plain(item.get("output"))})
        elif kind in _COMPACTIONS:
            made.append({"role": "user", "content": _SUMMARY_HEAD + _summary(item, where)})
        elif kind.endswith(_FOREIGN):
            dropped.append(kind)
        else:
            raise BadRequest(f"{where}.type: `{kind[:100]}` is not known here.", param=f"{where}.type")
    return made


def _summary(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a compaction of ours."""
    try:
        return base64.b64decode(str(item.get("encrypted_content")), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        param = f"{where}.encrypted_content"
        text = f"{param}: this is no compaction of this API; send the conversation itself."
        raise BadRequest(text, param=param) from error


def _added(made: list[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    made.append(message)
    return message


def _add_message(made: list[dict[str, Any]], last: dict[str, Any] | None, item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role") or "", _content(item.get("content"), f"{where}.content")
    if role == "developer":
        role = "system"
    if role not in ("user", "assistant", "system"):
        raise BadRequest(
            f"{where}.role: `{role[:100]}` is not user, assistant, system or developer.", param=f"{where}.role"
        )
    if role == "assistant" and last is not None and last["content"] is None:
        last["content"] = content
    elif (
        role == "system"
        and len(made) == 1
        and made[0]["role"] == role
        and all(isinstance(one, str) for one in (made[0]["content"], content))
    ):
        made[0]["content"] += f"\n\n{content}"
    else:
        made.append({"role": role, "content": content})


def _content(content: Any, where: str) -> Any:
    """Return text wherever there is nothing else: some templates know only texts."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content or ())]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"]} | detail}
    if kind == "input_file" and part.get("file_data"):
        return {"type": "file", "file": {name: part[name] for name in ("file_data", "filename") if part.get(name)}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise BadRequest(f"{where}: `{kind[:100]}` needs its data in the request; no files are kept here.", param=where)


def _plain(output: Any) -> str:
    if isinstance(output, str):
        return output
    return "".join(part.get("text") or "" for part in output or ())


def _call(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    for name in ("name", "call_id"):
        if not item.get(name):
            raise BadRequest(f"{where}.{name} is missing.", param=f"{where}.{name}")
    said = item.get(_CALLS[kind]) or ""
    arguments = custom_tools.said(said) if kind == "custom_tool_call" else said or "{}"
    function = {"name": _chat_name(item.get("namespace"), item["name"]), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


# -- the answer -------------------------------------------------------------------------------------------------------


def _envelope(fields: Mapping[str, Any], tools: list[dict[str, Any]], response_id: str, at: int) -> dict[str, Any]:
    """Return the response before its first event. A value that the request leaves to the engine has the API's
    default."""

    def given(name: str, default: Any = None) -> Any:
        value = fields.get(name)
        return default if value is None else value

    reasoning, text = given("reasoning", {}), given("text", {})
    form = text.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"name": "response", "description": None, "schema": None, "strict": False} | form
    return {
        "id": response_id,
        "object": "response",
        "created_at": at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": given("instructions"),
        "max_output_tokens": given("max_output_tokens"),
        "max_tool_calls": given("max_tool_calls"),
        "model": fields["model"],
        "output": [],
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": given("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": given("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": given("temperature", 1.0),
        "text": {**text, "format": form},
        "tool_choice": given("tool_choice", "auto"),
        "tools": [_echoed(tool) for tool in tools],
        "top_logprobs": given("top_logprobs", 0),
        "top_p": given("top_p", 1.0),
        "presence_penalty": given("presence_penalty", 0.0),
        "frequency_penalty": given("frequency_penalty", 0.0),
        "truncation": "disabled",
        "usage": None,
        "user": given("user"),
        "metadata": given("metadata", {}),
    }


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return tool
    return {name: tool.get(name) for name in ("type", "name", "description", "parameters", "strict")}


class _Item:
    """One item of the output, as it comes. `part`: the type of its one content part, "" for a call."""

    def __init__(self, index: int, head: dict[str, Any], part: str) -> None:
        self.index, self.head, self.part = index, head, part
        self.texts: list[str] = []
        self.logprobs: list[Any] = []

    @property
    def where(self) -> dict[str, Any]:
        place = {"item_id": self.head["id"], "output_index": self.index}
        return place | {"content_index": 0} if self.part else place

    def content(self, text: str) -> dict[str, Any]:
        if self.part == "output_text":
            return {"type": self.part, "text": text, "annotations": [], "logprobs": self.logprobs}
        return {"type": self.part, "text": text}

    def done(self, status: str) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.part:
            return self.head | {"status": status, "content": [self.content(text)]}
        if self.head["type"] == "custom_tool_call":
            return self.head | {"status": status, "input": custom_tools.heard(text)}
        return self.head | {"status": status, "arguments": text}


class ResponseAnswer:
    """`call`: a forced call's translation, applied first. `tools`: by their names in the chat."""

    nothing = b":\n\n"
    counts: tuple[int, int] | None = None
    counts_all = False

    def __init__(
        self,
        streams: bool,
        response: dict[str, Any],
        request_id: str,
        tools: Mapping[str, _Tool],
        clock: Callable[[], float],
    ) -> None:
        self.streams = streams
        self.headers = wire.EVENT_STREAM_HEADERS if streams else wire.JSON_HEADERS
        self.call: ForcedCall | None = None
        self._response, self._id, self._tools, self._clock = response, request_id, tools, clock
        self._num_events = 0
        self._open: _Item | None = None
        self._open_key = ""  # an item's kind, and a call's number
        self._reason = ""
        self._usage: dict[str, Any] = {}

    def began(self, queue_s: float) -> None:
        """OpenAI's API does not report the time in the queue."""

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
            out += self._said(choice.get("delta") or {}, choice)
        return b"".join(out)

    def _said(self, said: Mapping[str, Any], choice: Mapping[str, Any]) -> list[bytes]:
        """Take a delta, or a whole message."""
        self._reason = choice.get("finish_reason") or self._reason
        out = []
        if thoughts := said.get("reasoning_content") or said.get("reasoning"):
            out += self._text("reasoning", thoughts, [])
        if text := said.get("content") or said.get("refusal"):
            most, found = self._response["top_logprobs"], (choice.get("logprobs") or {}).get("content") or []
            logprobs = [one | {"top_logprobs": (one.get("top_logprobs") or [])[:most]} for one in found]
            out += self._text("message", text, logprobs)
        for number, call in enumerate(said.get("tool_calls") or ()):
            out += self._call(call, call.get("index", number))
        return out

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        return self._event("created", response=self._response) + self._event("in_progress", response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = named_event({"type": f"response.{kind}", "sequence_number": self._num_events} | fields)
        self._num_events += 1
        return made

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[bytes]:
        out = []
        if self._open_key != kind:
            if kind == "reasoning":
                head: dict[str, Any] = {"type": "reasoning", "id": self._item_id("rs"), "summary": []}
                part = "reasoning_text"
            else:
                head, part = {"type": "message", "id": self._item_id("msg"), "role": "assistant"}, "output_text"
            out += self._begin_item(kind, head, part, content=[])
            item = self._item
            out.append(self._event("content_part.added", **item.where, part=item.content("")))
        item = self._item
        item.texts.append(text)
        more = {"logprobs": logprobs} if item.part == "output_text" else {}
        out.append(self._event(f"{item.part}.delta", **item.where, delta=text, **more))
        item.logprobs = item.logprobs + logprobs
        return out

    def _call(self, call: Mapping[str, Any], number: int) -> list[bytes]:
        out, key, function = [], f"call {number}", call.get("function") or {}
        if self._open_key != key:
            name = function.get("name") or ""
            tool = self._tools.get(name) or _Tool("function", name, "", {})
            is_custom = tool.kind == "custom"
            head = {"type": "custom_tool_call" if is_custom else "function_call"}
            head |= {
                "id": self._item_id("ctc" if is_custom else "fc"),
                "call_id": call.get("id") or self._item_id("call"),
            }
            head |= {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
            out += self._begin_item(key, head, "", **{"input" if is_custom else "arguments": ""})
        item, arguments = self._item, function.get("arguments") or ""
        item.texts.append(arguments)
        if arguments and item.head["type"] == "function_call":
            out.append(self._event("function_call_arguments.delta", **item.where, delta=arguments))
        return out

    @property
    def _item(self) -> _Item:
        assert self._open is not None
        return self._open

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self._response['output']) + (self._open is not None)}"

    def _begin_item(self, key: str, head: dict[str, Any], part: str, **empty: Any) -> list[bytes]:
        out = self._close("completed")
        self._open, self._open_key = _Item(len(self._response["output"]), head, part), key
        begun = head | {"status": "in_progress"} | empty
        return [*out, self._event("output_item.added", output_index=self._open.index, item=begun)]

    def _close(self, status: str) -> list[bytes]:
        if self._open is None:
            return []
        item, self._open, self._open_key = self._open, None, ""
        done, out = item.done(status), []
        self._response["output"].append(done)
        if item.part:
            (part,) = done["content"]
            more = {"logprobs": item.logprobs} if item.part == "output_text" else {}
            out.append(self._event(f"{item.part}.done", **item.where, text=part["text"], **more))
            out.append(self._event("content_part.done", **item.where, part=part))
        elif done["type"] == "custom_tool_call":
            out.append(self._event("custom_tool_call_input.delta", **item.where, delta=done["input"]))
            out.append(self._event("custom_tool_call_input.done", **item.where, input=done["input"]))
        else:
            arguments = {"name": done["name"], "arguments": done["arguments"]}
            out.append(self._event("function_call_arguments.done", **item.where, **arguments))
        return [*out, self._event("output_item.done", output_index=item.index, item=done)]

    def end(self) -> bytes:
        if self._response["status"] != "in_progress":
            return b""
        out, status = [self._begin()], self._status
        out += self._close(status)
        return b"".join([*out, self._event(status, response=self._ended(status))])

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason in ("length", "content_filter") else "completed"

    def _ended(self, status: str) -> dict[str, Any]:
        self._response |= {"status": status, "usage": _used(self._usage)}
        if status == "completed":
            self._response["completed_at"] = int(self._clock())
        elif status == "incomplete":
            reason = "max_output_tokens" if self._reason == "length" else self._reason
            self._response["incomplete_details"] = {"reason": reason}
        return self._response

    def whole(self, answer: bytes) -> bytes:
        found = decode(self.call.whole(answer) if self.call is not None else answer)
        self._usage = found.get("usage") or {}
        choice = found["choices"][0]
        self._said(choice["message"], choice)
        self._close(self._status)
        return encode_json(self._ended(self._status))

    def error(self, error: bytes) -> bytes:
        return _renamed(error)

    def error_event(self, error: bytes) -> bytes:
        """Return the failed response, and the event whose `error` OpenAI's clients raise."""
        if self._response["status"] != "in_progress":
            return b""
        inner = decode(error)["error"]
        fields = {name: inner.get(name) for name in ("code", "message", "param")}
        out = [self._begin(), *self._close("incomplete")]
        self._response["error"] = {"code": fields["code"] or "server_error", "message": fields["message"]}
        out.append(self._event("failed", response=self._ended("failed")))
        last = {"type": "error", "sequence_number": self._num_events} | fields | {"error": inner}
        return b"".join([*out, named_event(last)])


class CompactAnswer(SameApi):
    """`said`: the user's messages, which stay as they are before the summary."""

    def __init__(self, said: list[str], request_id: str, created_at: int) -> None:
        super().__init__(streams=False)
        self._said, self._id, self._created_at = said, request_id, created_at

    def events(self, events: bytes) -> bytes:
        raise NotImplementedError("the chat was not asked for a stream")

    def end(self) -> bytes:
        raise NotImplementedError("the chat was not asked for a stream")

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        summary = found["choices"][0]["message"].get("content") or ""
        output: list[dict[str, Any]] = [
            {
                "type": "message",
                "id": f"msg_{self._id}_{i}",
                "status": "completed",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
            for i, text in enumerate(self._said)
        ]
        content = base64.b64encode(summary.encode()).decode()
        output.append({"type": "compaction", "id": f"cmp_{self._id}", "encrypted_content": content})
        return encode_json(
            {
                "id": f"resp_{self._id}",
                "object": "response.compaction",
                "created_at": self._created_at,
                "output": output,
                "usage": _used(found.get("usage") or {}),
            }
        )

    def error(self, error: bytes) -> bytes:
        return _renamed(error)


def _used(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    if not usage:
        return None
    prompt, made = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": int(cached or 0), "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": int(thought or 0)},
        "total_tokens": prompt + made,
    }


def _renamed(error: bytes) -> bytes:
    """Name the response's fields, not the chat's."""
    found = decode(error)
    inner = found["error"]
    if (param := _PARAMS.get(inner.get("param") or "")) is not None:
        inner["message"] = inner["message"].replace(f"{inner['param']}:", f"{param}:", 1)
        inner["param"] = param
    return encode_json(found)
