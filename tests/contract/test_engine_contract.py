"""The same calls on every engine driver."""

import asyncio
import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from glowplug.domain.errors import EngineFailed
from glowplug.domain.instance import PhaseName
from glowplug.engines import apis
from glowplug.engines.drivers import declaration, driver
from glowplug.engines.port import EngineHandle, Health, LoadReport
from glowplug.services.router import continuation, resumption, wire
from glowplug.services.router.continuation import NotContinuable
from glowplug_lab.emulated.profiles import DEFAULT_PROFILE, PROFILES
from tests.contract.engine_rig import ENGINES, EngineCase, engine_case, until_idle
from tests.waiting import lives, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

KEY = "key-of-this-engine"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
SMOLLM2_KV_BYTES_PER_TOKEN = 30 * 3 * (64 + 64) * 2  # layers, heads, key and value, two bytes each
AS_JSON = {"content-type": "application/json"}
TURN = {"messages": [{"role": "user", "content": "List three colours, one per line."}]}
GOES_ON: dict[str, tuple[str, dict[str, Any]]] = {
    apis.CHAT: ("max_tokens", TURN),
    apis.COMPLETIONS: ("max_tokens", {"prompt": "Red, green and"}),
    apis.MESSAGES: ("max_tokens", TURN),
}
OF_VLLM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|vllm_dist_.*")
LONG = {"max_tokens": 900, "min_tokens": 900, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[EngineCase]:
    async with engine_case(request.param, api_key=KEY) as case:
        yield case


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(case: EngineCase) -> LoadReport:
    return await case.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(started: LoadReport) -> AsyncIterator[httpx.AsyncClient]:
    no_reuse = httpx.Limits(max_keepalive_connections=0)  # engines close idle connections when they like
    async with httpx.AsyncClient(
        base_url=started.handle.url, headers=AUTHORIZED, timeout=60, limits=no_reuse
    ) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name a colour."}]
    return {"model": "Contract/Tiny", "messages": messages, "max_tokens": 8, **fields}


async def test_without_its_key_an_engine_answers_nobody_and_its_agent_sees_its_health_and_count(
    case: EngineCase, started: LoadReport
) -> None:
    async with httpx.AsyncClient(base_url=started.handle.url, timeout=60) as stranger:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for path in ("chat/completions", "completions"):
                assert (await stranger.post(f"/v1/{path}", json=chat(), headers=headers)).status_code == 401
    assert KEY not in " ".join(psutil.Process(started.handle.pid).cmdline())
    assert (await case.driver.health(started.handle)).ok
    assert await case.driver.num_in_flight(started.handle) == 0


def events(text: str) -> list[str]:
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]


async def test_phases_of_a_start_are_launch_load_and_warmup_in_order(started: LoadReport) -> None:
    assert [phase.name for phase in started.phases] == [PhaseName.LAUNCH, PhaseName.LOAD, PhaseName.WARMUP]
    moments = [moment for phase in started.phases for moment in (phase.started_at, phase.ended_at)]
    assert moments == sorted(moments)


async def test_a_ready_engine_is_healthy_idle_and_on_loopback(case: EngineCase, started: LoadReport) -> None:
    assert started.handle.url.startswith("http://127.0.0.1:")
    assert (await case.driver.health(started.handle)).ok
    assert await case.driver.num_in_flight(started.handle) == 0


async def test_slots_and_kv_tokens_are_the_engines_own(case: EngineCase, started: LoadReport) -> None:
    """PreServe's M: the capacity of the 128 MiB grant, not max_concurrency * context_tokens."""
    per_token = {"emulated": PROFILES[DEFAULT_PROFILE].kv_bytes_per_token}.get(case.name, SMOLLM2_KV_BYTES_PER_TOKEN)
    fitting = (128 << 20) // per_token
    expected = min(fitting, 4 * 1024) if case.name == "llamacpp" else fitting  # each of its slots has a part
    one_context = 1024 + 16
    figures = started.handle.figures
    assert figures.num_slots == 4
    assert expected * 0.95 - 128 <= figures.kv_tokens <= max(expected, one_context)
    assert (0 < figures.step_s < 10) == (case.name in ("emulated", "llamacpp")), (
        "measured in the warm-up, where there is one"
    )


