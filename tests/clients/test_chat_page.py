"""deep-chat (npm) on a page of another site, over Ollama's API.

In the long lane: `make clients-env` installs it if npm is there; needs chromium.
"""

import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests import browser
from tests.clients.test_clients import HERE, TALKS
from tests.fleet_runner import Fleet

BUNDLE = HERE / "node_modules" / "deep-chat" / "dist" / "deepChat.bundle.js"
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.llamacpp,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BUNDLE.exists(), reason="the clients for JavaScript are not installed: make clients-env"),
    pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING),
]
PAGE = """<!doctype html><link rel="icon" href="data:,"><body><script type="module">
import "/deepChat.bundle.js";
const chat = document.createElement("deep-chat");
Object.assign(chat, SETTINGS);
document.body.append(chat);
</script>"""
PATH = "/api/chat"
MODEL_OF_PAGE = {"directConnection": {"ollama": {"model": "talks", "options": {"temperature": 0}}}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("site")
    shutil.copyfile(BUNDLE, folder / BUNDLE.name)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, site: tuple[Path, str]) -> Iterator[Fleet]:
    models = {"talks": TALKS}
    origins = {"GLOWPLUG_ALLOWED_ORIGINS": site[1]}
    with Fleet.start(tmp_path_factory.mktemp("page"), models, engine="llamacpp", nodes=1, **origins) as made:
        yield made


async def test_a_person_chats_on_a_page_of_another_site(fleet: Fleet, site: tuple[Path, str]) -> None:
    """Not streamed: deep-chat takes each network piece for one line."""
    folder, address = site
    connect = {"url": fleet.url("data") + PATH, "headers": {"Content-Type": "application/json"}}
    settings = MODEL_OF_PAGE | {"connect": connect}
    (folder / "index.html").write_text(PAGE.replace("SETTINGS", json.dumps(settings)))
    complaints: list[str] = []
    async with browser.browsing() as chromium:
        page = await browser.new_page(chromium, complaints)
        await page.goto(address)
        for number, question in enumerate(("Say hello.", "And again?")):
            await page.locator("#text-input").fill(question)
            await page.keyboard.press("Enter")
            answer = page.locator(".ai-message-text").nth(number)
            await expect(answer).to_have_text(re.compile(r"\w"), timeout=browser.PATIENCE_S * 1000)
        await expect(page.locator(".error-message-text")).to_have_count(0)
    assert not [said for said in complaints if "ERR_NAME_NOT_RESOLVED" not in said], "it has a font from the network"
