"""Fetching from local disks and object stores. moto stands in for S3 and for Google's store, whose XML is alike."""

import errno
import hashlib
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from glowplug.domain.errors import ChecksumMismatch, NoSpace, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, RegionState, region_digest
from glowplug.weights.source import SourceInfo, SourceOptions, checked_relative, redacted
from glowplug.weights.sources import open_source
from glowplug.weights.writer import RegionWriter

DATA = random.Random(1).randbytes(700_003)
OBJECT = random.Random(3).randbytes(1_200_000)
OBJECT_SHA = hashlib.sha256(OBJECT).hexdigest()


async def whatever(_: int) -> int:
    return 10_000_000


def make(ref: WeightsRef, root: Path, **options: Any) -> Fetch:
    source = open_source(ref.uri, SourceOptions(chunk_bytes=50_000, **options))
    region = Region.at(root / "shm", "n", region_digest(ref))
    fetch_options = FetchOptions(part_bytes=100_000, max_attempts=2, backoff_first_s=0.001)
    return Fetch(ref, region, source, LinkMeter("n/nic"), whatever, options=fetch_options)


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}"])
async def test_one_file(tmp_path: Path, form: str) -> None:
    file = tmp_path / "my weights.gguf"
    file.write_bytes(DATA)
    uri = form.format(file if form == "{}" else str(file).replace(" ", "%20"))
    fetch = make(WeightsRef(uri=uri), tmp_path)
    info = await fetch.run()
    assert info and info.sha256 == hashlib.sha256(DATA).hexdigest()
    assert info.source == "file"
    assert fetch.region.blob.read_bytes() == DATA


async def test_a_directory_keeps_its_tree_and_has_the_digest_of_its_listing(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    files = {"config.json": b"{}", "empty": b"", "model-1.safetensors": DATA, "sub/tokenizer.json": DATA[:9]}
    for name, body in {**files, ".git/x": b"hidden"}.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(body)
    listing = "".join(f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in sorted(files.items()))
    sha256 = hashlib.sha256(listing.encode()).hexdigest()
    fetch = make(WeightsRef(uri=str(repo), sha256=sha256), tmp_path)
    info = await fetch.run()
    assert info and info.path == str(fetch.region.files)
    found = {p.relative_to(fetch.region.files).as_posix(): p.read_bytes() for p in _files(fetch.region.files)}
    assert found == files


async def test_a_link_out_of_a_directory_is_refused_but_for_the_blobs_of_the_hubs_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--o--n"
    at, blob, own = cache / "snapshots/main", cache / "blobs/ab", tmp_path / "weights"
    for folder in (at, blob.parent, own / "deep"):
        folder.mkdir(parents=True)
    blob.write_bytes(DATA)
    (at / "model.safetensors").symlink_to("../../blobs/ab")
    assert await make(WeightsRef(uri=str(at)), tmp_path).run()
    (own / "deep/a").write_bytes(DATA)
    (own / "b").symlink_to("deep/a")
    assert (await open_source(str(own)).measure()).num_bytes == 2 * len(DATA)
    (own / "deep/c").symlink_to(blob)
    with pytest.raises(WeightsUnavailable, match="deep/c: a link out of its directory"):
        await open_source(str(own)).measure()


def _files(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("make_it", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"")])
async def test_nothing_to_fetch(tmp_path: Path, make_it: object) -> None:
    make_it(tmp_path / "w")  # type: ignore[operator]
    with pytest.raises(WeightsUnavailable, match=r"no such file|holds no file|is empty"):
        await make(WeightsRef(uri=f"file://{tmp_path / 'w'}"), tmp_path).run()


@pytest.mark.parametrize("uri", ["ftp://x/y", "file://elsewhere/y", "s3://bucket", "gs://b/"])
def test_addresses_nobody_reads(uri: str) -> None:
    with pytest.raises(WeightsUnavailable):
        open_source(uri)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\\b"])
def test_names_that_leave_their_directory(name: str) -> None:
    with pytest.raises(WeightsUnavailable):
        checked_relative(name)


def test_secrets_of_addresses_are_not_shown() -> None:
    shown = redacted("https://user:pass@host:8443/path/w.gguf?X-Amz-Signature=secret#f")
    assert shown == "https://host:8443/path/w.gguf"


