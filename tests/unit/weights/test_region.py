"""The file contract of prefetcher and engines; the link's rate; irregular files."""

import asyncio
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.model import WeightsRef
from glowplug.weights.files import NoAnswer, PatientReader, read_regular
from glowplug.weights.inventory import (
    DiskContent,
    read_cached,
    read_disk,
    read_inventory,
    read_links,
    write_disk,
    write_links,
)
from glowplug.weights.link import LinkMeter, TokenBucket
from glowplug.weights.order import Range, RangeKind, ReadingOrder
from glowplug.weights.region import Region, RegionInfo, RegionState, region_digest
from tests.waiting import until

SHA = "ab" * 32


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region.at(tmp_path, "node-1", SHA)


def completed(region: Region, data: bytes = b"weights", path: str = "") -> RegionInfo:
    region.begin()
    region.blob.write_bytes(data)
    info = RegionInfo(path=path or str(region.blob), num_bytes=len(data), sha256=SHA, source="file", seconds=0.1)
    region.complete(info)
    return info


def test_digest_is_the_checksum_else_of_the_address() -> None:
    assert region_digest(WeightsRef(uri="x", sha256=SHA.upper())) == SHA
    assert region_digest(WeightsRef(uri="file:/w")) == hashlib.sha256(b"file:/w").hexdigest()


@pytest.mark.parametrize("sha256", ["../x", "ab", SHA + "0", "zz" * 32])
def test_a_checksum_that_is_none_is_refused(sha256: str) -> None:
    with pytest.raises(InvalidModelFile):
        region_digest(WeightsRef(uri="x", sha256=sha256))


def test_the_life_of_a_region(region: Region) -> None:
    assert region.read_state().state is RegionState.ABSENT
    region.begin()
    region.set_watermark(3)
    status = region.read_state()
    assert (status.state, status.num_bytes_done) == (RegionState.FETCHING, 3)
    assert (region.directory / "progress").read_bytes() == b"\x03" + b"\0" * 7
    info = completed(region)
    status = region.read_state()
    assert (status.state, status.num_bytes_done, status.info) == (RegionState.COMPLETE, 7, info)
    said = json.loads((region.directory / "complete.json").read_bytes())
    assert said.keys() == {"path", "num_bytes", "sha256", "source", "seconds", "stage_bytes"}
    region.remove()
    assert region.read_state().state is RegionState.ABSENT


def test_an_order_of_an_earlier_version_gets_the_cuts_and_its_stages_are_forgotten(region: Region) -> None:
    region.begin()
    region.renew_order()
    assert region.read_order() is None
    layers = tuple(Range(n, n + 1, RangeKind.LAYER, n) for n in range(4))
    region.write_order(ReadingOrder(ranges=layers, num_layers=4))
    path = region.directory / "order.json"
    order = json.loads(path.read_bytes())
    path.write_text(json.dumps({key: value for key, value in order.items() if key != "stages"}))
    info = RegionInfo(path="", num_bytes=2, sha256="", source="file", seconds=1.0)
    region.complete_stage(info, 0, 2)
    region.renew_order()
    assert json.loads(path.read_bytes()) == order
    assert region.read_state(stage=0, num_stages=2).state is RegionState.FETCHING
    region.complete_stage(info, 0, 2)
    region.renew_order()
    assert region.read_state(stage=0, num_stages=2).state is RegionState.COMPLETE


def test_a_failure_belongs_to_those_who_waited(region: Region) -> None:
    region.fail("weights_corrupt", "sha256 differs", failed_at=5.0, instance_ids=["i-1"])
    failure = region.read_state("i-1").failure
    assert failure and (failure.code, failure.message, failure.failed_at) == ("weights_corrupt", "sha256 differs", 5.0)
    assert region.read_state("i-2").state is RegionState.ABSENT
    assert region.read_state().state is RegionState.FAILED
    region.begin()
    assert region.read_state("i-1").state is RegionState.FETCHING


def test_a_failure_of_nobody_is_everybodys(region: Region) -> None:
    (region.directory).mkdir(parents=True)
    (region.directory / "failed.json").write_text('{"code": "no_space", "message": "full"}')
    assert region.read_state("i-2").state is RegionState.FAILED


@pytest.mark.parametrize("junk", [b"", b"{", b"[1]", b'{"path": 1, "other": 2}', b"\xff\xfe"])
def test_half_written_files_are_no_completion(region: Region, junk: bytes) -> None:
    region.begin()
    for name in ("complete.json", "meta.json", "models.json", "failed.json", "progress"):
        (region.directory / name).write_bytes(junk)
    assert region.read_state().state is not RegionState.COMPLETE
    assert region.watermark() == 0
    assert region.model_keys() == ()


