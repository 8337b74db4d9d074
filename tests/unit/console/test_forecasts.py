"""What the page reads of the predictor: windows as they came, forecasts with quantiles or without, and why none."""

import json
from typing import Any

import httpx
import pytest

from glowplug.domain.errors import NoCapacity
from services.console.forecasts import Forecasts, read_page

NOW = 1000.0


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


def test_todays_forecast_is_the_mean_with_its_peak_above() -> None:
    row = {"model_key": "m", "made_at": 990.0, "window_s": 60.0, "concurrency_mean": 2.0, "concurrency_peak": 5.0,
           "error_ratio": 0.2, "source": "csp"}  # fmt: skip
    other = row | {"model_key": "n"}
    (point,) = read_page("m", windows(), {"data": [row, other], "policy": "csp"}, NOW).forecasts
    assert (point.metric, point.value, point.quantiles) == ("concurrency", 2.0, ((1.0, 5.0),))
    assert (point.target_at, point.made_at, point.error_ratio, point.source) == (990.0, 990.0, 0.2, "csp")


def test_forecasts_to_come_name_their_metric_with_quantiles_and_target() -> None:
    row = {"model_key": "m", "made_at": 990.0, "window_s": 60.0, "metric": "requests", "value": 7.0,
           "target_at": 1020.0, "quantiles": [[0.9, 11.0], [0.1, 3.0]]}  # fmt: skip
    page = read_page("m", windows(), {"data": [row | {"target_at": 1080.0}, row], "policy": "holt_winters"}, NOW)
    assert [point.target_at for point in page.forecasts] == [1020.0, 1080.0] and page.why_empty == ""
    assert page.forecasts[0].quantiles == ((0.1, 3.0), (0.9, 11.0))


class FakeUpstream:
    """A predictor that answers in the test's own process, or cannot be reached."""

    def __init__(self, windows: Any = None, error: Exception | None = None) -> None:
        self.num_asked, self.error = 0, error
        self._answers = {"/v1/windows?model=m": windows, "/v1/forecasts?model=m": NONE}

    async def open(self, service: str, method: str, path: str, **_: Any) -> httpx.Response:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(self._answers[path]).encode()))


async def test_the_predictor_is_asked_once_for_all_pages_that_look() -> None:
    fake, now = FakeUpstream(windows(window(900.0))), [NOW]
    forecasts = Forecasts(fake, lambda: now[0])  # type: ignore[arg-type]
    assert (await forecasts.of("m")).windows == (await forecasts.of("m")).windows != []
    assert fake.num_asked == 2, "windows and forecasts"
    now[0] += 2.0
    await forecasts.of("m")
    assert fake.num_asked == 4


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeUpstream(error=NoCapacity("no predictor address known")), "no predictor address known"),
        (FakeUpstream(windows={"window_s": "odd"}), "something else than forecasts"),
        (FakeUpstream(windows=[1]), "something else than forecasts"),
    ],
)
async def test_a_predictor_that_cannot_be_read_is_said_not_raised(fake: FakeUpstream, problem: str) -> None:
    page = await Forecasts(fake, lambda: NOW).of("m")  # type: ignore[arg-type]
    assert problem in page.problem and page.windows == [] and page.why_empty == ""
