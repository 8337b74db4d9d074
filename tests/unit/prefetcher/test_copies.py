"""A prefetcher's controller, fetch tasks and disk, without a bus."""

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.model import WeightsRef
from glowplug.events.commands import FetchWeights
from glowplug.events.facts import WeightsFetched
from glowplug.services.prefetcher.fetcher import Fetcher
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.weights import disk
from glowplug.weights.disk import DiskCopies
from glowplug.weights.region import Region, region_digest
from tests.fleet_builder import an_event
from tests.small_disk import small_disk
from tests.waiting import WAIT_S
from tests.weight_servers import WeightServer

DATA = random.Random(6).randbytes(900_001)


@dataclass
class Node:
    """`step` gives a stimulus and performs its effects. Time counts steps."""

    root: Path
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    now_s: float = 0.0
    sources: list[str] = field(default_factory=list)  # of weights.fetched
    queue: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)

    def start(self, **params: Any) -> None:
        copies = DiskCopies(self.root / "disk", "node-1")
        assert copies.found() == ()
        given = {"capacity_bytes": 1_000_000, "disk_bytes": 4_000_000, "copy_after_s": 0.0} | params
        self.controller = PrefetcherController("node-1", PrefetcherParams(**given), digest_of=region_digest)
        metrics = PrefetcherMetrics("node-1", self.registry)
        self.fetcher = Fetcher(self.root / "shm", "node-1", self.queue.put, metrics, copies=copies)
        self.copies, self.executors = copies, self.fetcher.executors()

    async def step(self, stimulus: Any) -> None:
        self.now_s += 1.0
        for effect in self.controller.handle(stimulus, self.now_s):
            if type(effect) in self.executors:
                await self.executors[type(effect)](effect, None)
            elif isinstance(effect, Publish) and isinstance(effect.payload, WeightsFetched):
                self.sources.append(effect.payload.source)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                await self.step(await self.queue.get())

    async def bring(self, ref: WeightsRef) -> None:
        num = len(self.sources)
        command = FetchWeights(target="node-1", model_key="m", weights=ref)
        await self.step(an_event(command, issuer="placer-1", epoch=1))
        await self.until(lambda: len(self.sources) > num)

    async def copy(self) -> None:
        """Wait for a copy or its failure."""
        await self.step(Tick())
        await self.until(lambda: not self.controller.disk.is_writing)

    def region(self, ref: WeightsRef) -> Region:
        return self.fetcher.region(region_digest(ref))

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"node": "node-1", **labels}) or 0.0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A copy is worth it however long the disk takes: a busy machine's may take longer than the server beside it."""
    made = Node(tmp_path)
    made.start(disk_gain=0.0)
    yield made
    await made.fetcher.close()


async def test_two_sets_of_weights_take_turns_in_host_memory_and_come_back_from_disk(node: Node) -> None:
    with WeightServer(DATA, step_s=0.006) as server:
        refs = [WeightsRef(uri=f"{server.url}?{n}") for n in range(2)]
        for ref in [*refs, *refs]:
            await node.bring(ref)
            await node.copy()
        assert node.sources == ["http", "http", "disk", "disk"]
        assert node.region(refs[1]).blob.read_bytes() == DATA
    assert node.controller.cache.used_bytes == len(DATA)
    assert node.count("glowplug_fetched_bytes_total", source="disk") == 2 * len(DATA)
    assert node.count("glowplug_disk_written_bytes_total") == 2 * len(DATA)


@pytest.mark.parametrize("how", ["damaged", "source has changed", "vanished"])
async def test_a_copy_of_no_use_is_dropped_and_the_source_is_read(node: Node, how: str) -> None:
    with WeightServer(DATA, step_s=0.002) as server:
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        await node.bring(ref)
        await node.copy()
        await node.bring(other)
        directory = node.copies.region(region_digest(ref)).directory
        if how == "damaged":
            with (directory / "blob").open("r+b") as blob:
                blob.write(b"damaged")
        elif how == "vanished":
            (directory / "blob").unlink()
        else:
            server.data, server.etag = DATA[::-1], '"v2"'
        await node.bring(ref)
        assert node.sources == ["http", "http", "http"]
        assert node.region(ref).blob.read_bytes() == server.data
    assert not directory.exists()


async def test_of_a_damaged_copy_the_damaged_pieces_alone_are_fetched(node: Node) -> None:
    with WeightServer(DATA, step_s=0.002) as server:
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        await node.bring(ref)
        await node.copy()
        await node.bring(other)
        with (node.copies.region(region_digest(ref)).directory / "blob").open("r+b") as blob:
            for offset in (500, 400_000):
                blob.seek(offset)
                blob.write(b"damaged")
        sent = server.bytes_sent
        await node.bring(ref)
        assert server.bytes_sent - sent <= 2 * 16_384 + 2  # two pieces, and questions about changes
        assert node.sources[-1] == "http" and node.region(ref).blob.read_bytes() == DATA
    assert node.count("glowplug_wrong_pieces_total", source="disk") == 2
    assert not node.copies.region(region_digest(ref)).directory.exists()


