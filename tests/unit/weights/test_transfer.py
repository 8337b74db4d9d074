"""Cuts, takeovers and deferrals in one transfer."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator
from pathlib import Path

from glowplug.domain.model import WeightsRef
from glowplug.weights.link import ACTIVE_S, TRICKLE_S, LinkMeter
from glowplug.weights.region import Region
from glowplug.weights.source import SourceFile, SourceInfo
from glowplug.weights.sources.peer import STALL_S
from glowplug.weights.transfer import Holder, PeerBusy, PeerFiles, Transfer, TransferCounts
from glowplug.weights.writer import RegionWriter
from tests.waiting import WAIT_S

KIB = 1024
DATA = random.Random(3).randbytes(1 << 20)  # in 64 pieces of 16 KiB
FILES = (SourceFile(path="", num_bytes=len(DATA), validator="v"),)


class CheckedWriter(RegionWriter):
    def write(self, offset: int, chunk: bytes) -> None:
        assert DATA[offset : offset + len(chunk)] == chunk, f"{len(chunk)} bytes at {offset} belong elsewhere"
        super().write(offset, chunk)


class Scene:
    """Its source stalls once, after 300 KiB, until a peer takes over."""

    def __init__(self) -> None:
        self.now_s, self.has_stalled = 0.0, False
        self.stalled, self.taken_over = asyncio.Event(), asyncio.Event()

    def clock(self) -> float:
        return self.now_s


class StallingSource:
    scheme = "s3"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def probe(self) -> SourceInfo:
        return SourceInfo(files=FILES, ranges=True)

    async def read(self, file: SourceFile, first: int, last: int) -> AsyncGenerator[bytes, None]:
        scene = self._scene
        for step in (200 * KIB, 100 * KIB, 50 * KIB, 200 * KIB, 500 * KIB):
            if first >= last:
                return
            if first == 300 * KIB and not scene.has_stalled:
                scene.has_stalled = True
                scene.now_s += 3.0
                scene.stalled.set()
                await scene.taken_over.wait()
            yield DATA[first : min(last, first + step)]
            first += step

    async def close(self) -> None: ...


class FastPeer:
    name = "peer"

    def __init__(self, scene: Scene) -> None:
        self._scene, self.has_read = scene, False

    async def look(self, *, again: bool = False) -> PeerFiles | None:
        return PeerFiles(files=FILES, landed=b"\1" * 63 + b"\0")

    async def read(self, first: int, last: int) -> AsyncGenerator[bytes, None]:
        scene = self._scene
        if self.has_read:
            scene.taken_over.set()
            for _ in range(20):
                await asyncio.sleep(0)  # the source continues
        await scene.stalled.wait()
        self.has_read = True
        scene.now_s += 0.1
        yield DATA[first:last]

    async def close(self) -> None: ...


async def never(_: int, error: Exception) -> None:
    raise error


async def joined(holder: Holder) -> Holder:
    return holder


async def test_what_was_taken_over_before_what_has_come_is_cut_off(tmp_path: Path) -> None:
    """At the piece's start, thus behind the stalled source's last byte."""
    scene, region = Scene(), Region.at(tmp_path, "n", "ab" * 32)
    writer = CheckedWriter(region, WeightsRef(uri="s3://x"), SourceInfo(files=FILES, ranges=True), 1 << 30)
    writer.open()
    peer = Holder("peer", 1, peer=FastPeer(scene), landed=b"\1" * 63 + b"\0")
    transfer = Transfer(
        writer,
        LinkMeter("n/nic"),
        TransferCounts(),
        Holder("s3", 1, source=StallingSource(scene)),
        [joined(peer)],
        never,
        slow_s=WAIT_S,
        part_bytes=512 * KIB,
        clock=scene.clock,
    )
    await transfer.bring([(0, len(DATA))])
    assert scene.taken_over.is_set()
    writer.close()
    assert region.blob.read_bytes() == DATA


def test_bytes_for_others_come_before_their_reader_gives_up() -> None:
    assert TRICKLE_S < STALL_S - ACTIVE_S


class BusyPeer(FastPeer):
    async def read(self, first: int, last: int) -> AsyncGenerator[bytes, None]:
        if not self.has_read:
            self.has_read = True
            raise PeerBusy("too many others read it")
        self._scene.taken_over.set()
        yield DATA[first:last]


class WaitingSource(StallingSource):
    async def read(self, file: SourceFile, first: int, last: int) -> AsyncGenerator[bytes, None]:
        await self._scene.taken_over.wait()
        yield DATA[first:last]


async def test_a_peer_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    scene, region, ticks = Scene(), Region.at(tmp_path, "n", "ab" * 32), itertools.count()
    writer = CheckedWriter(region, WeightsRef(uri="s3://x"), SourceInfo(files=FILES, ranges=True), 1 << 30)
    writer.open()
    source, peer = Holder("s3", 1, source=WaitingSource(scene)), Holder("peer", 1, peer=BusyPeer(scene))
    transfer = Transfer(
        writer,
        LinkMeter("n/nic"),
        TransferCounts(),
        source,
        [joined(peer)],
        never,
        slow_s=WAIT_S,
        part_bytes=512 * KIB,
        clock=lambda: next(ticks) * 0.4,
    )
    async with asyncio.timeout(WAIT_S):
        await transfer.bring([(0, len(DATA))])
    assert scene.taken_over.is_set() and peer.lost is None
    writer.close()
    assert region.blob.read_bytes() == DATA
