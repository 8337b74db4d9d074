"""Tools for any chat template: vLLM refuses them unless told how its model writes a call."""

from collections.abc import Sequence

# What calls look like in a chat template, the first that is found; hermes' form is JSON between <tool_call> tags.
_PARSERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call>", "gemma4"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|channel|>", "openai"),
    ("Environment: ipython", "llama3_json"),
)
_HERMES = "hermes"
_READ_CALLS = ("--exclude-tools-when-tool-choice-none", "--enable-auto-tool-choice", "--tool-call-parser")

# Told to models whose template has no tools. Models that were trained on none need examples more than words.
_WITH_TOOLS = """\
{%- set talk = namespace(all=[]) %}
{%- for message in messages %}
{%- set said = message.content or '' %}
{%- if message.role == 'tool' %}
{%- set message = {'role': 'user', 'content': '<tool_response>\\n' ~ said ~ '\\n</tool_response>'} %}
{%- if loop.previtem and loop.previtem.role == 'tool' %}
{%- set message = {'role': 'user', 'content': talk.all[-1].content ~ '\\n' ~ message.content} %}
{%- set talk.all = talk.all[:-1] %}
{%- endif %}
{%- elif message.tool_calls %}
{%- set calls = namespace(text=said) %}
{%- for call in message.tool_calls %}
{%- set given = call.function.arguments %}
{%- set given = given if given is string else given | tojson %}
{%- set calls.text = calls.text ~ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ given ~ '}\\n</tool_call>' %}
{%- endfor %}
{%- set message = {'role': 'assistant', 'content': calls.text} %}
{%- endif %}
{%- set talk.all = talk.all + [message] %}
{%- endfor %}
{%- set messages = talk.all %}
{%- if tools %}
{%- set told = namespace(text='Functions that you may call, if they answer the question:') %}
{%- if messages[0].role == 'system' %}
{%- set told.text = messages[0].content ~ '\\n\\n' ~ told.text %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools %}{% set told.text = told.text ~ '\\n' ~ tool | tojson %}{% endfor %}
{%- set messages = [
  {'role': 'system', 'content': told.text},
  {'role': 'user', 'content': 'Hello!'},
  {'role': 'assistant', 'content': 'Hello! How can I help you?'},
  {'role': 'user', 'content': 'What time is it in Rome?'},
  {'role': 'assistant', 'content': '<tool_call>\\n{"name": "get_time", "arguments": {"place": "Rome"}}\\n</tool_call>'},
  {'role': 'user', 'content': 'Search for cheap shoes.'},
  {'role': 'assistant', 'content': '<tool_call>\\n{"name": "search_shops", "arguments": {"query": "cheap shoes"}}\\n</tool_call>'},
] + messages %}
{%- endif %}
"""  # noqa: E501


def with_tools(template: str) -> str:
    return template if "tools" in template else _WITH_TOOLS + template


def argv_of(template: str, argv: Sequence[str]) -> list[str]:
    """Return the flags with which vLLM reads the calls of a model with this template; none where the owner chose."""
    if any(word.startswith(("--tool-call-parser", "--enable-auto", "--no-enable-auto")) for word in argv):
        return []
    parser = next((name for mark, name in _PARSERS if mark in template), _HERMES)
    return [*_READ_CALLS, parser]
