"""The export of running requests from an engine. Lane: fast, 0.1 s."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from glowplug_vllm import moving, sleeping

BLOCK = 16


def write(directory: Path, number: int, token_ids: list[int], num_computed: int, **changes: Any) -> Path:
    facts = {"token_ids": token_ids, "num_computed": num_computed, "block_size": BLOCK, "num_tp": 1, **changes}
    path = moving.index(directory, number)
    path.write_text(json.dumps(facts))
    return path


def longest(directory: Path, token_ids: list[int]) -> tuple[int, Path | None]:
    return moving.longest(directory, token_ids, BLOCK, 1)


def test_the_file_with_most_of_the_beginning_is_found(tmp_path: Path) -> None:
    write(tmp_path, 0, [1, 2, 3, 9, 9, 9], 6)
    best = write(tmp_path, 1, [1, 2, 3, 4, 5, 6], 5)
    assert longest(tmp_path, [1, 2, 3, 4, 5, 6, 7, 8]) == (5, best)


def test_fewer_tokens_than_were_moved_are_found_too_and_the_last_one_is_computed(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [1, 2, 3, 4], 4)
    assert longest(tmp_path, [1, 2, 3]) == (2, path)
    assert longest(tmp_path, [1])[0] == 0


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"num_tp": 2}])
def test_a_cache_of_another_form_is_no_use(tmp_path: Path, changes: dict[str, int]) -> None:
    write(tmp_path, 0, [1, 2, 3], 3, **changes)
    assert longest(tmp_path, [1, 2, 3, 4]) == (0, None)


def test_what_is_not_written_to_its_end_is_not_seen(tmp_path: Path) -> None:
    write(tmp_path, 0, [1, 2, 3], 3).rename(tmp_path / "0.part")
    moving.index(tmp_path, 1).write_text('{"token_ids": [1, 2')
    assert longest(tmp_path, [1, 2, 3, 4]) == (0, None)


class FakeCore:
    """vLLM's engine core with one request; `asked`: blocks to read."""

    def __init__(self, num_computed: int) -> None:
        request = Namespace(
            request_id="r-1", all_token_ids=[5] * 40, num_prompt_tokens=30, num_computed_tokens=num_computed
        )
        manager = Namespace(get_block_ids=lambda _: ([3, 4, 5],))
        self.scheduler = Namespace(requests={"r-1": request}, kv_cache_manager=manager)
        parallel = Namespace(tensor_parallel_size=1)
        self.vllm_config = Namespace(cache_config=Namespace(block_size=BLOCK), parallel_config=parallel)
        self.asked: list[list[list[int]]] = []

    def collective_rpc(self, _: str, args: tuple[list[list[int]]]) -> list[list[dict[str, Any]]]:
        self.asked.append(args[0])
        return [[{}]]


@pytest.mark.parametrize(("num_computed", "asked"), [(39, [[[3, 4, 5]]]), (17, [[[3, 4]]]), (16, []), (0, [])])
def test_only_a_cache_that_is_worth_it_is_read(tmp_path: Path, num_computed: int, asked: list[list[list[int]]]) -> None:
    core = FakeCore(num_computed)
    (written,) = moving.export(core, str(tmp_path / "kv"), recompute_below=17)
    assert core.asked == asked
    assert (written["request_id"], written["num_tokens"], written["num_bytes"]) == ("r-1", 40, 0)
    facts = json.loads(moving.index(tmp_path / "kv", 0).read_text())
    assert facts["token_ids"] == [5] * 40 and facts["num_computed"] == 0, "no cache is there: all is computed anew"


class FakeClient:
    """vLLM's engine client."""

    def __init__(self, export: Callable[[], Any]) -> None:
        self.calls: list[str] = []
        self._export = export
        self.engine_core = self.output_processor = self
        self.num_requests = 2
        self.request_states = {"r-1": Namespace(lora_name=None), "r-2": Namespace(lora_name="poet")}

    def get_num_unfinished_requests(self) -> int:
        return self.num_requests

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def call_utility_async(self, name: str, *_: Any) -> Any:
        self.calls.append(name)
        return self._export()


def server(client: FakeClient) -> httpx.AsyncClient:
    app = FastAPI()
    engine, move = sleeping.Sleeping(client), moving.Move(client)
    app.include_router(sleeping.routes(lambda: engine, lambda: move))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


ASKED = {"directory": "/d", "recompute_below": 1}


async def test_an_engine_pauses_while_its_requests_are_written_and_goes_on() -> None:
    """A request continued nowhere else ends there."""
    client = FakeClient(lambda: [{"request_id": "r-1"}])
    answer = await server(client).post("/glowplug/export", json=ASKED)
    assert answer.status_code == 200 and answer.json()["requests"] == [{"request_id": "r-1"}]
    assert client.calls == ["pause keep False", "glowplug_export", "resume"]
    assert (await server(client).get("/glowplug/requests")).json() == {
        "num_requests": 2,
        "by_adapter": {"poet": 1},
    }


async def test_an_engine_whose_requests_cannot_leave_goes_on() -> None:
    def broken() -> None:
        raise OSError("no space")

    client = FakeClient(broken)
    answer = await server(client).post("/glowplug/export", json=ASKED)
    assert answer.status_code == 500 and "no space" in answer.text
    assert client.calls[-1] == "resume"


async def test_only_its_agent_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    client = FakeClient(list)
    async with server(client) as http:
        assert (await http.post("/glowplug/export", json=ASKED)).status_code == 401
        assert (await http.get("/glowplug/requests")).status_code == 401
        assert client.calls == []
        own = await http.post("/glowplug/export", json=ASKED, headers={"authorization": "Bearer key"})
    assert own.status_code == 200
