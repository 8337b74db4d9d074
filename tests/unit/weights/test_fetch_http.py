"""Fetching over HTTP, and redirects."""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.domain.errors import ChecksumMismatch, NoSpace, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, RegionState, region_digest
from glowplug.weights.source import Chunk, SourceFile, SourceOptions, not_slower
from glowplug.weights.sources import open_source
from glowplug.weights.sources.http import HttpSource, next_url
from glowplug.weights.writer import SAVE_EVERY_BYTES
from tests.waiting import WAIT_S, until
from tests.weight_servers import WeightServer

DATA = random.Random(7).randbytes(1_500_001)
SHA = hashlib.sha256(DATA).hexdigest()
OPTIONS = FetchOptions(part_bytes=200_000, max_parts=3, max_attempts=4, backoff_first_s=0.001, backoff_cap_s=0.01)
CDN = ("*.cdn.example", "hub.example")
FOLLOWED = [
    ("http://a.example/w", "/other", "http://a.example/other"),
    ("http://a.example:8080/w", "http://a.example:8080/x", "http://a.example:8080/x"),
    ("http://a.example/w", "https://a.example/w", "https://a.example/w"),
    ("https://a.example/w", "https://eu.cdn.example/w?sig=1", "https://eu.cdn.example/w?sig=1"),
    ("http://127.0.0.1:9000/w", "/v2", "http://127.0.0.1:9000/v2"),
    ("https://user:pw@a.example/w", "/v2", "https://user:pw@a.example/v2"),
    ("https://user:pw@a.example/w", "https://user:pw@hub.example/w", "https://hub.example/w"),
]


async def whatever(num_bytes: int) -> int:
    return max(num_bytes, 10_000_000)


def make(
    ref: WeightsRef, root: Path, options: FetchOptions = OPTIONS, stall_s: float = WAIT_S, **given: object
) -> Fetch:
    region = Region.at(root, "n", region_digest(ref))
    source = open_source(ref.uri, SourceOptions(chunk_bytes=32_768, stall_timeout_s=stall_s, connect_timeout_s=WAIT_S))
    return Fetch(ref, region, source, LinkMeter("n/nic"), whatever, options=options, **given)  # type: ignore[arg-type]


async def fetched(ref: WeightsRef, root: Path) -> Fetch:
    fetch = make(ref, root)
    await fetch.run()
    return fetch


def assert_whole(fetch: Fetch, sha: str = SHA, data: bytes = DATA) -> None:
    status = fetch.region.read_state()
    assert status.state is RegionState.COMPLETE and status.info
    assert status.info.sha256 == sha
    assert status.num_bytes_done == len(data)
    assert Path(status.info.path).read_bytes() == data
    assert fetch._link.bytes_in_flight == 0 and fetch._link.num_transfers == 0


SERVERS = {
    "redirected on the same server": {"moved": "/elsewhere.gguf"},
    "no ranges": {"ranges": False},
    "no ranges and no length": {"ranges": False, "length_told": False},
    "errors that pass": {"statuses": [500, 503, 429]},
}


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
async def test_a_file_comes_whole(tmp_path: Path, server: dict[str, Any]) -> None:
    with WeightServer(DATA, **server) as found:
        assert_whole(await fetched(WeightsRef(uri=found.url, sha256=SHA), tmp_path))


@pytest.mark.parametrize("sha256", [SHA, ""])
async def test_whole_file_by_parallel_ranges(tmp_path: Path, sha256: str) -> None:
    with WeightServer(DATA) as server:
        fetch = await fetched(WeightsRef(uri=server.url, num_bytes=len(DATA), sha256=sha256), tmp_path)
        assert_whole(fetch)
        assert fetch.tally.num_bytes == len(DATA)
        assert len(server.requests) == 1 + 1 + 8  # the probe, the file's head, and 8 parts of 200 kB


async def test_cut_connections_go_on_where_they_stopped(tmp_path: Path) -> None:
    with WeightServer(DATA, cuts=[10_000, 30_000, 50_000, 20_000, 1]) as server:
        fetch = await fetched(WeightsRef(uri=server.url, sha256=SHA), tmp_path)
        assert_whole(fetch)
        assert fetch.tally.num_retries == 4
        assert fetch.tally.num_bytes == len(DATA)


