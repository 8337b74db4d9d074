"""Two agents as on two machines: each on its own address, the same range of ports; and an agent that is the first
process of its container, whose end takes its engines along."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from glowplug.domain.instance import InstanceState
from glowplug.engines.process import started_at
from tests.integration.test_agent_process import AgentProcess, serves
from tests.ports import free_ports
from tests.servers import Infra
from tests.waiting import until

PORTS = free_ports(4)  # two for each agent: every address is the first one's too, on one machine


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
    for agent in agents:
        await agent.listen()
        await agent.up()
    yield agents
    for agent in agents:
        agent.kill_all()
        await agent.bus.close()
        await agent.store.close()


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
    assert agent.process is not None
    agent.process.kill()
    agent.process.wait()
    await agent.up()
    after = await agent.reaches("i-kept", InstanceState.READY, above=before.revision)
    second = await agent.run_model("i-second")
    assert (after.url, second.url) == (f"http://127.0.0.3:{PORTS + 2}", f"http://127.0.0.3:{PORTS + 3}")
    assert await serves(after) and await serves(second)


class Contained(AgentProcess):
    """An agent as PID 1 of a process namespace: when it ends the kernel ends everything in it."""

    def spawn(self) -> subprocess.Popen[bytes]:
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "services.agent"],
                env=self.env,
                stdout=log,
                stderr=log,
            )
        return self.process

    def inside(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0]

    def kill_all(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def can_contain() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not can_contain(), reason="needs process namespaces (unshare --pid as root)")
@pytest.mark.parametrize("lost_state", [False, True], ids=["kept", "lost"])
async def test_a_container_started_again_reports_its_engines_failed_and_serves(
    tmp_path: Path, infra: Infra, lost_state: bool
) -> None:
    """Whether or not its state directory survives: without, the store still has rows of its node."""
    agent = Contained(tmp_path, infra, f"contained-{lost_state}".lower())
    try:
        await agent.listen()
        await agent.up()
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
    finally:
        agent.kill_all()
        await agent.bus.close()
        await agent.store.close()


@pytest.mark.skipif(not can_contain(), reason="needs process namespaces (unshare --pid as root)")
async def test_the_first_process_reaps_what_lost_its_parent(tmp_path: Path, infra: Infra) -> None:
    agent = Contained(tmp_path, infra, "reaper")
    try:
        await agent.listen()
        await agent.up()
        first = agent.inside()
        # Its parent, a shell in the namespace, ends at once: the first process inherits it.
        orphan = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(first.pid), "-p", "-m", "sh", "-c", "setsid sleep 0.2 & true")
        )
        assert await orphan.wait() == 0

        async def inherited() -> bool:
            return any(child.name() == "sleep" for child in first.children())

        async def reaped() -> bool:
            return not any(child.name() == "sleep" for child in first.children())

        await until(inherited, "the orphan is a child of the agent", 5.0)
        await until(reaped, "the orphan is reaped")
    finally:
        agent.kill_all()
        await agent.bus.close()
        await agent.store.close()


def _anybody_at(url: str) -> bool:
    port = int(url.rsplit(":", 1)[1])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr[1] == port]
    return any(started_at(c.pid) is not None for c in listening if c.pid)
