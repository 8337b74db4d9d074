"""llama.cpp's specialties."""

import asyncio
import contextlib
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.domain.errors import BadRequest, EngineFailed
from glowplug.domain.gguf import GgufReader
from glowplug.engines import gguf, samples
from glowplug.engines.drivers import driver
from glowplug.engines.gguf import read_facts
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineHandle
from glowplug.engines.process import anonymous_bytes
from glowplug.engines.samples import sample_weights_path
from glowplug.policies.routing.prefix_index import SIMILARITY, Slots, num_alike
from tests.contract.engine_rig import EngineCase, engine_case, until_idle
from tests.waiting import WAIT_S

Q4_0, Q4_1 = 2, 3
pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(180)]


@pytest.fixture
async def case() -> AsyncIterator[EngineCase]:
    async with engine_case("llamacpp") as case:
        yield case


async def test_embeddings_when_asked_for_and_text_all_the_same(case: EngineCase) -> None:
    report = await case.start(engine_args={"embeddings": True})
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        vectors = (await client.post("/v1/embeddings", json={"model": "x", "input": ["a", "b"]})).json()["data"]
        text = await client.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 3})
    assert [len(item["embedding"]) for item in vectors] == [576, 576]
    assert text.status_code == 200


@pytest.mark.parametrize("args", [{}, {"n_batch": 500, "n_ubatch": 100}], ids=["as it is", "small batches"])
async def test_embeddings_in_a_number_of_slots_that_divides_no_batch(case: EngineCase, args: dict[str, Any]) -> None:
    """llama.cpp itself aborts while it starts."""
    given = {"engine_args": {"embeddings": True, **args}, "kv_bytes": 140 << 20, "context_tokens": 2048}
    report = await case.start(**given, max_concurrency=4)
    assert report.handle.figures.num_slots == 3
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        answer = await client.post("/v1/embeddings", json={"model": "x", "input": ["a", "b c", "d"]})
    assert [len(item["embedding"]) for item in answer.json()["data"]] == [576] * 3


@pytest.mark.parametrize("weights", [samples.sample_weights_path, samples.prepare], ids=["four bits", "eight bits"])
async def test_both_samples_know_the_capital_of_france(case: EngineCase, weights: Callable[[], Path]) -> None:
    report = await case.driver.load(await case.launch(weights_bytes=weights().stat().st_size), weights())
    asked = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        answer = (await client.post("/v1/completions", json=asked)).json()
    assert "Paris" in answer["choices"][0]["text"]


async def test_a_grant_for_fewer_slots_is_reported_as_such(case: EngineCase) -> None:
    """The sample model smol-chat: 140 MiB hold three contexts of 2,048 tokens."""
    report = await case.start(kv_bytes=140 << 20, context_tokens=2048, max_concurrency=4)
    assert (report.handle.figures.num_slots, report.handle.figures.kv_tokens) == (3, 6144)
    assert report.handle.figures.lacks == (), "its chat template knows no tools, and is given them"


async def test_its_slots_keep_what_the_router_takes_them_to_keep(case: EngineCase) -> None:
    """Cached tokens equal those of prefix_index.py."""
    report = await case.start(max_concurrency=2)
    slots, block = Slots(2), 4
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        length = dict.fromkeys(range(3), 0)
        for turn, chat in enumerate((0, 1, 0, 2, 1, 2, 2, 0, 0, 1)):
            length[chat] += 3
            said = tuple(1000 + 1000 * chat + at for at in range(length[chat]))
            held = num_alike(slots.take(turn, said, SIMILARITY * len(said)), said)
            assert slots.free(turn) == said
            asked = {"prompt": [token for one in said for token in [one] * block], "max_tokens": 1, "temperature": 0}
            usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == held * block, f"turn {turn}, of chat {chat}"