async def test_a_source_that_does_not_answer_leaves_the_copy_in_use(node: Node) -> None:
    with WeightServer(DATA, step_s=0.002) as server:
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        await node.bring(ref)
        await node.copy()
        await node.bring(other)
    await node.bring(ref)
    assert node.sources == ["http", "http", "disk"]


async def test_a_full_disk_costs_nothing_but_the_copy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as full, WeightServer(DATA, step_s=0.002) as server:
        node = Node(tmp_path)
        node.start(disk_retry_s=5.0)
        full.fill()
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        await node.bring(ref)
        await node.copy()
        assert "is full: No space left on device" in node.controller.disk.trouble
        assert node.controller.disk.copies == {} and not list((tmp_path / "disk/node-1").iterdir())
        assert node.count("glowplug_disk_failures_total", code="no_space") == 1
        await node.bring(other)
        full.free()
        node.now_s += 5.0
        await node.copy()
        assert node.controller.disk.trouble == "" and node.controller.disk.has(region_digest(other))
        assert node.sources == ["http", "http"]
        await node.fetcher.close()


async def test_weights_on_the_same_file_system_are_not_copied(node: Node) -> None:
    file = node.root / "w.gguf"
    file.write_bytes(DATA)
    ref = WeightsRef(uri=str(file))
    await node.bring(ref)
    node.controller.seconds.measured(region_digest(ref), len(DATA), 60.0, "file")
    await node.copy()
    (row,) = node.controller.placed()
    assert row.why_not_on_disk == f"{file} lies on the same file system"
    assert node.count("glowplug_disk_failures_total", code="disk_failed") == 0


async def held_write(node: Node, ref: WeightsRef, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """One read waits for the event."""
    goes_on, reads, pread = threading.Event(), list[int](), os.pread

    def slow(fd: int, num_bytes: int, position: int) -> bytes:
        reads.append(position)
        if len(reads) == 2:
            goes_on.wait(10.0)
        return pread(fd, num_bytes, position)

    await node.bring(ref)
    monkeypatch.setattr(disk, "STEP_BYTES", 100_000)
    monkeypatch.setattr(disk.os, "pread", slow)
    await node.step(Tick())
    async with asyncio.timeout(WAIT_S):
        while len(reads) < 2:
            await asyncio.sleep(0.001)
    return goes_on


async def test_a_copy_stops_for_weights_that_need_the_memory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lets go of the region before its removal."""
    with WeightServer(DATA, step_s=0.002) as server:
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        goes_on = await held_write(node, ref, monkeypatch)
        asyncio.get_running_loop().call_later(0.05, goes_on.set)
        await node.bring(other)
        assert goes_on.is_set() and not node.region(ref).directory.exists()
        await node.until(lambda: region_digest(ref) not in node.controller.disk.copies)
    assert not list(node.copies.root.glob("*.part")) and not node.copies.region(region_digest(ref)).directory.exists()
    assert node.controller.disk.trouble == "" and node.sources == ["http", "http"]


async def test_a_disk_that_does_not_answer_is_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightServer(DATA, step_s=0.002) as server:
        ref, other = (WeightsRef(uri=f"{server.url}?{n}") for n in range(2))
        goes_on = await held_write(node, ref, monkeypatch)
        node.fetcher._copier._wait_s = 0.02
        await node.bring(other)
        assert not goes_on.is_set() and "has not ended a write within 0.02 s" in node.controller.disk.trouble
        goes_on.set()
        await node.until(lambda: region_digest(ref) not in node.controller.disk.copies)


async def test_a_copy_that_fails_in_any_way_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise ValueError("a surprise")

    monkeypatch.setattr(node.copies, "write", broken)
    with WeightServer(DATA, step_s=0.002) as server:
        await node.bring(WeightsRef(uri=server.url))
        await node.copy()
    assert node.controller.disk.trouble == "ValueError: a surprise"


async def test_weights_that_came_from_disk_are_here_whatever_follows(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk.DiskSource, "forget_pages", broken)
    with WeightServer(DATA, step_s=0.002) as server:
        refs = [WeightsRef(uri=f"{server.url}?{n}") for n in range(2)]
        for ref in [*refs, refs[0]]:
            await node.bring(ref)
            await node.copy()
    assert node.sources == ["http", "http", "disk"]
