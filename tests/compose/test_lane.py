"""The fleet of deploy/docker-compose.yml, queried, harmed and healed. Laptop binaries stand in for third-party servers
(override.yml)."""

import json
from typing import Any

import httpx
import pytest

from tests.compose.engine import run
from tests.compose.fleet import ADMIN, NODES, PROJECT, SERVICES, WAIT_S, ComposeFleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3000)]
EMULATED = ("emulated-chat-7b", "emulated-story-7b")
WEIGHTS_BYTES = 98362432
TRY_S = 45.0
AT_REST = ("cold", "asleep", "prewarmed")  # prewarmed: it got a replica meanwhile


def stages(answer: httpx.Response) -> set[str]:
    return {part.partition(";")[0].strip() for part in answer.headers["server-timing"].split(",")}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


def test_nobody_is_root_and_nobody_writes_to_the_image(fleet: ComposeFleet) -> None:
    for service, given in fleet.containers().items():
        host = given["HostConfig"]
        assert given["Config"]["User"] == "10001:10001", service
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0, service
        if given["State"]["Running"] and service != "s3":
            status = fleet.exec(service, "cat", "/proc/1/status")
            assert "Uid:\t10001\t10001" in status and "CapEff:\t0000000000000000" in status, service
            assert "NoNewPrivs:\t1" in status, service


def test_a_cold_model_wakes_and_a_warm_one_answers_at_once(fleet: ComposeFleet) -> None:
    cold = fleet.chat(EMULATED[0])
    assert text_of(cold).startswith("[emulated]") and cold.headers["x-glowplug-emulated"]
    assert {"launch", "load"} <= stages(cold)
    warm = fleet.chat(EMULATED[0])
    assert text_of(warm) and "launch" not in stages(warm)
    assert fleet.node_of(warm) in ("node-1", "node-2")


def test_real_tokens_with_weights_out_of_the_s3_store(fleet: ComposeFleet) -> None:
    assert f"sending {WEIGHTS_BYTES} bytes" in fleet.compose("logs", "weights")
    answer = fleet.chat("smol-chat", "Say the word hello.")
    assert text_of(answer) and "emulated" not in text_of(answer)
    assert "x-glowplug-emulated" not in answer.headers
    assert {"fetch", "launch", "load", "warmup"} <= stages(answer) and fleet.node_of(answer) == "node-3"
    read = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/metrics').read().decode())"
    lines = fleet.exec("node-3-prefetcher", "python", "-c", read).splitlines()
    (fetched,) = [line for line in lines if line.startswith("glowplug_fetched_bytes_total{") and 'source="s3"' in line]
    assert float(fetched.rpartition(" ")[2]) == WEIGHTS_BYTES
    second = fleet.chat("smol-poet")  # shares weights already loaded
    assert text_of(second) and fleet.node_of(second) == "node-3"
    lines = fleet.exec("node-3-prefetcher", "python", "-c", read).splitlines()
    assert fetched in lines


def test_a_chat_of_the_playground_leaves_its_trace(fleet: ComposeFleet) -> None:
    """The prefetcher takes part only if the weights are not in host memory, the placer only if there is room at once: a
    later placement follows another's event."""
    answer = fleet.chat("smol-pirate", base_url=f"{fleet.console}/playground")
    assert text_of(answer)
    request_id, trace_id = answer.headers["x-request-id"], answer.headers["traceparent"].split("-")[1]
    everybody = {f"glowplug-{name}" for name in ("router", "autoscaler", "agent", "engine")}

    def whole() -> Any:
        found = fleet.see(f"/api/v1/requests/{request_id}/trace")
        return found if everybody <= set(found["services"]) and found["phases"] else None

    trace = wait_until("the trace of the chat is whole", whole, WAIT_S)
    assert trace["trace_id"] == trace_id
    assert {"decide", "launch", "load", "warmup"} <= {phase["name"] for phase in trace["phases"]}


def test_an_operator_acts_through_the_console(fleet: ComposeFleet) -> None:
    assert text_of(fleet.chat(EMULATED[1]))
    assert fleet.client.post(f"{fleet.console}/api/v1/models/{EMULATED[1]}/unload").status_code == 403
    unload(fleet, EMULATED[1])


def unload(fleet: ComposeFleet, model: str) -> None:
    path = f"{fleet.console}/api/v1/models/{model}/unload"
    assert fleet.client.post(path, headers={"Authorization": f"Bearer {ADMIN}"}).is_success
    wait_until("no instance serves", lambda: fleet.model(model)["state"] in AT_REST, WAIT_S)


def test_the_command_line_is_in_the_router_s_container(fleet: ComposeFleet) -> None:
    assert "smol-chat" in fleet.exec("router", "glowplug", "models")
    assert all(node in fleet.exec("router", "glowplug", "nodes") for node in NODES)


