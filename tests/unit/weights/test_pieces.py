"""A region read while it fills."""

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glowplug.domain.model import WeightsRef
from glowplug.engines.landing import Landing, WeightsDropped
from glowplug.weights.pieces import (
    PIECE_BYTES,
    Layout,
    is_piece,
    piece_bytes_for,
    piece_digest,
    piece_digests_json,
    read_landed,
    read_layout,
    read_piece_digests,
)
from glowplug.weights.region import Region, RegionInfo, RegionState
from glowplug.weights.source import SourceFile, SourceInfo
from glowplug.weights.writer import Digester, RegionWriter
from tests.arriving_region import has_landed

DATA = random.Random(5).randbytes(300_001)
FILES = {"config.json": DATA[:10_001], "model.safetensors": DATA[10_001:]}
REF = WeightsRef(uri="https://weights/x", sha256="ab" * 32)


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region.at(tmp_path, "node-1", "ab" * 32)


def writer_of(region: Region, files: dict[str, bytes] = FILES, validator: str = "v1") -> RegionWriter:
    entries = tuple(SourceFile(path=path, num_bytes=len(body), validator=validator) for path, body in files.items())
    writer = RegionWriter(region, REF, SourceInfo(files=entries, ranges=True), 1 << 30)
    writer.open()
    return writer


def land(writer: RegionWriter, first: int, last: int, data: bytes = DATA) -> None:
    for index in range(len(writer.info.files)):
        start, end = max(first, writer.file_start(index)), min(last, writer.file_end(index))
        if start < end:
            writer.write(start, data[start:end])


@pytest.mark.parametrize(
    ("num_bytes", "piece_bytes"),
    [(0, 4096), (1, 4096), (4096 * 64, 4096), (4096 * 65, 8192), (64 << 20, PIECE_BYTES), (1 << 40, PIECE_BYTES)],
)
def test_pieces_are_a_mebibyte_and_less_for_small_weights(num_bytes: int, piece_bytes: int) -> None:
    assert piece_bytes_for(num_bytes) == piece_bytes


def test_the_layout_is_there_before_any_byte(region: Region) -> None:
    writer = writer_of(region)
    said = json.loads((region.directory / "layout.json").read_bytes())
    assert said["files"] == [
        {"path": "config.json", "num_bytes": 10_001, "start": 0},
        {"path": "model.safetensors", "num_bytes": 290_000, "start": 10_001},
    ]
    assert (said["num_bytes"], said["piece_bytes"]) == (300_001, 8192)
    assert read_landed(region.directory, Layout.from_json(said) or Layout.of([])) == bytes(37)
    assert (region.files / "model.safetensors").stat().st_size == 290_000
    status = region.read_state()
    assert (status.state, status.path) == (RegionState.FETCHING, str(region.files.absolute()))
    assert status.generation == said["generation"]
    writer.close()


def test_a_piece_counts_once_its_last_byte_has_landed(region: Region) -> None:
    writer, at = writer_of(region), region.directory
    land(writer, 8192, 16_383)  # past the first file's end, and a byte short
    assert not has_landed(at, 8192, 8193)
    land(writer, 16_383, 16_384)
    assert has_landed(at, 8192, 16_384)
    assert not has_landed(at, 8191, 8193)
    assert has_landed(at, 5, 5)
    land(writer, 294_912, 300_001)  # the last piece is shorter
    assert has_landed(at, 300_000, 300_001)
    writer.close()


def test_a_reader_waits_for_what_it_needs_and_no_more(region: Region) -> None:
    writer = writer_of(region)
    reader = Landing(region.files)
    with pytest.raises(TimeoutError, match="have not arrived in time"):
        reader.wait_beginning(10, 0.01)
    later = threading.Timer(0.02, land, (writer, 0, 8192))
    later.start()
    reader.wait_beginning(8192, 5.0)
    assert (region.files / "config.json").read_bytes()[:8192] == DATA[:8192]
    with pytest.raises(TimeoutError):
        reader.wait_complete(0.01)
    later.join()
    writer.close()


def test_a_killed_fetch_goes_on_in_the_same_generation(region: Region) -> None:
    writer = writer_of(region)
    land(writer, 0, 100_000)
    before = read_layout(region.directory)
    reader = Landing(region.files)
    writer.close()  # meta.json lags: written every 8 MiB
    again = writer_of(region)
    assert again.landed.as_list() == [(0, 98_304)]  # whole pieces only
    assert read_layout(region.directory) == before
    assert has_landed(region.directory, 0, 98_304)
    assert not has_landed(region.directory, 98_304, 98_305)
    later = threading.Timer(0.02, land, (again, 98_304, 106_496))
    later.start()
    reader.wait_beginning(106_496, 5.0)
    later.join()
    again.close()


def test_bytes_that_come_anew_are_another_generation(region: Region) -> None:
    writer = writer_of(region)
    land(writer, 0, 100_000)
    reader = Landing(region.files)
    writer.close()
    writer_of(region, validator="v2").close()
    with pytest.raises(WeightsDropped):
        reader.wait_beginning(200_001, 5.0)
    reader = Landing(region.files)
    writer_of(region, validator="v3").close()
    with pytest.raises(WeightsDropped):
        reader.wait_complete(5.0)
    assert not has_landed(region.directory, 0, 1)