async def test_models_lists_the_model(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert "Contract/Tiny" in [card["id"] for card in answer["data"]]


@pytest.mark.parametrize("name", ["Contract/Tiny", "tiny-alias"])
async def test_chat_answers_under_every_name_of_the_model(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(model=name))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    used = body["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert 0 < used["completion_tokens"] <= 8


async def test_chat_streams_deltas_usage_and_done(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in parsed if c["choices"])
    assert [c["choices"][0]["finish_reason"] for c in parsed if c["choices"]][-1] in ("stop", "length")
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] > 0


async def test_completions_answer_and_stream(client: httpx.AsyncClient) -> None:
    body = {"model": "Contract/Tiny", "prompt": "The sea is", "max_tokens": 6}
    whole = await client.post("/v1/completions", json=body)
    assert whole.json()["object"] == "text_completion"
    assert whole.json()["choices"][0]["text"]
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    assert events(streamed.text)[-1] == "[DONE]"


@pytest.mark.parametrize("path", [apis.CHAT, apis.COMPLETIONS, apis.MESSAGES])
async def test_another_engine_goes_on_with_a_stream(case: EngineCase, client: httpx.AsyncClient, path: str) -> None:
    """With a cache a greedy stream stays the same; vLLM recomputes it all at once, which rounds differently."""
    model = case.model()
    api = declaration(case.name).api(model)
    if path not in api.continues:
        assert path not in (apis.CHAT, apis.COMPLETIONS)
        return
    ask = {"model": "Contract/Tiny", "stream": True, "temperature": 0, GOES_ON[path][0]: 10, **GOES_ON[path][1]}
    body = json.dumps(ask).encode()
    if api.token_ids:
        body = wire.asking_for_ids(path.encode(), body)
    told = [
        part + b"\n\n" for part in (await client.post(path, content=body, headers=AS_JSON)).content.split(b"\n\n")[:-1]
    ]
    whole = shown(b"".join(told))
    assert len(whole[0]) > 10
    for cut in range(1, len(told) - 1, 3):
        kept = resumption.begin(path.encode(), json.dumps(ask).encode(), api, model.context_tokens)
        kept.take(b"".join(told[:cut]))
        if kept.is_finished:
            break
        try:
            asked = kept.request()
        except NotContinuable as why:
            assert "its end was under way" in str(why)
            break
        more = await client.post(kept.path.decode(), content=asked, headers=AS_JSON)
        assert more.status_code == 200, more.text
        begun, (text, others) = shown(b"".join(told[:cut])), shown(b"".join(told[:cut]) + kept.rewrite(more.content))
        assert (text, others) == whole or case.name == "vllm", cut
        assert text.startswith(begun[0]) and text[:5] == whole[0][:5]
        if api.token_ids and begun[0]:
            asked_ids, said = json.loads(asked)["prompt"], [json.loads(one[6:]) for one in told[:cut]]
            ids = [id for one in said for id in one["choices"][0].get("token_ids") or ()]
            prompt_ids = said[0].get("prompt_token_ids") or said[0]["choices"][0]["prompt_token_ids"]
            assert kept.path == b"/v1/completions" and asked_ids == prompt_ids + ids
            assert kept.usage is not None and kept.usage[0] == len(prompt_ids) and kept.usage[1] <= 10


def shown(stream: bytes) -> tuple[str, list[Any]]:
    """(text, other events) without parts that differ between runs."""
    text, others = "", list[Any]()
    for name, data in continuation.events(stream):
        event: Any = json.loads(data) if data != b"[DONE]" else {"done": True}
        for choice in (event or {}).get("choices") or [{}]:
            delta = choice.get("delta")
            piece = choice.get("text") or ((delta or {}).get("content") if isinstance(delta, dict) else None)
            piece = piece or (event or {}).get("delta")
            piece = piece.get("text") if isinstance(piece, dict) else piece
            if isinstance(piece, str) and piece:
                text += piece
            elif event:
                others.append((name, choice.get("finish_reason"), event.get("text"), event.get("type")))
    return text, [other for other in others if any(other)]


async def test_embeddings_answer_or_are_refused_clearly(
    case: EngineCase, started: LoadReport, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/v1/embeddings", json={"model": "Contract/Tiny", "input": ["a", "b"]})
    if case.name == "emulated":  # llama.cpp needs engine_args for them: test_llamacpp.py
        assert [item["index"] for item in answer.json()["data"]] == [0, 1]
    else:
        assert answer.status_code in (400, 404, 501)


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[]", b'{"messages": 5}', b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}'],
)
async def test_bad_bodies_are_refused_and_the_engine_goes_on(
    case: EngineCase, started: LoadReport, client: httpx.AsyncClient, raw: bytes
) -> None:
    answer = await client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]
    assert (await case.driver.health(started.handle)).ok


async def test_a_prompt_longer_than_the_context_is_refused(client: httpx.AsyncClient) -> None:
    body = {"model": "Contract/Tiny", "prompt": "many words " * 3000, "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_a_stream_whose_client_leaves_is_cancelled(
    case: EngineCase, started: LoadReport, client: httpx.AsyncClient
) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **LONG)) as answer:
        lines = answer.aiter_lines()  # held: letting go of the iterator closes the connection
        while not (await anext(lines)).startswith("data: "):
            continue
        assert await case.driver.num_in_flight(started.handle) == 1
    await until_idle(case, started.handle)