async def test_what_it_reads_in_place_is_seen_and_what_it_repacks_is_its_own(case: EngineCase, tmp_path: Path) -> None:
    """Repacked 4-bit weights occupy its own memory. How this shows depends on the kernel; where it does not show, more
    counts as private."""
    repacked = tmp_path / "repacked.gguf"
    repacked.write_bytes(with_q4_0(sample_weights_path().read_bytes()))
    whole, private = {}, {}
    for path in (sample_weights_path(), repacked):
        report = await case.driver.load(await case.launch(), path)
        case.handles.append(report.handle)
        whole[path] = sum(end - first for first, end in read_facts(path).tensors)
        private[path] = whole[path] - report.handle.figures.shared_bytes, anonymous_bytes(report.handle.pid)
    (here, anonymous), (there, more) = private.values()
    assert here == 0, "the sample's kind of weights is not repacked"
    assert there >= more - anonymous - (8 << 20), "what is its own is never taken for shared"
    assert there < whole[repacked] or more - anonymous > 48 << 20


def with_q4_0(content: bytes) -> bytes:
    """Q4_1 tensors (a scale, a least value and 32 numbers each) become Q4_0, without the least value. Its answers make
    no sense."""
    reader = GgufReader(content)
    for _ in reader.values():
        pass
    infos_at, tensors = reader.at, list(reader.tensors())
    infos, numbers = bytearray(), bytearray()
    for tensor in tensors:
        begin, kind = reader.data_first + tensor.offset, tensor.kind
        its = content[begin : begin + gguf.bytes_of(tensor)]
        if kind == Q4_1:
            kind, packed = Q4_0, bytearray(len(its) // 20 * 18)
            for byte in range(18):
                packed[byte::18] = its[byte if byte < 2 else byte + 2 :: 20]
            its = bytes(packed)
        infos += content[tensor.first : tensor.end - 4] + struct.pack("<IQ", kind, len(numbers))
        numbers += its + bytes(-len(its) % 32)
    head = content[:infos_at] + infos
    return bytes(head + bytes(-len(head) % 32) + numbers)


TOOL_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n"
    'Answer <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{%- endif %}'
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


async def test_a_chat_template_of_the_models_owner_brings_tools(case: EngineCase) -> None:
    report = await case.start(engine_args={"chat_template": TOOL_TEMPLATE}, system_prompt="Be brief.")
    assert report.handle.figures.lacks == ()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        prompt = (await client.post("/apply-template", json=body)).json()["prompt"]
    assert "weather" in prompt and "Be brief." in prompt


@pytest.mark.parametrize(
    "args", [{"chat_template": "chatml"}, {"chat_template": ""}, {"chat_template": "{{ x }}" * 10_000}, {"mmproj": 5}]
)
async def test_what_is_no_template_and_no_path_is_refused_by_name(case: EngineCase, args: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as refused:
        await case.launch(engine_args=args)
    assert refused.value.param == f"engine_args.{next(iter(args))}"


async def refused(case: EngineCase, weights: Path, why: str, **changes: object) -> tuple[EngineHandle, str]:
    """Returns the handle and the failure's code."""
    handle = await case.launch(**changes)
    with pytest.raises(EngineFailed, match=why) as failure:
        await case.driver.load(handle, weights)
    return handle, failure.value.code


async def test_a_projector_that_is_not_there_is_named_and_counts_in_the_weights(case: EngineCase) -> None:
    projector = case.folder / "eyes.gguf"
    for what, text in ((f"there is no file {projector}", None), ("weights_bytes: .* is less than", b"x" * (300 << 20))):
        if text is not None:
            projector.write_bytes(text)
        _, code = await refused(case, case.weights, what, engine_args={"mmproj": str(projector)})
        assert code == "engine_misconfigured"


async def test_weights_cut_short_are_never_served(case: EngineCase) -> None:
    with case.weights.open("rb") as whole:
        cut = case.folder / "cut.gguf"
        cut.write_bytes(whole.read(20_000_000))
    handle, code = await refused(case, cut, r"cut\.gguf is cut short")
    assert code == "weights_corrupt"
    assert not case.driver.adopt(handle)


async def test_a_template_that_does_not_render_is_the_models_fault(case: EngineCase) -> None:
    args = {"chat_template": "{{ messages | nofilter }}"}
    assert (await refused(case, case.weights, "chat template: .*'nofilter'", engine_args=args))[1] == (
        "engine_misconfigured"
    )


async def test_prompts_stay_out_of_the_log(case: EngineCase) -> None:
    report = await case.start(system_prompt="Zanzibar is my secret.")
    body = {"messages": [{"role": "user", "content": "Quokkas too."}], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    log = Path(report.handle.log_path).read_text()
    assert "slots" in log
    assert "Zanzibar" not in log
    assert "Quokka" not in log


async def test_an_unstreamed_request_is_dropped_although_its_count_is_asked_for_all_the_time(case: EngineCase) -> None:
    report = await case.start(kv_bytes=0, context_tokens=8192, max_concurrency=1)
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        asked = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 8000, "ignore_eos": True})
        waiting = asyncio.ensure_future(asked)
        while await case.driver.num_in_flight(report.handle) == 0:
            assert not waiting.done()
            await asyncio.sleep(0.02)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    await until_idle(case, report.handle)
    assert "cancel task" in Path(report.handle.log_path).read_text()


async def test_weights_larger_than_what_the_model_declares_are_not_loaded(case: EngineCase) -> None:
    why = r"weights_bytes: 5 is less than the \d+ bytes of the file"
    assert (await refused(case, case.weights, why, weights_bytes=5))[1] == "engine_misconfigured"


async def said(handle: EngineHandle) -> str:
    async with httpx.AsyncClient(base_url=handle.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json={"prompt": "The sea", "max_tokens": 12, "temperature": 0})
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.skipif(sys.platform != "linux", reason="engines are parked on Linux")
async def test_a_start_from_the_parked_process_and_a_plain_one_after_its_end(
    case: EngineCase, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(case.driver, HostedDriver)
    zygote = case.driver.zygote
    zygote.until_parked(WAIT_S)
    parked = (await case.start()).handle
    assert parked.data["parked"] == "true" and psutil.Process(parked.pid).ppid() == zygote.pid
    os.kill(zygote.pid, signal.SIGKILL)
    plain = (await case.start()).handle
    assert "parked" not in plain.data and "the parked process is gone" in caplog.text
    assert await said(parked) == await said(plain), "a parked engine outlives its zygote"
    later = driver(case.name)
    assert later.adopt(EngineHandle.from_json(parked.to_json()))
    await later.stop(parked, grace_s=5.0)
    assert not later.adopt(parked)
    zygote.until_parked(WAIT_S)
    assert (await case.launch()).data["parked"] == "true", "the next start is parked again"


SENTENCE = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}


async def said_with(case: EngineCase, **args: Any) -> tuple[int, str, bool]:
    """(tokens of KV cache, answer, whether tokens were drafted) with 64 MiB of KV cache."""
    report = await case.start(kv_bytes=64 << 20, context_tokens=8192, max_concurrency=1, engine_args=args)
    async with httpx.AsyncClient(base_url=report.handle.url, timeout=60) as client:
        answer = (await client.post("/v1/completions", json=SENTENCE)).json()
    return report.handle.figures.kv_tokens, answer["choices"][0]["text"], answer["timings"].get("draft_n", 0) > 0


async def test_a_cache_of_smaller_numbers_holds_more_tokens_and_a_draft_says_the_same(case: EngineCase) -> None:
    """Fast lane, 8 s: three starts."""
    plain = await said_with(case)
    assert plain[0] == 2816
    small = await said_with(case, cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on")
    assert small[0] == 5376, "34 bytes for 32 numbers, and not 64"
    assert "Paris" in small[1]
    drafted = await said_with(case, draft=str(sample_weights_path()), draft_max=4)
    assert drafted == (1280, plain[1], True), "the drafting model's own KV cache lies in kv_bytes too"
