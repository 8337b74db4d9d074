"""The ollama package: list, show, ps, pull, chat, generate, embed, streams, tools, structured answers, errors."""

import sys

import ollama

base, model, embedder = sys.argv[1:4]
client = ollama.Client(host=base)
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
bound = {"num_predict": 5, "num_ctx": 512}
assert f"{model}:latest" in [row.model for row in client.list().models]
assert client.generate(model=model, keep_alive="5m").done_reason == "load"
assert f"{model}:latest" in [row.model for row in client.ps().models]
assert "completion" in client.show(model).capabilities
assert [row.status for row in client.pull(model, stream=True)][-1] == "success"
one = client.chat(model=f"{model}:latest", messages=messages, options=bound)
assert one.message.content and one.eval_count == 5 and one.done_reason == "length"
*parts, last = client.chat(model=model, messages=messages, options=bound, stream=True)
assert "".join(part.message.content for part in parts) and last.done and last.eval_count == 5
assert client.generate(model=model, prompt="The sea", raw=True, options=bound).response
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
assert "city" in client.chat(model=model, messages=messages, format=schema, options={"num_predict": 60}).message.content


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return f"It is sunny in {city}."


call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
told = [
    *messages,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_name": "weather", "content": weather("Paris")},
]
assert client.chat(model=model, messages=told, tools=[weather], options=bound).message.content is not None
assert len(client.embed(model=embedder, input=["a", "b"]).embeddings) == 2
for stream in (False, True):
    try:
        list(client.chat(model="nothing", messages=messages, stream=stream))
        raise SystemExit("a model that is not there has answered")
    except ollama.ResponseError as error:
        assert error.status_code == 404
