"""Talking to a model: `run` once, `chat` back and forth."""

import asyncio
import sys
from typing import Annotated

import httpx
import typer

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption
from glowplug.cli.show import emit
from glowplug.cli.stream import Answer, Message
from glowplug.cli.stream import chat as stream_chat
from glowplug.cli.terminal import say

TokensOption = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show on stderr where the time went.")]


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Read from stdin when absent.")
    ] = None,
    max_tokens: TokensOption = None,
    verbose: VerboseOption = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Ask a model once and stream its answer. A cold model is started."""
    fleet = connect(state_dir)
    text = " ".join(prompt) if prompt else sys.stdin.read()
    if not text.strip():
        raise CliError("no prompt: give one as argument or on stdin", 2)
    answer = asyncio.run(_answer(fleet, model, [{"role": "user", "content": text}], max_tokens, output is Format.TABLE))
    if output is Format.JSON:
        value = {name: getattr(answer, name) for name in ("text", "ttft_s", "total_s", "request_id", "instance_id")}
        emit(output, value | {"model": model, "emulated": answer.emulated, "timings_s": answer.timings_s}, (), ())
    if verbose:
        say(timing_line(answer), err=True)


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    system: Annotated[str, typer.Option("--system", help="A system message for this talk.")] = "",
    max_tokens: TokensOption = None,
    verbose: VerboseOption = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
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
) -> Answer:
    answer = Answer()
    async with httpx.AsyncClient(base_url=fleet.url("data"), headers=fleet.data_headers(), trust_env=False) as client:
        async for piece in stream_chat(client, model, messages, answer, max_tokens):
            if show:
                say(piece, nl=False)
    if show:
        say()
    return answer


def timing_line(answer: Answer) -> str:
    """'first token 0.412 s, whole 1.9 s; queue 0.002 ...'."""
    first = "no token" if answer.ttft_s is None else f"first token {answer.ttft_s:.3f} s"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in answer.timings_s.items())
    label = " (EMULATED engine)" if answer.emulated else ""
    return f"[{first}, whole {answer.total_s:.3f} s; {parts or 'no timings'}; request {answer.request_id}]{label}"