async def test_cut_connection_without_ranges_starts_again(tmp_path: Path) -> None:
    with WeightServer(DATA, ranges=False, cuts=[len(DATA), 300_000]) as server:
        fetch = await fetched(WeightsRef(uri=server.url, sha256=SHA), tmp_path)
        assert_whole(fetch)
        assert fetch.tally.num_bytes > len(DATA)


FINAL = [(status, f"HTTP {status}", 1) for status in (401, 403, 404, 410)]


@pytest.mark.parametrize(("status", "said", "num_tries"), [*FINAL, (500, "given up after 4 tries", 4)])
async def test_errors_that_stay_are_final_or_given_up(tmp_path: Path, status: int, said: str, num_tries: int) -> None:
    with WeightServer(DATA, statuses=[status] * 99) as server:
        with pytest.raises(WeightsUnavailable, match=said):
            await fetched(WeightsRef(uri=server.url), tmp_path)
        assert len(server.requests) == num_tries


async def test_nobody_listens(tmp_path: Path) -> None:
    with WeightServer(DATA) as server:
        url = server.url
    with pytest.raises(WeightsUnavailable, match="given up"):
        await fetched(WeightsRef(uri=url), tmp_path)


async def test_a_stalled_server_is_given_up(tmp_path: Path) -> None:
    with WeightServer(DATA, step_s=30.0) as server, pytest.raises(WeightsUnavailable, match="given up"):
        await make(WeightsRef(uri=server.url), tmp_path, FetchOptions(max_attempts=1), stall_s=0.5).run()


@pytest.mark.parametrize("ranges", [True, False], ids=["in parts", "whole"])
async def test_a_server_that_trickles_is_given_up(tmp_path: Path, ranges: bool) -> None:
    """A byte comes again and again, so that no reader ever stalls."""
    options = FetchOptions(max_parts=1, max_attempts=2, backoff_first_s=0.001, slow_s=0.3)
    given_up = pytest.raises(WeightsUnavailable, match=r"sent \d+ bytes in .* \(given up after 2 tries\)")
    with WeightServer(DATA, ranges=ranges, step=1, step_s=0.02) as server, given_up:
        await make(WeightsRef(uri=server.url), tmp_path, options).run()


async def test_a_reader_may_be_slower_than_any_source() -> None:
    async def quick() -> AsyncGenerator[Chunk, None]:
        for _ in range(3):
            yield b"x"

    came = b""
    async for chunk in not_slower(quick(), "it", over_s=0.3):
        came += chunk
        await asyncio.sleep(0.4)
    assert came == b"xxx"


@pytest.mark.parametrize("ranges", [True, False])
async def test_wrong_length_is_never_served(tmp_path: Path, ranges: bool) -> None:
    with WeightServer(DATA[:-7], ranges=ranges) as server:
        ref = WeightsRef(uri=server.url, num_bytes=len(DATA))
        with pytest.raises(ChecksumMismatch, match=f"{len(DATA) - 7} bytes, expected {len(DATA)}"):
            await fetched(ref, tmp_path)
        assert Region.at(tmp_path, "n", region_digest(ref)).read_state().state is not RegionState.COMPLETE


async def test_wrong_length_found_at_the_end(tmp_path: Path) -> None:
    server = WeightServer(DATA, ranges=False, length_told=False, extra=b"more")
    with server, pytest.raises(ChecksumMismatch, match="bytes, expected"):
        await fetched(WeightsRef(uri=server.url, num_bytes=len(DATA)), tmp_path)


async def test_corrupt_bytes_are_fetched_once_more_then_refused(tmp_path: Path) -> None:
    with WeightServer(DATA[:-1] + b"?") as server:
        ref = WeightsRef(uri=server.url, sha256=SHA)
        with pytest.raises(ChecksumMismatch, match="sha256"):
            await fetched(ref, tmp_path)
        assert server.bytes_sent == 2 * len(DATA) + 2  # two fetches, each with a probe
        region = Region.at(tmp_path, "n", region_digest(ref))
        assert region.read_state().state is RegionState.ABSENT
        assert not region.blob.exists()


async def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with WeightServer(b"", ranges=False) as server, pytest.raises(WeightsUnavailable, match="empty"):
        await fetched(WeightsRef(uri=server.url), tmp_path)


async def interrupted(ref: WeightsRef, root: Path, server: WeightServer) -> int:
    """Return the bytes landed."""
    fetch = make(ref, root, FetchOptions(part_bytes=200_000, max_parts=2))
    server.step_s = 0.02
    task = asyncio.create_task(fetch.run())
    await until(lambda: fetch.num_bytes_landed >= 300_000)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.step_s = 0.0
    assert fetch.region.read_state().state is RegionState.FETCHING
    return fetch.num_bytes_landed


