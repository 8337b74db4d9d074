"""One command from nothing to streamed tokens: real llama.cpp, the official client."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fleet_runner import as_json, document, running

pytestmark = [pytest.mark.fleet, pytest.mark.llamacpp, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with running() as path:
        yield path


def test_everything_is_ready_within_its_memory(state: Path) -> None:
    value = as_json(state, "status")
    assert {p["state"] for p in value["processes"]} == {"ready"}
    services = [p["service"] for p in value["processes"]]
    assert sorted(set(services)) == sorted(
        ["nats", "valkey", "router", "predictor", "placer", "autoscaler", "console", "agent", "prefetcher"]
    )
    assert services.count("agent") == services.count("prefetcher") == 3
    assert 0 < value["memory_bytes"] < 1.2e9


def test_cold_then_warm_through_the_official_client(state: Path) -> None:
    client = openai.OpenAI(base_url=f"{document(state)['urls']['data']}/v1", api_key="none on loopback", max_retries=0)
    assert {"smol-chat", "smol-poet"} <= {model.id for model in client.models.list()}
    for _ in ("cold", "warm"):
        stream = client.chat.completions.create(
            model="smol-chat",
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens > 0
    assert any(row["model_key"] == "smol-chat" for row in as_json(state, "ps"))