def test_uses_and_models_are_remembered(tmp_path: Path, region: Region) -> None:
    region.touch(5.0)
    region.add_model_key("early")  # no region yet
    completed(region)
    region.touch(1234.5)
    for key in ("b", "a", "", "a"):
        region.add_model_key(key)
    (cached,) = read_cached(tmp_path, "node-1")
    assert (cached.digest, cached.num_bytes, cached.model_keys, cached.last_used_at) == (SHA, 7, ("a", "b"), 1234.5)


def test_inventory_tells_whole_from_partial_from_rubbish(tmp_path: Path) -> None:
    assert read_inventory(tmp_path, "node-1").complete == ()
    whole, short, gone, partial, failed, empty = (Region.at(tmp_path, "node-1", c * 64) for c in "abcdef")
    completed(whole)
    completed(short)
    short.blob.write_bytes(b"wei")
    completed(gone)
    gone.blob.unlink()
    partial.begin()
    partial.write_meta({"num_bytes": 10, "landed": [[0, 4], [6, 8]]})
    failed.fail("no_space", "full", failed_at=1.0, instance_ids=["i-1"])
    empty.begin()
    empty.write_meta({"num_bytes": 0, "landed": [[0, 4]]})
    found = read_inventory(tmp_path, "node-1")
    assert [c.digest for c in found.complete] == [whole.digest]
    assert [(p.digest, p.num_bytes, p.num_bytes_done) for p in found.partial] == [(partial.digest, 10, 6)]
    assert found.failed == ("i-1",)
    assert found.rubbish == (short.digest, gone.digest, empty.digest)


def test_a_directory_of_files_counts_as_its_files(tmp_path: Path, region: Region) -> None:
    (region.files / "sub").mkdir(parents=True)
    (region.files / "config.json").write_bytes(b"{}")
    (region.files / "sub/w").write_bytes(b"12345")
    region.complete(RegionInfo(path=str(region.files), num_bytes=7, sha256=SHA, source="s3", seconds=0.1))
    assert [c.num_bytes for c in read_cached(tmp_path, "node-1")] == [7]


def test_links_are_told_by_file(tmp_path: Path) -> None:
    assert read_links(tmp_path, "node-1") == ()
    link = Link(link_id="node-1/nic", bytes_per_s=1e9, bytes_in_flight=5, num_transfers=1)
    write_links(tmp_path, "node-1", [link])
    assert read_links(tmp_path, "node-1") == (link,)
    assert read_inventory(tmp_path, "node-1").rubbish == ()


def test_copies_on_disk_are_told_by_file(tmp_path: Path) -> None:
    assert read_disk(tmp_path, "node-1") == DiskContent()
    content = DiskContent(copies=(CachedWeights(digest=SHA, num_bytes=7, model_keys=("m",)),), bytes_per_s=2e9)
    write_disk(tmp_path, "node-1", content)
    assert read_disk(tmp_path, "node-1") == content
    assert read_inventory(tmp_path, "node-1").rubbish == ()


ODD_FILES = (
    b"",
    b"\xff",
    b"[]",
    b"7",
    b'"x"',
    b"[" * 100_000,
    b'{"num_bytes": 1e400}',
    b'{"num_bytes": ' + b"9" * 5000 + b"}",
    b'{"landed": 5, "num_bytes": 3}',
    b'{"landed": [[0]], "num_bytes": 3}',
    b'{"landed": [["a", "b"]], "num_bytes": "x"}',
    b'{"landed": [[5, 1]], "num_bytes": 3}',
    b'{"landed": [[-9, 1]], "num_bytes": 3}',
    b'{"landed": [[0, 2]], "num_bytes": null}',
    b'{"landed": [[0, true]], "num_bytes": 3}',
    b'{"model_keys": 5}',
    b'{"model_keys": [5]}',
    b'{"model_keys": null}',
    b'{"failed_at": "soon", "instance_ids": 7, "code": [], "message": {}}',
    b'{"failed_at": null, "instance_ids": [7], "code": null}',
    b'{"path": "\\u0000", "num_bytes": 7, "sha256": "", "source": "", "seconds": 0}',
    b'{"path": "/", "num_bytes": -1, "sha256": "", "source": "", "seconds": "nan"}',
    b'[{"link_id": "\xff", "bytes_per_s": 1}]',
    b'[{"link_id": "l", "bytes_per_s": "inf"}]',
)


