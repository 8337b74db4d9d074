"""The prefetcher as a process: real NATS, Valkey and weight servers, kill -9 midway."""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.bus.nats_bus import NatsBus
from glowplug.cli import pull
from glowplug.cli.client import FleetClient
from glowplug.cli.terminal import CliError
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model, WeightsRef
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.envelope import Event, to_json
from glowplug.events.subjects import entity_facts
from glowplug.state.redis_store import RedisStore
from glowplug.weights.inventory import read_cached, read_disk, read_links
from glowplug.weights.region import Region, RegionFailure, RegionState, RegionStatus, region_digest
from tests.fleet_builder import a_model, an_instance
from tests.ha_fleet import Process
from tests.hub_server import HubServer
from tests.ports import free_port
from tests.servers import Infra
from tests.waiting import WAIT_S, until
from tests.weight_servers import WeightServer

DATA = random.Random(11).randbytes(3_000_000)
SHA = hashlib.sha256(DATA).hexdigest()
TOKEN = "let-me-in"
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@dataclass
class Prefetcher:
    node_id: str
    shm_dir: Path
    process: Process
    bus: NatsBus
    store: RedisStore
    epoch: int = 1
    facts: list[Event] = field(default_factory=list)

    async def start(self, **settings: object) -> "Prefetcher":
        self.process.env |= {f"GLOWPLUG_{k.upper()}": str(v) for k, v in settings.items()}
        self.process.start()
        await until(self.process.ready)
        return self

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.process.url + path, timeout=WAIT_S)

    async def send(self, payload: Any, epoch: int | None = None, event_id: str = "") -> None:
        event = Event(
            event_id=event_id or uuid.uuid4().hex,
            type=payload.TYPE,
            occurred_at=0.0,
            issuer="placer-1",
            data=payload,
            traceparent=TRACE,
            epoch=self.epoch if epoch is None else epoch,
        )
        await self.bus.publish(event)

    async def fetch(self, ref: WeightsRef, instance_id: str = "", model_key: str = "m", **more: Any) -> None:
        await self.send(
            FetchWeights(target=self.node_id, model_key=model_key, weights=ref, instance_id=instance_id, **more)
        )

    def state(self, ref: WeightsRef, instance_id: str = "") -> RegionStatus:
        return self.region(ref).read_state(instance_id)

    async def until_state(self, ref: WeightsRef, state: RegionState, instance_id: str = "") -> RegionStatus:
        await until(lambda: self.state(ref, instance_id).state is state)
        return self.state(ref, instance_id)

    async def until_complete(self, ref: WeightsRef, instance_id: str = "") -> RegionStatus:
        return await self.until_state(ref, RegionState.COMPLETE, instance_id)

    async def fetched(self, ref: WeightsRef, instance_id: str = "", model_key: str = "m") -> RegionStatus:
        await self.fetch(ref, instance_id, model_key)
        return await self.until_complete(ref, instance_id)

    async def until_failed(self, ref: WeightsRef, instance_id: str) -> RegionFailure:
        failure = (await self.until_state(ref, RegionState.FAILED, instance_id)).failure
        assert failure is not None
        return failure

    def region(self, ref: WeightsRef) -> Region:
        return Region.at(self.shm_dir, self.node_id, region_digest(ref))

    def received(self, kind: str) -> list[Any]:
        return [e.data for e in self.facts if e.type == kind and e.data.node_id == self.node_id]


@pytest.fixture
async def prefetcher(infra: Infra, tmp_path: Path) -> AsyncIterator[Prefetcher]:
    node_id = f"node-{uuid.uuid4().hex[:6]}"
    env = {
        **os.environ,
        **infra.env,
        "GLOWPLUG_PORT": str(free_port()),
        "GLOWPLUG_NODE_ID": node_id,
        "GLOWPLUG_SHM_DIR": str(tmp_path / "shm"),
        "GLOWPLUG_SERVICE_ID": f"prefetcher-{node_id}",
        "GLOWPLUG_ADMIN_TOKEN": TOKEN,
        "GLOWPLUG_FETCH_CHUNK_BYTES": "65536",
        "GLOWPLUG_RESYNC_S": "0.3",
    }
    bus, store = NatsBus(infra.nats.url, "test"), RedisStore(infra.valkey.url)
    await bus.connect()
    process = Process("prefetcher", "glowplug.services.prefetcher", env, tmp_path / "prefetcher.log")
    made = Prefetcher(node_id, tmp_path / "shm", process, bus, store)

    async def receive(event: Event) -> None:
        made.facts.append(event)

    await bus.subscribe([entity_facts("weights")], receive)
    yield made
    made.process.kill()
    await bus.close()
    await store.close()


