"""`python -m glowplug.services.agent` on real NATS and Valkey: kill -9, outages, own addresses, containers."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import psutil
import pytest

from glowplug.bus.nats_bus import NatsBus
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.engines.process import started_at
from glowplug.events.envelope import Event, from_json
from glowplug.events.subjects import entity_facts
from glowplug.state.port import StoreUnavailable
from glowplug.state.redis_store import RedisStore
from tests.agent_rig import complete, emulated_model, start_command, stop_command, write_weights
from tests.ports import free_ports
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until

T = TypeVar("T")
ARGV = (sys.executable, "-m", "glowplug.services.agent")
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
PORTS = free_ports(4)  # four for each agent; they share every address


class AgentProcess:
    within: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, infra: Infra, node_id: str, **env: str) -> None:
        self.folder, self.node_id = folder, node_id
        self.shm_dir = folder / "shm"
        own = {
            "GLOWPLUG_NODE_ID": node_id,
            "GLOWPLUG_SERVICE_ID": f"agent-{node_id}",
            "GLOWPLUG_STATE_DIR": str(folder / "state"),
            "GLOWPLUG_SHM_DIR": str(self.shm_dir),
            "GLOWPLUG_GPU_BUDGETS": "300MiB",
            "GLOWPLUG_ENGINES": "emulated",
            "GLOWPLUG_PORT": "0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        }
        self.env = {**os.environ, **infra.env, **own, **env}
        self.store = RedisStore(infra.valkey.url)
        self.bus = NatsBus(infra.nats.url, f"test-{node_id}")
        self.facts: list[Event] = []
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen([*self.within, *ARGV], env=self.env, stdout=log, stderr=log)
        return self.process

    async def up(self) -> None:
        began = time.time()
        self.spawn()

        async def beats() -> bool:
            node = await self.node()
            return node is not None and node.heartbeat_at > began

        await until(beats, f"the agent beats; its log:\n{(self.folder / 'agent.log').read_text()[-2000:]}")

    async def listen(self) -> None:
        async def keep(event: Event) -> None:
            self.facts.append(event)

        await self.bus.connect()
        await self.bus.subscribe([entity_facts("instance"), entity_facts("node")], keep, durable=f"t-{self.node_id}")

    async def row(self, table: str, key: str, cls: type[T]) -> T | None:
        try:
            raw = await self.store.get(table, key)
        except StoreUnavailable:
            return None
        return from_json(raw, cls) if raw else None

    async def node(self) -> Node | None:
        return await self.row("nodes", self.node_id, Node)

    async def reaches(self, instance_id: str, state: InstanceState, above: int = 0) -> Instance:
        async def look() -> Instance | None:
            found = await self.row("instances", instance_id, Instance)
            return found if found and found.state is state and found.revision > above else None

        found: Instance = await until(look, f"{instance_id} is {state}")
        return found

    async def run_model(self, instance_id: str) -> Instance:
        model = emulated_model()
        write_weights(self.shm_dir, model, self.node_id)
        await self.bus.publish(start_command(model, instance_id, node_id=self.node_id, epoch=2**62))
        return await self.reaches(instance_id, InstanceState.READY)

    def handles(self) -> dict[str, Any]:
        path = self.folder / "state" / self.node_id / "agent.json"
        found: dict[str, Any] = json.loads(path.read_bytes())["handles"]
        return found

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def __aenter__(self) -> Self:
        await self.listen()
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill_all()
        await self.bus.close()
        await self.store.close()

    def kill_all(self) -> None:
        if self.process is not None:
            self.kill()
        for handle in self.handles().values() if (self.folder / "state" / self.node_id / "agent.json").exists() else ():
            if started_at(handle["pid"]) == handle["pid_started_at"]:
                os.killpg(handle["pid"], signal.SIGKILL)


@pytest.fixture
async def agent(tmp_path: Path, infra: Infra, request: pytest.FixtureRequest) -> AsyncIterator[AgentProcess]:
    node_id = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    async with AgentProcess(tmp_path, infra, node_id) as agent:
        yield agent


async def serves(instance: Instance) -> bool:
    return (await complete(instance.url)).status_code == 200


async def test_kill_9_leaves_engines_and_takes_them_back(agent: AgentProcess) -> None:
    before = await agent.run_model("i-1")
    handle = agent.handles()["i-1"]
    agent.kill()
    assert await serves(before)
    await agent.up()
    after = await agent.reaches("i-1", InstanceState.READY, above=before.revision)
    assert after.url == before.url and agent.handles()["i-1"] == handle and await serves(after)
    await agent.bus.publish(stop_command("i-1", node_id=agent.node_id, epoch=2**62))
    await agent.reaches("i-1", InstanceState.STOPPED)
    assert started_at(handle["pid"]) is None


async def test_kill_9_leaves_what_sleeps_and_it_wakes_afterwards(agent: AgentProcess) -> None:
    await agent.run_model("i-6")
    handle = agent.handles()["i-6"]
    asleep = stop_command("i-6", node_id=agent.node_id, epoch=2**62)
    await agent.bus.publish(replace(asleep, data=replace(asleep.data, becomes="swapped_out")))
    before = await agent.reaches("i-6", InstanceState.SWAPPED_OUT)
    agent.kill()
    await agent.up()
    await agent.reaches("i-6", InstanceState.SWAPPED_OUT, above=before.revision)
    wakes = start_command(emulated_model(), "i-7", node_id=agent.node_id, epoch=2**62)
    await agent.bus.publish(replace(wakes, data=replace(wakes.data, source="i-6")))
    after = await agent.reaches("i-7", InstanceState.READY)
    assert await serves(after) and list(agent.handles()) == ["i-7"] and agent.handles()["i-7"]["pid"] == handle["pid"]


async def test_engine_dead_while_agent_was(agent: AgentProcess) -> None:
    before = await agent.run_model("i-2")
    agent.kill()
    os.killpg(agent.handles()["i-2"]["pid"], signal.SIGKILL)
    await agent.up()
    failed = await agent.reaches("i-2", InstanceState.FAILED, above=before.revision)
    assert "while its agent was down" in failed.reason

    async def is_free() -> bool:
        node = await agent.node()
        return node is not None and node.gpus[0].used_bytes == 0

    await until(is_free, "its bytes are free")


async def test_sigterm_stops_engines_and_leaves(agent: AgentProcess) -> None:
    await agent.run_model("i-3")
    pid = agent.handles()["i-3"]["pid"]
    assert agent.process is not None
    agent.process.terminate()
    assert await asyncio.to_thread(agent.process.wait, 20) == 0
    assert started_at(pid) is None and await agent.node() is None
    await agent.reaches("i-3", InstanceState.STOPPED)

    async def said() -> bool:
        return any(e.type == "node.left" and e.data.node_id == agent.node_id for e in agent.facts)

    await until(said, "node.left is told")


async def test_second_agent_refuses(agent: AgentProcess) -> None:
    assert agent.process is not None
    second = await asyncio.to_thread(subprocess.run, ARGV, env=agent.env, capture_output=True, timeout=WAIT_S)
    assert second.returncode == 1
    last = second.stderr.decode().strip().splitlines()[-1]
    assert (
        last.startswith("glowplug: ") and f"node {agent.node_id} has an agent already (pid {agent.process.pid}" in last
    )
    assert b"Traceback" not in second.stderr


@pytest.fixture
def servers(own_nats: NatsProcess, own_valkey: ValkeyProcess) -> Iterator[Infra]:
    yield Infra(own_nats, own_valkey)


async def test_outage_of_bus_and_store(tmp_path: Path, servers: Infra) -> None:
    """The store gets the changes made meanwhile, even if it returns empty."""
    async with AgentProcess(tmp_path, servers, "outage") as agent:
        ready = await agent.run_model("i-4")
        dead = await agent.run_model("i-5")
        servers.nats.kill()
        servers.valkey.kill()
        os.killpg(agent.handles()["i-5"]["pid"], signal.SIGKILL)
        assert await serves(ready)
        for left in servers.valkey.folder.glob("appendonlydir/*"):
            left.unlink()
        servers.valkey.start()
        servers.nats.start()
        failed = await agent.reaches("i-5", InstanceState.FAILED, above=dead.revision)
        again = await agent.reaches("i-4", InstanceState.READY)
        assert again.url == ready.url and await serves(again) and failed.reason
        await until(agent.node, "the node's row is there again")
        await agent.bus.publish(stop_command("i-4", node_id="outage", epoch=2**62))
        await agent.reaches("i-4", InstanceState.STOPPED)


@pytest.fixture
async def nodes(tmp_path: Path, infra: Infra) -> AsyncIterator[list[AgentProcess]]:
    agents = []
    for k, host in ((1, "127.0.0.2"), (2, "127.0.0.3")):
        folder = tmp_path / host
        folder.mkdir()
        env = {"GLOWPLUG_HOST": host, "GLOWPLUG_ENGINE_PORTS": f"{PORTS}-{PORTS + 1}"}
        agents.append(AgentProcess(folder, infra, f"address-{k}", **env))
    agents[1].env |= {"GLOWPLUG_HOST": "0.0.0.0", "GLOWPLUG_ADVERTISE_HOST": "127.0.0.3"}
    agents[1].env |= {"GLOWPLUG_ENGINE_PORTS": f"{PORTS + 2}-{PORTS + 3}"}
    async with agents[0], agents[1]:
        yield agents


async def test_nodes_and_engines_are_told_by_the_name_others_reach_them_by(nodes: list[AgentProcess]) -> None:
    for agent, url in zip(nodes, ("http://127.0.0.2", "http://127.0.0.3"), strict=True):
        node = await agent.node()
        assert node is not None and node.agent_url.rpartition(":")[0] == url
        instance = await agent.run_model(f"i-{agent.node_id}")
        first = PORTS if url.endswith("2") else PORTS + 2
        assert instance.url == f"{url}:{first}" and await serves(instance)


async def test_an_engine_keeps_its_port_over_a_restart_of_its_agent(nodes: list[AgentProcess]) -> None:
    agent = nodes[1]
    before = await agent.run_model("i-kept")
    agent.kill()
    await agent.up()
    after = await agent.reaches("i-kept", InstanceState.READY, above=before.revision)
    second = await agent.run_model("i-second")
    assert (after.url, second.url) == (f"http://127.0.0.3:{PORTS + 2}", f"http://127.0.0.3:{PORTS + 3}")
    assert await serves(after) and await serves(second)


class Contained(AgentProcess):
    """As PID 1 of a process namespace: when it ends, the kernel ends every process in it."""

    within = (*NAMESPACE, "--kill-child")

    def inside(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0]

    def kill_all(self) -> None:
        if self.process is not None:
            self.kill()


def can_contain() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not can_contain(), reason="needs process namespaces (unshare --pid as root)")
@pytest.mark.parametrize("lost_state", [False, True], ids=["kept", "lost"])
async def test_a_container_started_again_reports_its_engines_failed_and_serves(
    tmp_path: Path, infra: Infra, lost_state: bool
) -> None:
    """Without its state directory, the store still has rows of its node."""
    async with Contained(tmp_path, infra, f"contained-{lost_state}".lower()) as agent:
        before = await agent.run_model(f"i-old-{lost_state}")
        assert agent.process is not None
        os.kill(agent.inside().pid, signal.SIGKILL)
        agent.process.wait()
        assert not await asyncio.to_thread(_anybody_at, before.url)
        if lost_state:
            shutil.rmtree(agent.folder / "state")
        await agent.up()
        failed = await agent.reaches(f"i-old-{lost_state}", InstanceState.FAILED, above=before.revision)
        assert failed.reason
        assert await serves(await agent.run_model(f"i-new-{lost_state}"))


@pytest.mark.skipif(not can_contain(), reason="needs process namespaces (unshare --pid as root)")
async def test_the_first_process_reaps_what_lost_its_parent(tmp_path: Path, infra: Infra) -> None:
    async with Contained(tmp_path, infra, "reaper") as agent:
        first = agent.inside()
        # Its parent, a shell in the namespace, ends at once, so the first process inherits it.
        orphan = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(first.pid), "-p", "-m", "sh", "-c", "setsid sleep 0.2 & true")
        )
        assert await orphan.wait() == 0

        async def inherited() -> bool:
            return any(child.name() == "sleep" for child in first.children())

        async def reaped() -> bool:
            return not any(child.name() == "sleep" for child in first.children())

        await until(inherited, "the orphan is a child of the agent")
        await until(reaped, "the orphan is reaped")


def _anybody_at(url: str) -> bool:
    port = int(url.rsplit(":", 1)[1])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr[1] == port]
    return any(started_at(c.pid) is not None for c in listening if c.pid)
