"""Checking a draft deploys nothing and returns a deployment's messages."""

import json
from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceReady
from tests.fleet_builder import a_node, an_event, an_instance
from tests.integration.test_control_rest import MODEL, TOKEN, Fleet, fleet  # noqa: F401 - the fixture

CHECK = "/v1/model_files"


async def checked(fleet: Fleet, **body: Any) -> Any:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(CHECK, content=json.dumps(body), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_a_draft_is_checked_and_not_deployed(fleet: Fleet) -> None:  # noqa: F811
    found = await checked(fleet, fields=MODEL)
    assert (found["errors"], found["model"]["key"], found["fields"]) == ([], "org-tiny-1", MODEL)
    again = await checked(fleet, yaml=found["yaml"])
    assert (again["fields"], again["model"]) == (found["fields"], found["model"])
    async with fleet.client("autoscaler") as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.post(CHECK, json={"fields": MODEL})).status_code == 401
        assert (await client.get(CHECK)).status_code == 401


@pytest.mark.parametrize(
    ("change", "edits", "field"),
    [
        ({}, "", "name"),
        ({"name": "other"}, "", "aliases"),
        ({"name": "other", "aliases": []}, "org-tiny-1", "name"),
        ({"engine": "vllm"}, "org-tiny-1", "weights"),
        ({"weights": "ftp://x/y"}, "org-tiny-1", "weights"),
        ({"engine_args": {"profil": "x"}}, "org-tiny-1", "engine_args.profil"),
        ({"min_instances": -1}, "org-tiny-1", "min_instances"),
    ],
)
async def test_the_fault_that_a_check_finds_is_the_one_a_deployment_is_refused_for(
    fleet: Fleet,  # noqa: F811
    change: dict[str, Any],
    edits: str,
    field: str,
) -> None:
    draft = MODEL | change
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.post("/v1/models", json=MODEL)
        found = (await client.post(CHECK, json={"fields": draft, "edits": edits})).json()
        answer = await (
            client.put(f"/v1/models/{edits}", json=draft) if edits else client.post("/v1/models", json=draft)
        )
    assert [error["field"] for error in found["errors"]] == [field] and found["model"] is None
    refusal = answer.json()["error"]
    assert answer.status_code >= 400 and str(refusal["param"]).endswith(field)


async def test_an_edit_of_a_deployed_model_starts_from_its_file(fleet: Fleet) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.post("/v1/models", json=MODEL)
        file = (await client.get(f"{CHECK}/tiny")).json()
        assert (file["key"], file["source"], file["fields"]) == ("org-tiny-1", "api", MODEL)
        found = await checked(fleet, fields=file["fields"], edits="org-tiny-1")
        assert found["errors"] == []
        assert (await client.get(f"{CHECK}/nobody")).status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"yaml": "name: ["}, "yaml"),
        ({"yaml": "name: 2024-01-01\nengine: emulated"}, "name"),
        ({"yaml": "name: x\nengine: emulated\nweights_bytes: .nan"}, "weights_bytes"),
        ({"fields": {"name": "\ud800", "engine": "emulated"}}, "name"),
        ({"fields": MODEL | {"slo": {"\ud800": 1}}}, "slo"),
        ({"fields": MODEL, "texts": {"engine_args": "- a"}}, "engine_args"),
    ],
)
async def test_what_is_no_model_file_is_said_so(fleet: Fleet, body: dict[str, Any], field: str) -> None:  # noqa: F811
    found = await checked(fleet, **body)
    assert [error["field"] for error in found["errors"]][:1] == [field]


async def test_a_draft_says_which_instances_a_deployment_would_replace(fleet: Fleet) -> None:  # noqa: F811
    autoscaler, placer = (shell.controller for shell in fleet.shells[:2])
    async with fleet.client("autoscaler", headers=TOKEN) as client, fleet.client("placer") as shown:
        row = (await client.post("/v1/models", json=MODEL)).json()
        assert (await checked(fleet, fields=MODEL, edits=row["key"]))["change"] == ""
        for number, state in enumerate((InstanceState.READY, InstanceState.READY, InstanceState.SWAPPED_OUT)):
            runs = an_instance(f"i-{number}", row["key"], state, model_revision=row["revision"])
            for controller in (autoscaler, placer):
                controller.handle(an_event(InstanceReady(instance=runs)), 0.0)
        same = await checked(fleet, fields=MODEL | {"priority": 1}, edits=row["key"])
        assert (same["replaced"], same["ended"], same["change"]) == ([], [], "No instance is replaced")
        draft = MODEL | {"context_tokens": 64}
        found = await checked(fleet, fields=draft, edits=row["key"])
        assert (found["replaced"], found["ended"]) == (["i-0", "i-1"], ["i-2"]) and found["start_s"] > 0
        assert found["change"].startswith("2 instances are replaced, one after the other, each after a start of about ")
        (node,) = autoscaler.nodes.values() or (a_node(engines=("emulated",)),)
        full = replace(node, gpus=tuple(replace(gpu, total_bytes=1) for gpu in node.gpus))
        autoscaler.restore("nodes", {node.node_id: replace(full, engines=(*full.engines, MODEL["engine"]))}, 0.0)
        found = await checked(fleet, fields=draft, edits=row["key"])
        assert found["in_place"] and "each in place, since no memory is free: gone for about " in found["change"]
        after = (await client.put(f"/v1/models/{row['key']}", json=draft)).json()
        assert {one["instance_id"]: one["outdated"] for one in after["instances"]} == dict.fromkeys(
            ("i-0", "i-1", "i-2"), True
        )
        placer.restore("models", autoscaler.models, 0.0)
        assert {one["outdated"] for one in (await shown.get("/v1/instances")).json()["data"]} == {True}
        assert (await shown.get("/v1/instances/i-0")).json()["outdated"] is True


async def test_a_model_that_no_node_can_run_is_warned_of(fleet: Fleet) -> None:  # noqa: F811
    controller = fleet.shells[0].controller
    assert isinstance(controller, AutoscalerController)
    gpu = Gpu(gpu_id="n/0", total_bytes=1 << 20)
    controller.nodes = {"n": Node(node_id="n", gpus=(gpu,), engines=("llamacpp",), agent_url="")}
    assert "no node of this fleet can start emulated engines" in (await checked(fleet, fields=MODEL))["warning"]
    controller.nodes = {"n": Node(node_id="n", gpus=(gpu,), engines=("emulated",), agent_url="")}
    assert "an instance needs 74 MiB of one GPU" in (await checked(fleet, fields=MODEL))["warning"]


async def test_the_form_has_an_example_of_each_engine_that_is_right(fleet: Fleet) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        form = (await client.get(CHECK)).json()
    assert form["schema"]["required"] == ["name"]
    found = await checked(fleet, fields={"name": "x", "engine": "emulated", **form["engines"]["emulated"]["example"]})
    assert found["errors"] == []
