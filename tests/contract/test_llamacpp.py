"""What is llama.cpp's own: embeddings on request, weights cut short, prompts kept out of its log, parked starts."""

import asyncio
import contextlib
import os
import signal
import struct
import sys
import tempfile
from collections.abc import AsyncIterator
from mmap import ACCESS_READ, mmap
from pathlib import Path

import httpx
import psutil
import pytest

from glowplug.domain.errors import BadRequest, EngineFailed
from glowplug.engines import gguf
from glowplug.engines.drivers import driver
from glowplug.engines.gguf import read_facts
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineHandle
from glowplug.engines.process import anonymous_bytes
from glowplug.engines.samples import sample_weights_path
from tests.contract.engine_rig import EngineCase, engine_case, until_idle
from tests.waiting import WAIT_S

Q4_0, Q4_1 = 2, 3  # kinds of tensors in a GGUF file
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


async def test_a_grant_for_fewer_slots_is_reported_as_such(case: EngineCase) -> None:
    """The sample model smol-chat: 140 MiB hold three contexts of 2,048 tokens, not the four of max_concurrency."""
    report = await case.start(kv_bytes=140 << 20, context_tokens=2048, max_concurrency=4)
    assert (report.num_slots, report.kv_tokens) == (3, 6144)
    assert report.lacks == ("tool_choice",), "its chat template knows no tools"


async def test_what_it_reads_in_place_is_seen_and_what_it_repacks_is_its_own(case: EngineCase, tmp_path: Path) -> None:
    """On processors for which llama.cpp repacks 4-bit weights they lie in its own memory, beside the file's pages. How
    exactly that is seen depends on the kernel; where it does not show, more counts as its own."""
    repacked = tmp_path / "repacked.gguf"
    repacked.write_bytes(with_q4_0(sample_weights_path().read_bytes()))
    whole, private = {}, {}
    for path in (sample_weights_path(), repacked):
        report = await case.driver.load(await case.launch(), path)
        case.handles.append(report.handle)
        whole[path] = sum(end - first for first, end in read_facts(path).tensors)
        private[path] = whole[path] - report.shared_bytes, anonymous_bytes(report.handle.pid)
    (here, anonymous), (there, more) = private.values()
    assert here == 0, "the sample's kind of weights is not repacked"
    assert there >= more - anonymous - (8 << 20), "what is its own is never taken for shared"
    assert there < whole[repacked] or more - anonymous > 48 << 20


def with_q4_0(content: bytes) -> bytes:
    """A GGUF file with its Q4_1 tensors (a scale, a least value and 32 numbers each) as Q4_0, which leaves out the
    least value. It says nothing sensible, and is read as any other."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            _, infos_at, num_tensors = gguf._read_values(data)
            _, spans, _ = gguf._tensors(data, infos_at, num_tensors, 32)
            at, infos, tensors = infos_at, bytearray(), bytearray()
            for first, end in spans:
                name_at, (_, at) = at, gguf._string(data, at)
                (num_dimensions,) = struct.unpack_from("<I", data, at)
                kind_at = at + 4 + 8 * num_dimensions
                (kind,) = struct.unpack_from("<I", data, kind_at)
                tensor = content[first:end]
                if kind == Q4_1:
                    kind, packed = Q4_0, bytearray(len(tensor) // 20 * 18)
                    for byte in range(18):
                        packed[byte::18] = tensor[byte if byte < 2 else byte + 2 :: 20]
                    tensor = bytes(packed)
                infos += content[name_at:kind_at] + struct.pack("<IQ", kind, len(tensors))
                tensors += tensor + bytes(-len(tensor) % 32)
                at = kind_at + 12
            head = content[:infos_at] + infos
            return bytes(head + bytes(-len(head) % 32) + tensors)


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
    assert report.lacks == ()
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
    """The handle of a start that must fail for that reason, and the failure's code."""
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
    assert await until_idle(case, report.handle) == 0
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
    case: EngineCase, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(case.driver, HostedDriver)
    zygote = case.driver.zygote
    zygote.until_parked(WAIT_S)
    parked = (await case.start()).handle
    assert parked.data["parked"] == "true" and psutil.Process(parked.pid).ppid() == zygote.pid
    os.kill(zygote.pid, signal.SIGKILL)
    plain = (await case.start()).handle
    assert "parked" not in plain.data and "the parked process is gone" in capsys.readouterr().out
    assert await said(parked) == await said(plain), "a parked engine outlives its zygote"
    later = driver(case.name)
    assert later.adopt(EngineHandle.from_json(parked.to_json()))
    await later.stop(parked, grace_s=5.0)
    assert not later.adopt(parked)
    zygote.until_parked(WAIT_S)
    assert (await case.launch()).data["parked"] == "true", "the next start is parked again"
