"""Conversations find the engine that has them cached. Fast lane, below three seconds."""

import json
from typing import Any

import pytest

from tests.contract.data_port_rig import Reply, Rig, a_rig, answering, hang, post

UNION: dict[str, Any] = {"policy": "union"}
SYSTEM, OTHER = "You answer in few words. " * 80, "You answer at length. " * 90


def turn(*said: str, system: str = SYSTEM) -> bytes:
    """User and assistant alternate in `said`."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    return post("/v1/chat/completions", json.dumps({"model": "m", "messages": messages, "max_tokens": 8}).encode())


def telling(**details: int) -> Reply:
    message = {"role": "assistant", "content": "a cache"}
    usage = {"prompt_tokens": 500, "completion_tokens": 8, "prompt_tokens_details": details or None}
    return answering({"choices": [{"index": 0, "message": message}], "usage": usage})


def trust(rig: Rig) -> float:
    return float(rig.table.controller.balances.of("m").trust)  # type: ignore[union-attr]


async def test_a_turn_goes_to_the_engine_of_the_turn_before_although_another_has_fewer_requests() -> None:
    async with a_rig(params=UNION) as rig:
        engines = [await rig.engine(telling(cached_tokens=0), instance_id=name) for name in ("i-1", "i-2")]
        await rig.ask(turn("hello"))
        (first,) = [engine for engine in engines if engine.served]
        first.reply = hang
        busy = await rig.sent(post("/v1/completions", b'{"model":"m","prompt":"short","max_tokens":1}'))
        await rig.until(lambda: len(first.served) == 2)
        first.reply = telling(cached_tokens=480)
        await rig.ask(turn("hello", "a cache", "and then?"))
        assert len(first.served) == 3
        await rig.ask(turn("hello", system=OTHER))
        assert sum(len(engine.served) for engine in engines) == 4 and len(first.served) == 3
        busy.close()


@pytest.mark.parametrize(
    ("details", "is_less"), [({"cached_tokens": 0}, True), ({"cached_tokens": 480}, False), ({}, False)]
)
async def test_trust_falls_where_an_engine_says_that_nothing_was_cached(details: Any, is_less: bool) -> None:
    """An engine that does not report it stays trusted, whatever words its answer has."""
    async with a_rig(params=UNION) as rig:
        for name in ("i-1", "i-2"):
            await rig.engine(telling(**details), instance_id=name)
        for said in (("hello",), ("hello", "a cache", "and then?")):
            assert (await rig.ask(turn(*said))).status == 200
        await rig.until(lambda: rig.num_in_flight == 0)
        assert (trust(rig) < 1.0) == is_less