@pytest.mark.parametrize("sha256", [SHA, ""])
async def test_resume_fetches_only_what_is_missing(tmp_path: Path, sha256: str) -> None:
    with WeightServer(DATA) as server:
        ref = WeightsRef(uri=server.url, sha256=sha256)
        landed = await interrupted(ref, tmp_path, server)
        fetch = await fetched(ref, tmp_path)
        assert_whole(fetch)
        assert fetch.num_bytes_resumed == landed
        assert fetch.tally.num_bytes == len(DATA) - landed


async def test_a_changed_file_is_not_mixed_with_the_old(tmp_path: Path) -> None:
    with WeightServer(DATA) as server:
        ref = WeightsRef(uri=server.url)
        await interrupted(ref, tmp_path, server)
        server.data, server.etag = bytes(reversed(DATA)), '"v2"'
        fetch = await fetched(ref, tmp_path)
        assert_whole(fetch, hashlib.sha256(server.data).hexdigest(), server.data)
        assert fetch.num_bytes_resumed == 0


async def test_a_file_that_changes_under_the_fetch_starts_again(tmp_path: Path) -> None:
    with WeightServer(DATA, step_s=0.01) as server:
        fetch = make(WeightsRef(uri=server.url), tmp_path)
        task = asyncio.create_task(fetch.run())
        await until(lambda: fetch.num_bytes_landed >= 300_000)
        server.data, server.etag, server.step_s = bytes(reversed(DATA)), '"v2"', 0.0
        await task
        assert_whole(fetch, hashlib.sha256(server.data).hexdigest(), server.data)


@pytest.mark.parametrize("lacks", ["validator and checksum", "blob"])
async def test_what_cannot_be_resumed_is_fetched_anew(tmp_path: Path, lacks: str) -> None:
    with WeightServer(DATA, **({} if lacks == "blob" else {"etag": ""})) as server:
        ref = WeightsRef(uri=server.url)
        await interrupted(ref, tmp_path, server)
        if lacks == "blob":
            Region.at(tmp_path, "n", region_digest(ref)).blob.unlink()
        fetch = await fetched(ref, tmp_path)
        assert_whole(fetch)
        assert fetch.num_bytes_resumed == 0


async def test_a_byte_range_first_then_the_rest(tmp_path: Path) -> None:
    with WeightServer(DATA) as server:
        ref = WeightsRef(uri=server.url, sha256=SHA)
        middle = make(ref, tmp_path, first_byte=500_000, last_byte=900_000)
        assert await middle.run() is None and middle.tally.num_bytes == 425_984  # whole pieces of 32 KiB
        assert middle.region.read_state().state is RegionState.FETCHING
        assert middle.region.watermark() == 0
        assert middle.region.read_meta()["landed"] == [[491_520, 917_504]]
        rest = await fetched(ref, tmp_path)
        assert_whole(rest)
        assert (rest.num_bytes_resumed, rest.tally.num_bytes) == (425_984, len(DATA) - 425_984)


async def test_no_room_granted(tmp_path: Path) -> None:
    async def none(_: int) -> int:
        raise NoSpace("full")

    with WeightServer(DATA) as server:
        fetch = make(WeightsRef(uri=server.url), tmp_path)
        fetch._on_sized = none
        with pytest.raises(NoSpace):
            await fetch.run()
        assert not fetch.region.blob.exists()


async def test_unknown_size_is_bounded_by_the_room(tmp_path: Path) -> None:
    async def little(_: int) -> int:
        return 100_000

    with WeightServer(DATA, ranges=False, length_told=False) as server:
        fetch = make(WeightsRef(uri=server.url), tmp_path)
        fetch._on_sized = little
        with pytest.raises(NoSpace, match="100000 bytes of room"):
            await fetch.run()


