"""The openai package: chats, streams, tools, structured answers, completions, embeddings, responses, models, errors."""

import sys

import openai

base, model, embedder = sys.argv[1:4]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
assert model in [row.id for row in client.models.list()]
one = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
assert one.choices[0].message.content and one.usage.completion_tokens == 5
two = client.chat.completions.create(model=model, messages=messages, max_tokens=4, n=2)
assert len(two.choices) == 2 and two.usage.completion_tokens == 8
parts = list(
    client.chat.completions.create(
        model=model, messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
)
assert parts[-1].usage.completion_tokens == 5
called = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="required", max_tokens=60, temperature=0
)
assert called.choices[0].message.tool_calls[0].function.name == "weather"
schema = {"name": "city", "schema": tool["function"]["parameters"]}
form = {"type": "json_schema", "json_schema": schema}
assert "city" in client.chat.completions.create(
    model=model, messages=messages, response_format=form, max_tokens=60
).choices[0].message.content  # fmt: skip
text = client.completions.create(model=model, prompt=["The sea", "A"], max_tokens=3)
assert len(text.choices) == 2 and text.usage.completion_tokens == 6
assert client.responses.create(model=model, input="Hi", max_output_tokens=5).output_text
held = client.completions.create(model=model, prompt="A city:", max_tokens=60, extra_body={"response_format": form})
assert "city" in held.choices[0].text
flat = {"type": "function", "strict": False, **tool["function"]}
asked = {"model": model, "input": "What is the weather in Paris?", "tools": [flat], "max_output_tokens": 60}
response = client.responses.create(**asked, tool_choice="required", temperature=0)
with client.responses.stream(**asked, tool_choice={"type": "function", "name": "weather"}, temperature=0) as stream:
    for one in (response, stream.get_final_response()):
        assert one.output[0].type == "function_call" and one.output[0].name == "weather", one
assert len(client.embeddings.create(model=embedder, input=["a", "b"]).data) == 2
try:
    client.chat.completions.create(model="nothing", messages=messages)
    raise SystemExit("a model that is not there has answered")
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
