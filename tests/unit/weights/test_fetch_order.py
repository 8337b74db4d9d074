"""Fetching weights in the engine's reading order."""

import asyncio
import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.errors import WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.policies.placement.shape import parts_of
from glowplug.weights.fetch import Fetch, FetchOptions, PiecesWrong
from glowplug.weights.inventory import read_cached
from glowplug.weights.link import COLD_START, SERVING, LinkMeter, Rank, RateEstimate
from glowplug.weights.order import RangeKind, stage_ranges
from glowplug.weights.pieces import Layout, piece_digest
from glowplug.weights.region import Region, RegionState, region_digest
from glowplug.weights.source import SourceOptions
from glowplug.weights.sources import open_source
from glowplug.weights.transfer import PartQueue
from tests.arriving_region import has_landed
from tests.weight_servers import WeightServer

TENSOR_BYTES = 20_000
NAMES = [
    "lm_head.weight",
    "model.norm.weight",
    *(f"model.layers.{n}.w" for n in (3, 1, 2, 0)),
    "model.embed_tokens.weight",
]


def safetensors() -> bytes:
    """Laid out against the reading order."""
    spans = {name: [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES] for i, name in enumerate(NAMES)}
    entries = {name: {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": span} for name, span in spans.items()}
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + random.Random(3).randbytes(TENSOR_BYTES * len(NAMES))


DATA = safetensors()
SHA = hashlib.sha256(DATA).hexdigest()
LAYOUT = Layout.of([("", len(DATA))])


async def whatever(_: int) -> int:
    return 10_000_000


def fetch_of(uri: str, root: Path, **given: Any) -> Fetch:
    ref = WeightsRef(uri=uri, sha256=SHA)
    options = FetchOptions(part_bytes=LAYOUT.piece_bytes, max_parts=1, max_attempts=2, backoff_first_s=0.001)
    source, region = open_source(uri, SourceOptions(chunk_bytes=4096)), Region.at(root, "n", region_digest(ref))
    return Fetch(ref, region, source, LinkMeter("n/nic"), whatever, options=options, **given)


def asked(server: WeightServer) -> list[int]:
    return [int(one.removeprefix("bytes=").partition("-")[0]) for one in server.requests if one != "bytes=0-0"]


async def test_bytes_come_in_reading_order_wherever_they_lie(tmp_path: Path) -> None:
    with WeightServer(DATA) as server:
        fetch = fetch_of(server.url, tmp_path)
        assert await fetch.run()
        order = fetch.region.read_order()
        assert order is not None and order.num_layers == 4
        pieces = dict.fromkeys(piece for one in order.ranges for piece in LAYOUT.touched(one.first, one.last))
        assert asked(server) == [LAYOUT.piece(piece)[0] for piece in pieces]


@pytest.mark.parametrize("first", [0, 1])
async def test_a_stage_is_there_before_the_rest_which_completes_the_same_region(tmp_path: Path, first: int) -> None:
    file = tmp_path / "w"
    file.write_bytes(DATA)
    fetch = fetch_of(str(file), tmp_path, stage=first, num_stages=2)
    assert await fetch.run() is None
    region, order = fetch.region, fetch.region.read_order()
    assert order is not None
    status = region.read_state(stage=first, num_stages=2)
    assert status.state is RegionState.COMPLETE and status.info
    assert region.read_state(stage=1 - first, num_stages=2).state is RegionState.FETCHING
    assert fetch.tally.num_bytes == status.info.num_bytes < 0.75 * len(DATA)
    generation = region.read_state().generation
    content = region.blob.read_bytes()
    for one in stage_ranges(order, first, 2):
        assert has_landed(region.directory, one.first, one.last)
        assert content[one.first : one.last] == DATA[one.first : one.last]
    missing = [
        one for one in stage_ranges(order, 1 - first, 2) if not has_landed(region.directory, one.first, one.last)
    ]
    assert {one.kind for one in missing} & {RangeKind.LAYER}
    rest = fetch_of(str(file), tmp_path)
    assert await rest.run()
    assert rest.tally.num_bytes == len(DATA) - fetch.tally.num_bytes
    assert region.read_state().state is RegionState.COMPLETE
    assert region.read_state().generation == generation, "what was read of the stage counts"
    (cached,) = read_cached(region.directory.parent.parent, region.directory.parent.name)
    parts = [sum(r.last - r.first for r in stage_ranges(order, stage, 2)) for stage in range(2)]
    assert parts_of(cached.stage_bytes, 2) == tuple(parts) and sum(parts) >= len(DATA), "its node says how it is cut"


async def test_stages_of_weights_without_layers_bring_their_bytes(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(100_000)
    file = tmp_path / "w.bin"
    file.write_bytes(data)
    ref = WeightsRef(uri=str(file))
    region = Region.at(tmp_path, "n", region_digest(ref))
    source = open_source(ref.uri)
    fetch = Fetch(ref, region, source, LinkMeter("x"), whatever, first_byte=50_000, stage=1, num_stages=2)
    assert await fetch.run() is None
    assert region.read_meta()["landed"] == [[0, 4096], [49_152, 100_000]]  # the head was read
    assert region.read_state(stage=1, num_stages=2).state is RegionState.COMPLETE


async def test_a_stage_of_a_directory_without_layers_brings_all_of_it(tmp_path: Path) -> None:
    """vLLM opens every file: half the bytes would be zeros."""
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(random.Random(2).randbytes(100_000))
    ref = WeightsRef(uri=str(folder))
    region = Region.at(tmp_path, "n", region_digest(ref))
    given = {"first_byte": 50_000, "stage": 1, "num_stages": 2}
    assert await Fetch(ref, region, open_source(ref.uri), LinkMeter("x"), whatever, **given).run()
    assert region.read_state().state is RegionState.COMPLETE


async def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with WeightServer(DATA) as server, pytest.raises(WeightsUnavailable, match="4 layers cannot be cut into 5"):
        await fetch_of(server.url, tmp_path, stage=0, num_stages=5).run()


async def test_a_source_with_checksums_brings_all_but_what_is_damaged(tmp_path: Path) -> None:
    digests = [piece_digest(DATA[slice(*LAYOUT.piece(index))]) for index in range(LAYOUT.num_pieces)]
    digests[10], digests[20] = "00" * 16, "11" * 16
    file = tmp_path / "w"
    file.write_bytes(DATA)
    fetch = fetch_of(str(file), tmp_path, piece_digests=tuple(digests))
    with pytest.raises(PiecesWrong, match="2 pieces"):
        await fetch.run()
    wanted = [(0, LAYOUT.piece(10)[0]), (LAYOUT.piece(10)[1], LAYOUT.piece(20)[0]), (LAYOUT.piece(20)[1], len(DATA))]
    assert fetch.landed == wanted


# parts


def test_parts_go_out_in_order_and_as_long_as_the_holders_rate_says() -> None:
    layout = Layout(piece_bytes=10, num_bytes=1000, files=())
    parts = PartQueue(layout, [(500, 600), (0, 100)], part_bytes=50)
    first = parts.take("a", 20.0, None, 0.0)
    fast = parts.take("b", 1e9, None, 0.0)
    slow = parts.take("c", 0.1, None, 0.0)
    assert first and fast and slow
    assert [(p.first, p.last) for p in (first, fast, slow)] == [(500, 520), (520, 570), (570, 580)]
    parts.moved(first, 515, 1.0)
    parts.end(first)  # within a piece, which is handed out first
    again = parts.take("b", 1e9, None, 1.0)
    assert again and (again.first, again.last) == (510, 520)


def test_a_holder_is_asked_for_what_it_has() -> None:
    layout = Layout(piece_bytes=10, num_bytes=100, files=())
    parts = PartQueue(layout, [(0, 100)], part_bytes=50)
    has = bytes([0, 0, 1, 1, 0, 1, 0, 0, 0, 0])
    taken = [parts.take("a", 1e9, has, 0.0) for _ in range(3)]
    assert [(p.first, p.last) for p in taken if p] == [(20, 40), (50, 60)]
    rest = [parts.take("b", 1e9, None, 0.0) for _ in range(4)]
    assert [(p.first, p.last) for p in rest if p] == [(0, 20), (40, 50), (60, 100)]


def test_the_end_of_a_slow_part_is_taken_over_and_all_of_a_stalled_one() -> None:
    layout = Layout(piece_bytes=10, num_bytes=1000, files=())
    parts = PartQueue(layout, [(0, 200)], part_bytes=200)
    slow = parts.take("slow", 1e9, None, 0.0)
    assert slow and parts.take_over("fast", 100.0, None, 0.5) is None  # only just begun
    parts.moved(slow, 20, 1.0)
    taken = parts.take_over("fast", 100.0, None, 1.0)
    assert taken and (slow.last, taken.first, taken.last) == (60, 60, 200)  # 20 a second against 100
    assert parts.take_over("slow", 20.0, None, 1.0) is None  # never from the faster one
    stalled = parts.take_over("fast", 100.0, None, 4.0)
    assert stalled and (stalled.first, stalled.last, slow.num_bytes_left) == (20, 60, 0)
    for part in (taken, stalled):
        parts.moved(part, part.last, 5.0)
        parts.end(part)
    assert parts.is_done


# the link


def test_ranks_are_those_of_the_prefetchers_controller() -> None:
    from glowplug.controllers.prefetcher.messages import WAITED_FOR

    assert COLD_START == WAITED_FOR
    assert [Rank.of(priority) for priority in (WAITED_FOR, 99, 0, SERVING)] == [
        Rank.COLD_START,
        Rank.PREFETCH,
        Rank.PREFETCH,
        Rank.BACKGROUND,
    ]


async def test_a_cold_start_gets_the_link_beside_a_prefetch_that_runs() -> None:
    """Without a declared rate only rank decides."""
    link, moved = LinkMeter("n/nic"), {0: 0, COLD_START: 0, SERVING: 0}

    async def transfer(priority: int, num_chunks: int) -> None:
        for _ in range(num_chunks):
            await asyncio.sleep(0.005)
            await link.take(1000, priority)
            moved[priority] += 1

    prefetch, serving = asyncio.create_task(transfer(0, 500)), asyncio.create_task(transfer(SERVING, 500))
    await asyncio.sleep(0.05)
    before = moved[0]
    assert before > 0 and moved[SERVING] <= 1
    await transfer(COLD_START, 30)
    assert moved[COLD_START] == 30 and moved[0] <= before + 1  # the chunk in flight
    prefetch.cancel()
    serving.cancel()
    await asyncio.gather(prefetch, serving, return_exceptions=True)


def test_the_rate_is_that_of_a_busy_link() -> None:
    rate, now_s = RateEstimate(), 100.0
    for _ in range(20):  # 20 MB/s, in chunks of 1 MB
        rate.moved(1_000_000, now_s := now_s + 0.05)
    assert rate.bytes_per_s == 0.0  # one second is too short
    for _ in range(40):
        rate.moved(1_000_000, now_s := now_s + 0.05)
    assert rate.bytes_per_s == pytest.approx(20e6)
    for _ in range(5):  # with pauses
        now_s += 10.0
        for _ in range(10):
            rate.moved(100_000, now_s := now_s + 0.1)
    assert rate.bytes_per_s == pytest.approx(20e6)
    for _ in range(1000):  # permanently
        rate.moved(100_000, now_s := now_s + 0.1)
    assert rate.bytes_per_s == pytest.approx(1e6)


def test_short_transfers_say_nothing_of_the_link() -> None:
    rate = RateEstimate()
    for start in range(100):
        for chunk in range(4):
            rate.moved(1_000_000, start * 10.0 + chunk * 0.1)
    assert rate.bytes_per_s == 0.0
