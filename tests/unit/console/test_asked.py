"""The page's readings of predictor and price list."""

import json
from typing import Any

import httpx
import pytest

from glowplug.domain.errors import NoCapacity, NotFound
from glowplug.services.console.asked import forecasts_of, prices_of, read_page

NOW = 1000.0
HOLDER = {
    "instance_id": "i-1", "model": "m", "rung": "ready", "num_bytes": 64, "asked": 0.5, "climb_s": 2.0, "saves_s": 1.0,
    "worth": 1 / 64, "state": "ready", "order": 1, "why": "",
}  # fmt: skip
WHOLE = {"gpu_id": "node-1/0", "total_bytes": 100, "free_bytes": 36, "holders": [HOLDER]}


def window(started_at: float, **more: Any) -> dict[str, Any]:
    return {
        "started_at": started_at, "num_requests": 4, "num_cold": 1, "prompt_tokens": 40, "response_tokens": 80,
        "num_tokens_exact": 4, "concurrency_peak": 3, "concurrency_seconds": 30.0, **more,
    }  # fmt: skip


def windows(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "window_s": 60.0, "data": {"m": list(rows)}}


NONE = {"object": "list", "data": [], "policy": "none"}


def test_windows_say_what_came_and_which_one_is_open() -> None:
    page = read_page("m", windows(window(900.0), window(960.0, num_tokens_exact=3)), NONE, NOW)
    whole, opened = page.windows
    assert (whole.is_open, whole.requests, whole.cold, whole.concurrency, whole.is_exact) == (False, 4, 1, 0.5, True)
    assert opened.is_open and opened.concurrency == 0.75 and not opened.is_exact, "40 s of it are over"


def test_no_forecast_says_why() -> None:
    assert read_page("m", windows(), NONE, NOW).why_empty.startswith("no forecasting policy is in force")
    assert "seasonal" in read_page("m", windows(), {"data": [], "policy": "seasonal"}, NOW).why_empty


def test_forecasts_of_the_model_name_their_metric_with_quantiles_and_target() -> None:
    row = {"model_key": "m", "made_at": 990.0, "window_s": 60.0, "metric": "requests", "value": 7.0,
           "target_at": 1020.0, "quantiles": [[0.1, 3.0], [0.9, 11.0]], "error_ratio": 0.2,
           "source": "csp"}  # fmt: skip
    rows = [row | {"target_at": 1080.0}, row, row | {"model_key": "n"}]
    page = read_page("m", windows(), {"data": rows, "policy": "holt_winters"}, NOW)
    assert [point.target_at for point in page.forecasts] == [1020.0, 1080.0] and page.why_empty == ""
    point = page.forecasts[0]
    assert (point.metric, point.value, point.quantiles) == ("requests", 7.0, ((0.1, 3.0), (0.9, 11.0)))
    assert (point.made_at, point.error_ratio, point.source) == (990.0, 0.2, "csp")


class FakeUpstream:
    """In-process: one answer per path, or unreachable."""

    def __init__(
        self, answers: dict[str, Any] | None = None, status: int = 200, error: Exception | None = None
    ) -> None:
        self._answers, self._status, self._error = answers or {}, status, error

    async def open(self, service: str, method: str, path: str, **_: Any) -> httpx.Response:
        if self._error is not None:
            raise self._error
        return httpx.Response(self._status, stream=httpx.ByteStream(json.dumps(self._answers.get(path)).encode()))


def predictor(said: Any) -> FakeUpstream:
    return FakeUpstream({"/v1/windows?model=m": said, "/v1/forecasts?model=m": NONE})


def placer(said: Any) -> FakeUpstream:
    return FakeUpstream({"/v1/gpus/node-1/0/worth": said})


async def test_the_predictor_is_asked_for_one_model() -> None:
    page = await forecasts_of(predictor(windows(window(900.0))), "m", NOW)  # type: ignore[arg-type]
    assert len(page.windows) == 1 and page.policy == "none" and page.problem == ""


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeUpstream(error=NoCapacity("no predictor address known")), "no predictor address known"),
        (FakeUpstream(status=503), "status 503"),
        (predictor({"window_s": "odd"}), "not a forecast"),
        (predictor([1]), "not a forecast"),
    ],
)
async def test_a_predictor_that_cannot_be_read_is_said_not_raised(fake: Any, problem: str) -> None:
    page = await forecasts_of(fake, "m", NOW)
    assert problem in page.problem and page.windows == [] and page.why_empty == ""


async def test_the_placer_is_asked_for_one_gpu() -> None:
    page = await prices_of(placer(WHOLE), "node-1/0", NOW)  # type: ignore[arg-type]
    assert page.prices is not None and page.problem == ""
    assert (page.prices.free_bytes, page.prices.holders[0].order, page.prices.holders[0].worth) == (36, 1, 1 / 64)


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeUpstream(error=NoCapacity("no placer address known")), "no placer address known"),
        (FakeUpstream(status=503), "the placer answered 503"),
        (placer([1]), "not a price list"),
        (placer({**WHOLE, "holders": [{"worth": "much"}]}), "not a price list"),
    ],
)
async def test_a_placer_that_cannot_be_read_is_said_not_raised(fake: Any, problem: str) -> None:
    page = await prices_of(fake, "node-1/0", NOW)
    assert problem in page.problem and page.prices is None


async def test_a_gpu_that_the_placer_does_not_know_is_not_found() -> None:
    with pytest.raises(NotFound, match="node-9/0"):
        await prices_of(FakeUpstream(status=404), "node-9/0", NOW)  # type: ignore[arg-type]
