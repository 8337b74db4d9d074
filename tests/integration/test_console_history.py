"""The console's history and uPlot's files over HTTP."""

import dataclasses
from pathlib import Path

import httpx
import pytest

from glowplug.services.console import app
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, serving, visited


async def filled(at: ConsoleUnderTest) -> None:
    at.clock.stopped_at = 1_700_000_405.0
    fact = story.request_finished(1, at.clock())
    await at.tell(fact, dataclasses.replace(fact, request_id="r-2", cold=True))
    at.console.history.sample()


async def test_the_history_has_every_metric_over_the_same_times() -> None:
    async with serving() as at:
        await filled(at)
        page = await at.read("/v1/history")
        assert list(page["metrics"]) == ["tokens", "ttft", "queue", "gpu", "starts", "hits"]
        assert (page["span"], page["step_s"], page["source"], len(page["times"])) == ("1h", 10, "console", 360)
        assert all(len(line["values"]) == 360 for lines in page["metrics"].values() for line in lines)
        assert page["metrics"]["hits"][0]["values"][-2:] == [None, 0.5]
        one = await at.read("/v1/history", metric="hits,starts", span="7d", model="smol/poet")
        assert (one["model"], list(one["metrics"])) == ("smol-poet", ["hits", "starts"])


@pytest.mark.parametrize("query", ["span=2h", "metric=odd", "metric=gpu&model=chat", "model=---"])
async def test_what_there_is_not_is_a_typed_error(query: str) -> None:
    async with visited() as (_, client):
        answer = await client.get(f"/v1/history?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in query


async def test_the_history_outlives_its_console(tmp_path: Path) -> None:
    async with serving(state_dir=tmp_path, trace_disk=False) as first:
        first.console.open_disk()
        await filled(first)
        before = await first.read("/v1/history")
        await first.console.history.close()
    async with serving(state_dir=tmp_path, trace_disk=False) as second:
        second.clock.stopped_at = 1_700_000_405.0
        second.console.open_disk()
        assert await second.read("/v1/history") == before
        await second.console.history.close()


async def test_a_prometheus_that_is_away_is_the_pages_problem() -> None:
    async with serving(prometheus_url="http://127.0.0.1:9") as at:
        page = await at.read("/v1/history")
        assert page["source"] == "prometheus" and "does not answer at http://127.0.0.1:9" in page["problem"]


async def test_uplot_is_served_as_files_of_the_page_and_named_in_the_document() -> None:
    async with visited() as (_, client):
        for name, kind in zip(app.UPLOT, ("text/javascript", "text/css"), strict=True):
            answer: httpx.Response = await client.get(f"/page/{name}")
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            again = await client.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304
        document = await client.get("/")
        assert '<meta name="uplot" content="/page/uPlot.iife.js /page/uPlot.min.css">' in document.text
