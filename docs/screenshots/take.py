"""Take the four pictures of the README in one go: `make screenshots`.

Starts an emulated fleet of its own (four nodes of two GPUs, eight models), sends it requests, and photographs its
console with Debian's chromium. Everything on the pictures is emulated and says so.
"""

import asyncio
import contextlib
import io
import random
import sys
import tempfile
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Page, ViewportSize, expect

from tests import browser as chromium
from tests.browser import new_page, until
from tests.fleet_runner import Fleet

HERE = Path(__file__).parent
WINDOW: ViewportSize = {"width": 1360, "height": 800}
LARGEST_BYTES = 150_000
NODES = 4
GIB_OF = {  # weights and KV cache of each model
    "llama-2-7b": (13, 8),
    "llama-2-13b": (26, 10),
    "support-bot": (13, 6),
    "translator": (13, 9),
    "summaries": (13, 12),
    "coder": (26, 9),
    "night-shift": (13, 6),
    "reviewer": (26, 8),
}
AWAKE = ("llama-2-7b", "support-bot", "translator", "summaries", "llama-2-13b", "coder")
YAML = """
name: {name}
engine: emulated
weights_bytes: {weights}GiB
kv_bytes: {kv}GiB
max_concurrency: 16
keep_alive_s: 600
max_wait_s: 120
engine_args: {{profile: "{profile}"}}
"""
ASKED = ("Why is the sky blue?", "Plan three days in Lisbon.", "Explain a hash map.", "Write a haiku about glow plugs.")


def models() -> dict[str, str]:
    return {
        name: YAML.format(
            name=name, weights=weights, kv=kv, profile="llama-2-13b/h100" if weights > 20 else "llama-2-7b/h800"
        )
        for name, (weights, kv) in GIB_OF.items()
    }


async def ask(client: httpx.AsyncClient, fleet: Fleet, model: str, text: str, max_tokens: int = 120) -> httpx.Response:
    body = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}
    return await client.post(fleet.url("data") + "/v1/chat/completions", json=body)


async def wake(client: httpx.AsyncClient, fleet: Fleet) -> str:
    """Wake the models one after the other, the last one twice. Returns the request id of its second start."""
    for name in AWAKE:
        answer = await ask(client, fleet, name, ASKED[0])
        answer.raise_for_status()
    return await wake_again(client, fleet, AWAKE[-1])


async def wake_again(client: httpx.AsyncClient, fleet: Fleet, name: str) -> str:
    """Start one model a second time, which the agent predicts from the first. Returns the request id."""
    told = await client.post(f"{fleet.url('autoscaler')}/v1/models/{name}/unload", headers=fleet.admin)
    told.raise_for_status()
    while fleet.instances(name):
        await asyncio.sleep(0.2)
    answer = await ask(client, fleet, name, ASKED[2])
    answer.raise_for_status()
    return answer.headers["x-request-id"]


async def talk(client: httpx.AsyncClient, fleet: Fleet, seed: int) -> None:
    """Act as one of the people who keep the fleet busy."""
    chance = random.Random(seed)
    while True:
        with contextlib.suppress(httpx.HTTPError):
            await ask(client, fleet, chance.choice(AWAKE), chance.choice(ASKED), chance.randrange(60, 300))


async def take(page: Page, name: str) -> None:
    await page.mouse.move(0, 0)
    await page.wait_for_timeout(400)  # transitions end
    path = HERE / f"{name}.png"
    picture = Image.open(io.BytesIO(await page.screenshot(animations="disabled"))).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(HERE.parent.parent)}  {size // 1000} kB")
    assert size <= LARGEST_BYTES, f"{path.name} is {size} bytes, more than {LARGEST_BYTES}"


async def photograph(fleet: Fleet) -> None:
    complaints: list[str] = []
    async with httpx.AsyncClient(timeout=180) as client, chromium.browsing() as browser:
        cold = await wake(client, fleet)
        people = [asyncio.create_task(talk(client, fleet, seed)) for seed in range(14)]
        page = await new_page(browser, complaints, viewport=WINDOW)
        console = fleet.url("console")

        await page.set_viewport_size({**WINDOW, "height": 660})  # enough for four nodes
        await page.goto(f"{console}/#/fleet")
        await expect(page.locator(".node")).to_have_count(NODES)
        waking = asyncio.create_task(ask(client, fleet, "reviewer", ASKED[2]))
        await until(page, "document.querySelector('.motion .state.loading, .motion .state.starting') !== null")
        await page.wait_for_timeout(700)
        await take(page, "fleet")
        await waking

        await page.set_viewport_size({**WINDOW, "height": 960})  # all of its rows
        await page.goto(f"{console}/#/request/{cold}")
        await until(page, "document.querySelectorAll('[role=treegrid] [role=row]').length > 8")
        await take(page, "trace")
        await page.set_viewport_size(WINDOW)

        await page.goto(f"{console}/#/decisions/kind=place")
        await page.locator("main a", has_text="place").first.click()
        await expect(page.locator("h1")).to_contain_text("place", ignore_case=True)
        await page.wait_for_timeout(1000)
        await take(page, "decision")

        await page.goto(f"{console}/#/playground/night-shift")
        await page.get_by_label("Message").fill("Who keeps the lights on at night?")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.model .foot")).to_contain_text("tokens", timeout=90_000)
        await take(page, "playground")
        for person in people:
            person.cancel()
        await asyncio.gather(*people, return_exceptions=True)
        assert complaints == [], complaints


def main() -> int:
    if chromium.CHROMIUM is None:
        print(chromium.MISSING)
        return 1
    with tempfile.TemporaryDirectory(prefix="gp-screenshots-") as folder:
        fleet = Fleet.start(Path(folder), models(), nodes=NODES, GLOWPLUG_GPU_BUDGETS="40GB,40GB")
        try:
            asyncio.run(photograph(fleet))
        finally:
            fleet.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
