"""What every test of the page needs: a console to look at, and a tab whose complaints fail the test.

One browser serves a file of tests; each test has a context of its own in it, with cookies and storage of its own.
All of it lives in one event loop, the session's. `at` is a console fed by a made-up fleet (`at.tell` and `at.export`
tell it more events and spans), `page` a fresh tab of playwright's async API; `tests/browser.py` has `until` for what
`expect` cannot say.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests import browser as chromium
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, FakeOwner, owning, serving

expect.set_options(timeout=chromium.PATIENCE_S * 1000)


@pytest.fixture
def settings() -> dict[str, str]:
    """Settings of the console `at`; a file of tests gives its own by a fixture of this name."""
    return {}


@pytest_asyncio.fixture(loop_scope="session")
async def owner() -> AsyncIterator[FakeOwner]:
    """Router, autoscaler and placer for a console whose `settings` are `addresses(owner)`."""
    async with owning() as far_side:
        yield far_side


@pytest_asyncio.fixture(loop_scope="session")
async def at(settings: dict[str, str]) -> AsyncIterator[ConsoleUnderTest]:
    """A console that has received `console_story.fleet_events`. Its clock stands still, so that nothing goes stale
    while a slow browser looks; `at.clock.forward(seconds)` lets time pass."""
    async with serving(**settings) as console:
        await console.publish(*story.fleet_events(console.clock.stop()))
        yield console
        await console.console.upstream.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One headless browser for the tests of a file; without chromium they are skipped."""
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    async with chromium.browsing() as started:
        yield started


@pytest.fixture
def complaints() -> list[str]:
    """What the page has complained about: uncaught errors, warnings of its console, its security policy, failed
    requests. A test that expects some of it clears the list and so says that it did."""
    return []


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, complaints: list[str]) -> AsyncIterator[Page]:
    """A fresh tab, 1440 by 900, dark. Complaints left at the end fail the test."""
    tab = await chromium.new_page(browser, complaints)
    yield tab
    await tab.context.close()
    assert complaints == [], "the page complained"
