"""Tools for models whose chat template knows none: told in the system message, with calls in hermes' form."""

# Models that were trained on no tools need examples more than words.
WITH_TOOLS = """\
{%- set talk = namespace(all=[]) %}
{%- for message in messages %}
{%- set said = message.content or '' %}
{%- if message.role == 'tool' %}
{%- set message = {'role': 'user', 'content': '<tool_response>\\n' ~ said ~ '\\n</tool_response>'} %}
{%- if loop.previtem and loop.previtem.role == 'tool' %}
{%- set message = {'role': 'user', 'content': talk.all[-1].content ~ '\\n' ~ message.content} %}
{%- set talk.all = talk.all[:-1] %}{% endif %}
{%- elif message.tool_calls %}
{%- set calls = namespace(text=said) %}
{%- for call in message.tool_calls %}
{%- set given = call.function.arguments %}{% set given = given if given is string else given | tojson %}
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
{%- set told.text = messages[0].content ~ '\\n\\n' ~ told.text %}{% set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools %}{% set told.text = told.text ~ '\\n' ~ tool | tojson %}{% endfor %}
{%- set messages = [
  {'role': 'system', 'content': told.text},
  {'role': 'user', 'content': 'Hello!'}, {'role': 'assistant', 'content': 'Hello! How can I help you?'},
  {'role': 'user', 'content': 'What time is it in Rome?'}, {'role': 'assistant', 'content': '<tool_call>\\n{"name": "get_time", "arguments": {"place": "Rome"}}\\n</tool_call>'},
  {'role': 'user', 'content': 'Search for cheap shoes.'}, {'role': 'assistant', 'content': '<tool_call>\\n{"name": "search_shops", "arguments": {"query": "cheap shoes"}}\\n</tool_call>'},
] + messages %}
{%- endif %}
"""  # noqa: E501


def with_tools(template: str) -> str:
    """Return the template as it is if it knows tools, or is empty."""
    return WITH_TOOLS + template if template and "tools" not in template else template