async def test_an_unstreamed_request_is_cancelled_where_the_engine_says_so(
    case: EngineCase, started: LoadReport, client: httpx.AsyncClient
) -> None:
    waiting = asyncio.ensure_future(
        client.post("/v1/chat/completions", json=chat(**(LONG | {"max_tokens": 200, "min_tokens": 200})))
    )
    await until(lambda: case.driver.num_in_flight(started.handle), "the request is taken")
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until_idle(case, started.handle)
    assert not case.driver.capabilities.metrics or case.driver.capabilities.cancels_unstreamed


async def test_more_requests_than_seats_all_get_an_answer(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=chat()) for _ in range(9)))
    assert [answer.status_code for answer in answers] == [200] * 9


async def test_vllm_metric_names_where_the_engine_says_so(case: EngineCase, client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    expected = "vllm:num_requests_running" if case.driver.capabilities.metrics else "llamacpp:requests_processing"
    assert expected in text


async def test_a_handle_read_back_from_disk_adopts_the_living_engine(case: EngineCase, started: LoadReport) -> None:
    again = EngineHandle.from_json(started.handle.to_json())
    assert again == started.handle
    assert case.driver.adopt(again)
    assert (await case.driver.health(again)).ok


async def test_a_system_prompt_of_the_model_changes_what_it_reads_not_the_body(case: EngineCase) -> None:
    report = await case.start(system_prompt='You are "Ada".\nAnswer as {{ Ada }} would.')
    async with httpx.AsyncClient(base_url=report.handle.url, headers=AUTHORIZED, timeout=60) as client:
        plain = (await client.post("/v1/chat/completions", json=chat())).json()
        own = [{"role": "system", "content": "x"}, {"role": "user", "content": "Name a colour."}]
        given = (await client.post("/v1/chat/completions", json=chat(messages=own))).json()
    await case.driver.stop(report.handle, grace_s=5.0)
    assert plain["usage"]["prompt_tokens"] > given["usage"]["prompt_tokens"] + 5


async def test_stop_ends_every_process_of_the_engine_and_none_leaves_a_file(case: EngineCase) -> None:
    before = in_tmp()
    handle = (await case.start()).handle
    family = [psutil.Process(handle.pid), *psutil.Process(handle.pid).children(recursive=True)]
    await case.driver.stop(handle, grace_s=5.0)
    assert not case.driver.adopt(handle)
    await until(lambda: not any(lives(member) for member in family), "every process of the engine has ended")
    assert in_tmp() <= before, "a kill would have left them for ever"
    await case.driver.stop(handle, grace_s=5.0)


def in_tmp() -> set[str]:
    """Return the sockets and files that vLLM would have in /tmp."""
    return {path.name for path in Path(tempfile.gettempdir()).iterdir() if OF_VLLM.fullmatch(path.name)}


async def test_an_engine_that_is_killed_is_not_healthy(case: EngineCase) -> None:
    handle = (await case.start()).handle
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: not case.driver.adopt(handle), "the process is seen to be gone")
    health = await case.driver.health(handle)
    assert (health.ok, health.alive) == (False, False)
    with pytest.raises(EngineFailed):
        await case.driver.num_in_flight(handle)
    await case.driver.stop(handle, grace_s=0.0)


async def test_a_frozen_engine_is_not_healthy_and_still_stops(case: EngineCase) -> None:
    handle = (await case.start()).handle
    os.kill(handle.pid, signal.SIGSTOP)

    impatient = driver(case.name, replace(case.settings, health_timeout_s=1.0))

    async def unhealthy() -> Health | None:
        health = await impatient.health(handle)
        return None if health.ok else health

    health = await until(unhealthy, "its threads, which do not all stop at once, have stopped")
    assert health.alive and health.reason
    await case.driver.stop(handle, grace_s=0.2)
    assert not case.driver.adopt(handle)


async def test_stop_before_the_weights_came_ends_the_process(case: EngineCase) -> None:
    handle = await case.launch()
    assert case.driver.adopt(handle)
    assert not (await case.driver.health(handle)).ok
    await case.driver.stop(handle, grace_s=5.0)
    assert not case.driver.adopt(handle)


async def test_an_engine_that_dies_while_loading_says_so(case: EngineCase) -> None:
    handle = await case.launch()
    os.kill(handle.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="ended before it was ready"):
        await case.driver.load(handle, case.weights)


@pytest.mark.parametrize("kind", ["missing", "garbage"])
async def test_bad_weights_fail_with_a_reason_and_leave_no_process(case: EngineCase, kind: str) -> None:
    bad = case.folder / f"{kind}.bin"
    if kind == "garbage":
        bad.write_bytes(b"" if case.name == "emulated" else b"GGUF" + bytes(range(256)) * 64)
    handle = await case.launch()
    with pytest.raises(EngineFailed) as failure:
        await case.driver.load(handle, bad)
    assert bad.name in failure.value.message
    assert not case.driver.adopt(handle)