def test_a_full_file_system_says_no_space(tmp_path: Path) -> None:
    """A real kernel limit (file size) in a separate process; EFBIG is reported as ENOSPC is."""
    (tmp_path / "w").write_bytes(DATA)
    script = f"""
import asyncio, resource
from tests.unit.weights.test_fetch_file import make
from glowplug.domain.model import WeightsRef
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
asyncio.run(make(WeightsRef(uri={str(tmp_path / "w")!r}), Path({str(tmp_path)!r})).run())
"""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'libs'}"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert "NoSpace: host memory is full" in run.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])  # at once, and as bytes land
async def test_no_space_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    (tmp_path / "w").write_bytes(DATA)
    fetch = make(WeightsRef(uri=str(tmp_path / "w")), tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(NoSpace):
        await fetch.run()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert fetch.region.read_state().state is not RegionState.COMPLETE


async def test_weights_larger_than_the_file_system_say_so_before_a_byte_lands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w").write_bytes(DATA)
    fetch = make(WeightsRef(uri=str(tmp_path / "w")), tmp_path)
    there = os.statvfs(tmp_path)
    left = os.statvfs_result((there.f_frsize, there.f_frsize, there.f_blocks, 1, 1, *tuple(there)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: left)
    with pytest.raises(NoSpace, match="No space left"):
        await fetch.run()
    assert fetch.num_bytes_landed == 0


async def test_what_an_earlier_try_has_allocated_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w").write_bytes(DATA)
    info = await open_source(str(tmp_path / "w")).probe()
    for num_landed in (0, 4096):
        writer = RegionWriter(Region(tmp_path / "r"), WeightsRef(uri=str(tmp_path / "w")), info, len(DATA))
        assert writer.open() == num_landed
        writer.write(0, DATA[:4096])
        writer.save()
        writer.close()
        there = os.statvfs(tmp_path)
        left = os.statvfs_result((there.f_frsize, there.f_frsize, there.f_blocks, 1, 1, *tuple(there)[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _, left=left: left)


async def test_weights_larger_than_the_room_are_not_begun(tmp_path: Path) -> None:
    source = open_source(str(Path(__file__)))
    info: SourceInfo = await source.probe()
    writer = RegionWriter(Region(tmp_path / "r"), WeightsRef(uri="x"), info, info.num_bytes - 1)
    with pytest.raises(NoSpace, match="room for"):
        writer.open()
    assert not (tmp_path / "r").exists()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": server,
        "GOOGLE_BASE_URL": server,
        "GOOGLE_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.resource("s3", endpoint_url=server, region_name="us-east-1")
    found = s3.Bucket("weights")
    found.create(ACL="public-read")
    yield found
    found.objects.all().delete()
    found.delete()


def put(bucket: Any, key: str, body: bytes) -> None:
    """Public: Google's store is asked without a signature."""
    bucket.put_object(Key=key, Body=body, ACL="public-read")


OF_BOTH = pytest.mark.parametrize("scheme", ["s3", "gs"])


@OF_BOTH
async def test_an_object_by_ranges(bucket: Any, tmp_path: Path, scheme: str) -> None:
    put(bucket, "a/w.gguf", OBJECT)
    fetch = make(WeightsRef(uri=f"{scheme}://weights/a/w.gguf", sha256=OBJECT_SHA, num_bytes=len(OBJECT)), tmp_path)
    info = await fetch.run()
    assert info and info.source == scheme
    assert fetch.tally.num_bytes == len(OBJECT)
    assert fetch.region.blob.read_bytes() == OBJECT


async def test_a_set_endpoint_wins(bucket: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_object(Key="w", Body=OBJECT)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    info = await make(WeightsRef(uri="s3://weights/w"), tmp_path, s3_endpoint=server).run()
    assert info and info.sha256 == OBJECT_SHA


@OF_BOTH
async def test_a_prefix_is_a_directory(bucket: Any, tmp_path: Path, scheme: str) -> None:
    put(bucket, "repo/config.json", b"{}")
    put(bucket, "repo/sub/model.safetensors", OBJECT)
    put(bucket, "repo2/other", b"not ours")
    fetch = make(WeightsRef(uri=f"{scheme}://weights/repo/"), tmp_path)
    await fetch.run()
    assert (fetch.region.files / "config.json").read_bytes() == b"{}"
    assert (fetch.region.files / "sub/model.safetensors").read_bytes() == OBJECT
    assert not (fetch.region.files / "other").exists()


@pytest.mark.parametrize("uri", ["{}://weights/none", "{}://weights/none/", "{}://nobucket/w"])
@OF_BOTH
async def test_what_is_not_there(bucket: Any, tmp_path: Path, uri: str, scheme: str) -> None:
    with pytest.raises(WeightsUnavailable, match=r"no such object|no object"):
        await make(WeightsRef(uri=uri.format(scheme)), tmp_path).run()


async def test_google_credentials_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(WeightsUnavailable, match=r"gs://weights/w: .*"):
        open_source("gs://weights/w")


async def test_corrupt(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="w", Body=OBJECT[:-1] + b"?")
    with pytest.raises(ChecksumMismatch):
        await make(WeightsRef(uri="s3://weights/w", sha256=OBJECT_SHA), tmp_path).run()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="given up"):
        await make(WeightsRef(uri="s3://weights/w"), tmp_path, s3_endpoint="http://127.0.0.1:9").run()


@OF_BOTH
async def test_an_object_that_changed_is_not_mixed(bucket: Any, tmp_path: Path, scheme: str) -> None:
    put(bucket, "w", OBJECT)
    ref = WeightsRef(uri=f"{scheme}://weights/w")
    fetch = make(ref, tmp_path)
    fetch._first_byte, fetch._last_byte = 0, 300_000
    assert await fetch.run() is None
    other = bytes(reversed(OBJECT))
    put(bucket, "w", other)
    again = make(ref, tmp_path)
    info = await again.run()
    assert again.num_bytes_resumed == 0
    assert info and info.sha256 == hashlib.sha256(other).hexdigest()
