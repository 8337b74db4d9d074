"""One agent with real (emulated) engine processes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from glowplug.domain.engine_key import engine_key
from glowplug.domain.hardware import CachedWeights, Link, Node
from glowplug.domain.instance import InstanceState, PhaseName
from glowplug.engines.process import started_at
from glowplug.events.envelope import from_json
from glowplug.services.agent.main import make
from glowplug.weights.inventory import DiskContent, write_disk, write_links
from tests.agent_rig import (
    NODE,
    AgentRig,
    complete,
    emulated_model,
    start_command,
    stop_command,
    until_runs,
    write_weights,
)
from tests.contract.continuation_rig import decoded
from tests.contract.data_port_rig import a_rig, post
from tests.contract.test_data_port_moves import outcomes
from tests.fleet_builder import MIB
from tests.waiting import WAIT_S, until


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[AgentRig]:
    rig = AgentRig(tmp_path, **getattr(request, "param", {}))
    await rig.start()
    yield rig
    rig.store.down = rig.broker.down = False
    rig.settings.engines_on_stop = "stop"
    await rig.service.stop()


def set_to(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", [settings], indirect=True, ids=[""])


async def started(rig: AgentRig, *, mib: int = 100) -> str:
    return (await rig.run(emulated_model(mib=mib))).url


async def test_start_serve_drain_stop(rig: AgentRig) -> None:
    model = emulated_model(mib=100)
    await rig.send(start_command(model, "i-1"))
    await rig.reaches("i-1", InstanceState.STARTING)
    await until(lambda: rig.handle("i-1"), "the engine process starts before its weights are there")
    assert rig.used_bytes() == 100 * MIB
    write_weights(rig.settings.shm_dir, model)
    ready = await rig.reaches("i-1", InstanceState.READY)
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = await client.post(f"{ready.url}/v1/chat/completions", json=asked)
    assert answer.status_code == 200 and answer.json()["choices"]
    assert ready.emulated and ready.decision_id == "d-i-1"
    assert [p.name for p in ready.phases] == [name for name in PhaseName if name is not PhaseName.ROOM]
    assert all(p.ended_at >= p.started_at for p in ready.phases)
    pid = rig.handle("i-1")["pid"]
    stopped = await rig.stop("i-1")
    assert started_at(pid) is None and rig.used_bytes() == 0
    states = ("starting", "loading", "ready", "draining", "stopped")
    assert rig.facts("i-1") == [f"instance.{state}" for state in states]
    assert (await until(lambda: rig.row("i-1") == stopped, "the store has the end")) is True


@set_to(inventory_s=0.02)
async def test_the_nodes_beats_carry_what_its_prefetcher_has_on_disk(rig: AgentRig) -> None:
    copy = CachedWeights(digest="d" * 64, num_bytes=7, model_keys=("m",))
    write_disk(rig.settings.shm_dir, NODE, DiskContent(copies=(copy,), bytes_per_s=2e9))
    await until(lambda: rig.service.controller.node(0.0).on_disk == (copy,))
    assert rig.service.controller.node(0.0).disk_bytes_per_s == 2e9


@set_to(inventory_s=60.0, prefetcher_url="http://127.0.0.1:1")
async def test_links_that_a_prefetcher_says_after_its_agent_began_are_known_soon(rig: AgentRig) -> None:
    nic = Link(link_id=f"{NODE}/nic", bytes_per_s=1e7)
    await asyncio.sleep(0.05)
    write_links(rig.settings.shm_dir, NODE, [nic])
    await until(lambda: from_json(rig.store.tables["nodes"][NODE], Node).links == (nic,))


@set_to(engine_secret="s", health_every_s=0.05)
async def test_with_a_secret_an_engine_answers_only_who_makes_its_key(rig: AgentRig) -> None:
    url = await started(rig)
    ready = rig.instance("i-1")
    assert ready is not None and ready.key_id
    assert (await until(lambda: rig.row("i-1") == ready, "the store has it")) is True
    row = str(msgspec.to_builtins(ready))
    key = engine_key("s", ready.key_id)
    assert key not in row
    refused = await complete(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await complete(url, headers={"authorization": f"Bearer {key}"})).status_code == 200
    await rig.stop("i-1")


async def test_a_drain_waits_for_what_runs(rig: AgentRig) -> None:
    url = (await rig.run(emulated_model(engine_args={"time_scale": 1.0, "launch_s": 0, "warmup_s": 0}))).url
    request = asyncio.create_task(complete(url, max_tokens=40, ignore_eos=True))
    await until_runs(url)
    await rig.send(stop_command("i-1"))
    await rig.reaches("i-1", InstanceState.DRAINING)
    answer = await request
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 40
    await rig.reaches("i-1", InstanceState.STOPPED)


async def test_a_stream_leaves_an_instance_before_its_drain_ends(rig: AgentRig) -> None:
    """It continues elsewhere with the same tokens, so the drained engine is free early."""
    model = emulated_model(engine_args={"time_scale": 0.3, "launch_s": 0, "warmup_s": 0})
    asked = {"model": model.name, "prompt": "tell", "max_tokens": 110, "ignore_eos": True}
    await rig.run(model, "i-1")
    async with a_rig(models=(model,), params={"move_within_s": 10.0}) as router:
        known = 0

        def passes_on() -> bool:
            nonlocal known
            for event in rig.broker.published[known:]:
                if event.type.startswith("instance."):
                    router.table.do(router.table.controller.handle(event, router.table.clock()))
            known = len(rig.broker.published)
            router.tick()
            row = rig.row("i-1")
            return row is not None and row.state is InstanceState.STOPPED

        passes_on()
        other = await rig.run(model, "i-2")
        expected = asyncio.create_task(complete(other.url, **{k: asked[k] for k in ("max_tokens", "ignore_eos")}))
        client = await router.sent(post("/v1/completions", json.dumps({**asked, "stream": True}).encode()))
        await client.head()
        got = await client.chunk()
        await rig.send(stop_command("i-1", grace_s=6.0))  # after as long as it has left
        await until(passes_on, "the first engine is free")
        assert router.table.exchanges, "the stream goes on"
        text = "".join(one["choices"][0]["text"] for one in decoded(got + await client.rest()) if one != "[DONE]")
        assert text == (await expected).json()["choices"][0]["text"]
        assert not router.published, "nothing waited for a start"
        assert outcomes(router) == {("drained", "continued"): 1.0} and router.finished[0].num_continued == 1
    deadline_at = next(e.data.instance.drain_ends_at for e in rig.broker.published if e.type == "instance.draining")
    stopped = rig.row("i-1")
    assert stopped is not None and stopped.spells[0].name == "drain" and stopped.spells[0].ended_at < deadline_at


@set_to(engine_overhead_bytes=100 * MIB, engine_memory_s=0.02)
async def test_an_engine_that_takes_too_much_memory_is_ended_with_a_reason(rig: AgentRig) -> None:
    model = emulated_model(engine_args={"time_scale": 50.0, "faults": {"grow_bytes_per_token": 8 * MIB}})
    url = (await rig.run(model)).url
    pid = rig.handle("i-1")["pid"]
    with pytest.raises(httpx.HTTPError):
        await complete(url, max_tokens=1000, ignore_eos=True)
    failed = await rig.reaches("i-1", InstanceState.FAILED)
    assert "MiB of host memory, more than its limit of " in failed.reason and "OVERHEAD_BYTES" in failed.reason
    await until(lambda: rig.used_bytes() == 0, "the ledger is free")
    assert started_at(pid) is None
    assert rig.broker.of_type("instance.failed")[-1].data.instance.reason == failed.reason


@set_to(health_every_s=0.05, health_timeout_s=0.5, health_misses=3)
async def test_hung_engine_is_replaced_by_a_failure(rig: AgentRig) -> None:
    await started(rig)
    pid = rig.handle("i-1")["pid"]
    os.kill(pid, signal.SIGSTOP)
    failed = await rig.reaches("i-1", InstanceState.FAILED)
    assert "its engine hangs" in failed.reason
    await until(lambda: started_at(pid) is None and rig.used_bytes() == 0, "the hung process is killed")


async def test_a_start_goes_on_after_kill_9(rig: AgentRig) -> None:
    model = emulated_model()
    await rig.send(start_command(model, "i-1"))
    first = await until(lambda: rig.handle("i-1"), "the engine launches")
    await rig.crash()
    await rig.start()
    write_weights(rig.settings.shm_dir, model)
    await rig.reaches("i-1", InstanceState.READY)
    assert rig.handle("i-1")["pid"] != first["pid"] and started_at(first["pid"]) is None


@pytest.mark.parametrize("schema", [None, 1])
async def test_engines_nobody_knows_are_killed(rig: AgentRig, schema: int | None) -> None:
    """The agent lost its memory, or another version's schema wrote it."""
    await started(rig)
    pid = rig.handle("i-1")["pid"]
    await rig.crash()
    memory = rig.settings.node_dir / "agent.json"
    if schema is None:
        memory.unlink()
    else:
        memory.write_text(json.dumps(json.loads(memory.read_bytes()) | {"schema": schema}))
    await rig.start()
    await until(lambda: started_at(pid) is None, "the orphan is killed")
    await until(lambda: (row := rig.row("i-1")) and row.state is InstanceState.FAILED, "its row ends")


