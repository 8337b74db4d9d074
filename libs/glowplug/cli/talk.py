"""`run` and `chat`: stream answers, and show where their time went."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import httpx
import typer

from glowplug.cli.client import FleetClient, connect, error_message
from glowplug.cli.options import JsonOption, ModelArgument, StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, say, say_json

HELD_TIMEOUT_S = 300.0
_TIMING = re.compile(r"([a-zA-Z_]+);dur=([0-9.]+)")
Message = Mapping[str, str]
TokensOption = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Maximum tokens of the answer.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print on stderr where the time went.")]


@dataclass
class ChatAnswer:
    """`timings_s`: Server-Timing in seconds: queue, phases of the awaited start, router."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    request_id: str = ""
    instance_id: str = ""
    emulated: bool = False
    timings_s: dict[str, float] = field(default_factory=dict)

    def take_timings(self, text: str) -> None:
        self.timings_s |= {name: float(ms) / 1000 for name, ms in _TIMING.findall(text)}


async def streamed(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Message],
    answer: ChatAnswer,
    max_tokens: int | None = None,
) -> AsyncIterator[str]:
    """Yield pieces of the answer, and fill `answer`. Raises CliError if the request fails."""
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
                said, retry_after = await response.aread(), response.headers.get("retry-after", "")
                raise CliError(error_message(str(response.request.url), response.status_code, said, retry_after))
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
        raise CliError(f"the connection was lost during the answer: {type(error).__name__} {error}") from error
    if not done:
        raise CliError("the answer ended early, without its [DONE]")
    answer.total_s = time.perf_counter() - started


def _piece(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise CliError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def run(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="The question; read from stdin when omitted.")
    ] = None,
    max_tokens: TokensOption = None,
    verbose: VerboseOption = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model once, and stream the answer. A cold model is started first."""
    fleet = connect(state_dir)
    text = " ".join(prompt) if prompt else sys.stdin.read()
    if not text.strip():
        raise CliError("the prompt is empty: give one as an argument or on stdin", WRONG_USAGE)
    answer = asyncio.run(_answer(fleet, model, [{"role": "user", "content": text}], max_tokens, not as_json))
    if as_json:
        value = {name: getattr(answer, name) for name in ("text", "ttft_s", "total_s", "request_id", "instance_id")}
        say_json(value | {"model": model, "emulated": answer.emulated, "timings_s": answer.timings_s})
    if verbose:
        say(timing_line(answer), err=True)


def chat(
    model: ModelArgument,
    system: Annotated[str, typer.Option("--system", help="The system message of the conversation.")] = "",
    max_tokens: TokensOption = None,
    verbose: VerboseOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Talk with a model until an empty line or Ctrl-D."""
    fleet = connect(state_dir)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            text = input("you> ")
        except EOFError:
            say()
            return
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        try:
            answer = asyncio.run(_answer(fleet, model, messages, max_tokens, True))
        except CliError as error:
            say(f"glowplug: {error}", err=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
        if verbose:
            say(timing_line(answer), err=True)


async def _answer(
    fleet: FleetClient, model: str, messages: list[Message], max_tokens: int | None, show: bool
) -> ChatAnswer:
    answer = ChatAnswer()
    async with httpx.AsyncClient(base_url=fleet.url("data"), headers=fleet.data_headers(), trust_env=False) as client:
        async for piece in streamed(client, model, messages, answer, max_tokens):
            if show:
                say(piece, nl=False)
    if show:
        say()
    return answer


def timing_line(answer: ChatAnswer) -> str:
    first = "no token" if answer.ttft_s is None else f"first token {answer.ttft_s:.3f} s"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in answer.timings_s.items())
    label = " (EMULATED engine)" if answer.emulated else ""
    return f"[{first}, whole {answer.total_s:.3f} s; {parts or 'no timings'}; request {answer.request_id}]{label}"
