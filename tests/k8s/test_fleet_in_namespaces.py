"""The fleet itself under the policies: the sim overlay's containers as processes, one network namespace per pod.

No service needs a refused connection, and some service uses each drawn one.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.arrows import expand, table
from tests.k8s.namespaces import REFUSED, why_not
from tests.k8s.pod_fleet import SECRETS, PodFleet
from tests.k8s.rendering import render
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
REPLICAS = {"nats": 3, "placer": 2, "autoscaler": 2, "node": 2}
SPEEDUP = {"GLOWPLUG_EMULATED_TIME_SCALE": "20"}  # a modelled start of 40 s takes 2
MODELS = ["emulated-chat-7b", "emulated-code-7b", "emulated-story-7b", "emulated-brief-7b"]
READER = {"X-Glowplug-Console-Key": SECRETS["GLOWPLUG_CONSOLE_KEY"]}
KEY = {"Authorization": f"Bearer {SECRETS['GLOWPLUG_API_KEY']}", "Content-Type": "application/json"}
ADMIN = READER | {"Authorization": f"Bearer {SECRETS['GLOWPLUG_ADMIN_TOKEN']}"}
# One predictor, which makes no span yet; emulated engines read no weights, so nodes serve each other none.
IDLE = {("predictor", "predictor"), ("predictor", "console"), ("node", "node")}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodFleet]:
    made = PodFleet(render("sim"), tmp_path_factory.mktemp("pods"), REPLICAS, SPEEDUP)
    try:
        made.start(*made.pods)
        made.until_ready(*made.pods)
        wait_until("the router knows the models", lambda: len(listed(made)) == 8)
        # A request before an autoscaler leads is started from the routers' loads, outside its trace.
        wait_until("one of each leads", lambda: all(leader_of(made, kind) for kind in ("placer", "autoscaler")))
        yield made
    finally:
        made.close()


def address(fleet: PodFleet, pod: str) -> str:
    return fleet.pods[pod].address


def listed(fleet: PodFleet) -> list[Any]:
    status, _, body = fleet.ask("stranger", address(fleet, "router-0"), 8000, "/v1/models", headers=KEY)
    return list(json.loads(body)["data"]) if status == 200 else []


def complete(fleet: PodFleet, source: str, pod: str, port: int, base: str, model: str) -> tuple[Any, bytes]:
    asked = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Good morning"}]}
    path, body = f"{base}/v1/chat/completions", json.dumps(asked).encode()
    headers = READER | KEY if pod.startswith("console") else KEY
    given = fleet.ask(source, address(fleet, pod), port, path, method="POST", body=body, headers=headers)
    assert given[0] == 200, given[2]
    return given[1:]


def chat(fleet: PodFleet, model: str) -> str:
    headers, body = complete(fleet, "stranger", "router-0", 8000, "", model)
    assert headers["x-glowplug-emulated"]
    assert json.loads(body)["choices"][0]["message"]["content"].startswith("[emulated]")
    return str(headers["x-request-id"])


def get(fleet: PodFleet, source: str, pod: str, port: int, path: str) -> Any:
    status, _, body = fleet.ask(source, address(fleet, pod), port, path, headers=READER)
    assert status == 200, (pod, path, body)
    return json.loads(body)


def ready_urls(fleet: PodFleet) -> list[str]:
    instances = get(fleet, "console-0", "placer-0", 8080, "/v1/instances")["data"]
    return [i["url"] for i in instances if i["state"].lower() == "ready" and i["url"]]


def is_refused(fleet: PodFleet, source: str, pod: str, port: int) -> bool:
    try:
        fleet.ask(source, address(fleet, pod), port, "/live", timeout_s=5)
    except OSError:
        return True
    return False


def leader_of(fleet: PodFleet, kind: str) -> str:
    """ "" unless there is exactly one."""
    roles = {
        name: get(fleet, name, name, 8080, "/health")["role"]
        for name, pod in fleet.pods.items()
        if pod.kind == kind and pod.processes
    }
    leaders = [name for name, role in roles.items() if role == "leader"]
    return leaders[0] if len(leaders) == 1 else ""


def test_a_cold_request_works_and_its_trace_arrives(fleet: PodFleet) -> None:
    request_id = chat(fleet, MODELS[0])
    wanted = {"glowplug-router", "glowplug-autoscaler", "glowplug-placer", "glowplug-agent", "glowplug-engine"}
    path = f"/api/v1/requests/{request_id}/trace"

    missing = set(wanted)

    def is_whole() -> bool:
        status, _, body = fleet.ask("operators", address(fleet, "console-0"), 8080, path, headers=READER)
        missing.difference_update(json.loads(body)["services"] if status == 200 else ())
        if missing:
            raise ValueError(f"not in the trace: {missing}")
        return True

    wait_until("the trace is whole", is_whole)


def test_every_probe_is_answered(fleet: PodFleet) -> None:
    """NATS is unhealthy until it has caught up with a stream."""

    def all_are_well() -> bool:
        said = fleet.probes()
        assert len(said) > 3 * len(fleet.pods) - 3
        if failing := {probe: status for probe, status in said.items() if status != 200}:
            raise ValueError(f"not well: {failing}")
        return True

    wait_until("every probe is answered", all_are_well)


def test_the_streams_have_three_copies(fleet: PodFleet) -> None:
    copies: dict[str, int] = {}
    for name in (n for n in fleet.pods if n.startswith("nats")):
        _, _, body = fleet.ask(name, "127.0.0.1", 8222, "/jsz?accounts=true&streams=true&config=true")
        for account in json.loads(body).get("account_details", ()):
            copies |= {s["name"]: s["config"]["num_replicas"] for s in account["stream_detail"]}
    assert copies == {"GLOWPLUG_FACTS": 3, "GLOWPLUG_COMMANDS": 3, "GLOWPLUG_USAGE": 3}


def test_whichever_replica_is_asked_the_leader_answers(fleet: PodFleet) -> None:
    wait_until("one placer leads", lambda: leader_of(fleet, "placer") != "")
    for name in ("placer-0", "placer-1"):
        nodes = get(fleet, "console-0", name, 8080, "/v1/nodes")["data"]
        assert json.dumps(nodes).count('"node-0"') > 0, name


def test_an_operator_acts_through_the_console(fleet: PodFleet) -> None:
    console = address(fleet, "console-0")
    for path in ("models/emulated-chat-7b/pin", "models/emulated-chat-7b/unpin", "nodes/node-1/drain"):
        said = fleet.ask("operators", console, 8080, f"/api/v1/{path}", method="POST", headers=ADMIN)
        assert said[0] == 202, (path, said[2])
    for headers, status in ((READER, 403), (ADMIN, 202)):
        path = "/api/v1/nodes/node-1/undrain"
        assert fleet.ask("operators", console, 8080, path, method="POST", headers=headers)[0] == status


def test_prometheus_reads_everybody(fleet: PodFleet) -> None:
    for name, pod in fleet.pods.items():
        if pod.kind in ("nats", "valkey"):
            continue
        for port in (8080, 8081) if pod.kind == "node" else (8080,):
            status, _, body = fleet.ask("prometheus", pod.address, port, "/metrics")
            assert status == 200, name
            assert b"glowplug_" in body, name
            assert is_refused(fleet, "neighbour", name, port), name


def test_no_service_wants_what_is_not_drawn_and_none_is_drawn_in_vain(fleet: PodFleet) -> None:
    complete(fleet, "operators", "console-0", 8080, "/playground", MODELS[0])
    get(fleet, "operators", "console-0", 8080, f"/api/v1/forecasts?model={MODELS[0]}")
    said = fleet.ask("operators", address(fleet, "console-0"), 8080, "/api/v1/logs", method="POST", headers=ADMIN)
    assert said[0] == 200, said[2]
    for name in ("placer-0", "placer-1", "autoscaler-0", "autoscaler-1"):
        get(fleet, "console-0", name, 8080, "/v1/nodes" if name.startswith("placer") else "/v1/models")
    kinds = {pod.kind for pod in fleet.pods.values()}
    drawn = {pair for pair in expand(table("sim")) if set(pair) <= kinds}
    wanted = {(kind, who) for kind, hook, who in fleet.counters() if hook == "output" and who in kinds}
    assert wanted == drawn

    unused: set[tuple[str, str]] = set()

    def all_used() -> bool:
        counted = fleet.counters()
        unused.clear()
        unused.update((source, target) for source, target in drawn - IDLE if not counted[(source, "output", target)])
        if unused:
            raise ValueError(f"not used: {unused}")
        return True

    wait_until("each arrow is used", all_used)
    refused = {kind: n for (kind, hook, who), n in fleet.counters().items() if (hook, who) == ("output", REFUSED) and n}
    assert refused == {}, "a service tried to reach what is not drawn"


def test_an_unlisted_connection_fails(fleet: PodFleet) -> None:
    chat(fleet, MODELS[0])
    wait_until("the placer knows of the engine", lambda: ready_urls(fleet) != [])
    host, _, port = ready_urls(fleet)[0].removeprefix("http://").rpartition(":")
    node = next(name for name, pod in fleet.pods.items() if pod.address == host)
    assert 20000 <= int(port) <= 20199
    listening = [("nats-0", 4222), ("valkey-0", 6379), ("placer-0", 8080), ("console-0", 8080), (node, int(port))]
    for source in ("stranger", "impostor", "internet"):
        for pod, number in [*listening, ("router-0", 8080), ("nats-0", 8222), (node, 8080)]:
            assert is_refused(fleet, source, pod, number), f"{source} -> {pod}:{number}"
    for source in ("console-0", "predictor-0", "placer-0", "nats-0", "valkey-0"):
        assert is_refused(fleet, source, node, int(port)), f"{source} -> the engine"
    for pod, number in [("autoscaler-0", 8080), ("router-0", 8080), ("router-0", 8000), ("node-0", 8080)]:
        assert is_refused(fleet, "placer-0", pod, number), f"placer -> {pod}:{number}"
    fleet.network.enforce(node, "")
    fleet.network.enforce("internet", "")
    try:
        assert not is_refused(fleet, "internet", node, int(port)), "without the rules the engine is there for anybody"
    finally:
        fleet.enforce()


def test_the_standby_takes_over_when_the_leaders_server_dies(fleet: PodFleet) -> None:
    wait_until("one placer leads", lambda: leader_of(fleet, "placer") != "")
    before = leader_of(fleet, "placer")
    fleet.kill(before)
    chat(fleet, MODELS[1])
    assert leader_of(fleet, "placer") not in ("", before)


def test_two_servers_of_the_bus_are_enough(fleet: PodFleet) -> None:
    fleet.kill("nats-0")
    assert chat(fleet, MODELS[2])


def test_a_node_that_comes_back_serves_again(fleet: PodFleet) -> None:
    fleet.kill("node-0")
    fleet.kill("node-1")
    fleet.start("node-1")
    fleet.until_ready("node-1")
    chat(fleet, MODELS[3])