async def test_stop_leaves_no_engine_even_when_the_drain_is_cut(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, drain_s=0.0, stop_grace_s=0.0)
    await rig.start()
    await started(rig)
    pid = rig.handle("i-1")["pid"]
    rig.service.shell.restored = False  # as if the store had never answered
    await rig.service.stop()
    assert started_at(pid) is None


async def test_engines_may_be_left(rig: AgentRig) -> None:
    await started(rig)
    pid = rig.handle("i-1")["pid"]
    rig.settings.engines_on_stop = "leave"
    await rig.service.stop()
    assert started_at(pid) is not None and not rig.broker.of_type("node.left")
    await rig.start()
    assert (await rig.reaches("i-1", InstanceState.READY)).url


async def test_rest(rig: AgentRig) -> None:
    rig.settings.admin_token = "secret"
    await started(rig)
    transport = httpx.ASGITransport(app=make(rig.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        rows = (await client.get("/v1/instances")).json()["data"]
        assert [row["instance_id"] for row in rows] == ["i-1"] and rows[0]["emulated"]
        assert (await client.get("/v1/instances/none")).json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/instances/i-1/logs?tail=5")).status_code == 401
        given = {"Authorization": "Bearer secret"}
        assert (await client.get("/v1/instances/i-1/logs?tail=5", headers=given)).status_code == 200
        assert (await client.get("/v1/instances/i-1/logs?tail=x", headers=given)).status_code == 400
        (gpu,) = (await client.get("/v1/gpus")).json()["data"]
        assert gpu["bytes_by_owner"] == {"weights": 100 * MIB} and gpu["free_bytes"] == 200 * MIB
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/instances/i-1/stop")).status_code == 401
        stopped = await client.post("/v1/instances/i-1/stop?grace_s=1", headers=given)
        assert stopped.status_code == 202 and stopped.json()["state"] == "draining"
    await rig.reaches("i-1", InstanceState.STOPPED)