@pytest.mark.parametrize(
    "name", ["meta.json", "models.json", "complete.json", "failed.json", "progress", "links.json", "disk.json"]
)
def test_whatever_a_file_of_a_region_holds_the_others_are_read(tmp_path: Path, name: str) -> None:
    for number, raw in enumerate(ODD_FILES):
        root = tmp_path / str(number)
        completed(Region.at(root, "node-1", "cd" * 32))
        odd = Region.at(root, "node-1", SHA)
        odd.begin()
        odd.set_watermark(2)
        odd.write_meta({"landed": [[0, 2]], "num_bytes": 3})
        path = root / "node-1" / name if name in ("links.json", "disk.json") else odd.directory / name
        path.write_bytes(raw)
        for _ in range(2):
            assert [cached.digest for cached in read_cached(root, "node-1")] == ["cd" * 32], raw
        read_inventory(root, "node-1")
        assert read_links(root, "node-1") == () and read_disk(root, "node-1") == DiskContent(), raw
        odd.read_state("i-1")
        odd.add_model_key("m")
        assert odd.model_keys() == ("m",), raw
        landed = odd.read_meta().get("landed", [])
        assert all(0 <= first <= last for first, last in landed), raw
        odd.begin()
        assert odd.read_state().state is RegionState.FETCHING, raw


def test_a_large_chunk_passes_and_is_paid_afterwards() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=10)
    assert bucket.wait_s(0.0) == 0.0
    bucket.spend(50)
    assert bucket.wait_s(0.0) == 0.5
    assert bucket.wait_s(0.25) == 0.25
    assert bucket.wait_s(0.5) == 0.0


def test_a_clock_that_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=10, filled_at=5.0)
    bucket.spend(100)
    assert bucket.wait_s(1.0) == 1.0
    assert bucket.wait_s(5.5) == 0.5


async def test_the_urgent_go_first_when_the_rate_binds() -> None:
    link = LinkMeter("n/nic", bytes_per_s=100_000, burst_s=0.0)
    order: list[str] = []

    async def transfer(name: str, priority: int) -> None:
        await link.take(1000, priority)
        order.append(name)

    await link.take(1000)  # the first is free: the bucket goes into debt
    names = [("later", 0), ("sooner", 0), ("urgent", 5)]
    await asyncio.gather(*(transfer(name, priority) for name, priority in names))
    assert order == ["urgent", "later", "sooner"]


async def test_fetches_share_the_rate_evenly_whatever_their_parts() -> None:
    """HydraServe section 4.2: B / N for each of N fetches."""
    link = LinkMeter("n/nic", bytes_per_s=1_000_000, burst_s=0.0)
    passed = dict.fromkeys(("wide", "narrow"), 0)
    half: dict[str, int] = {}

    async def part(fetch: str, num_chunks: int) -> None:
        for _ in range(num_chunks):
            await link.take(1000, fetch=fetch)
            passed[fetch] += 1
        if fetch == "narrow":
            half.update(passed)

    await asyncio.gather(*(part("wide", 10) for _ in range(4)), part("narrow", 20))
    assert abs(half["wide"] - half["narrow"]) <= 5, half
    assert passed == {"wide": 40, "narrow": 20}


async def test_a_cancelled_transfer_pays_nothing_and_blocks_nobody() -> None:
    link = LinkMeter("n/nic", bytes_per_s=100_000, burst_s=0.0)
    await link.take(1000)
    waiting = asyncio.create_task(link.take(10**12, 9))
    await asyncio.sleep(0)
    waiting.cancel()
    await link.take(1000)
    assert waiting.cancelled()


async def test_bytes_in_flight_are_what_has_not_landed() -> None:
    link = LinkMeter("n/nic")
    link.begin(100)
    await link.take(40)
    assert (link.bytes_in_flight, link.num_transfers) == (60, 1)
    link.end(60)
    assert (link.bytes_in_flight, link.num_transfers) == (0, 0)


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "too large", "link to a pipe", "missing"])
def test_anything_else_is_refused_at_once_with_its_reason(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif kind == "too large":
        path.write_bytes(b"123456")
    with pytest.raises(OSError) as caught:
        read_regular(path, 5)
    assert caught.value.strerror


async def test_what_does_not_answer_is_given_up_and_holds_one_thread() -> None:
    reader, answer, calls = PatientReader(0.05), threading.Event(), []

    def work() -> str:
        calls.append(1)
        answer.wait()
        return "late"

    with pytest.raises(NoAnswer, match=r"not answered within 0\.05 s"):
        await reader.run("mount", work)
    with pytest.raises(NoAnswer, match="still does not answer"):
        await reader.run("mount", work)
    assert calls == [1] and reader.is_waiting("mount")
    assert await reader.run("another", lambda: "at once") == "at once"
    answer.set()
    await until(lambda: not reader.is_waiting("mount"))
    assert await reader.run("mount", lambda: "again") == "again"


async def test_errors_come_out_where_they_are_waited_for() -> None:
    def work() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(FileNotFoundError):
        await PatientReader(10.0).run("a", work)
