"""The operator's process between a stand-in for the API server and a fleet of real processes. Costs some 30 s: five
processes, emulated engine."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import kube_api
from tests.ha_fleet import ADMIN, START_S, HaFleet
from tests.kube_api import KubeApi
from tests.servers import Infra
from tests.waiting import wait_until

SPEC = {
    "engine": "emulated",
    "weights_bytes": "1GiB",
    "kv_bytes": "1GiB",
    "keep_alive_s": -1,
    "engine_args": {"profile": "llama-2-7b/h800"},
}


@pytest.fixture(scope="module")
def api() -> Iterator[KubeApi]:
    with kube_api.serving() as standing:
        yield standing


@pytest.fixture(scope="module")
def fleet(infra: Infra, api: KubeApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HaFleet]:
    made = HaFleet(tmp_path_factory.mktemp("operated"), infra, lease_s=0)
    (made.folder / "models").mkdir()
    for name in ("autoscaler-1", "placer-1", "router-1", "agent-1", "prefetcher-1"):
        made.add(name, GLOWPLUG_NODE_ID="node-1")
    (made.folder / "models" / "filed.yaml").write_text(
        "name: filed\nengine: emulated\nweights_bytes: 1GiB\nengine_args: {profile: llama-2-7b/h800}\n"
    )
    urls = {
        f"GLOWPLUG_{name.upper()}_URL": made.processes[f"{name}-1"].url for name in ("autoscaler", "placer", "router")
    }
    own = {
        "GLOWPLUG_KUBERNETES_URL": api.url,
        "GLOWPLUG_KUBERNETES_ACCOUNT": str(made.folder),
        "GLOWPLUG_RESYNC_S": "0.5",
    }
    made.add("operator-1", GLOWPLUG_LEADER_LEASE_S="2", **own, **urls)
    made.add("operator-2", GLOWPLUG_LEADER_LEASE_S="2", **own, **urls)
    try:
        for process in made.processes.values():
            if process.name != "operator-2":
                process.start()
        wait_until("the fleet is ready", lambda: all(p.ready() for p in made.processes.values() if p.process), START_S)
        wait_until("the model of the file is deployed", lambda: len(made.router_models()) == 1)
        yield made
    finally:
        made.stop()


def row(fleet: HaFleet, key: str) -> dict[str, Any]:
    found: dict[str, Any] = fleet.processes["autoscaler-1"].get(f"/v1/models/{key}")
    return found


def holder(api: KubeApi) -> str:
    lease = api.objects.get(("leases", "default", "glowplug-operator"), {})
    return str(lease.get("spec", {}).get("holderIdentity", ""))


def test_a_model_lives_from_apply_to_delete(fleet: HaFleet, api: KubeApi) -> None:
    api.declare("Model", "writer", **SPEC)
    wait_until("the model is accepted", lambda: api.conditions("models", "writer").get("Accepted") == "Deployed")
    wait_until("the router lists it", lambda: "writer" in {one["id"] for one in fleet.router_models()})
    assert row(fleet, "writer")["source"] == "kubernetes:default/writer"
    assert fleet.chat("writer").status_code == 200

    wait_until("the status says hot", lambda: api.status("models", "writer").get("state") == "hot")
    status = api.status("models", "writer")
    assert (status["replicas"], status["where"], status["observedGeneration"]) == (1, "node-1", 1)
    assert api.conditions("models", "writer") == {"Accepted": "Deployed", "Ready": "Hot"}
    wait_until("an event tells of the start", lambda: {"Starting", "Started"} <= {reason for reason, _ in api.events()})
    assert {one["manager"] for one in api.get("models", "writer")["metadata"]["managedFields"]} == {
        "kubectl",
        "glowplug-operator",
    }


def test_who_is_killed_loses_nothing_and_nothing_of_others_is_touched(fleet: HaFleet, api: KubeApi) -> None:
    fleet.processes["operator-1"].kill()
    api.declare("Model", "writer", **SPEC, max_instances=2)
    api.declare("Model", "filed", **SPEC)
    events = len(api.events())
    fleet.processes["operator-2"].start()

    wait_until("the change is deployed", lambda: api.status("models", "writer").get("observedGeneration") == 2)
    assert holder(api) == "operator-2"
    assert row(fleet, "writer")["max_instances"] == 2
    wait_until("the name is refused", lambda: api.conditions("models", "filed").get("Accepted") == "!Conflict")
    assert row(fleet, "filed")["source"].endswith("filed.yaml")
    notes = [note for _, note in api.events()]
    assert len(notes) == len(set(notes)) >= events, "an event was announced again"

    refused = httpx.put(
        fleet.processes["autoscaler-1"].url + "/v1/models/writer", json={"name": "writer", **SPEC}, headers=ADMIN
    )
    assert refused.status_code == 409 and "default/writer in Kubernetes" in refused.text

    api.remove("Model", "filed")
    wait_until("the refused resource is gone", lambda: ("models", "default", "filed") not in api.objects)
    assert row(fleet, "filed")["state"] == "cold"


def test_a_deleted_model_finishes_its_stream_first(fleet: HaFleet, api: KubeApi) -> None:
    lines: list[str] = []
    answering = threading.Event()

    def stream() -> None:
        url = fleet.processes["router-1"].data_url + "/v1/chat/completions"
        body = {"model": "writer", "stream": True, "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
        with httpx.stream("POST", url, json=body, timeout=200) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                answering.set()

    client = threading.Thread(target=stream)
    client.start()
    assert answering.wait(90)
    api.remove("Model", "writer")
    wait_until("the resource is gone", lambda: ("models", "default", "writer") not in api.objects)
    client.join(90)
    assert lines[-1] == "" and "data: [DONE]" in lines
    assert not fleet.instances("writer")
    assert httpx.get(fleet.processes["autoscaler-1"].url + "/v1/models/writer").status_code == 404


def test_a_tenant_is_put_and_removed(fleet: HaFleet, api: KubeApi) -> None:
    api.declare("Tenant", "acme", priority="batch", limits={"requests_per_minute": 60})
    wait_until("the tenant is accepted", lambda: api.conditions("tenants", "acme").get("Accepted") == "Deployed")
    url = fleet.processes["autoscaler-1"].url
    shown = httpx.get(f"{url}/v1/tenants/acme", headers=ADMIN).json()
    assert (shown["priority"], shown["limits"]["requests_per_minute"]) == ("batch", 60)
    key = httpx.post(f"{url}/v1/keys", json={"tenant": "acme", "name": "ci"}, headers=ADMIN).json()
    api.remove("Tenant", "acme")
    wait_until("it waits for its key", lambda: api.conditions("tenants", "acme").get("Ready") == "!InUse")
    assert httpx.delete(f"{url}/v1/keys/{key['key_id']}", headers=ADMIN).status_code == 200
    api.declare("Tenant", "other")
    wait_until("it is gone", lambda: ("tenants", "default", "acme") not in api.objects)
    assert httpx.get(f"{url}/v1/tenants/acme", headers=ADMIN).status_code == 404
