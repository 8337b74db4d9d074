"""What the page reads of the placer's price list, and what it says where there is none."""

import json
from typing import Any

import httpx
import pytest

from glowplug.domain.errors import NoCapacity, NotFound
from services.console.prices import Prices

NOW = 1000.0
HOLDER = {
    "instance_id": "i-1", "model": "m", "rung": "ready", "num_bytes": 64, "asked": 0.5, "climb_s": 2.0, "saves_s": 1.0,
    "worth": 1 / 64, "state": "ready", "order": 1, "why": "",
}  # fmt: skip
WHOLE = {"gpu_id": "node-1/0", "total_bytes": 100, "free_bytes": 36, "holders": [HOLDER]}


class FakeUpstream:
    """A placer that answers in the test's own process, or cannot be reached."""

    def __init__(self, answer: Any = WHOLE, status: int = 200, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answer, self._status, self._error = answer, status, error

    async def open(self, service: str, method: str, path: str, **_: Any) -> httpx.Response:
        self.asked.append((service, path))
        if self._error is not None:
            raise self._error
        return httpx.Response(self._status, stream=httpx.ByteStream(json.dumps(self._answer).encode()))


async def test_the_placer_is_asked_once_for_all_pages_that_look() -> None:
    fake, now = FakeUpstream(), [NOW]
    prices = Prices(fake, lambda: now[0])  # type: ignore[arg-type]
    page = await prices.of("node-1/0")
    assert page.prices is not None and page.problem == ""
    assert (page.prices.free_bytes, page.prices.holders[0].order, page.prices.holders[0].worth) == (36, 1, 1 / 64)
    assert await prices.of("node-1/0") is page
    assert fake.asked == [("placer", "/v1/gpus/node-1/0/worth")]
    now[0] += 2.0
    await prices.of("node-1/0")
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeUpstream(error=NoCapacity("no placer address known")), "no placer address known"),
        (FakeUpstream(status=503), "the placer answered 503"),
        (FakeUpstream(answer=[1]), "something else than prices"),
        (FakeUpstream(answer={**WHOLE, "holders": [{"worth": "much"}]}), "something else than prices"),
    ],
)
async def test_a_placer_that_cannot_be_read_is_said_not_raised(fake: FakeUpstream, problem: str) -> None:
    page = await Prices(fake, lambda: NOW).of("node-1/0")  # type: ignore[arg-type]
    assert problem in page.problem and page.prices is None


async def test_a_gpu_that_the_placer_does_not_know_is_not_found() -> None:
    with pytest.raises(NotFound, match="node-9/0"):
        await Prices(FakeUpstream(status=404), lambda: NOW).of("node-9/0")  # type: ignore[arg-type]