async def test_cold_fetch_then_a_hit_then_a_drop(prefetcher: Prefetcher) -> None:
    await prefetcher.start()
    with WeightServer(DATA) as server:
        ref = WeightsRef(uri=server.url, sha256=SHA, num_bytes=len(DATA))
        status = await prefetcher.fetched(ref, model_key="one")
        assert status.info and Path(status.info.path).read_bytes() == DATA
        await until(lambda: prefetcher.received("weights.fetched"))
        num_requests = len(server.requests)
        await prefetcher.fetch(ref, model_key="two")
        await until(lambda: len(prefetcher.received("weights.fetched")) == 2)
        assert len(server.requests) == num_requests
    assert [f.source for f in prefetcher.received("weights.fetched")] == ["http", "cache"]
    assert all(
        e.traceparent.split("-")[1] == "a" * 32 for e in prefetcher.facts if e.data.node_id == prefetcher.node_id
    )
    (cached,) = read_cached(prefetcher.shm_dir, prefetcher.node_id)
    assert (cached.digest, cached.num_bytes, cached.model_keys) == (SHA, len(DATA), ("one", "two"))
    await until(lambda: read_links(prefetcher.shm_dir, prefetcher.node_id)[0].bytes_in_flight == 0)
    body = prefetcher.get("/v1/cache").json()
    assert body["used_bytes"] == len(DATA) and body["data"][0]["model_keys"] == ["one", "two"]
    metrics, node = prefetcher.get("/metrics").text, prefetcher.node_id
    fetched = f'glowplug_fetched_bytes_total{{node="{node}",source="http"}} {float(len(DATA))}'
    assert fetched in metrics.replace("3e+06", "3000000.0")
    assert f'glowplug_cache_hits_total{{node="{node}"}} 1.0' in metrics
    assert f'glowplug_cache_misses_total{{node="{node}"}} 1.0' in metrics
    await dropped_over_rest(prefetcher)


async def test_weights_are_pulled_over_rest(prefetcher: Prefetcher, tmp_path: Path) -> None:
    """With the command line's own steps."""
    fleet = FleetClient({}, admin_token=TOKEN)
    node = {"node_id": prefetcher.node_id, "prefetcher_url": prefetcher.process.url}

    async def pulled(uri: str) -> dict[str, Any]:
        return await asyncio.to_thread(pull._onto, fleet, node, pull.PullTarget(WeightsRef(uri=uri)), True)

    with HubServer({"org/one": {"one.gguf": DATA}}) as hub:
        prefetcher.process.env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        await prefetcher.start()
        row = await pulled("hf://org/one")
        assert (row["where"], row["num_bytes"], row["source"]) == (prefetcher.node_id, len(DATA), "hf")
        assert (await pulled("hf:org/one"))["source"] == "cache"
        with pytest.raises(CliError, match=r"no such repository.*\(weights_unavailable\)"):
            await pulled("hf:org/other")
    with pytest.raises(CliError, match=r"no source reads oci: .*\(bad_request\)"):
        await pulled("oci://org/one")
    with pytest.raises(CliError, match=r"begins with a slash \(bad_request\)"):
        await pulled("file:w.gguf")
    (cached,) = read_cached(prefetcher.shm_dir, prefetcher.node_id)
    assert cached.model_keys == ("org-one",)
    assert prefetcher.get("/v1/fetches/none").status_code == 404
    absent = prefetcher.get(f"/v1/fetches/{'0' * 64}").json()
    assert (absent["stage"], absent["num_bytes"], absent["message"]) == ("absent", 0, "")
    body = {"weights": {"uri": "hf:org/one"}}
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        assert (await client.post(f"{prefetcher.process.url}/v1/fetches", json=body)).status_code == 401


