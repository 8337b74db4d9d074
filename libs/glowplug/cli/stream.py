"""One streamed chat completion, with what its headers and comments tell about where the time went."""

import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from glowplug.cli.client import error_message
from glowplug.cli.options import CliError

HELD_TIMEOUT_S = 300.0
_TIMING = re.compile(r"([a-zA-Z_]+);dur=([0-9.]+)")
Message = Mapping[str, str]


@dataclass
class Answer:
    """What came back. `timings_s` is Server-Timing in seconds: queue, phases of the start it waited for, router."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    request_id: str = ""
    instance_id: str = ""
    emulated: bool = False
    timings_s: dict[str, float] = field(default_factory=dict)

    def take_timings(self, text: str) -> None:
        self.timings_s |= {name: float(ms) / 1000 for name, ms in _TIMING.findall(text)}


async def chat(
    client: httpx.AsyncClient, model: str, messages: Sequence[Message], answer: Answer, max_tokens: int | None = None
) -> AsyncIterator[str]:
    """Pieces of the answer as they come; `answer` fills up beside. Raises CliError when the request fails."""
    body: dict[str, object] = {"model": model, "messages": list(messages), "stream": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    started = time.perf_counter()
    done = False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, timeout=HELD_TIMEOUT_S) as response:
            answer.request_id = response.headers.get("x-request-id", "")
            answer.instance_id = response.headers.get("x-glowplug-instance", "")
            answer.emulated = "x-glowplug-emulated" in response.headers
            answer.take_timings(response.headers.get("server-timing", ""))
            if response.is_error:
                await response.aread()
                raise CliError(error_message(response))
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    answer.take_timings(line)
                done = done or line == "data: [DONE]"
                piece = _piece(line)
                if piece and answer.ttft_s is None:
                    answer.ttft_s = time.perf_counter() - started
                answer.text += piece
                if piece:
                    yield piece
    except httpx.HTTPError as error:
        raise CliError(f"the answer broke off: {error!r}") from error
    if not done:
        raise CliError("the answer broke off: no [DONE] came")
    answer.total_s = time.perf_counter() - started


def _piece(line: str) -> str:
    """The text in one SSE line. Raises CliError for an error event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise CliError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")
