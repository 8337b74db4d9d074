"""A fleet of processes starts and serves with foreign data in its store and bus."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from redis import Redis

from glowplug.bus.nats_bus import NatsBus, arrive
from glowplug.cli.doctor.servers import ask_store
from glowplug.events.envelope import encode, to_json
from glowplug.events.facts import InstanceFailed
from glowplug.events.subjects import subject
from glowplug.state.keys import PREFIX
from tests.fleet_builder import a_model, a_node, an_event, an_instance
from tests.ha_fleet import HaFleet, emulated
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
SERVICES = ("autoscaler", "placer", "predictor", "agent", "prefetcher", "router", "console")
TABLES = ("models", "nodes", "instances", "cordons", "leaders", "processes", "start_times", "scaling_learned")
ODD_ROWS = {
    b"\xff\xfe": b"{}",
    b"bytes": b"\xff\xfe",
    b"inside": to_json(an_instance("inside")).replace(b'"reason":"', b'"reason":"\xc3('),
    b"empty": b"",
    b"shape": b"[1]",
    b"deep": b"[" * 100_000,
    b"huge": b'{"revision":' + b"9" * 5000 + b"}",
    b"large": b'"' + b"x" * (5 << 20) + b'"',
}
STREAM_SUBJECTS = (
    subject(InstanceFailed(instance=an_instance("i-1"))),
    "glowplug.v1.evt.node.joined._.node-1",
    "glowplug.v1.evt.model.deployed.m.m",
    "glowplug.v1.tel.node.beat._.node-1",
    "glowplug.v1.tel.router.load_reported._.router-1",
    "glowplug.v1.cmd.placer.place.any",
    "glowplug.v1.cmd.agent.start.node-1",
    "glowplug.v1.cmd.prefetcher.fetch.node-1",
)
_FACT = encode(an_event(InstanceFailed(instance=an_instance("i-1"))))
ODD_EVENTS = (b"", b"\xff\xfe", _FACT.replace(b'"issuer":"', b'"issuer":"\xff'), b'{"data":' + b"[" * 100_000, b"[]")


def poison_store(url: str) -> None:
    with Redis.from_url(url) as client:
        for table in TABLES:
            client.hset(f"{PREFIX}:{table}", mapping=ODD_ROWS)  # type: ignore[arg-type]
        misplaced = {"models": a_model("m"), "nodes": a_node("n"), "instances": an_instance("i")}
        for table, row in misplaced.items():
            client.hset(f"{PREFIX}:{table}", "another", to_json(row))
        client.set(f"{PREFIX}:decisions", b"no log")
        for service in ("autoscaler", "placer", "predictor"):
            client.set(f"{PREFIX}:epoch:{service}", b"\xff")
        client.set(f"{PREFIX}:lease:placer", b"\xff")
        client.hset(f"{PREFIX}:lease:autoscaler", mapping={"holder": b"\xff", "epoch": b"nan"})  # type: ignore[arg-type]


async def poison_bus(url: str) -> None:
    bus = NatsBus(url, "poisoner")
    await bus.connect()  # creates the streams
    await bus.close()
    client = await nats.connect(url)
    try:
        for name in STREAM_SUBJECTS:
            for raw in ODD_EVENTS:
                await client.publish(name, raw)
        await arrive(client)
    finally:
        await client.close()


def counted(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def test_a_fleet_starts_and_serves_beside_what_nobody_can_read(
    tmp_path: Path, own_nats: NatsProcess, own_valkey: ValkeyProcess
) -> None:
    poison_store(own_valkey.url)
    asyncio.run(poison_bus(own_nats.url))
    infra = Infra(own_nats, own_valkey)
    fleet = HaFleet(tmp_path, infra, models={"tiny": emulated("tiny")})
    for folder in ("models", "state", "state/router-1", "state/node-1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "tiny.yaml").write_text(fleet.models["tiny"])
    (tmp_path / "state" / "router-1" / "tables.json").write_bytes(b"\xff\xfe")
    (tmp_path / "state" / "node-1" / "agent.json").write_bytes(b'{"handles": {"\xff": {}}}')
    try:
        for service in SERVICES:
            fleet.add(f"{service}-1", GLOWPLUG_NODE_ID="node-1").start()
        wait_until("everything is ready", fleet.ready, 120)
        wait_until("the model is known", lambda: len(fleet.router_models()) == 1)
        assert fleet.chat("tiny").status_code == 200
        asyncio.run(poison_bus(own_nats.url))
        poison_store(own_valkey.url)
        assert fleet.chat("tiny").status_code == 200
        for name, process in fleet.processes.items():
            wait_until(f"{name} counts", lambda url=process.url: counted(url, "glowplug_bus_malformed_total") > 0)
            wait_until(f"{name} counts", lambda url=process.url: counted(url, "glowplug_rows_unreadable") >= 8)
            assert process.ready(), name
            assert "Traceback" not in process.log(), process.log()
        facts = asyncio.run(ask_store(own_valkey.url, ""))
        named = "\n".join(facts.unreadable)
        for table in TABLES:
            assert f"{table}/bytes cannot be read" in named and f"{table}/\\xff\\xfe cannot be read" in named
        assert "decisions is not a log" in named
        assert facts.models.keys() == {"tiny"} and facts.nodes.keys() == {"node-1"}
        rest = fleet.processes["console-1"].url + "/api/v1/fleet"
        shown: dict[str, Any] = json.loads(httpx.get(rest, timeout=30).content)
        assert [row["value"]["key"] for row in shown["models"]] == ["tiny"]
    finally:
        fleet.stop()
