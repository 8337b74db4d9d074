"""The router's own REST and readiness."""

import asyncio
import gc
import resource
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.effects import Publish
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import Hold, Recall, Reject, RequestArrived, RequestEnded
from glowplug.domain.errors import ModelNotFound, NoCapacity
from glowplug.events.envelope import to_json
from glowplug.fleet.tables import FleetTables
from glowplug.runtime.service import World
from glowplug.services.router import main
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.main import GC_EVERY_ALLOCATIONS, make, raise_file_limit, settle_memory
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.port import DataPort
from glowplug.services.router.reports import Reports
from glowplug.services.router.request_table import PortStage, RequestTable
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.shell import TablesCopy
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from tests.contract.data_port_rig import a_model
from tests.waiting import until

CHAT = {"model": "n", "messages": [{"role": "user", "content": "hi"}]}
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
    gc.unfreeze()
    settle_memory()
    frozen, set_ = gc.get_freeze_count(), gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(*before)
    assert frozen > 1000 and set_ == (GC_EVERY_ALLOCATIONS, 10, 20)


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
    table.restore("models", {key: a_model(key) for key in ("n", "m", "x:latest")})
    assert [model.key for model in table.models()] == ["m", "n", "x:latest"]
    assert table.find("m").key == table.find("m:latest").key == "m"
    assert table.find("x:latest").key == "x:latest"
    for name in ("z:latest", "mm", "x"):
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


class LateBus(MemoryBus):
    async def connect(self) -> None:
        await until(lambda: self.connected)


async def test_a_router_serves_from_its_copy_then_from_the_store_and_reports_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RouterSettings(service_id="router-1", state_dir=tmp_path, tick_s=0.01, resync_s=0.01)
    bus, store = LateBus(), MemoryStore()
    store.down = bus.broker.down = True
    opened: Any = World(settings, "router", bus, store, ShellMetrics("router", CollectorRegistry()))  # type: ignore[arg-type]
    did = list[Any]()
    monkeypatch.setattr(RouterSettings, "read", classmethod(lambda cls: settings))
    monkeypatch.setattr(World, "open", classmethod(lambda cls, *given: opened))
    monkeypatch.setattr(main, "RouterMetrics", partial(RouterMetrics, CollectorRegistry()))
    monkeypatch.setattr(main, "raise_file_limit", did.append)
    monkeypatch.setattr(main, "settle_memory", lambda: did.append("settled"))
    ports = list[DataPort]()

    def make_port(*given: Any, **over: Any) -> DataPort:
        ports.append(DataPort(*given, **over))
        return ports[0]

    monkeypatch.setattr(main, "DataPort", make_port)
    known = FleetTables()
    known.model_table.apply(a_model(), 0.0)
    TablesCopy(tmp_path / "router-1" / "tables.json").write(known, time.time())
    stopping = asyncio.Event()
    serving = asyncio.create_task(main.serve(stopping))
    await until(lambda: did[1:] == ["settled"])
    table = ports[0].context.table
    assert did[0] == settings.limits.max_connections and set(table.controller.fleet.models) == {"m"}
    assert table.not_ready() == ""
    bus.broker.down = store.down = False
    await until(lambda: len(bus.broker.subscriptions) == 2)
    await store.put("models", "n", to_json(a_model("n")))
    await until(lambda: "n" in table.controller.fleet.models)
    (started,) = await until(lambda: bus.broker.of_type("service.started"))
    data_url, url = started.data.data_url, started.data.url
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{data_url}/health")).json()["service"] == "router"
        assert [row["model"] for row in (await client.get(f"{url}/v1/queue")).json()["data"]] == ["n"]
        asked = asyncio.create_task(client.post(f"{data_url}/v1/chat/completions", json=CHAT))
        await until(lambda: bus.broker.of_type("request.waiting") and bus.broker.of_type("router.load_reported"))
        stopping.set()
        settings.drain_s = 0.0
        await until(lambda: table.stage is PortStage.REFUSING)
        assert (await asked).status_code == 503
    await serving
    (ended,) = [one for event in bus.broker.of_type("router.requests_finished") for one in event.data.requests]
    assert (ended.model_key, ended.status) == ("n", 503)