async def dropped_over_rest(prefetcher: Prefetcher) -> None:
    url = f"{prefetcher.process.url}/v1/cache/{SHA}/drop"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        assert (await client.post(url)).status_code == 401
        assert (await client.post(url, headers=headers)).status_code == 200
        again = await client.post(url, headers=headers)
    assert again.status_code == 404 and again.json()["error"]["code"] == "not_found"
    await until(lambda: not read_cached(prefetcher.shm_dir, prefetcher.node_id))


@pytest.mark.parametrize(
    ("data", "status", "code"), [(DATA[:-1] + b"?", 0, "weights_corrupt"), (DATA, 404, "weights_unavailable")]
)
async def test_failures_are_written_down_with_their_reason(
    prefetcher: Prefetcher, data: bytes, status: int, code: str
) -> None:
    await prefetcher.start()
    with WeightServer(data, statuses=[status] * 20 if status else []) as server:
        ref = WeightsRef(uri=server.url, sha256=SHA)
        await prefetcher.fetch(ref, "i-1")
        failure = await prefetcher.until_failed(ref, "i-1")
        assert failure.code == code
        assert prefetcher.state(ref, "i-2").state is RegionState.ABSENT
        await until(lambda: prefetcher.received("weights.fetch_failed"))
        assert prefetcher.received("weights.fetch_failed")[0].code == code
        server.data, server.statuses, server.etag = DATA, [], '"v2"'
        await prefetcher.fetched(ref, "i-2")


async def test_killed_midway_it_resumes_by_itself(prefetcher: Prefetcher) -> None:
    """No repeated command: the restarted process finds the instance in the tables."""
    data = DATA * 28  # more parts than are fetched at once
    with WeightServer(data, step_s=0.01) as server:
        ref = WeightsRef(uri=server.url, sha256=hashlib.sha256(data).hexdigest())
        model: Model = a_model(f"m-{prefetcher.node_id}", weights=ref)
        instance = an_instance(
            f"i-{prefetcher.node_id}", model.key, InstanceState.STARTING, gpu_id=f"{prefetcher.node_id}/0"
        )
        await prefetcher.store.put("models", model.key, to_json(model))
        await prefetcher.store.put("instances", instance.instance_id, to_json(instance))
        await prefetcher.start()
        await prefetcher.fetch(ref, instance.instance_id, model.key)
        region = prefetcher.region(ref)
        await until(lambda: sum(b - a for a, b in region.read_meta().get("landed", [])) >= 500_000)
        prefetcher.process.kill()
        assert region.read_state().state is RegionState.FETCHING
        kept = sum(b - a for a, b in region.read_meta()["landed"])
        server.step_s, before = 0.0, server.bytes_sent
        await prefetcher.start()
        await prefetcher.until_complete(ref, instance.instance_id)
        assert server.bytes_sent - before <= len(data) - kept + 500_000
    await prefetcher.store.delete("models", model.key)
    await prefetcher.store.delete("instances", instance.instance_id)


async def test_complete_regions_are_adopted_and_damaged_ones_are_not(prefetcher: Prefetcher) -> None:
    await prefetcher.start()
    with WeightServer(DATA) as server:
        good, bad = WeightsRef(uri=server.url), WeightsRef(uri=server.url + "?2")
        await prefetcher.fetch(good)
        await prefetcher.fetch(bad)
        await prefetcher.until_complete(good)
        await prefetcher.until_complete(bad)
        prefetcher.process.kill()
        with (prefetcher.region(bad).blob).open("ab") as blob:
            blob.truncate(10)
        await prefetcher.start()
        digests = [c["digest"] for c in prefetcher.get("/v1/cache").json()["data"] if c["complete"]]
        assert digests == [region_digest(good)]
        assert prefetcher.state(bad).state is RegionState.ABSENT
        num_requests = len(server.requests)
        await prefetcher.fetched(bad, "i-9")
        assert len(server.requests) > num_requests
        assert prefetcher.region(bad).blob.read_bytes() == DATA


