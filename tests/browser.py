"""A real browser for tests, benches and screenshots: playwright with Debian's chromium.

The page's security policy stays on, so nothing may need `eval` in the page: poll with `until`, not `wait_for_function`.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Literal

from playwright.async_api import Browser, ConsoleMessage, Error, Page, ViewportSize, async_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # first: a fifth less time
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no chromium on this machine (apt-get install chromium-headless-shell)"
FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--renderer-process-limit=1",  # each console has its own port, for which chromium would start another process
)
VIEWPORT: ViewportSize = {"width": 1440, "height": 900}
COLOURS: Literal["dark"] = "dark"
MOTION: Literal["reduce"] = "reduce"
PATIENCE_S = 90.0
CLOSE_S = 20.0
POLL_S = 0.05
log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def browsing(*flags: str) -> AsyncIterator[Browser]:
    """Open a fresh profile. A browser that hangs at its end is left: its driver's pipe closes with this process."""
    assert CHROMIUM, MISSING
    driver = await async_playwright().start()
    try:
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        try:
            yield chromium
        finally:
            await _ended(chromium.close())
    finally:
        await _ended(driver.stop())


async def _ended(closing: Coroutine[Any, Any, None]) -> None:
    try:
        await asyncio.wait_for(closing, CLOSE_S)
    except TimeoutError:
        log.warning("the browser did not end within %g s, and is left", CLOSE_S)


async def new_page(browser: Browser, complaints: list[str], **options: Any) -> Page:
    """Open a tab of 1440 by 900, dark and without motion unless `options` differ."""
    usual = {"viewport": VIEWPORT, "color_scheme": COLOURS, "reduced_motion": MOTION}
    tab = await browser.new_page(**{**usual, **options})
    tab.set_default_timeout(PATIENCE_S * 1000)
    listen(tab, complaints)
    return tab


def listen(page: Page, complaints: list[str]) -> None:
    """Collect uncaught errors and the console's, including violations of the security policy."""

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            complaints.append(f"{message.type}: {message.text}")

    page.on("console", said)
    page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))


async def until(page: Page, script: str, within_s: float = PATIENCE_S) -> Any:
    """Poll a JavaScript expression until true, and return it. AssertionError carries the page's text."""
    last: object = None
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            found = await page.evaluate(script)
        except Error as error:
            last = error
        else:
            last = found
            if found:
                return found
        await asyncio.sleep(POLL_S)
    text = await page.evaluate("document.body.innerText")
    raise AssertionError(f"never true: {script}\nlast: {last!r}\nthe page says:\n{text[:3000]}")
