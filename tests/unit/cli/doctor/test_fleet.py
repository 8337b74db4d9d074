"""Checks of a running fleet."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from nats.js.api import ClusterInfo, PeerInfo, StorageType, StreamInfo, StreamState

from glowplug.bus.streams import stream_configs
from glowplug.cli.client import FleetClient
from glowplug.cli.doctor import rows, servers, services
from glowplug.cli.doctor.findings import Finding, Level
from glowplug.cli.doctor.fleet import CONTROL, FleetFacts, NodeFacts, ServiceFacts, _Asker
from glowplug.cli.doctor.servers import BusFacts, StoreFacts
from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.telemetry import semconv
from tests.fleet_builder import MIB, a_model, a_node, an_instance

OK, WARN, FAIL, SKIPPED = Level
NOW = 1_800_000_000.0
EMPTY = StreamState(messages=0, bytes=0, first_seq=0, last_seq=0, consumer_count=0)
STREAMS = tuple((wanted, StreamInfo(config=wanted, state=EMPTY)) for wanted in stream_configs(1))
FACTS = STREAMS[0][0]
BUS = BusFacts(version="2.15", sync="always", streams=STREAMS, backlog={"placer-1-facts": 3})
NODE = a_node("node-1", heartbeat_at=NOW - 1, engines=("emulated",))
MODEL = a_model("m", engine="emulated")
INFO = {
    "server_name": "valkey",
    "valkey_version": "9",
    "role": "master",
    "aof_enabled": 1,
    "used_memory": MIB,
    "maxmemory": 256 * MIB,
    "maxmemory_policy": "noeviction",
}
STORE = StoreFacts(
    info=INFO,
    fsync="everysec",
    epochs={"placer": int(NOW * 1000) - 5},
    models={"m": MODEL},
    instances={"i-1": an_instance("i-1", "m")},
    nodes={"node-1": NODE},
)
ROW = {"name": "m", "engine": "emulated", "memory_bytes": 100 * MIB, "last_failure": "", "config_error": ""}
QUEUE = {"model": "m", "num_waiting": 1, "max_queue": 10, "oldest_waiting_s": 2.0, "max_wait_s": 60.0}
PROCESS = {"name": "nats", "state": "ready", "restarts": 0, "exit_reason": ""}


def a_service(name: str, **fields: Any) -> ServiceFacts:
    given: dict[str, Any] = {"ready": True, "version": "0.1.0", "skew_s": 0.0}
    return ServiceFacts(name=name, service=name.partition("-")[0], url=f"http://{name}", **(given | fields))


WELL = FleetFacts(
    now_s=NOW,
    version="0.1.0",
    expected=CONTROL,
    processes=(PROCESS,),
    services=tuple(a_service(name, role="single") for name in CONTROL),
    store=STORE,
    bus=BUS,
    nodes={"node-1": NodeFacts(cache_capacity_bytes=1 << 30)},
    models=(ROW,),
    queues=(QUEUE,),
    num_traces=3,
    num_weights_checked=1,
)


def findings(facts: FleetFacts) -> list[Finding]:
    about_servers = (*servers.check_store(facts.store), *servers.check_bus(facts.bus))
    return [*services.check(facts), *about_servers, *rows.check(facts)]


def having(**fields: Any) -> FleetFacts:
    return replace(WELL, **fields)


def with_service(name: str, **fields: Any) -> FleetFacts:
    return having(services=tuple(replace(s, **fields) if s.name == name else s for s in WELL.services))


def counting(service: str, metric: str, value: float) -> FleetFacts:
    return with_service(service, metrics={metric: value})


def with_info(**fields: Any) -> FleetFacts:
    return with_store(info=INFO | fields)


def with_store(**fields: Any) -> FleetFacts:
    return having(store=replace(STORE, **fields))


def with_bus(**fields: Any) -> FleetFacts:
    return having(bus=replace(BUS, **fields))


def with_stream(*peers: PeerInfo, **fields: Any) -> FleetFacts:
    config = replace(FACTS, **fields)
    info = StreamInfo(config=config, state=EMPTY, cluster=ClusterInfo(replicas=list(peers)))
    return with_bus(streams=((FACTS, info), STREAMS[1]))


def with_model(**fields: Any) -> FleetFacts:
    return having(models=(ROW | fields,))


def with_queue(**fields: Any) -> FleetFacts:
    return having(queues=(QUEUE | fields,))


OVER = replace(
    NODE,
    gpus=(Gpu(gpu_id="node-1/0", total_bytes=10, grants=(Grant(holder="i-1", owner=GrantOwner.KV, num_bytes=11),)),),
)
LEAK = replace(NODE, gpus=(replace(NODE.gpus[0], grants=(Grant(holder="i-9", owner=GrantOwner.KV, num_bytes=1),)),))
LARGE = replace(MODEL, name="large", weights=WeightsRef(uri="file:///w", num_bytes=2 << 30))
REAL = replace(MODEL, engine="llamacpp")
LEADING = a_service("placer-a", role="leader", leader="placer-a")
STANDBY = a_service("placer-b", role="standby", leader="placer-a")


def elected(**fields: Any) -> FleetFacts:
    return having(services=(LEADING, replace(STANDBY, **fields)))


def test_a_fleet_that_is_well_has_nothing_to_do() -> None:
    found = findings(WELL)
    assert [f for f in found if f.level is not OK] == []
    named = {"router", "placer", "store", "bus", "stream facts", "node-1", "models", "traces"}
    assert named <= {f.about for f in found}


@pytest.mark.parametrize(
    ("facts", "about", "level", "words"),
    [
        (having(processes=(PROCESS | {"state": "crash-loop"},)), "nats", FAIL, "keeps ending"),
        (having(processes=(PROCESS | {"state": "waiting"},)), "nats", FAIL, "is waiting"),
        (having(processes=(PROCESS | {"restarts": 4},)), "nats", WARN, "restarted 4 times"),
        (with_service("placer", error="refused"), "placer", FAIL, "does not answer at http://placer: refused"),
        (with_service("placer", ready=False, reason="the bus"), "placer", FAIL, "is not ready: the bus"),
        (having(services=WELL.services[1:]), "autoscaler", FAIL, "no address"),
        (with_bus(is_shared=True), "bus rights", WARN, "may publish every command"),
        (with_store(is_shared=True), "store rights", WARN, "may write every table"),
        (with_service("router", version="0.2.0"), "versions", WARN, "0.2.0: router"),
        (having(version="0.9"), "versions", WARN, "this command 0.9"),
        (with_service("placer", skew_s=-4.0), "clocks", WARN, "clock of placer is 4 s behind"),
        (with_service("placer", skew_s=30.0), "clocks", WARN, "30 s ahead"),
        (elected(), "placer leader", OK, "placer-a leads, 1 standing by"),
        (elected(role="leader"), "placer leader", FAIL, "placer-a and placer-b both"),
        (having(services=(STANDBY,)), "placer leader", OK, "placer-a leads, 1 standing by"),
        (having(services=(replace(STANDBY, leader=""),)), "placer leader", FAIL, "none of placer-b leads"),
        (elected(leader="placer-c"), "placer leader", FAIL, "disagree on who leads: placer-a or placer-c"),
        (counting("placer", semconv.STALE_COMMANDS_TOTAL, 2.0), "placer", WARN, "older epoch"),
        (counting("placer", semconv.BUS_MALFORMED_TOTAL, 1.0), "placer", WARN, "1 event"),
        (counting("placer", semconv.BUS_GIVEN_UP_TOTAL, 2.0), "placer", WARN, "gave up 2 event(s)"),
        (counting("placer", semconv.ROWS_UNREADABLE, 3.0), "placer", WARN, "skips 3 row(s)"),
        (counting("placer", semconv.TABLE_SYNC_TIMESTAMP_SECONDS, NOW - 60), "placer", WARN, "60 s"),
        (counting("placer", semconv.SPANS_DROPPED_TOTAL, 5.0), "placer", WARN, "5 span"),
        (counting("placer", semconv.BUS_STORES, 0.0), "placer", FAIL, "stores no events"),
        (counting("placer", semconv.STORE_WRITABLE, 0.0), "placer", FAIL, "accepts no writes"),
        (having(data_port="no answer"), "OpenAI API", FAIL, "no answer"),
        (having(console_problem="it does not reach the bus"), "console", WARN, "reach the bus"),
        (having(num_traces=0), "traces", SKIPPED, "no request yet"),
        (replace(counting("router", semconv.REQUESTS_TOTAL, 9.0), num_traces=0), "traces", WARN, "9 request(s)"),
        (with_store(unknown="no address"), "store", SKIPPED, "no address"),
        (with_store(error="refused"), "store", FAIL, "refused"),
        (with_info(role="slave"), "store", FAIL, "replica"),
        (with_info(aof_enabled=0), "store on disk", WARN, "no append-only file"),
        (with_store(info={}), "store on disk", SKIPPED, "does not tell"),
        (with_info(aof_last_write_status="err"), "store on disk", FAIL, "err"),
        (with_store(fsync="no"), "store on disk", WARN, "power cut"),
        (with_info(used_memory=250 * MIB), "store memory", FAIL, "250 MiB of 256 MiB"),
        (with_info(maxmemory_policy="allkeys-lru"), "store memory", FAIL, "would evict"),
        (with_bus(unknown="no address"), "bus", SKIPPED, "no address"),
        (with_bus(error="refused"), "bus", FAIL, "refused"),
        (with_bus(sync="120 s"), "bus on disk", WARN, "120 s"),
        (with_bus(sync=""), "bus on disk", SKIPPED, "cannot be seen"),
        (with_bus(cluster_size=3), "stream facts", WARN, "1 replica(s) in a cluster of 3"),
        (with_bus(backlog={"placer-1-facts": 5000}), "bus", WARN, "5000 events behind"),
        (with_bus(streams=((FACTS, None), STREAMS[1])), "stream facts", FAIL, "not there"),
        (with_stream(storage=StorageType.MEMORY), "stream facts", FAIL, "in memory"),
        (with_stream(PeerInfo(current=True), PeerInfo(current=False), num_replicas=3), "stream facts", FAIL, "2 of 3"),
        (with_stream(max_age=60.0), "stream facts", WARN, "60 s, not 86400 s"),
        (with_store(unreadable=("nodes/n: why",)), "rows", FAIL, "nodes/n"),
        (with_store(epochs={"placer": int((NOW + 500) * 1000)}), "epochs", WARN, "500 s in the future"),
        (with_store(nodes={}), "nodes", FAIL, "no node has joined"),
        (with_store(nodes={"node-1": replace(NODE, heartbeat_at=NOW - 20)}), "node-1", FAIL, "silent for 20 s"),
        (with_store(nodes={"node-1": replace(NODE, heartbeat_at=NOW - 5)}), "node-1", WARN, "silent for 5 s: at 8 s"),
        (having(expected_nodes=("node-1", "node-2")), "node-2", FAIL, "counts as gone, or it never joined"),
        (with_store(nodes={"node-1": OVER}), "node-1", FAIL, "11 B granted of 10 B"),
        (with_store(nodes={"node-1": replace(NODE, engines=())}), "node-1 engines", FAIL, "none can start"),
        (with_store(nodes={"node-1": LEAK}), "instances", WARN, "keeps bytes for i-9"),
        (with_store(instances={"i-1": an_instance("i-1", "m", gpu_id="gone/0")}), "instances", FAIL, "gone"),
        (with_store(instances={"i-1": an_instance("i-1", "x")}), "instances", WARN, "not deployed"),
        (with_store(models={"m": LARGE}), "node-1 weights", FAIL, "large has 2.0 GiB"),
        (
            replace(with_store(models={"m": REAL}), nodes={"node-1": NodeFacts(warnings=("too much",))}),
            "node-1",
            WARN,
            "too much",
        ),
        (
            having(nodes={"node-1": NodeFacts(cache_capacity_bytes=1 << 30, disk_trouble="the disk at /d is full")}),
            "node-1 disk",
            WARN,
            "/d is full",
        ),
        (having(file_errors={"a.yaml": "kv_bites"}), "model files", FAIL, "a.yaml is not in force: kv_bites"),
        (having(missing_files={"/a.yaml": "is gone"}), "model files", WARN, "is gone"),
        (having(models=()), "models", WARN, "none is deployed"),
        (with_model(last_failure="weights_corrupt: sha\nmore"), "model m", FAIL, "failed: weights_corrupt: sha"),
        (with_model(config_error="bad"), "model m", FAIL, "older file"),
        (with_model(engine="vllm"), "model m", FAIL, "no node can start vllm"),
        (
            replace(with_model(engine="vllm"), nodes={"node-1": NodeFacts(unavailable={"vllm": "no environment"})}),
            "model m",
            FAIL,
            "no environment",
        ),
        (with_model(memory_bytes=1 << 50), "model m", FAIL, "largest GPU"),
        (having(weights={"m": "w.gguf is not what"}), "weights of m", FAIL, "w.gguf"),
        (having(queues=None), "held requests", SKIPPED, "no router"),
        (with_queue(oldest_waiting_s=70.0), "requests of m", FAIL, "70 s of at most 60 s"),
        (with_queue(num_waiting=10), "requests of m", WARN, "queue is full"),
        (
            having(placements=({"model_key": "m", "started": False, "waited_s": 90.0},)),
            "placements",
            WARN,
            "waited 90 s for free memory",
        ),
    ],
)
def test_what_is_wrong_is_named(facts: FleetFacts, about: str, level: Level, words: str) -> None:
    found = [f for f in findings(facts) if f.about == about and f.level is level]
    assert any(words in f.says for f in found), findings(facts)
    assert all(f.do for f in found if level in (WARN, FAIL))


def test_a_draining_instance_of_a_model_that_was_undeployed_is_well() -> None:
    leaving = an_instance("i-1", "gone", InstanceState.DRAINING)
    assert not [f for f in findings(with_store(instances={"i-1": leaving})) if f.level is not OK]


def test_budgets_larger_than_the_machine_are_well_where_all_is_emulated() -> None:
    facts = having(nodes={"node-1": NodeFacts(warnings=("too much",))})
    assert not [f for f in findings(facts) if f.level is not OK]


@pytest.mark.parametrize(
    ("api_key", "status", "told"),
    [("", 200, ""), ("", 401, ""), ("wrong", 401, "http://data/v1/models answers 401"), ("", 503, "answers 503")],
)
async def test_a_port_that_asks_for_a_named_key_serves(api_key: str, status: int, told: str) -> None:
    fleet = FleetClient({"data": "http://data"}, api_key=api_key)
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    async with httpx.AsyncClient(transport=transport) as http:
        problem = await _Asker(fleet, http).data_port()
    assert problem.endswith(told) and bool(problem) == bool(told)
