"""REST of autoscaler, placer and predictor, on a memory bus and store."""

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.operator import Cordon
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.reads import READS
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.reads import Reads
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.lease import Leader
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import from_json, to_json
from glowplug.events.facts import NodeJoined, NodeLeft
from glowplug.policies.eviction.lru import evict
from glowplug.policies.placement.first_fit import place
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.runtime.control import ControlService
from glowplug.runtime.shell import Shell
from glowplug.services.autoscaler import main as autoscaler_app
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.services.autoscaler.settings import AutoscalerSettings
from glowplug.services.placer import main as placer_app
from glowplug.services.placer.settings import PlacerSettings
from glowplug.services.predictor import main as predictor_app
from glowplug.services.predictor.settings import PredictorSettings
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from tests.fleet_builder import a_node, an_event

TOKEN = {"Authorization": "Bearer secret"}
MODEL = {"name": "Org/Tiny.1", "engine": "emulated", "weights_bytes": "10MiB", "aliases": ["tiny"]}


class Fleet:
    def __init__(self) -> None:
        self.broker, self.store = MemoryBroker(), MemoryStore()
        self.shells: list[Shell] = []
        self.apps: dict[str, FastAPI] = {}

    def service(self, name: str, reads: Reads | None = None) -> ControlService:
        world = SimpleNamespace(service=name, store=self.store, bus=MemoryBus(self.broker))
        return ControlService(world, reads or Reads(service=name))

    async def add(self, name: str, controller, make, reads=None) -> None:
        service, reads = self.service(name, reads), reads or Reads(service=name)
        means = (MemoryBus(self.broker), self.store, ShellMetrics(name, CollectorRegistry()))
        shell = Shell(name, f"{name}-1", controller, *means, reads=reads, epoch=1)
        await shell.start()
        service.shell = shell
        self.shells.append(shell)
        self.apps[name] = make(service)

    def client(self, name: str, **kwargs) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.apps[name], raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", **kwargs)


@pytest.fixture
async def fleet():
    made = Fleet()
    watch = ModelWatch(None, 1.0)
    settings = AutoscalerSettings(service_id="autoscaler-1", admin_token="secret")
    await made.add(
        "autoscaler",
        AutoscalerController(scale, "reactive", 1),
        lambda service: autoscaler_app.make(service, settings, watch),
    )
    policies = {"placement": "first_fit", "eviction": "lru"}
    await made.add(
        "placer",
        PlacerController(place, evict, policies, 1),
        lambda service: placer_app.make(service, PlacerSettings(service_id="placer-1", admin_token="secret"), policies),
        reads=READS,
    )
    await made.add(
        "predictor",
        PredictorController(),
        lambda s: predictor_app.make(s, PredictorSettings(service_id="predictor-1", policy_prediction="none")),
    )
    yield made
    for shell in made.shells:
        await shell.stop()


async def test_a_model_is_created_read_updated_and_deleted(fleet):
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        created = await client.post("/v1/models", json=MODEL)
        assert (created.status_code, created.json()["key"], created.json()["state"]) == (201, "org-tiny-1", "cold")
        assert (await client.post("/v1/models", json=MODEL)).json()["error"]["code"] == "conflict"
        for name in ("org-tiny-1", "Org/Tiny.1", "tiny"):
            assert (await client.get(f"/v1/models/{name}")).json()["name"] == "Org/Tiny.1"
        changed = await client.put("/v1/models/org-tiny-1", json=MODEL | {"keep_alive_s": "5m"})
        assert changed.json()["keep_alive_s"] == 300
        assert (await client.delete("/v1/models/tiny")).json() == {"key": "org-tiny-1", "deleted": True}
        gone = await client.get("/v1/models/tiny")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_verbs_become_commands(fleet):
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.post("/v1/models", json=MODEL)
        assert (await client.post("/v1/models/Org/Tiny.1/load")).status_code == 202
        assert [e.data.model.key for e in fleet.broker.of_type(PlaceInstance.TYPE)] == ["org-tiny-1"]
        assert (await client.post("/v1/models/tiny/drain")).json()["state"] == "suspended"
        assert (await client.post("/v1/models/tiny/pin")).json()["pinned"] is True
        assert (await client.post("/v1/models/tiny/unpin")).json()["pinned"] is False
        wrong = await client.post("/v1/models/tiny/explode")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "verb")


