"""The router's own REST and readiness."""

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import RequestArrived
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.main import make
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.reports import Reports
from glowplug.services.router.request_table import PortStage, RequestTable
from glowplug.services.router.settings import RouterSettings
from tests.contract.data_port_rig import a_model

TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    table = RequestTable[Exchange](RouterController())
    table.restore("models", {"m": a_model()})
    table.take(RequestArrived(1, "m", "r-1"))
    reports = Reports("router-1", table, RouterMetrics(CollectorRegistry()), lambda *_: None, 10)
    app = make(RouterSettings(service_id="router-1", admin_token="secret"), table, reports)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as made:
        yield made


async def test_the_queue_shows_depth_and_eta(client: httpx.AsyncClient) -> None:
    [row] = (await client.get("/v1/queue", headers=TOKEN)).json()["data"]
    assert (row["model"], row["state"], row["num_waiting"], row["max_queue"]) == ("m", "cold", 1, 256)
    assert row["eta_s"] > 0 and row["oldest_waiting_s"] >= 0


async def test_a_bad_limit_is_400_naming_it(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/requests?limit=0", headers=TOKEN)
    assert answer.status_code == 400 and "limit" in answer.json()["error"]["message"]


async def test_policy_health_and_openapi(client: httpx.AsyncClient) -> None:
    assert (await client.get("/policies")).json() == {"routing": "union", "fairness": "vtc"}
    assert (await client.get("/ready")).status_code == 200
    assert {"/v1/queue", "/v1/requests"} <= set((await client.get("/openapi.json")).json()["paths"])


def test_a_router_of_a_new_fleet_is_ready_when_it_has_reached_the_bus_or_given_up_on_it() -> None:
    now_s = 100.0
    table = RequestTable[Exchange](RouterController(), clock=lambda: now_s)
    table.await_bus(5.0)
    assert "table" in table.not_ready()
    table.restore("models", {})
    assert table.not_ready() == "connecting to the bus"
    now_s = 105.0
    assert table.not_ready() == ""
    now_s = 101.0
    table.bus_reached()
    assert table.not_ready() == ""
    table.stage = PortStage.LEAVING
    assert table.not_ready() == "stopping"
