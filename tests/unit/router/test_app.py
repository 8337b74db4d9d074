"""The router's own REST and readiness."""

import gc
import resource
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.controllers.effects import Publish
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import Hold, Recall, Reject, RequestArrived, RequestEnded
from glowplug.domain.errors import ModelNotFound, NoCapacity
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.main import GC_EVERY_ALLOCATIONS, make, raise_file_limit, settle_memory
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


@pytest.mark.parametrize(
    ("now", "num", "then"),
    [
        ((1024, 4096), 100, None),
        ((455, 4096), 100, (456, 4096)),
        ((456, 4096), 100, None),
        ((100, 300), 100, (300, 300)),
        ((100, -1), 100, (456, -1)),
        ((-1, -1), 100, None),
    ],
)
def test_there_are_two_files_for_each_connection_as_far_as_the_system_lets(
    now: tuple[int, int], num: int, then: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda what: now)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    raise_file_limit(num)
    assert given == ([then] if then else [])


def test_imports_are_left_out_of_garbage_collection_which_is_seldom() -> None:
    before = gc.get_threshold()
    settle_memory()
    frozen, (first, *_) = gc.get_freeze_count(), gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(*before)
    assert frozen > 1000 and first == GC_EVERY_ALLOCATIONS


async def test_a_row_of_the_queue_tells_of_its_oldest_and_of_none() -> None:
    now_s = 100.0
    table = RequestTable[Exchange](RouterController(), clock=lambda: now_s)
    table.restore("models", {"m": a_model("m"), "n": a_model("n")})
    table.take(RequestArrived(1, "m", "r-1"))
    now_s = 103.0
    reports = Reports("router-1", table, RouterMetrics(CollectorRegistry()), lambda *_: None, 10)
    app = make(RouterSettings(service_id="router-1"), table, reports)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        held, empty = (await client.get("/v1/queue")).json()["data"]
        assert (held["model_key"], held["num_waiting"], held["oldest_waiting_s"]) == ("m", 1, 3.0)
        assert (empty["model_key"], empty["num_waiting"], empty["oldest_waiting_s"]) == ("n", 0, 0.0)
        assert len((await client.get("/v1/requests?limit=10000")).json()["data"]) == 0
        for limit in (1, 200):
            assert (await client.get(f"/v1/requests?limit={limit}")).status_code == 200
        assert (await client.get("/v1/requests?limit=10001")).status_code == 400


def test_models_are_found_by_their_names_alone_and_never_before_they_are_read() -> None:
    table = RequestTable[Exchange](RouterController())
    with pytest.raises(NoCapacity) as early:
        table.find("m")
    assert early.value.retry_after_s == 1
    table.restore("instances", {})
    with pytest.raises(NoCapacity):
        table.models()
    table.restore("models", {key: a_model(key) for key in ("n", "m", "m:latest2")})
    assert [model.key for model in table.models()] == ["m", "m:latest2", "n"]
    assert table.find("m").key == table.find("m:latest").key == "m"
    for name in ("z:latest", "mm"):
        with pytest.raises(ModelNotFound):
            table.find(name)


class Executed:
    def __init__(self) -> None:
        self.effects = list[Any]()

    def take(self, effect: Any) -> None:
        self.effects.append(effect)

    dispatch = hold = recall = move = reject = take


async def test_effects_reach_their_requests_and_loads_are_told_to_have_changed() -> None:
    published = list[Any]()
    table = RequestTable[Any](RouterController(), published.append)
    table.restore("models", {"m": a_model()})
    one = Executed()
    table.arrive(one, RequestArrived(1, "m", "r-1"))
    assert [type(effect) for effect in one.effects] == [Hold] and table.changed.is_set() and published
    table.do([Recall(1, "a"), Recall(2, "of another"), Reject(1, NoCapacity("b"))])
    assert [type(effect) for effect in one.effects[1:]] == [Recall, Reject]
    table.changed.clear()
    table.end(RequestEnded(1))
    assert table.changed.is_set() and not table.exchanges and not table.controller.load("m").num_waiting
    table.publish(payload := RequestEnded(1))
    assert published[-1] == Publish(payload)
