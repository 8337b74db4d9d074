"""Real vLLM in two stages on a whole fleet: a cold model answers as a pipeline and becomes one engine within the
answer, with the same text. Lane: long, about 80 s."""

import json
from collections.abc import Iterator

import httpx
import pytest

from glowplug.engines import vllm_env, vllm_sample
from tests.fleet_runner import Fleet
from tests.hub_server import HubServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(500)]
RATE = 40e6  # bytes per second of each node's link
MODEL = """
name: {name}
engine: vllm
weights: hf:test/smol
kv_bytes: 128MiB
context_tokens: 1024
max_concurrency: 4
keep_alive_s: 600
max_wait_s: 150
engine_args: {{dtype: float32, num_threads: 1}}
slo: {{ttft_s: {ttft_s}}}
"""
NUM_TOKENS = 240
PROMPT = "Write down everything that you know about the sea."


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One node cannot fetch the weights within the objective of `far`, two can."""
    if reason := vllm_env.missing(vllm_env.interpreter()):
        pytest.skip(reason)
    files = {path.name: path.read_bytes() for path in sorted(vllm_sample.prepare().iterdir()) if path.is_file()}
    num_bytes = sum(map(len, files.values()))
    models = {
        "far": MODEL.format(name="far", ttft_s=num_bytes / 2 / 0.9 / RATE + 2.5),
        "near": MODEL.format(name="near", ttft_s=100),
    }
    root = tmp_path_factory.mktemp("fleet")
    env = {
        "GLOWPLUG_POLICIES": "hydraserve",
        "GLOWPLUG_LINK_BYTES_PER_S": str(RATE),
        "GLOWPLUG_GPU_BUDGETS": "2GiB",
        "GLOWPLUG_HOST_CACHE_BYTES": str(2 * num_bytes),
    }
    with HubServer({"test/smol": files}) as hub, Fleet.start(root, models, engine="vllm", **env, **at(hub)) as made:
        yield made


def at(hub: HubServer) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url}


def said(fleet: Fleet, model: str) -> tuple[list[str], list[int]]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    texts, stages = list[str](), list[int]()
    with httpx.stream("POST", fleet.url("data") + "/v1/chat/completions", json=body, timeout=200) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if text := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                texts.append(text)
                if len(texts) % 10 == 1:
                    rows = fleet.instances(model)
                    stages.append(
                        next((r["num_stages"] for r in rows if r["state"].lower() == "ready" and r["url"]), 0)
                    )
    return texts, stages


def test_a_cold_model_answers_in_stages_and_becomes_one_engine_within_the_answer(fleet: Fleet) -> None:
    texts, stages = said(fleet, "far")
    assert stages[0] == 2, stages
    assert stages[-1] == 1, "it has not become one engine"
    wait_until("the other stage has gone", lambda: [r["num_stages"] for r in fleet.instances("far")] == [1])
    alone, _ = said(fleet, "near")
    assert "".join(texts) == "".join(alone)
    assert [row["num_stages"] for row in fleet.instances("near")] == [1]
