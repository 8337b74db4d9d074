"""A pipeline of emulated engines over real sockets: HydraServe sections 4 and 6."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from glowplug_lab.emulated.api import Api
from glowplug_lab.emulated.engine import Engine, EngineConfig, Whole
from glowplug_lab.emulated.faults import Faults
from glowplug_lab.emulated.http import Connection
from glowplug_lab.emulated.profiles import PROFILES
from glowplug_lab.emulated.stages import StageLink, StageLost, StepPart
from glowplug_lab.emulated.text import answer_tokens
from tests.waiting import WAIT_S, until

PROFILE = PROFILES["qwen2.5-7b/a10"]
GIB = 1 << 30
KEY = "key of stage {}"
WHOLE = {"kv_bytes": 8 * GIB, "max_running": 4}


class Stage:
    """`steps` ends when it can no longer step."""

    def __init__(self, stage: int, num: int, **changes: Any) -> None:
        fields: dict[str, Any] = {"time_scale": 40.0, "stage_timeout_s": 5.0, "kv_bytes": 4 * GIB}
        fields |= {"load_bytes_per_s": 70e9} | changes
        config = EngineConfig(
            profile=PROFILE,
            context_tokens=2048,
            max_running=4 * num if not stage else 4,
            weights_bytes=14 * GIB,
            first_bytes=-(-14 * GIB // num),
            stage=stage,
            num_stages=num,
            **fields,
        )
        self.engine = Engine(config, Faults())
        self.api_key = KEY.format(stage)

    async def open(self) -> None:
        api = Api(self.engine, ["m"], api_key=self.api_key)
        loop = asyncio.get_running_loop()
        self.connections: list[Connection] = []

        def connection() -> Connection:
            self.connections.append(Connection(api))
            return self.connections[-1]

        self.server = await loop.create_server(connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.steps = asyncio.ensure_future(self.engine.run())
        headers = {"authorization": f"Bearer {self.api_key}"}
        self.client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=WAIT_S)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.client.post(path, json=body or {})

    async def close(self) -> None:
        self.steps.cancel()
        await self.client.aclose()
        self.server.close()


@asynccontextmanager
async def pipeline(num: int = 2, *, joined: bool = True, **changes: Any) -> AsyncIterator[list[Stage]]:
    stages = [Stage(number, num, **changes) for number in range(num)]
    for stage in stages:
        await stage.open()
    if joined:
        answer = await join(stages)
        assert answer.status_code == 200, answer.text
    try:
        yield stages
    finally:
        for stage in stages:
            await stage.close()


async def join(stages: list[Stage]) -> httpx.Response:
    later = [{"url": stage.url, "api_key": stage.api_key} for stage in stages[1:]]
    return await stages[0].ask("/stage/join", {"stages": later})


def completion(num_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a " * 200, "max_tokens": num_tokens, "ignore_eos": True, **fields}


async def text(stage: Stage, num_tokens: int = 8) -> str:
    answer = await stage.ask("/v1/completions", completion(num_tokens))
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def told(num_tokens: int) -> str:
    return "".join(itertools.islice(answer_tokens("a " * 200, 0), num_tokens))


async def test_a_pipeline_answers_as_one_engine_does() -> None:
    async with pipeline(3) as stages:
        answering = asyncio.create_task(text(stages[0], 200))
        await until(lambda: stages[2].engine.carried.kv_tokens > 100, "the prompt has passed through all of them")
        for stage in stages[1:]:
            carried = stage.engine.carried
            assert carried.kv_tokens >= 100 and carried.bytes_per_token == PROFILE.kv_bytes_per_token // 3
            assert stage.engine.kv_bytes_used == carried.kv_tokens * carried.bytes_per_token
        assert await answering == told(200)
        for stage in stages[1:]:
            assert "emulated:num_requests_carried" in (await stage.client.get("/metrics")).text


async def test_only_the_first_stage_answers_and_only_once_it_is_joined() -> None:
    async with pipeline(joined=False) as (first, later):
        for stage, number in ((first, 0), (later, 1)):
            refused = await stage.ask("/v1/completions", completion())
            assert refused.status_code == 503 and f"stage {number} of 2" in refused.text
        assert (await join([first, later])).json() == {
            "kv_tokens": 2 * 4 * GIB // PROFILE.kv_bytes_per_token // 16 * 16,
            "num_slots": 8,
        }
        assert await text(first)
        assert (await later.ask("/v1/completions", completion())).status_code == 503


async def test_stages_ask_for_the_keys_of_their_engines() -> None:
    async with pipeline(joined=False) as (first, later):
        wrong = [{"url": later.url, "api_key": "another"}]
        refused = await first.ask("/stage/join", {"stages": wrong})
        assert refused.status_code == 502 and "says 401" in refused.text
        bare = httpx.AsyncClient(base_url=later.url)
        for path in ("/stage/step?seconds=0&tokens=1&kv=1&running=1", "/stage/attach", "/stage/abandon"):
            assert (await bare.post(path)).status_code == 401
        assert (await bare.get("/stage/kv?tokens=1")).status_code == 401
        await bare.aclose()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "1 later stages"),
        ({"stages": []}, "1 later stages"),
        ({"stages": [{"url": 3}]}, "stages[0].url"),
        ({"stages": ["x"]}, "stages[0]"),
    ],
)
async def test_a_join_that_makes_no_sense_is_refused(body: dict[str, Any], why: str) -> None:
    async with pipeline(joined=False) as (first, _):
        refused = await first.ask("/stage/join", body)
        assert refused.status_code == 400 and why in refused.text


async def test_a_stage_of_another_pipeline_is_refused() -> None:
    async with pipeline(joined=False) as (first, _), pipeline(3, joined=False) as others:
        refused = await first.ask("/stage/join", {"stages": [{"url": others[2].url, "api_key": others[2].api_key}]})
        assert refused.status_code == 502 and "this is stage 2 of 3, not 1 of 2" in refused.text


async def test_what_is_no_step_is_refused() -> None:
    async with pipeline(joined=False) as (_, later):
        whole = {"seconds": "0.1", "tokens": "1", "kv": "1", "running": "1"}
        for changed in ({"seconds": "nan"}, {"tokens": "-1"}, {"kv": "x"}, {"running": ""}, {"seconds": "-1"}):
            query = "&".join(f"{name}={value}" for name, value in (whole | changed).items())
            assert (await later.ask(f"/stage/step?{query}")).status_code == 400, changed
        for tokens in ("", "-1", "1.5", "999999999"):
            assert (await later.client.get(f"/stage/kv?tokens={tokens}")).status_code == 400, tokens


async def test_it_becomes_whole_under_a_request_that_runs() -> None:
    async with pipeline() as (first, later):
        answering = asyncio.create_task(text(first, 400))
        await until(lambda: later.engine.carried.kv_tokens, "a step passes through the later stage")
        links = first.engine.pipeline
        assert links is not None
        whole = await first.ask("/stage/consolidate", WHOLE)
        assert not answering.done(), "it became whole while the request ran"
        assert whole.json() == {"kv_tokens": 8 * GIB // PROFILE.kv_bytes_per_token // 16 * 16}
        moved = links.num_bytes_moved // (PROFILE.kv_bytes_per_token // 2)
        assert 100 <= moved <= 520, "its tokens, each once or a little more often"
        first_of_all = later.engine.carried.kv_tokens
        assert await answering == told(400)
        assert later.engine.carried.kv_tokens == first_of_all and first.engine.config.num_stages == 1
        assert (await first.ask("/stage/consolidate", WHOLE)).status_code == 200, "asked twice it is whole already"
        assert (await first.ask("/stage/abandon")).json()["is_whole"] is True


async def test_a_later_stage_becomes_whole_and_carries_the_pipeline_on() -> None:
    """Section 6.2, scale up: it serves its own requests meanwhile."""
    async with pipeline() as (first, later):
        assert (await later.ask("/stage/consolidate", WHOLE)).status_code == 200
        both = await asyncio.gather(text(first, 40), text(later, 40))
        assert both[0] == both[1] and first.engine.config.num_stages == 2
        assert (await first.ask("/stage/consolidate", WHOLE)).status_code == 200
        assert await text(first, 40) == both[0]


async def test_a_consolidation_is_given_up_and_asked_for_again() -> None:
    async with pipeline(time_scale=1.0, load_bytes_per_s=1e9) as (first, _):  # 7 s
        asked = asyncio.create_task(first.ask("/stage/consolidate", WHOLE))
        await asyncio.sleep(0.05)
        assert (await first.ask("/stage/abandon")).json() == {"is_whole": False, "kv_tokens": 0}
        await asyncio.wait([asked], timeout=WAIT_S)
        assert asked.done() and first.engine.config.num_stages == 2
        first.engine.config = replace(first.engine.config, time_scale=50.0)
        assert (await first.ask("/stage/consolidate", WHOLE)).status_code == 200
        assert first.engine.config.num_stages == 1


@pytest.mark.parametrize("how", ["gone", "hangs"])
async def test_without_a_stage_the_engine_ends(how: str) -> None:
    """As in vLLM: its requests lose KV cache."""
    async with pipeline(stage_timeout_s=1.0) as (first, later):
        answering = asyncio.create_task(first.ask("/v1/completions", completion(1000)))
        await until(lambda: later.engine.carried.kv_tokens, "a step passes through the later stage")
        harm(later, how)
        with pytest.raises(StageLost, match=r"no answer in 1 s|Incomplete|Connect"):
            await asyncio.wait_for(first.steps, WAIT_S)
        answering.cancel()


@pytest.mark.parametrize("how", ["gone", "hangs"])
async def test_with_all_of_the_weights_it_goes_on_alone(how: str) -> None:
    """It recomputes the lost stage's KV cache."""
    async with pipeline(stage_timeout_s=1.0) as (first, later):
        answering = asyncio.create_task(text(first, 400))
        await until(lambda: later.engine.carried.kv_tokens > 150, "steps pass through the later stage")
        first.engine.whole = Whole(8 * GIB, 4)
        harm(later, how)
        await until(lambda: first.engine.config.num_stages == 1, "it goes on alone")
        assert (await first.ask("/stage/consolidate", WHOLE)).status_code == 200
        assert not first.steps.done()
        assert await answering == told(400)


def harm(stage: Stage, how: str) -> None:
    if how == "hangs":
        stage.engine.set_faults(Faults(hang=True))
    else:
        stage.server.close()
        for connection in stage.connections:
            connection.close()


async def test_a_link_that_is_cut_in_an_answer_is_lost_and_opens_anew() -> None:
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", b"HTTP/1.1 200 OK\r\n\r\n", b"nonsense\r\n\r\n"]
    answers += [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    link = StageLink(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "", 5.0)
    for why in ("IncompleteRead", "without its length", "invalid literal|ValueError|IndexError"):
        with pytest.raises(StageLost, match=why):
            await link.ask("GET", "/stage/kv?tokens=1")
    assert await link.ask("GET", "/stage/kv?tokens=1") == b"ok"
    link.close()
    server.close()


def test_a_step_is_read_as_it_was_written() -> None:
    part = StepPart(0.0123, 3, 1000, 2)
    query = dict(pair.split("=") for pair in part.target().partition("?")[2].split("&"))
    assert StepPart.read({name: [value] for name, value in query.items()}) == part
    assert json.loads(json.dumps(query))["kv"] == "1000"
