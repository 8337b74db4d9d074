"""An engine's server rebuilt and proven after wake, without llama.cpp. Lane: fast, 0.3 s."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.engines.llamacpp_sleep import EngineServer

PROPS = {"total_slots": 2, "default_generation_settings": {"n_ctx": 64}}


class FakeLlamacpp:
    """Answers the canary with each built server's `likeliest`."""

    def __init__(self) -> None:
        self.likeliest: list[float] = [-1.0]  # one per server; the last repeats
        self.ports: list[int] = []
        self.asked: list[str] = []
        self.num_running = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(PROPS)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                logprob = fake.likeliest[min(len(fake.ports), len(fake.likeliest)) - 1]
                top = [{"id": 7, "logprob": logprob}, {"id": 8, "logprob": -4.0}]
                self.say({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})

            def say(self, body: dict[str, Any]) -> None:
                fake.asked.append(self.path)
                raw = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        self.handler = Handler
        self.listen(0)

    def listen(self, port: int) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self.handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def listening_address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def handle_metrics(self) -> str:
        return f"llamacpp:requests_processing {self.num_running}\n"

    def build(self, port: int) -> "FakeLlamacpp":
        self.ports.append(port)
        if port:  # the previous server was dropped
            self.http.shutdown()
            self.http.server_close()
            self.listen(port)
        return self


@pytest.fixture
def fake() -> Iterator[FakeLlamacpp]:
    made = FakeLlamacpp()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def engine(fake: FakeLlamacpp, tmp_path: Path) -> EngineServer:
    """An engine whose KV pages cannot be given back."""
    made = EngineServer(fake.build, 1 << 20, Path("weights"), host_memory=False, run_dir=tmp_path)
    assert made.warm_up() == PROPS
    return made


def test_without_pages_to_give_back_the_server_is_dropped_and_built_again_on_its_port(
    fake: FakeLlamacpp, engine: EngineServer
) -> None:
    assert engine.answer({"do": "sleep", "becomes": "swapped_out"})["how"] == "server"
    assert engine.answer({"do": "state"})["state"] == "swapped_out"
    assert engine.answer({"do": "wake"})["state"] == "awake"
    assert fake.ports == [0, engine.port]


def test_a_busy_engine_that_may_sleep_only_idle_serves_on(fake: FakeLlamacpp, engine: EngineServer) -> None:
    fake.num_running = 2
    asked = {"do": "sleep", "becomes": "swapped_out", "if_idle": True}
    assert engine.answer(asked) == {"state": "awake", "how": "server", "running": 2}
    assert httpx.get(f"{fake.listening_address}/props").json() == PROPS and fake.ports == [0]
    fake.num_running = 0
    assert engine.answer(asked)["state"] == "swapped_out"


def test_without_pages_to_give_back_there_is_no_replica(engine: EngineServer) -> None:
    with pytest.raises(RuntimeError, match="was not found in host memory"):
        engine.answer({"do": "sleep", "becomes": "prewarmed"})
    assert engine.answer({"do": "state"})["state"] == "awake"


@pytest.mark.parametrize(
    ("likeliest", "num_built"), [([-1.0, -1.2, -1.0], 3), ([-1.0, -1.0001], 2)], ids=["another answer", "rounding"]
)
def test_a_wake_that_answers_otherwise_builds_the_server_again(
    fake: FakeLlamacpp, engine: EngineServer, likeliest: list[float], num_built: int
) -> None:
    fake.likeliest = likeliest
    engine.answer({"do": "sleep", "becomes": "swapped_out"})
    assert engine.answer({"do": "wake"})["state"] == "awake"
    assert len(fake.ports) == num_built


def test_a_wake_that_goes_on_answering_otherwise_fails(fake: FakeLlamacpp, engine: EngineServer) -> None:
    fake.likeliest = [-1.0, -1.2]
    engine.answer({"do": "sleep", "becomes": "swapped_out"})
    with pytest.raises(RuntimeError, match="as at its start"):
        engine.answer({"do": "wake"})
    assert engine.answer({"do": "state"})["state"] == "swapped_out"


@pytest.mark.parametrize("question", [{"do": "dance"}, {}, {"do": "sleep", "becomes": "lazy"}])
def test_another_question_is_an_error_and_changes_nothing(engine: EngineServer, question: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"known|become"):
        engine.answer(question)
    assert engine.answer({"do": "state"})["state"] == "awake"
