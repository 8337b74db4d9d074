"""The form that deploys and edits a model, over the autoscaler's own REST."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.operator import Deploy
from glowplug.policies.scaling.baselines import reactive
from glowplug.runtime import model_files
from glowplug.runtime.service import serve_rest
from glowplug.services.autoscaler import main as autoscaler_app
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.services.autoscaler.settings import AutoscalerSettings
from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest
from tests.e2e.console.test_access import JUDGE, RULES, faults
from tests.integration.test_control_rest import Fleet
from tests.waiting import WAIT_S

# This console has no bus: it knows no models, and a model's page is not found.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.complains("404")]

TINY = {"name": "Org/Tiny.1", "engine": "emulated", "weights_bytes": "10MiB", "aliases": ["tiny"], "max_queue": 7}


@pytest_asyncio.fixture(loop_scope="session")
async def owned() -> AsyncIterator[tuple[Fleet, str]]:
    made = Fleet()
    settings = AutoscalerSettings(service_id="autoscaler-1", admin_token=ADMIN_TOKEN)
    watch = ModelWatch(None, 1.0)
    await made.add(
        "autoscaler",
        AutoscalerController(reactive, "reactive", 1),
        lambda service: autoscaler_app.make(service, settings, watch),
    )
    server, url = await serve_rest(made.apps["autoscaler"], settings)
    await made.shells[0].ask(Deploy(model=model_files.parse(TINY, "api")))
    yield made, url
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    for shell in made.shells:
        await shell.stop()


@pytest.fixture
def fleet(owned: tuple[Fleet, str]) -> Fleet:
    return owned[0]


@pytest.fixture
def settings(owned: tuple[Fleet, str]) -> dict[str, str]:
    return {"autoscaler_url": owned[1]}


def models(fleet: Fleet) -> dict[str, Any]:
    controller = fleet.shells[0].controller
    assert isinstance(controller, AutoscalerController)
    return controller.models


@pytest_asyncio.fixture(loop_scope="session")
async def page(at: ConsoleUnderTest, page: Page) -> Page:
    await page.goto(f"{at.url}/#/fleet")
    await page.evaluate(f"sessionStorage.setItem('glowplug.admin-token', '{ADMIN_TOKEN}')")
    return page


async def test_an_emulated_model_is_deployed_without_reading_anything(fleet: Fleet, page: Page) -> None:
    await page.evaluate("location.hash = '#/models'")
    await page.get_by_role("link", name="Deploy a model").click()
    await page.get_by_label("Engine needed").select_option("emulated")
    await page.get_by_role("button", name="Fill in an example for emulated").click()
    await page.get_by_label("Name needed").fill("first")
    await page.get_by_label("Aliases").fill("one, uno")
    await expect(page.locator(".form-state")).to_contain_text("It can be deployed. An instance takes 30.2 GiB")
    await expect(page.locator("#model-yaml")).to_have_value(
        "name: first\nengine: emulated\nweights_bytes: 15.2GB\nkv_bytes: 16GiB\naliases:\n- one\n- uno\n"
        "engine_args:\n  profile: qwen2.5-7b/a100\n"
    )
    await page.get_by_role("button", name="Deploy", exact=True).click()
    await page.wait_for_url("**/#/model/first")
    assert models(fleet)["first"].aliases == ("one", "uno")
    assert models(fleet)["first"].engine_args == {"profile": "qwen2.5-7b/a100"}


async def test_faults_stand_at_their_fields_while_one_types(fleet: Fleet, page: Page) -> None:
    await page.evaluate("location.hash = '#/deploy'")
    await page.get_by_label("Name needed").fill("tiny")
    await page.get_by_label("Engine needed").select_option("emulated")
    await page.get_by_label("GPU memory for the KV cache").fill("much")
    await expect(page.locator("#field-kv_bytes-fault")).to_have_text(
        "not a size in bytes: 'much' (try 512MiB, 1GiB, 24GB)"
    )
    await expect(page.locator("#field-weights-uri-fault")).to_have_text("")
    await page.get_by_label("GPU memory for the KV cache").fill("1GiB")
    await page.get_by_label("GPU memory for weights").fill("1GiB")
    await page.get_by_role("button", name="Deploy", exact=True).click()
    await expect(page.locator(".form-state")).to_have_text("1 field is not right yet.")
    await expect(page.locator("#field-aliases-fault")).to_have_text("the name 'tiny' belongs to model 'Org/Tiny.1'")
    await page.get_by_text("More", exact=True).click()
    await page.get_by_label("Engine arguments").fill("profil: x")
    await expect(page.locator("#field-engine_args-fault")).to_contain_text("did you mean profile?")
    assert set(models(fleet)) == {"org-tiny-1"}


async def test_an_edit_keeps_what_the_form_does_not_show_and_yaml_flows_back(fleet: Fleet, page: Page) -> None:
    await page.evaluate("location.hash = '#/edit/org-tiny-1'")
    await expect(page.get_by_label("Name needed")).to_have_value("Org/Tiny.1")
    yaml = page.locator("#model-yaml")
    await expect(yaml).to_have_value(
        "name: Org/Tiny.1\nengine: emulated\nweights_bytes: 10MiB\nmax_queue: 7\naliases:\n- tiny\n"
    )
    await yaml.fill(
        "name: Org/Tiny.1\nengine: emulated\nweights_bytes: 10MiB\nmax_queue: 7\nslo: {ttft_s: 2s}\nkeep_alive_s: ["
    )
    await expect(page.locator("#model-yaml-fault")).to_contain_text("line 6")
    await yaml.fill(
        "# mine\nname: Org/Tiny.1\nengine: emulated\nweights_bytes: 10MiB\nmax_queue: 7\nslo: {ttft_s: 2s}\n"
    )
    await expect(page.get_by_label("Aim: first token within")).to_have_value("2s")
    await expect(page.get_by_label("Aliases")).to_have_value("")
    await page.get_by_label("Kept when idle").fill("5m")
    await expect(yaml).to_have_value(
        "name: Org/Tiny.1\nengine: emulated\nweights_bytes: 10MiB\nmax_queue: 7\nkeep_alive_s: 5m\nslo:\n  ttft_s: 2s\n"
    )
    await page.get_by_role("button", name="Save").click()
    await page.wait_for_url("**/#/model/org-tiny-1")
    model = models(fleet)["org-tiny-1"]
    assert (model.max_queue, model.keep_alive_s, model.slo.ttft_s, model.aliases) == (7, 300, 2, ())


async def test_a_model_is_deleted_after_a_question(fleet: Fleet, page: Page) -> None:
    await page.evaluate("location.hash = '#/edit/org-tiny-1'")
    await page.get_by_role("button", name="Delete…").click()
    await expect(page.get_by_text("Requests for it are refused from then on")).to_be_visible()
    await page.get_by_role("button", name="Delete", exact=True).click()
    await page.wait_for_url("**/#/models")
    assert models(fleet) == {}


async def test_a_model_of_a_file_is_changed_there(fleet: Fleet, page: Page) -> None:
    path = Path("/etc/models/story.yaml")
    model = model_files.parse({"name": "story", "engine": "emulated", "weights_bytes": "1GiB"}, str(path))
    await fleet.shells[0].ask(Deploy(model=model))
    await page.evaluate("location.hash = '#/edit/story'")
    await expect(page.get_by_text("/etc/models/story.yaml")).to_be_visible()
    await expect(page.get_by_label("Name needed")).to_be_disabled()
    await expect(page.get_by_role("button", name="Save")).to_be_hidden()
    await expect(page.get_by_role("button", name="Delete…")).to_be_hidden()


@pytest.mark.complains("401")
async def test_without_the_token_there_is_no_form(page: Page) -> None:
    await page.evaluate("sessionStorage.clear()")
    await page.evaluate("location.hash = '#/deploy'")
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.get_by_text("for holders of the admin token")).to_be_visible()


@pytest.mark.complains("401")
async def test_requests_at_once_ask_for_the_token_once(page: Page) -> None:
    """A second prompt would cover the first and make it unanswerable."""
    await page.evaluate("sessionStorage.clear()")
    await page.evaluate(
        """() => { window.both = import("/page/asking.js").then(({ send }) =>
            Promise.all([1, 2].map(() => send("/api/v1/model_files", "GET")))) }"""
    )
    await page.get_by_label("Admin token").fill(ADMIN_TOKEN)
    await page.get_by_role("button", name="Go on").click()
    answers = page.evaluate("window.both.then((both) => both.map((answer) => answer.status))")
    assert await asyncio.wait_for(answers, WAIT_S) == [200, 200]
    await expect(page.locator("dialog.ask")).to_have_count(0)


async def test_axe_finds_nothing_in_either_theme_and_a_phone_shows_all_of_it(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.evaluate("location.hash = '#/deploy'")
    await page.get_by_label("Engine needed").select_option("llamacpp")
    await page.get_by_label("GPU memory for the KV cache").fill("much")
    await expect(page.locator("#field-kv_bytes-fault")).not_to_be_empty()
    await page.get_by_text("More", exact=True).click()
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
    await page.evaluate(Axe().axe_script)
    schemes: tuple[Any, ...] = ("dark", "light")
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert faults(await page.evaluate(JUDGE, RULES)) == []
