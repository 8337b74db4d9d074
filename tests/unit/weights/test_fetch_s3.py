"""Fetching from S3, against a real server that speaks it (moto)."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from glowplug.domain.errors import ChecksumMismatch, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, region_digest
from glowplug.weights.source import SourceOptions
from glowplug.weights.sources import open_source

DATA = random.Random(3).randbytes(1_200_000)
SHA = hashlib.sha256(DATA).hexdigest()


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
    }.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.resource("s3", endpoint_url=server, region_name="us-east-1")
    found = s3.Bucket("weights")
    found.create()
    yield found
    found.objects.all().delete()
    found.delete()


async def whatever(_: int) -> int:
    return 10_000_000


def make(ref: WeightsRef, root: Path, **options: Any) -> Fetch:
    region = Region.at(root, "n", region_digest(ref))
    source = open_source(ref.uri, SourceOptions(chunk_bytes=100_000, **options))
    fetch_options = FetchOptions(part_bytes=300_000, max_attempts=2, backoff_first_s=0.001)
    return Fetch(ref, region, source, LinkMeter("n/nic"), whatever, options=fetch_options)


async def test_an_object_by_ranges(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="a/w.gguf", Body=DATA)
    fetch = make(WeightsRef(uri="s3://weights/a/w.gguf", sha256=SHA, num_bytes=len(DATA)), tmp_path)
    result = await fetch.run()
    assert result.info and result.info.source == "s3"
    assert result.num_bytes_fetched == len(DATA)
    assert fetch.region.blob.read_bytes() == DATA


async def test_an_endpoint_of_the_settings_wins(
    bucket: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_object(Key="w", Body=DATA)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    result = await make(WeightsRef(uri="s3://weights/w"), tmp_path, s3_endpoint=server).run()
    assert result.info and result.info.sha256 == SHA


async def test_a_prefix_is_a_directory(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="repo/config.json", Body=b"{}")
    bucket.put_object(Key="repo/sub/model.safetensors", Body=DATA)
    bucket.put_object(Key="repo2/other", Body=b"not ours")
    fetch = make(WeightsRef(uri="s3://weights/repo/"), tmp_path)
    await fetch.run()
    assert (fetch.region.files / "config.json").read_bytes() == b"{}"
    assert (fetch.region.files / "sub/model.safetensors").read_bytes() == DATA
    assert not (fetch.region.files / "other").exists()


@pytest.mark.parametrize("uri", ["s3://weights/none", "s3://weights/none/", "s3://nobucket/w"])
async def test_what_is_not_there(bucket: Any, tmp_path: Path, uri: str) -> None:
    with pytest.raises(WeightsUnavailable, match=r"no such object|no object"):
        await make(WeightsRef(uri=uri), tmp_path).run()


async def test_corrupt(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="w", Body=DATA[:-1] + b"?")
    with pytest.raises(ChecksumMismatch):
        await make(WeightsRef(uri="s3://weights/w", sha256=SHA), tmp_path).run()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="given up"):
        await make(WeightsRef(uri="s3://weights/w"), tmp_path, s3_endpoint="http://127.0.0.1:9").run()


async def test_an_object_that_changed_is_not_mixed(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="w", Body=DATA)
    ref = WeightsRef(uri="s3://weights/w")
    fetch = make(ref, tmp_path)
    fetch._first_byte, fetch._last_byte = 0, 300_000
    assert (await fetch.run()).info is None
    other = bytes(reversed(DATA))
    bucket.put_object(Key="w", Body=other)
    result = await make(ref, tmp_path).run()
    assert result.num_bytes_resumed == 0
    assert result.info and result.info.sha256 == hashlib.sha256(other).hexdigest()
