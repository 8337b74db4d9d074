"""Each known request field changes the answer, is a hint, or is refused by name: one table for all engines."""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines.drivers import driver
from glowplug.services.router import responses_as_chat
from glowplug.services.router.request_body import SHAPES, check_model, read_body
from tests.contract.data_port_rig import Answer, Rig, a_model, a_rig, an_instance, post
from tests.contract.engine_rig import engine_case

ALL = "llamacpp vllm emulated"
CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSE, MESSAGE, COUNT, RERANK = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/rerank"
COMPACT = "/v1/responses/compact"


@dataclass(frozen=True)
class Row:
    """`beside`: fields that let this one show; None: left out beside it. `hint`: why it may be without effect.
    `refused`: by these engines."""

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""
    refused: str = ""


USER = {"role": "user", "content": "Tell me a short story about a cat."}
BRIEF = "Answer with one word: what is the capital of France?"
NAMED = {"name": "f", "description": "Find", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": NAMED}]
FLAT = [{"type": "function", **NAMED}]
OF_ANTHROPIC = [{"name": "f", "input_schema": {"type": "object"}}]
SCHEMA = {"enum": ["Paris"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
OF_MESSAGE = {"type": "json_schema", "schema": SCHEMA}
HOT = {"temperature": 2, "seed": 1}
LONG = {"max_tokens": 16}
UNBOUND = {"max_tokens": None}
WHOSE, ORDER = "it says whose request it is", "it orders the waiting requests, of keys that may choose"
SPEED, STORED = "it changes the speed alone", "it describes kept answers, and none is kept"
MAY_CALL = "it allows several calls, and obliges to none"

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 8, "temperature": 0},
    COMPLETION: {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
    MESSAGE: {"messages": [USER], "max_tokens": 8, "temperature": 0},
    COUNT: {"messages": [USER]},
    RESPONSE: {"input": USER["content"], "max_output_tokens": 8, "temperature": 0},
    COMPACT: {"input": USER["content"]},
    EMBEDDING: {"input": "a cat"},
    RERANK: {"query": "cat", "documents": ["a cat", {"text": "the sea"}]},
}
GENERATING = {
    "stream": Row(True),
    "user": Row("u", hint=WHOSE),
    "stream_options": Row({"include_usage": True}, {"stream": True}),
    "n": Row(2, HOT, refused="emulated"),
    "max_tokens": Row(3),
    "temperature": Row(2, {"seed": 1}),
    "top_p": Row(0.01, HOT),
    "presence_penalty": Row(2, LONG),
    "frequency_penalty": Row(2, LONG),
    "logit_bias": Row(dict.fromkeys(("28", "253", "260", "338"), -100)),
    "seed": Row(5, HOT),
    "stop": Row("a"),
    "top_k": Row(1, HOT),
    "min_p": Row(1, HOT),
    "repetition_penalty": Row(1.9, LONG, refused="llamacpp"),
    "repeat_penalty": Row(1.9, LONG, refused="vllm"),
    "min_tokens": Row(4, refused="llamacpp"),
    "stop_token_ids": Row([28], refused="llamacpp emulated"),
    "ignore_eos": Row(True, LONG | {"messages": [USER | {"content": BRIEF}]}),
    "skip_special_tokens": Row(False, refused="llamacpp"),
    "cache_prompt": Row(False, hint=SPEED),
    "timings_per_token": Row(True, {"stream": True}, refused="vllm emulated"),
    "response_format": Row(FORM, refused="emulated"),
    "n_predict": Row(3, UNBOUND, refused="vllm emulated"),
    "n_probs": Row(2, refused="vllm emulated"),
    "n_cmpl": Row(2, HOT, refused="vllm emulated"),
    "prompt_logprobs": Row(1, refused="llamacpp emulated"),
    "grammar": Row('root ::= "yes"', refused="vllm emulated"),
    "json_schema": Row(SCHEMA, refused="vllm emulated"),
    "structured_outputs": Row({"choice": ["yes"]}, refused="llamacpp emulated"),
    "guided_grammar": Row('root ::= "yes"', refused=ALL),
    "guided_regex": Row("yes", refused=ALL),
    "guided_json": Row(SCHEMA, refused=ALL),
    "guided_choice": Row(["yes"], refused=ALL),
}
KEPT = {
    "metadata": Row({"a": "b"}, hint=STORED),
    "service_tier": Row("auto", hint=ORDER),
    "prompt_cache_key": Row("k", hint=SPEED),
    "prompt_cache_retention": Row("24h", hint=SPEED),
    "safety_identifier": Row("s", hint=WHOSE),
}
COUNTED = {
    "system": Row("Speak French."),
    "tools": Row(OF_ANTHROPIC),
    "thinking": Row({"type": "disabled"}),
    "context_management": Row({"edits": []}, hint="it shortens long conversations, and a short answer is no other"),
    "cache_control": Row({"type": "ephemeral"}, hint=SPEED),
}
FIELDS: dict[str, dict[str, Row]] = {
    CHAT: GENERATING
    | KEPT
    | {
        "max_completion_tokens": Row(3),
        "logprobs": Row(True, refused="emulated"),
        "top_logprobs": Row(2, {"logprobs": True}, refused="emulated"),
        "tools": Row(TOOLS),
        "tool_choice": Row("required", {"tools": TOOLS}, refused="emulated"),
        "parallel_tool_calls": Row(False, {"tools": TOOLS}, hint=MAY_CALL),
        "modalities": Row(["text"], hint="all answers are texts"),
        "reasoning_effort": Row("none"),
        "verbosity": Row("low", refused=ALL),
        "prediction": Row({"type": "content", "content": "x"}, hint=SPEED),
        "store": Row(True, refused=ALL),
        "chat_template_kwargs": Row({"enable_thinking": False}),
        "add_generation_prompt": Row(False),
        "continue_final_message": Row(True, {"add_generation_prompt": False}),
        "functions": Row([{"name": "f"}], refused=ALL),
        "function_call": Row("auto", refused=ALL),
        "audio": Row({"voice": "alloy", "format": "wav"}, refused=ALL),
    },
    COMPLETION: GENERATING
    | {
        "stream_options": Row({"include_usage": True}, {"stream": True}, hint="llama.cpp always tells the usage"),
        "ignore_eos": Row(True, LONG | {"prompt": f"<|im_start|>user\n{BRIEF}<|im_end|>\n<|im_start|>assistant\n"}),
        "max_completion_tokens": Row(3, UNBOUND, refused=ALL),
        "logprobs": Row(2, refused="emulated"),
        "best_of": Row(2, refused=ALL),
        "echo": Row(True, refused="llamacpp emulated"),
        "suffix": Row("x", refused="llamacpp emulated"),
    },
    EMBEDDING: {
        "stream": Row(True, refused=ALL),
        "user": Row("u", hint=WHOSE),
        "encoding_format": Row("base64"),
        "dimensions": Row(8, refused="llamacpp emulated"),
    },
    RERANK: {
        "stream": Row(True, refused=ALL),
        "user": Row("u", hint=WHOSE),
        "top_n": Row(1),
        "return_documents": Row(True, refused="llamacpp"),
        "max_tokens_per_doc": Row(1, refused="llamacpp"),
        "truncate_prompt_tokens": Row(1, refused="llamacpp"),
    },
    COUNT: COUNTED
    | {
        "stream": Row(True, refused=ALL),
        "tool_choice": Row({"type": "any"}, {"tools": OF_ANTHROPIC}, hint="tools count whether or not they are called"),
        "output_config": Row({"format": OF_MESSAGE}, hint="a structure takes no tokens"),
        "output_format": Row(OF_MESSAGE, hint="a structure takes no tokens", refused="vllm"),
    },
    MESSAGE: COUNTED
    | {
        "stream": Row(True),
        "tool_choice": Row({"type": "any"}, {"tools": OF_ANTHROPIC}),
        "output_config": Row({"format": OF_MESSAGE}, refused="emulated"),
        "output_format": Row(OF_MESSAGE, refused="vllm emulated"),
        "stop_sequences": Row(["a"]),
        "temperature": Row(1, LONG),
        "top_p": Row(0.01, LONG | {"temperature": 1}),
        "top_k": Row(1, LONG | {"temperature": 1}),
        "metadata": Row({"user_id": "u"}, hint=WHOSE),
        "service_tier": Row("auto", hint=ORDER),
        "inference_geo": Row("us", refused=ALL),
    },
    RESPONSE: KEPT
    | {
        "stream": Row(True),
        "user": Row("u", hint=WHOSE),
        "client_metadata": Row({"a": "b"}, hint=WHOSE),
        "input": Row("Count to ten.", {"input": USER["content"]}),
        "instructions": Row("Speak French."),
        "max_output_tokens": Row(3),
        "temperature": Row(2, {"max_output_tokens": 16}),
        "top_p": Row(0.01, {"max_output_tokens": 16, "temperature": 2}),
        "tools": Row(FLAT),
        "tool_choice": Row("required", {"tools": FLAT}, refused="emulated"),
        "text": Row({"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, refused="emulated"),
        "reasoning": Row({"effort": "high"}),
        "top_logprobs": Row(2, refused="emulated"),
        "parallel_tool_calls": Row(False, {"tools": FLAT}, hint=MAY_CALL),
        "max_tool_calls": Row(1, hint="it counts calls that the server makes, and it makes none"),
        "stream_options": Row({"include_obfuscation": False}, {"stream": True}, hint="none is added"),
        "include": Row(["reasoning.encrypted_content"], hint="reasoning comes as text"),
        "truncation": Row("auto", refused=ALL),
        "store": Row(False, hint=STORED),
        "background": Row(True, refused=ALL),
        "previous_response_id": Row("r", refused=ALL),
        "conversation": Row("c", refused=ALL),
        "prompt": Row({"id": "p"}, refused=ALL),
    },
    COMPACT: {
        "stream": Row(True, refused=ALL),
        "user": Row("u", hint=WHOSE),
        "input": Row("Count to ten.", {"input": USER["content"]}),
        "instructions": Row("Speak French."),
        "service_tier": Row("auto", hint=ORDER),
        "prompt_cache_key": Row("k", hint=SPEED),
        "prompt_cache_retention": Row("24h", hint=SPEED),
        "previous_response_id": Row("r", refused=ALL),
    },
}
EACH = [(path, name, row) for path, rows in FIELDS.items() for name, row in rows.items()]
# Made-up texts show none of these; the engine has neither a sampler nor a template.
UNSEEN = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p"}
UNSEEN |= {"repetition_penalty", "repeat_penalty", "min_tokens", "ignore_eos", "skip_special_tokens", "tools"}
UNSEEN |= {"reasoning_effort", "reasoning", "thinking", "chat_template_kwargs", "add_generation_prompt"}
TEMPLATE = """\
{% if tools %}{{ tools | tojson }}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}\
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""  # with tools, effort and thinking, in the manner of Qwen's
ARGS: dict[str, dict[str, dict[str, Any]]] = {  # of each engine's models
    "llamacpp": {
        "m": {"chat_template": TEMPLATE},
        "e": {"embeddings": True},
        "r": {"embeddings": True, "pooling": "rank"},
    },
    "vllm": {"m": {}},
    "emulated": {"m": {"time_scale": 1000.0, "launch_s": 0.1}},
}


def a_body(path: str, fields: Mapping[str, Any], model: str = "m") -> bytes:
    named = {"model": model, **BODIES[path], **fields}
    return json.dumps({name: value for name, value in named.items() if value is not None}).encode()


def serving(engine: str, path: str) -> Model | None:
    """Return the model whose engine has this path."""
    for name, args in ARGS[engine].items():
        model = a_model(name, engine=engine, engine_args=args, context_tokens=1024)
        if path not in driver(engine).api(model).lacks:  # type: ignore[attr-defined]
            return model
    return None


def test_each_known_field_has_a_row() -> None:
    for path, rows in FIELDS.items():
        optional = {one.name for one in msgspec.structs.fields(SHAPES[path.encode()]) if not one.required}
        assert not optional - set(rows), path
    free = {path for path, shape in SHAPES.items() if not shape.__struct_config__.forbid_unknown_fields}
    assert {path.encode() for path in FIELDS} == set(SHAPES) - free, "the engine reads the fields of these"


@pytest.mark.parametrize("engine", ARGS)
def test_an_engine_refuses_by_name_what_it_cannot_do(engine: str) -> None:
    found = {path: serving(engine, path) for path in FIELDS}
    for path, name, row in EACH:
        model = found[path] if engine != "vllm" else serving(engine, CHAT)
        if model is None:
            continue
        param, body, api = "", a_body(path, row.beside | {name: row.value}), driver(engine).api(model)
        reader = path.encode()
        try:
            asked = read_body(reader, body)
            if path == RESPONSE:
                reader, forces = CHAT.encode(), CHAT.encode() in api.translated
                body, _, _ = responses_as_chat.translate(body, "r", 0, time.time, forces=forces)
                asked = read_body(reader, body)
            check_model(asked, model, api, reader, len(body))
        except BadRequest as error:
            param = "text" if error.param == "response_format" and path == RESPONSE else str(error.param)
        is_translated = path.encode() in api.translated and name == "tool_choice"
        assert is_translated or param.partition(".")[0] == (name if engine in row.refused else ""), (path, name)


def shown(answer: Answer) -> Any:
    """Return what differs only if the answer does: without ids, times and the caches' numbers."""
    if b"data:" in answer.body:
        return [_kept(json.loads(line[6:])) for line in answer.body.splitlines() if line.startswith(b"data: {")]
    found = answer.json()
    return _kept(found.get("output", found))


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(one) for one in value]
    if not isinstance(value, dict):
        return value
    left_out = ("id", "item_id", "created", "created_at")
    return {
        key: "..." if key in ("usage", "timings") else _kept(one) for key, one in value.items() if key not in left_out
    }


@contextlib.asynccontextmanager
async def a_port(engine: str) -> AsyncIterator[Rig]:
    """A port with each of the engine's models."""
    models = [
        a_model(name, engine=engine, engine_args=args, context_tokens=1024) for name, args in ARGS[engine].items()
    ]
    async with engine_case(engine) as case, a_rig(models=tuple(models)) as rig:
        for model in models:
            report = await case.start(name=model.name, key=model.key, engine_args=model.engine_args)
            rig.tell(an_instance(f"i-{model.name}", report.handle.url, model_key=model.key))
        yield rig


class Asker:
    def __init__(self, rig: Rig, engine: str) -> None:
        self._rig, self._engine = rig, engine
        self._known: dict[tuple[str, str], Any] = {}

    async def ask(self, path: str, fields: Mapping[str, Any]) -> Answer:
        model = serving(self._engine, path)
        assert model is not None
        return await self._rig.ask(post(path, a_body(path, fields, model.name)))

    async def without(self, path: str, row: Row) -> Any:
        fields = {name: value for name, value in row.beside.items() if value is not None}
        key = path, json.dumps(fields)
        if key not in self._known:
            self._known[key] = shown(await self.ask(path, fields))
        return self._known[key]

    async def wrong(self, path: str, name: str, row: Row) -> str:
        """Return "" if the field changes the answer, is refused by name, or is a hint that is taken."""
        answer = await self.ask(path, row.beside | {name: row.value})
        if answer.status != 200:
            is_named = answer.status == 400 and name in answer.json()["error"]["message"]
            return "" if is_named and not row.hint else f"{answer.status} {answer.body!r}"
        if row.hint or (self._engine == "emulated" and name in UNSEEN):
            return ""
        return "" if shown(answer) != await self.without(path, row) else "taken and ignored"


@pytest.mark.parametrize(
    "engine", ["emulated", pytest.param("llamacpp", marks=[pytest.mark.llamacpp, pytest.mark.system])]
)
async def test_each_field_changes_the_answer_or_is_refused_by_name(engine: str) -> None:
    async with a_port(engine) as rig:
        asker, found = Asker(rig, engine), {}
        for path, name, row in EACH:
            if serving(engine, path) is not None and engine not in row.refused:
                found[path, name] = await asker.wrong(path, name, row)
        assert not {where: why for where, why in found.items() if why}
