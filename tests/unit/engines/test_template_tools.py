"""Tools in chat templates that know none."""

from typing import Any

import jinja2.sandbox
import pytest

from glowplug.engines.template_tools import with_tools

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"in": "Paris"}}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"in": "Paris"}}\n</tool_call>'


def rendered(messages: list[dict[str, Any]], tools_: list[Any] | None = None) -> str:
    # vLLM renders templates in such an environment, by transformers.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(with_tools(PLAIN)).render(messages=messages, tools=tools_)


def test_without_tools_a_talk_is_as_it_was() -> None:
    assert rendered([{"role": "system", "content": "S"}, USER]) == "<system>S<user>hi"


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "S"}]])
def test_a_model_whose_template_has_no_tools_is_told_of_them_beside_the_system_prompt(system: list[Any]) -> None:
    first, _, rest = rendered([*system, USER], [TOOL]).partition("<user>")
    assert first.startswith("<system>S\n\nFunctions" if system else "<system>Functions") and '"weather"' in first
    assert CALLED.partition("weather")[0] in rest and rest.endswith("<user>hi") and "<system>" not in rest


@pytest.mark.parametrize("arguments", [{"in": "Paris"}, '{"in": "Paris"}'])
def test_calls_and_their_results_are_text(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    results = [{"role": "tool", "tool_call_id": "c", "content": text} for text in ("sun", "rain")]
    answers = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert rendered(talk + results) == f"<user>hi<assistant>{CALLED}{CALLED}<user>{answers}"


def test_a_template_with_tools_is_left_alone() -> None:
    assert with_tools("{{ tools }}") == "{{ tools }}"