async def test_a_killed_fetch_has_written_down_what_landed_in_unfinished_parts(tmp_path: Path) -> None:
    """A killed process saves nothing as it ends."""
    data = random.Random(9).randbytes(3 * SAVE_EVERY_BYTES)
    with WeightServer(data, step_s=0.001) as server:
        fetch = make(WeightsRef(uri=server.url), tmp_path, FetchOptions(part_bytes=len(data), max_parts=1))
        task = asyncio.create_task(fetch.run())
        while (landed := fetch.region.read_meta().get("landed", [])) == [] or landed[0][1] < SAVE_EVERY_BYTES:
            await asyncio.sleep(0.002)
        assert not task.done()
        ((first, last),) = landed
        assert first == 0 and SAVE_EVERY_BYTES <= last < len(data)
        assert fetch.region.blob.read_bytes()[:last] == data[:last]
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize(("source", "location", "wanted"), FOLLOWED)
def test_followed(source: str, location: str, wanted: str) -> None:
    assert str(next_url(httpx.URL(source), location, CDN, "shown")) == wanted


REFUSED = [
    ("https://a.example/w", "http://a.example/w"),  # from https to http
    ("https://a.example/w", "https://b.example/w"),  # an undeclared host
    ("http://a.example/w", "http://eu.cdn.example/w"),  # declared, but without a certificate
    ("http://a.example/w", "https://cdn.example.evil.example/w"),
    ("https://a.example/w", "https://evilhub.example/w"),
    ("http://a.example/w", "http://a.example:6379/w"),
    ("https://a.example/w", "https://a.example:2379/w"),
    ("http://127.0.0.1:9000/w", "http://127.0.0.1:6379/w"),
    ("http://a.example/w", "file:///etc/passwd"),
    ("http://a.example/w", "s3://bucket/key"),
    ("http://a.example/w", "http://127.0.0.1/w"),
    ("http://a.example/w", "//127.0.0.1/w"),
]


@pytest.mark.parametrize(("source", "location"), REFUSED)
def test_refused(source: str, location: str) -> None:
    with pytest.raises(WeightsUnavailable, match=r"shown: a redirect to \S+ is not followed"):
        next_url(httpx.URL(source), location, CDN, "shown")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "localhost", "x.localhost", "169.254.169.254", "10.0.0.1", "[fd00::1]", "[fe80::1]"]
)
def test_no_pattern_opens_the_network_within(host: str) -> None:
    with pytest.raises(WeightsUnavailable, match="not followed"):
        next_url(httpx.URL("https://a.example/w"), f"https://{host}/w", ("*",), "shown")


def test_a_reason_shows_no_secret() -> None:
    with pytest.raises(WeightsUnavailable) as refused:
        next_url(httpx.URL("https://a.example/w"), "https://u:secret@b.example/w?sig=secret", CDN, "shown")
    assert "secret" not in refused.value.message


MEASURED: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "by a HEAD": ({"head": True}, ["HEAD"], True),
    "a HEAD that is refused": ({}, ["HEAD", "bytes=0-0"], True),
    "a HEAD that does not say whether ranges work": ({"head": True, "ranges": False}, ["HEAD", "bytes=0-0"], False),
}


@pytest.mark.parametrize(("server", "requests", "ranges"), MEASURED.values(), ids=MEASURED)
async def test_a_size_is_known_before_anything_is_fetched(
    server: dict[str, Any], requests: list[str], ranges: bool
) -> None:
    with WeightServer(DATA, **server) as found:
        source = HttpSource(found.url)
        info = await source.measure()
        await source.close()
    assert (info.num_bytes, info.ranges, found.requests) == (len(DATA), ranges, requests)
    assert found.bytes_sent <= (1 if ranges else len(DATA))


async def test_a_size_that_nobody_says() -> None:
    with WeightServer(DATA, head=True, ranges=False, length_told=False) as server:
        source = HttpSource(server.url)
        assert (await source.measure()).num_bytes == 0
        await source.close()


async def test_nobody_is_asked_whom_a_redirect_may_not_lead_to() -> None:
    with WeightServer(DATA) as inner, WeightServer(DATA, moved=inner.url) as outer:
        source = HttpSource(outer.url, SourceOptions())
        with pytest.raises(WeightsUnavailable, match="not followed"):
            await source.probe()
        with pytest.raises(WeightsUnavailable, match="not followed"):
            async for _ in source.read(SourceFile(path="", num_bytes=10), 0, 10):
                pass
        await source.close()
    assert inner.requests == [] and len(outer.requests) == 2


async def test_redirects_without_an_end_are_given_up() -> None:
    with WeightServer(DATA) as server:
        server.moved = server.url
        source = HttpSource(server.url, SourceOptions())
        with pytest.raises(WeightsUnavailable, match="more than 5 redirects"):
            await source.probe()
        await source.close()
    assert len(server.requests) == 1 + 5