async def test_verbs_take_a_rung_and_refuse_what_makes_no_sense(fleet):
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.post("/v1/models", json=MODEL)
        row = (await client.post("/v1/models/tiny/load", json={"to": "asleep"})).json()
        assert row["is_being_put_away"] is True
        assert [e.data.waits for e in fleet.broker.of_type(PlaceInstance.TYPE)] == [True]
        pinned = (await client.post("/v1/models/tiny/pin", json={"at": "host"})).json()
        assert (pinned["pinned_at"], pinned["kept_at"], pinned["pinned"]) == ("host", "host", False)
        for verb, body, param in (
            ("load", {"to": "host"}, "to"),
            ("unload", {"from": "host"}, "from"),
            ("pin", {"at": "prewarmed"}, "at"),
            ("sleep", {"to": "ready"}, "to"),
            ("load", {"to": "gone"}, "body.to"),
        ):
            wrong = await client.post(f"/v1/models/tiny/{verb}", json=body)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)


async def test_the_placer_says_what_a_verb_would_cost(fleet):
    await fleet.store.put("nodes", "node-1", to_json(a_node()))
    async with fleet.client("autoscaler", headers=TOKEN) as autoscaler, fleet.client("placer") as placer:
        await autoscaler.post("/v1/models", json=MODEL)
        await fleet.shells[1]._resync()
        cost = (await placer.get("/v1/models/tiny/cost", params={"verb": "load"})).json()
        assert (cost["model"], cost["rung"], cost["node_id"], cost["scope"]) == (
            "Org/Tiny.1",
            "ready",
            "node-1",
            "prior",
        )
        assert cost["seconds"] > 2 and cost["gpu_bytes"] == (10 + 64) << 20 and "default of emulated" in cost["source"]
        for params, code in (({"verb": "explode"}, "bad_request"), ({"verb": "load", "node": "n"}, "not_found")):
            assert (await placer.get("/v1/models/tiny/cost", params=params)).json()["error"]["code"] == code
        missing = await placer.get("/v1/models/nobody/cost", params={"verb": "load"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await placer.post("/v1/models/tiny/fetch")).status_code == 401
        refused = await placer.post("/v1/models/tiny/fetch", headers=TOKEN)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "to")
        assert (await placer.post("/v1/models/tiny/drop", headers=TOKEN)).json() == {"model": "Org/Tiny.1", "nodes": []}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"weights_bytes": -1}, "weights_bytes"),
        ({"kv_bytes": "-1MiB"}, "kv_bytes"),
        ({"slo": {"ttft_s": -1}}, "slo.ttft_s"),
        ({"keep_alive_s": -2}, "keep_alive_s"),
        ({"min_instances": 3, "max_instances": 2}, "min_instances"),
        ({"max_wait_s": "1e999"}, "max_wait_s"),
    ],
)
async def test_numbers_that_nobody_can_mean_are_400_and_name_the_field(fleet, given, field):
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        for answer in (
            await client.post("/v1/models", json=MODEL | given),
            await client.put("/v1/models/org-tiny-1", json=MODEL | given),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"].removeprefix("body.") == field and error["message"].startswith(error["param"])
        assert (await client.get("/v1/models")).json()["data"] == []


async def test_the_placer_shows_nodes_decisions_and_why(fleet):
    await fleet.store.put("nodes", "node-1", to_json(a_node()))
    await fleet.shells[1]._resync()
    async with fleet.client("autoscaler", headers=TOKEN) as autoscaler, fleet.client("placer") as placer:
        await autoscaler.post("/v1/models", json=MODEL)
        await autoscaler.post("/v1/models/tiny/load")
        for event in fleet.broker.of_type(PlaceInstance.TYPE):
            await fleet.shells[1].on_event(event)
        (node,) = (await placer.get("/v1/nodes")).json()["data"]
        assert node["node_id"] == "node-1"
        decisions = (await placer.get("/v1/decisions", params={"model": "org-tiny-1"})).json()["data"]
        assert [d["kind"] for d in decisions] == ["place", "scale"]
        one = (await placer.get(f"/v1/decisions/{decisions[0]['decision_id']}")).json()
        assert one["gpu_id"] == "node-1/0" and one["rivals"]
        assert (await placer.get("/v1/decisions", params={"gpu": "node-9/0"})).json()["data"] == []
        assert (await placer.get("/v1/decisions/none")).status_code == 404
        (row,) = (await placer.get("/v1/placements")).json()["data"]
        assert row["started"] is True
        worth = (await placer.get("/v1/gpus/node-1/0/worth")).json()
        assert (worth["gpu_id"], worth["holders"]) == ("node-1/0", []), "no agent has granted anything yet"
        assert (await placer.get("/v1/gpus/node-9/0/worth")).status_code == 404


async def test_the_cordon_of_a_node_that_has_left_is_shown_and_lifted(fleet):
    await fleet.shells[1].on_event(an_event(NodeJoined(node=a_node("gone-1"))))
    async with fleet.client("placer", headers=TOKEN) as client:
        assert (await client.post("/v1/nodes/gone-1/drain")).status_code == 202
        await fleet.shells[1].on_event(an_event(NodeLeft(node_id="gone-1", reason="asked to stop")))
        assert (await client.get("/v1/cordons")).json()["data"] == [{"node_id": "gone-1", "is_alive": False}]
        assert (await client.post("/v1/nodes/gone-1/drain")).status_code == 404, "nothing is known of such a node"
        assert (await client.post("/v1/nodes/gone-1/undrain")).status_code == 202
        assert (await client.get("/v1/cordons")).json()["data"] == []
        assert (await client.post("/v1/nodes/gone-1/undrain")).status_code == 404
    assert from_json(fleet.store.tables["cordons"]["gone-1"], Cordon) == Cordon("gone-1", False)


async def test_decisions_and_leaders_that_cannot_be_read_are_left_out(fleet):
    made = DecisionRecord(decision_id="d-1", kind="place", policy="p", service="placer", reason="r", made_at=1.0)
    leader = Leader(service="placer", service_id="placer-1", url="http://p", epoch=1, since=1.0)
    for raw in (b"\xff", b"[]", b"{}", to_json(made), b""):
        await fleet.store.append("decisions", raw, keep=100)
    await fleet.store.put("leaders", "placer", to_json(leader))
    await fleet.store.put("leaders", "autoscaler", b"\xff")
    async with fleet.client("placer") as client:
        assert [d["decision_id"] for d in (await client.get("/v1/decisions")).json()["data"]] == ["d-1"]
        assert (await client.get("/v1/decisions/d-1")).status_code == 200
        assert [r["service"] for r in (await client.get("/v1/leaders")).json()["data"]] == ["placer"]
        fleet.store.no_tables |= {"decisions", "leaders"}
        for path in ("/v1/decisions", "/v1/leaders"):
            answer = await client.get(path)
            assert answer.status_code == 503 and "cannot be read" in answer.text


async def test_forecasts_are_empty_and_say_why(fleet):
    async with fleet.client("predictor") as client:
        nothing = {"object": "list", "data": [], "policy": "none", "horizons": {}}
        assert (await client.get("/v1/forecasts")).json() == nothing
        assert (await client.get("/v1/windows")).json()["data"] == {}


@pytest.mark.parametrize("name", ["autoscaler", "placer", "predictor"])
async def test_while_connecting_it_is_alive_but_not_ready(fleet, name):
    make = {
        "autoscaler": lambda s: autoscaler_app.make(s, AutoscalerSettings(), ModelWatch(None, 1)),
        "placer": lambda s: placer_app.make(s, PlacerSettings(), {}),
        "predictor": lambda s: predictor_app.make(s, PredictorSettings()),
    }[name]
    fleet.apps["young"] = make(fleet.service(name))
    path = {"autoscaler": "/v1/models", "placer": "/v1/nodes", "predictor": "/v1/forecasts"}[name]
    async with fleet.client("young") as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        answer = await client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
