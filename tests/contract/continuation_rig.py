"""Engines that give the same words each time and continue a request's."""

import asyncio
import json
from typing import Any

from glowplug.domain.model import Model
from glowplug.engines.apis import CHAT, COMPLETIONS, MESSAGES
from tests.contract.data_port_rig import DONE, FakeEngine, Reply, Rig, Served, a_model, post

WORDS = ["The", " sea", " is", " a", " vast", " realm"]
STOPPED = {"stop_reason": "max_tokens", "stop_sequence": None}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": len(WORDS)},
    COMPLETIONS: {"prompt": "Once:", "max_tokens": len(WORDS)},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": len(WORDS)},
}


def asked_of(path: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, **ASKED[path], **more}


def a_real_model(**over: Any) -> Model:
    return a_model(engine="llamacpp", **over)


def asking(path: str, **more: Any) -> bytes:
    return post(path, json.dumps(asked_of(path, **more)).encode())


def sse(event: dict[str, Any]) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


class Story:
    """Answers WORDS, continuing a request's; dies after `cut` events, or, if `torn`, within the next."""

    def __init__(self, name: str, cut: int = 1000, *, torn: bool = False, failing: bytes = b"") -> None:
        self.name, self.cut, self.torn, self.failing = name, cut, torn, failing
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, served: Served) -> None:
        path = served.head.split(b" ", 2)[1].decode()
        body = json.loads(served.body)
        self.asked.append(body)
        events = self.events(path, body)
        await served.sse_head()
        for event in events[: self.cut]:
            await served.chunk(event)
        if self.cut >= len(events):
            await served.end()
            return
        if self.torn:
            await served.send(b"%x\r\n%b" % (len(events[self.cut]), events[self.cut][:-9]))
        if self.failing:
            await served.chunk(self.failing)
            await served.end()
            return
        await asyncio.sleep(0.01)
        served.die()

    def events(self, path: str, body: dict[str, Any]) -> list[bytes]:
        begun, prompt = self.before(path, body)
        most = next(body[n] for n in ("max_tokens", "max_completion_tokens") if n in body)
        words = WORDS[begun : begun + most]
        if begun == len(WORDS):
            words = [" more"]
        usage = {"prompt_tokens": prompt + begun, "completion_tokens": len(words)}
        usage["total_tokens"] = sum(usage.values())
        if path in (CHAT, COMPLETIONS):
            return self.chunks(path, words, usage, bool((body.get("stream_options") or {}).get("include_usage")))
        used = {"input_tokens": prompt + begun, "output_tokens": len(words)}
        return self.message(words, used)

    @staticmethod
    def before(path: str, body: dict[str, Any]) -> tuple[int, int]:
        """The request's answered words, and tokens of its prompt."""
        if path == COMPLETIONS:
            text, prompt = body["prompt"].removeprefix("Once:"), 2
        else:
            last = body["messages"][-1]
            is_ours = isinstance(last, dict) and last["role"] == "assistant"
            content = last["content"] if is_ours else ""
            text, prompt = content if isinstance(content, str) else content[0]["text"], 5
        begun = next(n for n in range(len(WORDS) + 1) if "".join(WORDS[:n]) == text)
        return begun, prompt

    def chunks(self, path: str, words: list[str], usage: dict[str, int], wants: bool) -> list[bytes]:
        head = {"id": f"id-{self.name}", "created": 7, "model": self.name, "object": "chunk"}

        def chunk(**choice: Any) -> bytes:
            return sse({**head, "choices": [{"index": 0, "finish_reason": None, **choice}]})

        if path == CHAT:
            said = [chunk(delta={"role": "assistant", "content": None})]
            said += [chunk(delta={"content": word}) for word in words] + [chunk(delta={}, finish_reason="length")]
        else:
            said = [chunk(text=word) for word in words] + [chunk(text="", finish_reason="length")]
        return said + [sse({**head, "choices": [], "usage": usage})] * wants + [DONE]

    def message(self, words: list[str], usage: dict[str, int]) -> list[bytes]:
        message = {"id": f"id-{self.name}", "role": "assistant", "content": [], "usage": {**usage, "output_tokens": 0}}
        return [
            sse({"type": "message_start", "message": message}),
            sse({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            *(
                sse({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}})
                for word in words
            ),
            sse({"type": "content_block_stop", "index": 0}),
            sse({"type": "message_delta", "delta": STOPPED, "usage": {"output_tokens": len(words)}}),
            sse({"type": "message_stop"}),
        ]


async def rig_of(rig: Rig, *stories: Reply) -> list[FakeEngine]:
    return [await rig.engine(story, instance_id=f"i-{n}") for n, story in enumerate(stories, 1)]


def as_first(path: str, **more: Any) -> bytes:
    return b"".join(Story("1").events(path, asked_of(path, **more)))


def decoded(body: bytes) -> list[Any]:
    blocks = body.decode().split("\n\n")
    data = [line[6:] for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
