"""Each check of a running fleet, both ways: its services, its bus and store, its rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from glowplug.cli.doctor import rows, servers, services
from glowplug.cli.doctor.findings import Finding, Level
from glowplug.cli.doctor.fleet import BusFacts, FleetFacts, NodeFacts, ServiceFacts, StoreFacts, StreamFacts
from glowplug.cli.doctor.fleet_facts import CONTROL
from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.telemetry import semconv
from tests.fleet_builder import MIB, a_model, a_node, an_instance

NOW = 1_800_000_000.0
FACTS = StreamFacts(name="GLOWPLUG_FACTS", max_age_s=86400, wanted_age_s=86400, max_bytes=256 * MIB)
COMMANDS = StreamFacts(name="GLOWPLUG_COMMANDS", max_age_s=60, wanted_age_s=60, max_bytes=64 * MIB)
BUS = BusFacts(version="2.15", sync="always", streams=(FACTS, COMMANDS), backlog={"placer-1-facts": 3})
NODE = a_node("node-1", heartbeat_at=NOW - 1, engines=("emulated",))
MODEL = a_model("m", engine="emulated")
STORE = StoreFacts(
    version="Valkey 9",
    role="master",
    append_only=True,
    fsync="everysec",
    used_bytes=MIB,
    max_bytes=256 * MIB,
    policy="noeviction",
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
    where="/somewhere",
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
    def every() -> Iterator[Finding]:
        for module in (services, servers, rows):
            yield from module.check(facts)

    return list(every())


def with_service(name: str, **fields: Any) -> FleetFacts:
    changed = (replace(s, **fields) if s.name == name else s for s in WELL.services)
    return replace(WELL, services=tuple(changed))


def with_store(**fields: Any) -> FleetFacts:
    return replace(WELL, store=replace(STORE, **fields))


def with_bus(**fields: Any) -> FleetFacts:
    return replace(WELL, bus=replace(BUS, **fields))


def with_stream(**fields: Any) -> FleetFacts:
    return with_bus(streams=(replace(FACTS, **fields), COMMANDS))


def with_model(**fields: Any) -> FleetFacts:
    return replace(WELL, models=(ROW | fields,))


def with_queue(**fields: Any) -> FleetFacts:
    return replace(WELL, queues=(QUEUE | fields,))


OVER = replace(
    NODE,
    gpus=(Gpu(gpu_id="node-1/0", total_bytes=10, grants=(Grant(holder="i-1", owner=GrantOwner.KV, num_bytes=11),)),),
)
LEAK = replace(NODE, gpus=(replace(NODE.gpus[0], grants=(Grant(holder="i-9", owner=GrantOwner.KV, num_bytes=1),)),))
LARGE = replace(MODEL, name="large", weights=WeightsRef(uri="file:///w", num_bytes=2 << 30))
REAL = replace(MODEL, engine="llamacpp")
ELECTED = (
    a_service("placer-a", role="leader", leader="placer-a"),
    a_service("placer-b", role="standby", leader="placer-a"),
)


def test_a_fleet_that_is_well_has_nothing_to_do() -> None:
    found = findings(WELL)
    assert [f for f in found if f.level is not Level.OK] == []
    assert {"router", "placer", "store", "bus", "stream facts", "node-1", "models", "traces"} <= {
        f.about for f in found
    }


@pytest.mark.parametrize(
    ("facts", "about", "level", "words"),
    [
        (replace(WELL, processes=(PROCESS | {"state": "crash-loop"},)), "nats", Level.FAIL, "keeps ending"),
        (replace(WELL, processes=(PROCESS | {"state": "waiting"},)), "nats", Level.FAIL, "is waiting"),
        (replace(WELL, processes=(PROCESS | {"restarts": 4},)), "nats", Level.WARN, "started again 4 times"),
        (with_service("placer", error="refused"), "placer", Level.FAIL, "does not answer at http://placer: refused"),
        (with_service("placer", ready=False, reason="the bus"), "placer", Level.FAIL, "is not ready: the bus"),
        (replace(WELL, services=WELL.services[1:]), "autoscaler", Level.FAIL, "no address"),
        (with_bus(is_shared=True), "bus rights", Level.WARN, "may publish every command"),
        (with_store(is_shared=True), "store rights", Level.WARN, "may write every table"),
        (with_service("router", version="0.2.0"), "versions", Level.WARN, "0.2.0: router"),
        (replace(WELL, version="0.9"), "versions", Level.WARN, "this command 0.9"),
        (with_service("placer", skew_s=-4.0), "clocks", Level.WARN, "clock of placer is 4 s behind"),
        (with_service("placer", skew_s=30.0), "clocks", Level.FAIL, "30 s ahead"),
        (replace(WELL, services=ELECTED), "placer leader", Level.OK, "placer-a leads, 1 standing by"),
        (
            replace(WELL, services=(ELECTED[0], replace(ELECTED[1], role="leader"))),
            "placer leader",
            Level.FAIL,
            "placer-a and placer-b both",
        ),
        (replace(WELL, services=ELECTED[1:]), "placer leader", Level.OK, "placer-a leads, 1 standing by"),
        (
            replace(WELL, services=(replace(ELECTED[1], leader=""),)),
            "placer leader",
            Level.FAIL,
            "none of placer-b leads",
        ),
        (
            replace(WELL, services=(ELECTED[0], replace(ELECTED[1], leader="placer-c"))),
            "placer leader",
            Level.FAIL,
            "disagree on who leads: placer-a or placer-c",
        ),
        (with_service("placer", metrics={semconv.STALE_COMMANDS_TOTAL: 2.0}), "placer", Level.WARN, "older epoch"),
        (with_service("placer", metrics={semconv.BUS_MALFORMED_TOTAL: 1.0}), "placer", Level.WARN, "1 event"),
        (with_service("placer", metrics={semconv.BUS_GIVEN_UP_TOTAL: 2.0}), "placer", Level.WARN, "gave up 2 event(s)"),
        (with_service("placer", metrics={semconv.ROWS_UNREADABLE: 3.0}), "placer", Level.WARN, "leaves out 3 row(s)"),
        (
            with_service("placer", metrics={semconv.TABLE_SYNC_TIMESTAMP_SECONDS: NOW - 60}),
            "placer",
            Level.WARN,
            "60 s",
        ),
        (with_service("placer", metrics={semconv.SPANS_DROPPED_TOTAL: 5.0}), "placer", Level.WARN, "5 span"),
        (replace(WELL, data_port="no answer"), "OpenAI API", Level.FAIL, "no answer"),
        (replace(WELL, console_problem="it does not reach the bus"), "console", Level.WARN, "reach the bus"),
        (replace(WELL, num_traces=0), "traces", Level.SKIPPED, "no request yet"),
        (
            replace(with_service("router", metrics={semconv.REQUESTS_TOTAL: 9.0}), num_traces=0),
            "traces",
            Level.WARN,
            "9 request(s)",
        ),
        (with_store(unknown="no address"), "store", Level.SKIPPED, "no address"),
        (with_store(error="refused"), "store", Level.FAIL, "refused"),
        (with_store(role="slave"), "store", Level.FAIL, "replica"),
        (with_store(append_only=False), "store on disk", Level.WARN, "no append-only file"),
        (with_store(append_only=None), "store on disk", Level.SKIPPED, "does not tell"),
        (with_store(aof_problem="err"), "store on disk", Level.FAIL, "err"),
        (with_store(fsync="no"), "store on disk", Level.WARN, "power cut"),
        (with_store(used_bytes=250 * MIB), "store memory", Level.FAIL, "250 MiB of 256 MiB"),
        (with_store(policy="allkeys-lru"), "store memory", Level.FAIL, "throw away"),
        (with_bus(unknown="no address"), "bus", Level.SKIPPED, "no address"),
        (with_bus(error="refused"), "bus", Level.FAIL, "refused"),
        (with_bus(sync="120 s"), "bus on disk", Level.WARN, "120 s"),
        (with_bus(sync=""), "bus on disk", Level.SKIPPED, "cannot be seen"),
        (with_bus(cluster_size=3), "stream facts", Level.WARN, "1 replica(s) in a cluster of 3"),
        (with_bus(backlog={"placer-1-facts": 5000}), "bus", Level.WARN, "5000 events behind"),
        (with_stream(problem="is not there"), "stream facts", Level.FAIL, "not there"),
        (with_stream(on_file=False), "stream facts", Level.FAIL, "in memory"),
        (with_stream(replicas=3, replicas_current=2), "stream facts", Level.FAIL, "2 of 3"),
        (with_stream(max_age_s=60.0), "stream facts", Level.WARN, "60 s, not 86400 s"),
        (with_store(unreadable=("nodes/n: why",)), "rows", Level.FAIL, "nodes/n"),
        (with_store(epochs={"placer": int((NOW + 500) * 1000)}), "epochs", Level.WARN, "500 s in the future"),
        (with_store(nodes={}), "nodes", Level.FAIL, "no node has joined"),
        (with_store(nodes={"node-1": replace(NODE, heartbeat_at=NOW - 20)}), "node-1", Level.FAIL, "silent for 20 s"),
        (with_store(nodes={"node-1": OVER}), "node-1", Level.FAIL, "11 B granted of 10 B"),
        (with_store(nodes={"node-1": replace(NODE, engines=())}), "node-1 engines", Level.FAIL, "none can start"),
        (with_store(nodes={"node-1": LEAK}), "instances", Level.WARN, "keeps bytes for i-9"),
        (with_store(instances={"i-1": an_instance("i-1", "m", gpu_id="gone/0")}), "instances", Level.FAIL, "gone"),
        (with_store(instances={"i-1": an_instance("i-1", "x")}), "instances", Level.WARN, "not deployed"),
        (with_store(models={"m": LARGE}), "node-1 weights", Level.FAIL, "large has 2.0 GiB"),
        (
            replace(with_store(models={"m": REAL}), nodes={"node-1": NodeFacts(warnings=("too much",))}),
            "node-1",
            Level.WARN,
            "too much",
        ),
        (
            replace(WELL, file_errors={"a.yaml": "kv_bites"}),
            "model files",
            Level.FAIL,
            "a.yaml is not in force: kv_bites",
        ),
        (replace(WELL, missing_files={"/a.yaml": "is gone"}), "model files", Level.WARN, "is gone"),
        (replace(WELL, models=()), "models", Level.WARN, "none is deployed"),
        (with_model(last_failure="weights_corrupt: sha\nmore"), "model m", Level.FAIL, "failed: weights_corrupt: sha"),
        (with_model(config_error="bad"), "model m", Level.FAIL, "older file"),
        (with_model(engine="vllm"), "model m", Level.FAIL, "no node can start vllm"),
        (
            replace(with_model(engine="vllm"), nodes={"node-1": NodeFacts(unavailable={"vllm": "no environment"})}),
            "model m",
            Level.FAIL,
            "no environment",
        ),
        (with_model(memory_bytes=1 << 50), "model m", Level.FAIL, "largest GPU"),
        (replace(WELL, weights={"m": "w.gguf is not what"}), "weights of m", Level.FAIL, "w.gguf"),
        (replace(WELL, queues=None), "held requests", Level.SKIPPED, "no router"),
        (with_queue(oldest_waiting_s=70.0), "requests of m", Level.FAIL, "70 s of at most 60 s"),
        (with_queue(num_waiting=10), "requests of m", Level.WARN, "queue is full"),
        (
            replace(WELL, placements=({"model_key": "m", "started": False, "waited_s": 90.0},)),
            "placements",
            Level.WARN,
            "waited 90 s for free memory",
        ),
    ],
)
def test_what_is_wrong_is_named(facts: FleetFacts, about: str, level: Level, words: str) -> None:
    found = [f for f in findings(facts) if f.about == about and f.level is level]
    assert any(words in f.says for f in found), findings(facts)
    assert all(f.do for f in found if level in (Level.WARN, Level.FAIL))


def test_a_draining_instance_of_a_model_that_was_undeployed_is_well() -> None:
    leaving = an_instance("i-1", "gone", InstanceState.DRAINING)
    assert not [f for f in findings(with_store(instances={"i-1": leaving})) if f.level is not Level.OK]


def test_budgets_larger_than_the_machine_are_well_where_all_is_emulated() -> None:
    facts = replace(WELL, nodes={"node-1": NodeFacts(warnings=("too much",))})
    assert not [f for f in findings(facts) if f.level is not Level.OK]