def test_a_model_file_added_is_a_model_served(fleet: ComposeFleet) -> None:
    body = {"name": "added", "engine": "emulated", "weights_bytes": "1GiB", "kv_bytes": "1GiB", "max_wait_s": 180}
    body |= {"engine_args": {"profile": "llama-2-7b/a100"}}
    write = f"import pathlib; pathlib.Path('/tmp/added.yaml').write_text({json.dumps(body)!r})"
    fleet.exec("router", "python", "-c", write)
    fleet.exec("router", "glowplug", "deploy", "/tmp/added.yaml")
    assert text_of(fleet.chat("added")).startswith("[emulated]")
    fleet.exec("router", "glowplug", "undeploy", "added")


def test_engines_that_ended_leave_no_zombie(fleet: ComposeFleet) -> None:
    assert text_of(fleet.chat(EMULATED[0]))
    unload(fleet, EMULATED[0])
    look = "import psutil; print([p.status() for p in psutil.process_iter() if p.status() == psutil.STATUS_ZOMBIE])"

    def none() -> bool:
        return all(fleet.exec(node, "python", "-c", look).strip() == "[]" for node in NODES)

    wait_until("no node holds a zombie", none, WAIT_S)


def test_a_node_stops_its_models_move_and_it_comes_back(fleet: ComposeFleet) -> None:
    here = fleet.node_of(served(fleet, EMULATED[0]))
    pair = (here, f"{here}-prefetcher")
    fleet.compose("stop", "-t", "60", *pair)
    given = fleet.containers()
    assert [given[service]["State"]["ExitCode"] for service in pair] == [0, 0], "it was killed, it did not end"
    wait_until("the console says that it left", lambda: here not in fleet.nodes_up(), WAIT_S)
    moved = served(fleet, EMULATED[0])
    assert fleet.node_of(moved) not in (here, "node-3")
    fleet.compose("start", *pair)
    wait_until("it is back", lambda: here in fleet.nodes_up(), WAIT_S)


def test_a_node_is_cut_off_and_heals(fleet: ComposeFleet) -> None:
    """Its engine runs on, unreachable: requests move elsewhere."""
    here = fleet.node_of(served(fleet, EMULATED[1]))
    network, container = f"{PROJECT}_fleet", fleet.container(here)
    run("docker", "network", "disconnect", network, container)
    try:
        wait_until("the console says that it is lost", lambda: here not in fleet.nodes_up(), WAIT_S)
        elsewhere = served(fleet, EMULATED[1])
        assert fleet.node_of(elsewhere) not in (here, "node-3")
    finally:
        run("docker", "network", "connect", "--alias", here, network, container)
    wait_until("it is back", lambda: here in fleet.nodes_up(), WAIT_S)
    wait_until("it is healthy", lambda: fleet.unhealthy() == [], WAIT_S)
    assert text_of(served(fleet, EMULATED[1]))


def test_bus_and_record_restart_under_the_fleet(fleet: ComposeFleet) -> None:
    warm = served(fleet, EMULATED[0])
    fleet.compose("stop", "-t", "30", "nats", "valkey")
    assert text_of(fleet.chat(EMULATED[0])), "a warm model needs neither"
    fleet.compose("start", "nats", "valkey")

    def both_up() -> bool:
        return all(source["is_up"] for source in fleet.see("/api/v1/fleet")["sources"].values())

    wait_until("the console hears both again", both_up, WAIT_S)
    wait_until("every node is known again", lambda: set(fleet.nodes_up()) == set(NODES), WAIT_S)
    assert text_of(served(fleet, "emulated-code-7b")) and text_of(warm)
    wait_until("everybody is healthy", lambda: fleet.unhealthy() == [], WAIT_S)


def test_nobody_was_restarted_by_the_engine(fleet: ComposeFleet) -> None:
    """A service that exits by itself is a fault. Last in this file."""
    restarted = {s: given["RestartCount"] for s, given in fleet.containers().items() if given["RestartCount"]}
    assert restarted == {} and set(SERVICES) <= fleet.containers().keys()


def served(fleet: ComposeFleet, model: str) -> httpx.Response:
    """Retry, as a client would, requests that a developing fault swallows: on a dead link they wait for the router's
    GLOWPLUG_ENGINE_SILENCE_S."""

    def asked() -> httpx.Response | None:
        answer = fleet.chat(model, timeout_s=TRY_S)
        return answer if answer.status_code == 200 and fleet.node_of(answer) else None

    found: httpx.Response = wait_until(f"{model} answers", asked, WAIT_S, 1.0)
    return found
