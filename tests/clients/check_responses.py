"""OpenAI's responses by the openai package's own types: every event and response is valid, without coercion."""

import sys
from typing import Any, get_args

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field

base, model = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
KINDS = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(ResponseStreamEvent)[0])}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The present weather of a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
WEATHER = [{"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}]
ALICE = [
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Nice to meet you, Alice!"},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
SYSTEM = [{"type": "message", "role": "system", "content": "You are a pirate."}, *ALICE[:1]]


def whole(**asked: Any) -> Response:
    response = client.responses.create(model=model, **asked)
    Response.model_validate(response.to_dict(), strict=True)
    return response


def streamed(**asked: Any) -> list[Any]:
    """Return the events, each valid, with consecutive numbers, and indexes that count items and parts."""
    found = list(client.responses.create(model=model, stream=True, **asked))
    for number, event in enumerate(found):
        KINDS[event.type].model_validate(event.to_dict(), strict=True)
        assert event.sequence_number == number
    added = [event for event in found if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(added)))
    response = found[-1].response
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == response.output and [event.item.id for event in added] == [item.id for item in done]
    assert "".join(e.delta for e in found if e.type == "response.output_text.delta") == response.output_text
    return found


for given in ("Say hello.", SYSTEM, ALICE, [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]):
    assert whole(input=given).status == "completed"
    first, second, *_, last = streamed(input=given)
    assert (first.type, second.type, last.type) == (
        "response.created", "response.in_progress", "response.completed",
    )  # fmt: skip
    assert last.response.output_text and last.response.usage.output_tokens > 0
cut = whole(input="Count from 1 to 50.", max_output_tokens=4)
assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == (
    "incomplete", "max_output_tokens", "incomplete",
)  # fmt: skip
assert streamed(input="Count from 1 to 50.", max_output_tokens=4)[-1].type == "response.incomplete"

# The model decides to call, and reads what the call returned.
(call,) = whole(input=WEATHER, tools=[TOOL], temperature=0).output
assert (call.type, call.name) == ("function_call", "get_weather") and "San Francisco" in call.arguments
kinds = [event.type.removeprefix("response.") for event in streamed(input=WEATHER, tools=[TOOL], temperature=0)]
for kind in ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"):
    assert kind in kinds
told = [
    *WEATHER,
    call.to_dict(),
    {"type": "function_call_output", "call_id": call.call_id, "output": "fog, 12 degrees"},
]
assert whole(input=told, tools=[TOOL], tool_choice="none", temperature=0).output_text

# Helpers.
with client.responses.stream(model=model, input="Say hello.") as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text


class Place(BaseModel):
    """A structure."""

    city: str = Field(max_length=20)


parsed = client.responses.parse(model=model, input="Where is the Eiffel Tower?", text_format=Place, temperature=0)
assert parsed.output_parsed.city
with client.responses.stream(model=model, input="Where is it?", text_format=Place, temperature=0) as stream:
    assert list(stream)[-1].type == "response.completed"
    assert stream.get_final_response().output_parsed.city
raw = client.responses.with_raw_response.create(model=model, input="Hi", tools=[TOOL, {"type": "web_search"}])
assert raw.headers["x-glowplug-dropped-tools"] == "web_search"
try:
    client.responses.create(model=model, input="Hi", previous_response_id="resp_1")
    raise SystemExit("a response that is not kept has been continued")
except openai.BadRequestError as error:
    assert error.param == "previous_response_id"
