"""LangChain's ChatOpenAI and ChatOllama: answers, streams, a structured answer, a forced tool."""

import sys

from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

base, model = sys.argv[1:3]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)


openai = ChatOpenAI(model=model, base_url=f"{base}/v1", api_key="none", max_tokens=60, temperature=0)
ollama = ChatOllama(model=model, base_url=base, num_predict=60, temperature=0)
for chat in (openai, ollama):
    assert chat.invoke("Hi").content
    assert "".join(part.content for part in chat.stream("Hi"))
forced = openai.bind_tools([Weather], tool_choice="Weather").invoke("What is the weather in Paris?")
assert forced.tool_calls[0]["name"] == "Weather" and forced.tool_calls[0]["args"]["city"]
for method in ("json_schema", "function_calling"):
    assert openai.with_structured_output(Weather, method=method).invoke("What is the weather in Paris?").city
assert ollama.with_structured_output(Weather, method="json_schema").invoke("What is the weather in Paris?").city