async def test_a_drop_cancels_a_fetch_on_its_way(prefetcher: Prefetcher) -> None:
    await prefetcher.start()
    with WeightServer(DATA, step_s=0.05) as server:
        ref = WeightsRef(uri=server.url)
        await prefetcher.fetch(ref, "i-1")
        await prefetcher.until_state(ref, RegionState.FETCHING)
        await prefetcher.send(DropWeights(target=prefetcher.node_id, digest=region_digest(ref), reason="not wanted"))
        failure = await prefetcher.until_failed(ref, "i-1")
        assert failure.message == "the fetch was given up: not wanted"
        await until(lambda: prefetcher.get("/v1/fetches").json()["data"] == [])
        assert prefetcher.get("/v1/cache").json()["used_bytes"] == 0
        assert not prefetcher.region(ref).blob.exists()


async def test_two_slow_sources_hold_up_no_start_and_are_read_on_after_it(prefetcher: Prefetcher) -> None:
    await prefetcher.start()
    with WeightServer(DATA * 8, step_s=1.0) as slow, WeightServer(DATA) as quick:
        slow_ones = [WeightsRef(uri=f"{slow.url}?{number}") for number in range(2)]
        for ref in slow_ones:
            await prefetcher.fetch(ref)
            await prefetcher.until_state(ref, RegionState.FETCHING)
        await prefetcher.fetched(WeightsRef(uri=quick.url), "i-1")
        assert RegionState.COMPLETE not in {prefetcher.state(ref).state for ref in slow_ones}
        slow.step_s = 0.0
        for ref in slow_ones:
            await prefetcher.until_complete(ref)


async def test_it_knows_the_rate_of_the_link_once_ready_and_stops_clean_on_sigterm(prefetcher: Prefetcher) -> None:
    await prefetcher.start(link_bytes_per_s=1e7)
    (link,) = read_links(prefetcher.shm_dir, prefetcher.node_id)
    assert link.bytes_per_s == 1e7
    prefetcher.process.signal(signal.SIGTERM)
    assert prefetcher.process.process is not None
    assert await asyncio.to_thread(prefetcher.process.process.wait, 10) == 0


async def test_weights_that_were_mended_at_their_source_replace_the_copy(
    prefetcher: Prefetcher, tmp_path: Path
) -> None:
    """No checksum pins them: a local file is compared with its source unprompted, a web server's at its next use."""
    await prefetcher.start(recheck_s=0.2)
    file = tmp_path / "w.gguf"
    file.write_bytes(b"garbage")
    with WeightServer(b"garbage") as server:
        for num, uri in enumerate((str(file), server.url)):
            ref = WeightsRef(uri=uri)
            await prefetcher.fetched(ref)
            file.write_bytes(DATA)
            if num:
                server.data, server.etag = DATA, '"v2"'
                await prefetcher.fetch(ref)
            await until(lambda num=num: len(prefetcher.received("weights.evicted")) > num)
            assert prefetcher.received("weights.evicted")[num].reason == "its source has changed"
            status = await prefetcher.fetched(ref, "i-1")
            assert status.info and status.info.sha256 == SHA


async def test_a_fetch_is_told_in_the_commands_trace_with_its_retries(prefetcher: Prefetcher) -> None:
    with WeightServer(DATA, cuts=[100_000, 1]) as server:
        await prefetcher.start()
        await prefetcher.fetched(WeightsRef(uri=server.url + "?X-Signature=secret", sha256=SHA), "i-1")
        (fact,) = await until(lambda: prefetcher.received("weights.fetched"))
    assert (fact.num_bytes, fact.source, fact.num_retries) == (len(DATA), "http", 1)
    assert "secret" not in str(prefetcher.facts) and prefetcher.facts[-1].traceparent.split("-")[1] == "a" * 32


