"""The emulated engine's routes over real sockets."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from glowplug_lab.emulated.api import Api
from glowplug_lab.emulated.engine import Engine, EngineConfig
from glowplug_lab.emulated.faults import Faults
from glowplug_lab.emulated.http import MAX_BODY_BYTES, Connection
from glowplug_lab.emulated.profiles import PROFILES
from tests.waiting import WAIT_S, until

USER: list[Any] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def serving(*, time_scale: float = 1000.0, **changes: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    config = EngineConfig(
        profile=PROFILES["llama-2-7b/a10"],
        context_tokens=changes.pop("context_tokens", 512),
        max_running=changes.pop("max_running", 4),
        kv_bytes=changes.pop("kv_bytes", 0),
        weights_bytes=13 << 30,
        load_bytes_per_s=10e9,
        first_bytes=changes.pop("first_bytes", -1),
        time_scale=time_scale,
    )
    engine = Engine(config, Faults(**changes))
    api = Api(engine, ["big", "big-alias"], system_prompt="")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(api), "127.0.0.1", 0)
    stepping = asyncio.ensure_future(engine.run())
    host, port = server.sockets[0].getsockname()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WAIT_S) as client:
        yield engine, client
    stepping.cancel()
    server.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving() as (_, made):
        yield made


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "big", "messages": USER, **fields}


async def test_every_answer_says_that_it_is_emulated(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(max_tokens=4), headers={"X-Request-Id": "r1"})
    assert answer.headers["x-glowplug-emulated"] == "1"
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("r1", "chatcmpl-r1")
    assert answer.json()["system_fingerprint"] == "emulated"
    assert answer.json()["choices"][0]["message"]["content"].startswith("[emulated]")
    assert 'emulated="true"' in (await client.get("/metrics")).text
    assert (await client.get("/nowhere")).headers["x-glowplug-emulated"] == "1"


async def test_the_openai_client_chats_streams_and_embeds() -> None:
    import openai

    async with serving() as (_, client), openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x") as sdk:
        whole = await sdk.chat.completions.create(model="big", messages=USER, max_tokens=5, seed=3)
        stream: Any = await sdk.chat.completions.create(model="big", messages=USER, max_tokens=5, seed=3, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert whole.choices[0].message.content == text
        vectors = await sdk.embeddings.create(model="big", input=["a", "b"])
        assert len(vectors.data[1].embedding) == 64


async def test_base64_and_float_vectors_are_the_same_numbers(client: httpx.AsyncClient) -> None:
    body = {"model": "big", "input": "a"}
    floats = (await client.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
    packed = (await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert len(raw) == 4 * len(floats)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (chat(max_tokens="5"), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(n=2), "n"),
        (chat(stop=5), "stop"),
        (chat(stop=["a"] * 5), "stop"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={}), "stream_options"),
        (chat(temperature=3), "temperature"),
        (chat(top_p="x"), "top_p"),
        (chat(model=5), "model"),
        (chat(max_tokens=512), "messages"),
    ],
)
async def test_wrong_types_are_400_and_name_the_field(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_number_of_thousands_of_digits_is_400(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", content=b'{"seed": ' + b"9" * 5000 + b"}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")


@pytest.mark.parametrize("raw", [b"", b"nope", b"[1]", b'{"model": NaN}', b"\xff\xfe", b"[" * 100_000])
async def test_bodies_that_are_not_json_are_400(client: httpx.AsyncClient, raw: bytes) -> None:
    answer = await client.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def test_unknown_models_and_routes_are_404_and_unknown_fields_are_left_alone(client: httpx.AsyncClient) -> None:
    missing = await client.post("/v1/chat/completions", json=chat(model="other"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await client.get("/v2")).status_code == 404
    assert (await client.get("/v1/chat/completions")).status_code == 405
    odd = await client.post("/v1/chat/completions", json=chat(max_tokens=2, top_k=3, guided_json={}))
    assert odd.status_code == 200


async def test_usage_chunk_only_when_asked_and_length_is_the_reason(client: httpx.AsyncClient) -> None:
    plain = await client.post("/v1/chat/completions", json=chat(max_tokens=3, stream=True))
    asked = await client.post(
        "/v1/chat/completions", json=chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
    )
    assert '"usage"' not in plain.text
    last = json.loads(asked.text.split("\n\n")[-3].removeprefix("data: "))
    assert last["usage"]["completion_tokens"] == 3
    assert '"finish_reason": "length"' in plain.text
    assert plain.text.endswith("data: [DONE]\n\n")


async def test_an_answer_stops_before_the_stop_string(client: httpx.AsyncClient) -> None:
    full = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 12})).json()["choices"][0]
    stop = full["text"].split()[4]
    cut = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 12, "stop": stop})).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["text"] == full["text"].split(stop)[0]


async def test_a_request_told_to_fail_fails_so(client: httpx.AsyncClient) -> None:
    for status in (429, 500, 503):
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Return-Error": str(status)})
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == "injected"


async def test_live_changes_take_hold_and_bad_ones_change_nothing() -> None:
    async with serving() as (engine, client):
        changed = await client.post("/admin/config", json={"failure_rate": 1.0, "failure_types": ["rate_limit"]})
        assert changed.json()["failure_rate"] == 1.0
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        refused = await client.post("/admin/config", json={"failure_rate": 0.0, "odd": 1})
        assert refused.status_code == 400
        assert engine.faults.failure_rate == 1.0


async def test_a_hang_makes_no_token_while_health_stays_well_and_ends_when_lifted() -> None:
    async with serving(hang=True) as (engine, client):
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        await until(lambda: engine.num_in_flight == 1)
        assert (await client.get("/health")).status_code == 200
        assert not waiting.done()
        await client.post("/admin/config", json={"hang": False})
        assert (await waiting).status_code == 200


async def test_health_can_be_made_ill() -> None:
    async with serving(unhealthy=True) as (_, client):
        assert (await client.get("/health")).status_code == 503
    async with serving(hang_health=True) as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/health", timeout=0.2)


async def test_a_client_that_leaves_frees_its_seat_streamed_or_not() -> None:
    async with serving(time_scale=1.0) as (engine, client):
        for stream in (True, False):
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream}
            asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
            before = engine.metrics.num_generation_tokens
            await until(lambda before=before: engine.metrics.num_generation_tokens > before + 2)  # type: ignore[misc]
            asked.cancel()
            await until(lambda: engine.num_in_flight == 0)
        await until(lambda: engine.kv_bytes_used == 0)
        assert engine.metrics.num_finished == {"abort": 2}


async def test_requests_queue_when_seats_are_taken_and_metrics_say_so() -> None:
    async with serving(max_running=1, hang=True) as (engine, client):
        body = {"prompt": "x", "max_tokens": 2}
        waiting = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: engine.num_in_flight == 3)
        engine.set_faults(Faults())
        await until(lambda: all(task.done() for task in waiting))
        assert {task.result().status_code for task in waiting} == {200}
        text = (await client.get("/metrics")).text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
            assert f"vllm:{name}{{" in text
        assert 'vllm:generation_tokens_total{model_name="big",engine="0",emulated="true"} 6.0' in text


WHOLE_S, HALF_S, PREFILL_S = (13 << 30) / 10e9, (13 << 29) / 10e9, 0.0177  # 13 GiB at 10 GB/s, and the shortest prefill


@pytest.mark.parametrize(
    ("first_bytes", "calls", "expected_s"),
    [
        (
            13 << 29,
            ["/wake_up", "/wake_up"],
            pytest.approx([HALF_S - PREFILL_S], abs=1e-3),
        ),  # beside the last one
        (-1, ["/sleep?level=1", "/sleep?level=1", "/wake_up"], pytest.approx([WHOLE_S, WHOLE_S])),
    ],
    ids=["WarmServe section 4: the rest of a replica, once", "SwapServeLLM section 4: both ways"],
)
async def test_weights_take_their_modelled_time(first_bytes: int, calls: list[str], expected_s: Any) -> None:
    waited: list[float] = []
    async with serving(first_bytes=first_bytes) as (engine, client):

        async def pass_time(seconds: float) -> None:
            waited.append(seconds)

        engine.pass_time = pass_time  # type: ignore[method-assign]
        for call in calls:
            assert (await client.post(call)).status_code == 200
    assert waited == expected_s


async def test_sleep_holds_requests_and_waking_takes_the_modelled_transfer(client: httpx.AsyncClient) -> None:
    assert (await client.post("/sleep?level=1")).status_code == 200
    waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.post("/wake_up")
    assert (await waiting).status_code == 200
    assert (await client.post("/sleep?level=2")).status_code == 400


async def test_a_sleep_and_a_wake_fail_for_the_reason_that_is_set() -> None:
    async with serving(sleep_failure="no host memory", wake_failure="no GPU memory") as (_, client):
        said = {path: await client.post(path) for path in ("/pause?mode=abort", "/sleep?level=1", "/wake_up")}
        assert {answer.status_code for answer in said.values()} == {500}
        reasons = [answer.json()["error"]["message"] for answer in said.values()]
        assert reasons == ["no host memory", "no host memory", "no GPU memory"]
        await client.post("/admin/config", json={"sleep_failure": "", "wake_failure": ""})
        assert [(await client.post(path)).status_code for path in said] == [200, 200, 200]


async def test_pause_aborts_what_runs_and_resume_goes_on() -> None:
    async with serving(time_scale=5.0) as (engine, client):
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        lost = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: engine.num_in_flight == 1)
        await client.post("/pause?mode=abort")
        assert (await lost).json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        kept = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: engine.num_in_flight == 1)
        await client.post("/resume")
        assert (await kept).json()["choices"][0]["finish_reason"] == "length"


async def test_tokenize_counts_what_usage_counts(client: httpx.AsyncClient) -> None:
    counted = (await client.post("/tokenize", json={"prompt": "hello there"})).json()["count"]
    used = (await client.post("/v1/completions", json={"prompt": "hello there", "max_tokens": 1})).json()["usage"]
    assert counted == used["prompt_tokens"]


async def test_what_is_not_http_or_too_large_is_refused_and_others_go_on(client: httpx.AsyncClient) -> None:
    host, port = client.base_url.host, client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    reader, writer = await asyncio.open_connection(host, port)
    length = 2 * MAX_BODY_BYTES
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
    for _ in range((MAX_BODY_BYTES >> 20) + 1):
        writer.write(b" " * (1 << 20))
    assert (await reader.read(100)).startswith(b"HTTP/1.1 413")
    writer.close()
    assert (await client.get("/health")).status_code == 200
