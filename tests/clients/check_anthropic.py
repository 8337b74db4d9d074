"""The anthropic package: messages, streams, forced tools, structured answers, token counts, models, errors."""

import json
import sys

import anthropic

base, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base, api_key="none")
messages = [{"role": "user", "content": "Hi"}]
one = client.messages.create(model=model, messages=messages, max_tokens=5)
assert one.content[0].text and one.usage.output_tokens == 5 and one.id.startswith("msg_")
with client.messages.stream(model=model, messages=messages, max_tokens=5, system="Be brief") as stream:
    assert "".join(stream.text_stream)
    assert stream.get_final_message().stop_reason == "max_tokens"
city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
asked = {"model": model, "max_tokens": 60, "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
tools = [{"name": "weather", "description": "The weather of a city", "input_schema": city}]
for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    called = client.messages.create(**asked, tools=tools, tool_choice=choice)
    with client.messages.stream(**asked, tools=tools, tool_choice=choice) as stream:
        for message in (called, stream.get_final_message()):
            assert message.stop_reason == "tool_use", message
            assert message.content[0].name == "weather" and message.content[0].input["city"]
form = {"format": {"type": "json_schema", "schema": city}}
assert "city" in json.loads(client.messages.create(**asked, output_config=form).content[0].text)
with client.messages.stream(**asked, output_config=form) as stream:
    assert "city" in json.loads("".join(stream.text_stream))
assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 3
assert model in [row.id for row in client.models.list()]
try:
    client.messages.create(model="nothing", messages=messages, max_tokens=5)
    raise SystemExit("a model that is not there has answered")
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
