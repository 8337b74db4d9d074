"""A model file changed under a stream, on a live fleet of the emulated engine: beside the old instance where there is
memory, in its place where there is none. And one whose engine never starts, until its file is mended."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet_runner import Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]
NUM_TOKENS = 1500
FILE = """
name: kept
engine: emulated
weights_bytes: 512MiB
kv_bytes: {kv}
context_tokens: {context}
min_instances: 1
max_wait_s: 6
engine_args: {{profile: "llama-2-7b/h800", launch_s: 0.2, warmup_s: 0.1}}
"""
BROKEN = """
name: broken
engine: emulated
weights_bytes: 512MiB
kv_bytes: 64MiB
max_wait_s: 120
engine_args: {launch_s: 0.2, warmup_s: 0.1, faults: {startup_failure: "no kernel in /opt/site/secret/kernels.so"}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet.start(
        tmp_path, {"kept": FILE.format(kv="256MiB", context=4096)}, nodes=1, GLOWPLUG_GPU_BUDGETS="2GiB"
    ) as made:
        yield made


class Stream(threading.Thread):
    """A chat of NUM_TOKENS tokens, whose engine must not end it."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.body = {
            "model": "kept", "messages": [{"role": "user", "content": "hello"}], "max_tokens": NUM_TOKENS,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        self.url, self.events = fleet.url("data") + "/v1/chat/completions", list[dict[str, Any]]()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=120.0) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def ends_whole(self) -> bool:
        self.join(timeout=120.0)
        assert not any("error" in event for event in self.events), self.events[-1]
        reasons = [choice["finish_reason"] for event in self.events for choice in event["choices"]]
        return [reason for reason in reasons if reason] == ["length"]


def ready(fleet: Fleet) -> list[str]:
    return [row["instance_id"] for row in fleet.instances("kept") if row["state"] == "ready" and not row["outdated"]]


def is_replaced(fleet: Fleet, old: str) -> str | None:
    rows = fleet.instances("kept")
    return ready(fleet)[0] if len(rows) == 1 and ready(fleet) and ready(fleet) != [old] else None


def test_a_changed_file_reaches_what_serves_and_no_stream_ends(fleet: Fleet, tmp_path: Path) -> None:
    file = fleet.models_dir / "kept.yaml"
    first = wait_until("an instance", lambda: next(iter(ready(fleet)), None))

    stream, draft = Stream(fleet), tmp_path / "draft.yaml"
    wait_until("the stream runs", lambda: len(stream.events) > 2)
    draft.write_text(FILE.format(kv="256MiB", context=8192))
    said = fleet.cli("deploy", "--dry-run", str(draft)).stdout
    assert "1 instance is replaced, after a start of about" in said and fleet.model("kept")["context_tokens"] == 4096
    file.write_text(draft.read_text())
    wait_until("another is ready beside it", lambda: ready(fleet) not in ([], [first]))
    assert stream.ends_whole()
    second = wait_until("the old one has left", lambda: is_replaced(fleet, first))

    stream = Stream(fleet)
    wait_until("the stream runs", lambda: len(stream.events) > 2)
    draft.write_text(FILE.format(kv="1GiB", context=8192))
    assert "1 instance is replaced, in place" in fleet.cli("deploy", "--dry-run", str(draft)).stdout
    file.write_text(draft.read_text())
    wait_until("it is outdated", lambda: fleet.model("kept")["kv_bytes"] == 1 << 30)
    third = wait_until("they have changed places", lambda: is_replaced(fleet, second))
    assert stream.ends_whole() and third
    rows = httpx.get(fleet.process("router")["url"] + "/v1/requests", headers=fleet.admin).json()["data"]
    assert [row["num_continued"] for row in rows[:2]] == [1, 0]
    assert "outdated" not in fleet.cli("ps").stdout


def test_a_model_whose_starts_fail_says_why_until_it_is_declared_anew(fleet: Fleet) -> None:
    file = fleet.models_dir / "broken.yaml"
    file.write_text(BROKEN)
    wait_until("it is deployed", lambda: any(one["id"] == "broken" for one in fleet.models()))
    for _ in range(3):  # the first waits for two starts
        answer = fleet.chat("broken")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "engine_failed"), error
        assert "no kernel in kernels.so" in error["message"] and "secret" not in answer.text
    assert not fleet.instances("broken"), "nothing starts for those who are refused"
    file.write_text(BROKEN.partition("engine_args")[0])
    wait_until("it is mended", lambda: not fleet.model("broken")["engine_args"])
    assert fleet.chat("broken").status_code == 200
