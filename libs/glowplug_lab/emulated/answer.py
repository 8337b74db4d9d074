"""One text on its way to a client: tokens come from the engine's clock, their words from the prompt."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import islice
from typing import Any

from glowplug_lab.emulated import openai
from glowplug_lab.emulated.engine import Engine
from glowplug_lab.emulated.http import Reply
from glowplug_lab.emulated.openai import Generate
from glowplug_lab.emulated.text import answer_tokens, natural_length, num_begun


class Answer:
    """Sent whole or as a stream; `abort` ends it early with the finish reason "abort"."""

    def __init__(self, engine: Engine, wanted: Generate, answer_id: str, chat: bool) -> None:
        self._engine = engine
        self._wanted, self.model = wanted, wanted.model
        self._chat = chat
        body = wanted.body
        seed, is_echo = body.seed or engine.config.seed, engine.faults.mode == "echo"
        num_there = num_begun(wanted.prompt, seed, wanted.begun, is_echo) if wanted.begun else 0
        prompt = wanted.prompt if num_there else wanted.prompt + wanted.begun
        self._words = islice(answer_tokens(prompt, seed, is_echo), num_there, None)
        self._due: asyncio.Queue[bool | None] = asyncio.Queue()  # one entry per token: is it the last; None: aborted
        self._num_tokens = 0
        self._reason = "stop"
        num_free = engine.config.context_tokens - wanted.num_prompt
        natural = max(natural_length(prompt, seed) - num_there, body.min_tokens or 0, 1)
        limit = min(body.num_wanted or num_free, num_free)
        self._length = limit if body.ignore_eos else min(natural, limit)
        self._end_reason = "length" if self._length >= limit else "stop"
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": answer_id,
            "object": f"{kind}.chunk" if chat and body.stream else kind,
            "created": int(time.time()),
            "model": wanted.model,
            "system_fingerprint": openai.FINGERPRINT,
        }

    async def whole(self, reply: Reply) -> None:
        async with aclosing(self._pieces()) as pieces:
            text = "".join([piece async for piece in pieces])
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        reply.send(200, {**self._head, "choices": [choice], "usage": self._usage()})

    async def stream(self, reply: Reply) -> None:
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if not reply.started:
                    reply.start("text/event-stream; charset=utf-8")
                    if self._chat:
                        await reply.chunk(self._event({"role": "assistant", "content": ""}, None))
                if piece:
                    await reply.chunk(self._event({"content": piece} if self._chat else piece, None))
        await reply.chunk(self._event({} if self._chat else "", self._reason))
        if self._wanted.body.includes_usage:
            last = {**self._head, "choices": [], "usage": self._usage()}
            await reply.chunk(f"data: {json.dumps(last)}\n\n".encode())
        await reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    def abort(self) -> None:
        self._due.put_nowait(None)

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Pieces of text as tokens come due, cut at the first stop string."""
        self._reason = "abort"  # what holds when this ends early
        sequence = self._engine.submit(self._wanted.num_prompt, self._length, self._due.put_nowait)
        cutter = StopCutter(self._wanted.body.stops)
        try:
            last: bool | None = False
            while last is False and not cutter.found:
                last = await self._due.get()
                if last is not None:
                    self._num_tokens += 1
                    yield cutter.feed(next(self._words))
            yield cutter.rest()
            if last is not None:
                self._reason = "stop" if cutter.found else self._end_reason
        finally:
            self._engine.finish(sequence, self._reason)

    def _event(self, delta: dict[str, str] | str, reason: str | None) -> bytes:
        choice = {"index": 0, "delta" if self._chat else "text": delta, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps({**self._head, 'choices': [choice]})}\n\n".encode()

    def _usage(self) -> dict[str, int]:
        prompt, answer = self._wanted.num_prompt, self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class StopCutter:
    """Lets text through up to the first stop string; holds back what could still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is sure to be shown now."""
        if not self._stops:
            return text
        self._held += text
        starts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def rest(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        return next((n for n in range(min(len(stop), len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