def test_a_reader_ends_with_the_fetch(region: Region) -> None:
    writer = writer_of(region)
    reader = Landing(region.files)
    region.fail("weights_corrupt", "sha256 differs", failed_at=1.0)
    with pytest.raises(WeightsDropped):
        reader.wait_beginning(1, 5.0)
    writer.close()
    region.clear_bytes()
    with pytest.raises(WeightsDropped, match="the layout of"):
        Landing(region.files)


ACROSS = {"a/config.json": DATA[:100], "b/empty": b"", "c/model.safetensors": DATA[100:120_000], "d/x": DATA[120_000:]}


@pytest.mark.parametrize("files", [FILES, ACROSS, {"": DATA}], ids=["two files", "many in one piece", "one file"])
async def test_files_are_hashed_as_they_land_in_whatever_order(region: Region, files: dict[str, bytes]) -> None:
    writer = writer_of(region, files)
    digester = Digester(writer, step_bytes=7_001)
    digesting = asyncio.create_task(digester.run())
    starts = list(range(0, len(DATA), 20_000))
    random.Random(3).shuffle(starts)
    for first in starts:
        land(writer, first, min(first + 20_000, len(DATA)))
        await asyncio.sleep(0)
    listing = "".join(f"{hashlib.sha256(body).hexdigest()}  {path}\n" for path, body in files.items())
    assert await digesting == hashlib.sha256(listing.encode() if "" not in files else DATA).hexdigest()
    layout = writer.layout
    assert layout is not None
    wanted = tuple(piece_digest(DATA[slice(*layout.piece(index))]) for index in range(layout.num_pieces))
    assert digester.piece_digests == wanted
    writer.close()


async def test_bytes_that_vanish_fail_the_checksum(region: Region) -> None:
    writer = writer_of(region, {"": DATA})
    land(writer, 0, len(DATA))
    os.truncate(region.blob, 50_000)
    with pytest.raises(OSError, match="byte 50000 of the region has vanished"):
        await Digester(writer).run()
    writer.close()


def test_checksums_of_an_earlier_version_are_read_and_handed_on_as_they_are(region: Region) -> None:
    writer = writer_of(region)
    layout = writer.layout
    assert layout is not None
    contents = [DATA[slice(*layout.piece(index))] for index in range(layout.num_pieces)]
    earlier = [hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents]
    written = {"algorithm": "blake2b-128", "piece_bytes": layout.piece_bytes, "digests": earlier}
    (region.directory / "pieces.json").write_text(json.dumps(written))
    read = read_piece_digests(region.directory, layout)
    assert read == tuple(earlier)
    assert piece_digests_json(layout, read) == written
    assert all(is_piece(content, digest) for content, digest in zip(contents, read, strict=True))
    assert not is_piece(contents[0][:-1] + b"?", read[0])
    for wrong in ({"algorithm": "crc32"}, {"algorithm": "md5"}, {"digests": earlier[:-1]}):
        (region.directory / "pieces.json").write_text(json.dumps(written | wrong))
        assert read_piece_digests(region.directory, layout) == ()
    writer.close()


async def test_each_piece_has_a_checksum_of_its_own(region: Region) -> None:
    writer = writer_of(region)
    land(writer, 0, len(DATA))
    writer.checked_pieces[3] = "ab" * 16  # as from an earlier version
    digester = Digester(writer, step_bytes=50_000)
    await digester.run()
    layout = writer.layout
    assert layout is not None
    wanted = tuple(piece_digest(DATA[slice(*layout.piece(index))]) for index in range(layout.num_pieces))
    assert digester.piece_digests == wanted
    region.write_piece_digests(layout, digester.piece_digests)
    assert read_piece_digests(region.directory, layout) == wanted
    assert read_piece_digests(region.directory, Layout.of([("x", 5)])) == ()
    writer.close()


def test_a_stage_is_complete_before_the_whole(region: Region) -> None:
    writer = writer_of(region)
    info = RegionInfo(path=str(region.files), num_bytes=7, sha256="", source="http", seconds=0.1)
    region.complete_stage(info, 1, 2)
    assert region.read_state(stage=1, num_stages=2).info == info
    assert region.read_state(stage=0, num_stages=2).state is RegionState.FETCHING
    assert region.read_state().state is RegionState.FETCHING
    region.clear_bytes()
    assert region.read_state(stage=1, num_stages=2).state is RegionState.ABSENT
    writer.close()


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"7", b'{"files": [{}]}', b'{"files": 5}', b"[" * 100_000])
def test_what_is_no_layout_is_none(region: Region, junk: bytes) -> None:
    region.begin()
    for name in ("layout.json", "order.json", "pieces.json", "landed"):
        (region.directory / name).write_bytes(junk)
    layout = Layout.of([("", 10_000)])
    assert read_layout(region.directory) is None
    assert region.read_order() is None
    assert read_piece_digests(region.directory, layout) == ()
    assert read_landed(region.directory, layout) == bytes(layout.num_pieces)


def test_the_reader_needs_the_standard_library_alone() -> None:
    path = Path(__file__).parents[3] / "libs/glowplug/weights/pieces.py"
    script = "import runpy, sys; runpy.run_path(sys.argv[1])"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", script, str(path)], check=False)
    assert run.returncode == 0
