"""Fixtures for tests of the page: a console, and a tab whose complaints fail the test.

All tests of a process share one browser and one tab, reset between them, since a fresh tab costs two seconds of a core;
a test marked `own_tab` has its own. All run in the session's event loop. `at` is a console fed by a made-up fleet
(`at.tell` and `at.export` add to it), `page` the tab by playwright's async API; for conditions beyond `expect` use
`until` of `tests/browser.py`.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from glowplug.services.console.asked import ForecastPage, ForecastPoint, WindowPoint
from tests import browser as chromium
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, FakeOwner, owning, serving

expect.set_options(timeout=chromium.PATIENCE_S * 1000)


@pytest.fixture
def settings() -> dict[str, str]:
    """Settings of `at`, for a file of tests to override."""
    return {}


@pytest_asyncio.fixture(loop_scope="session")
async def owner() -> AsyncIterator[FakeOwner]:
    async with owning() as far_side:
        yield far_side


@pytest_asyncio.fixture(loop_scope="session")
async def at(settings: dict[str, str], tmp_path: Path) -> AsyncIterator[ConsoleUnderTest]:
    """It has received `console_story.fleet_events`. Its clock stands still, else a slow browser's data becomes stale;
    `at.clock.forward(seconds)` moves it."""
    async with serving(**{"state_dir": tmp_path, **settings}) as console:
        await console.publish(*story.fleet_events(console.clock.stop()))
        yield console
        await console.console.upstream.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    async with chromium.browsing() as started:
        yield started


@dataclass
class KeptTab:
    browser: Browser
    complaints: list[str] = field(default_factory=list)
    page: Page | None = None

    async def open(self) -> Page:
        """Return the tab as new: without cookies, rules, or a size or media of its own."""
        if self.page is None or self.page.is_closed():
            self.page = await chromium.new_page(self.browser, self.complaints)
        self.complaints.clear()
        return self.page

    async def empty(self) -> None:
        assert self.page is not None
        await self.page.unroute_all()
        if self.page.url.startswith("http"):
            await self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        await self.page.goto("about:blank")
        await self.page.context.clear_cookies()
        await self.page.set_viewport_size(chromium.VIEWPORT)
        await self.page.emulate_media(color_scheme=chromium.COLOURS, reduced_motion=chromium.MOTION)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kept_tab(browser: Browser) -> KeptTab:
    return KeptTab(browser)


@pytest_asyncio.fixture(loop_scope="session")
async def page(kept_tab: KeptTab, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """A fresh tab, 1440 by 900, dark. Uncaught errors, console warnings, security policy violations and failed requests
    fail the test; `complains(text, ...)` allows those with one of these texts."""
    alone = request.node.get_closest_marker("own_tab") is not None
    tab = KeptTab(kept_tab.browser) if alone else kept_tab
    opened = await tab.open()
    yield opened
    if alone:
        await opened.context.close()
    else:
        await tab.empty()
    marker = request.node.get_closest_marker("complains")
    expected = marker.args if marker else ()
    assert [line for line in tab.complaints if not any(text in line for text in expected)] == [], "the page complained"


@pytest_asyncio.fixture(loop_scope="session")
async def forecast(page: Page) -> None:
    now = time.time()
    start = now - now % 60
    windows = [
        WindowPoint(started_at=start - 60 * n, is_open=n == 0, requests=10 + n, cold=1, prompt_tokens=100,
                    response_tokens=300, is_exact=True, concurrency=1.5, concurrency_peak=3)
        for n in range(9, -1, -1)
    ]  # fmt: skip
    points = [
        ForecastPoint(metric="requests", target_at=start + 60 * n, window_s=60.0, value=12.0 + n,
                      quantiles=((0.1, 8.0), (0.9, 20.0)), made_at=now - 5, error_ratio=0.21, source="test")
        for n in range(-2, 4)
    ]  # fmt: skip
    points += [msgspec.structs.replace(point, ahead=3, value=30.0, made_at=now - 125) for point in points[:2]]
    known = ForecastPage(now=now, model_key="smol-chat", policy="test", windows=windows, forecasts=points)
    answer = msgspec.to_builtins(known)
    await page.route("**/api/v1/forecasts?model=smol-chat", lambda route: route.fulfill(json=answer))


@pytest_asyncio.fixture(loop_scope="session")
async def prices(page: Page) -> None:
    holder = {"model": "smol-poet", "asked": 0.12, "climb_s": 0.28, "saves_s": 0.034, "worth": 2.3e-10, "rung": "ready"}
    holders = [
        {**holder, "instance_id": "i-0a9e", "num_bytes": 203 << 20, "state": "ready", "order": 1, "why": ""},
        {
            **holder,
            "instance_id": "i-33f0",
            "num_bytes": 416 << 20,
            "state": "draining",
            "order": 0,
            "why": "it drains",
        },
    ]
    whole = {"gpu_id": "node-2/0", "total_bytes": 640 << 20, "free_bytes": 21 << 20, "holders": holders}
    answer = {"now": time.time(), "gpu_id": "node-2/0", "prices": whole, "problem": ""}
    await page.route("**/api/v1/gpus/node-2/0/worth", lambda route: route.fulfill(json=answer))
