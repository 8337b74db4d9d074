"""The data port's OpenAPI document, held against the port."""

import json
from typing import Any

from glowplug.services.router import ollama, paths
from glowplug.services.router.intake import PATHS
from glowplug.services.router.request_body import OPERATIONS
from tests.contract.data_port_rig import Rig, a_rig, answering, get, post

METHODS = ("get", "post", "delete", "put", "patch")
LISTS = ("/v1/models", "/v1/files", "/v1/batches")


async def read(rig: Rig) -> dict[str, Any]:
    answer = await rig.ask(get("/openapi.json"), "GET")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    return dict(answer.json())


async def test_each_path_of_the_port_is_in_it_with_its_methods_and_no_other() -> None:
    async with a_rig(api_key="secret") as rig:
        described = (await read(rig))["paths"]
        known = {path.decode() for path in {*OPERATIONS, *paths.AS_THEY_ARE, *ollama.PATHS}} - {"/metrics"}
        assert {path for path in described if "{" not in path} == known
        assert {path.partition("/{")[0] for path in described if "{" in path} == set(LISTS)
        assert all(any(one.startswith(said.removesuffix("*")) for one in described) for said in PATHS), (
            "GET / names no other"
        )
        for path, operations in described.items():
            if path.startswith(("/v1/files", "/v1/batches")):
                continue  # this port keeps none; tests/integration/test_batches.py
            for method in METHODS:
                key = b"authorization: Bearer secret\r\ncontent-length: 0\r\n"
                there = path.replace("{model}", "m")
                answer = await rig.ask(get(there, method=method.upper(), extra=key))
                takes_all = path.encode() in ollama.OPERATORS  # one refusal for all methods
                assert (answer.status != 405) == (method in operations or takes_all), (method, path, answer.body)
                assert b"There is nothing at" not in answer.body


async def test_its_requests_are_those_that_are_taken() -> None:
    async with a_rig() as rig:
        await rig.engine(answering({"object": "chat.completion"}))
        found = await read(rig)
        chat = found["components"]["schemas"]["ChatAsked"]
        assert set(chat["required"]) == {"model", "messages"} and "additionalProperties" not in chat
        assert chat["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
        taken = {"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 128, "other": 1}
        for num, status in ((128, 200), (129, 400)):
            answer = await rig.ask(post("/v1/chat/completions", json.dumps(taken | {"n": num}).encode()))
            assert answer.status == status
    async with a_rig(strict_fields=True) as rig:
        assert (await read(rig))["components"]["schemas"]["ChatAsked"]["additionalProperties"] is False


async def test_it_is_made_once() -> None:
    async with a_rig() as first, a_rig() as second:
        assert first.port.intake._openapi is second.port.intake._openapi