async def test_a_node_reads_from_another_what_the_registry_does_not_give(
    prefetcher: Prefetcher, infra: Infra, tmp_path: Path
) -> None:
    """The registry gives the second node only errors."""
    other_id = f"node-{uuid.uuid4().hex[:6]}"
    with WeightServer(DATA) as server:
        ref = WeightsRef(uri=server.url, sha256=SHA)
        await prefetcher.start()
        await prefetcher.fetched(ref)
        own = {"PORT": free_port(), "NODE_ID": other_id, "SERVICE_ID": f"prefetcher-{other_id}"}
        env = prefetcher.process.env | {f"GLOWPLUG_{name}": str(value) for name, value in own.items()}
        process = Process("prefetcher", "glowplug.services.prefetcher", env, tmp_path / "other.log")
        other = Prefetcher(other_id, prefetcher.shm_dir, process, prefetcher.bus, prefetcher.store)
        try:
            await other.start()
            route = f"/v1/regions/{region_digest(ref)}"
            assert prefetcher.get(route).status_code == prefetcher.get(f"{route}/bytes").status_code == 401
            server.statuses += [503] * 1000
            await other.fetch(ref, "i-2", peers=("http://127.0.0.1:9", prefetcher.process.url))
            await other.until_complete(ref, "i-2")
            assert other.region(ref).blob.read_bytes() == DATA
            read = f'glowplug_fetched_bytes_total{{node="{other_id}",source="peer"}} 3e+06'
            await until(lambda: read in other.get("/metrics").text)
            served = f'glowplug_peer_served_bytes_total{{node="{prefetcher.node_id}"}} 3e+06'
            assert served in prefetcher.get("/metrics").text
        finally:
            process.kill()


async def until_on_disk(prefetcher: Prefetcher, ref: WeightsRef) -> dict[str, Any]:
    def row() -> dict[str, Any]:
        rows = prefetcher.get("/v1/tiers").json()["data"]
        return next((r for r in rows if r["digest"] == region_digest(ref) and "disk" in r["tiers"]), {})

    return await until(row)


async def test_weights_that_left_host_memory_are_read_from_disk(prefetcher: Prefetcher, tmp_path: Path) -> None:
    """Host memory holds one of two, and the source is slow."""
    disk = tmp_path / "disk"
    sizes = {"host_cache_bytes": len(DATA) + 1000, "disk_cache_bytes": 4 * len(DATA), "copy_after_s": 0.0}
    await prefetcher.start(disk_cache_dir=disk, **sizes)
    with WeightServer(DATA, step_s=0.02) as server:
        first, second = WeightsRef(uri=server.url + "?1"), WeightsRef(uri=server.url + "?2", sha256=SHA)
        await prefetcher.fetched(first, model_key="one")
        row = await until_on_disk(prefetcher, first)
        assert row["tiers"] == ["memory", "disk"] and row["model_keys"] == ["one"]
        assert [(m["source"], m["target"]) for m in row["moves"]] == [("memory", "disk"), ("remote", "memory")]
        assert all(m["num_bytes"] == len(DATA) and m["seconds"] > 0 for m in row["moves"])
        assert row["expected_s"]["disk"] < row["expected_s"]["remote"]
        shown = await until(lambda: read_disk(prefetcher.shm_dir, prefetcher.node_id).copies)
        assert [copy.digest for copy in shown] == [row["digest"]], "to the agent, and so to the fleet"
        await prefetcher.fetched(second)
        await until_on_disk(prefetcher, second)
        prefetcher.process.kill()
        torn = disk / prefetcher.node_id / f"{'9' * 64}.part"
        torn.mkdir()
        await prefetcher.start()
        assert (await until_on_disk(prefetcher, first))["tier"] == "disk" and not torn.exists()
        sent = server.bytes_sent
        await prefetcher.fetched(first, "i-1")
        assert prefetcher.region(first).blob.read_bytes() == DATA
        await until(lambda: [f.source for f in prefetcher.received("weights.fetched")] == ["http", "http", "disk"])
        assert server.bytes_sent - sent <= 1, "it was asked whether it has changed, and nothing else"
    read = 'glowplug_fetch_seconds_count{source="disk"} 1.0'
    await until(lambda: read in prefetcher.get("/metrics").text)
    await until(lambda: "a copy stays on disk" in prefetcher.received("weights.evicted")[-1].reason)


async def test_no_directory_for_weights_is_one_clear_line(prefetcher: Prefetcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    env = {**prefetcher.process.env, "GLOWPLUG_SHM_DIR": str(tmp_path / "file/shm")}
    argv = [sys.executable, "-m", "glowplug.services.prefetcher"]
    run = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1] == (
        f"glowplug: cannot keep weights in GLOWPLUG_SHM_DIR={tmp_path / 'file/shm'}: Not a directory"
    )
