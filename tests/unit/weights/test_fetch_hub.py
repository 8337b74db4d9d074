"""Weights from the Hugging Face hub, its cache, and the token's reach."""

import asyncio
import errno
import hashlib
import logging
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.cli.pull import fill_cache
from glowplug.domain.errors import WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, region_digest
from glowplug.weights.source import (
    HubAddress,
    SourceChanged,
    SourceInterrupted,
    SourceOptions,
    hub_address,
    is_directory,
    redacted,
    suffix,
)
from glowplug.weights.sources.connection import ConnectionLimits, Connections, HttpAnswer
from glowplug.weights.sources.hub import Chosen, HubSource, choose
from tests.hub_server import HubServer, etag_of
from tests.waiting import WAIT_S
from tests.weight_servers import WeightServer

GGUF = random.Random(3).randbytes(700_001)
SET = {
    ".gitattributes": b"x",
    "README.md": b"read me",
    "config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    "model-00001-of-00002.safetensors": random.Random(4).randbytes(300_000),
    "model-00002-of-00002.safetensors": random.Random(5).randbytes(200_001),
    "model.safetensors.index.json": b'{"i": 1}',
    "pytorch_model.bin": b"old",
}
SET_NAMES = [name for name in SET if name.startswith(("c", "t", "m"))]
REPOS = {"org/one": {"README.md": b"x", "one.Q4_K_M.gguf": GGUF}, "org/set": SET}
COMMIT = "a" * 40


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(dict(REPOS)) as server:
        yield server


def options(hub: HubServer | None, cache: Path, **given: Any) -> SourceOptions:
    endpoint = hub.url if hub else "http://127.0.0.1:9"
    fixed = {"hf_endpoint": endpoint, "hf_cache_dir": cache, "hf_offline": False, "hf_token": ""}
    return SourceOptions(
        **{"chunk_bytes": 32_768, "stall_timeout_s": WAIT_S, "connect_timeout_s": WAIT_S, **fixed, **given}
    )


async def fetched(uri: str, hub: HubServer | None, root: Path, **given: Any) -> Fetch:
    ref = WeightsRef(uri=uri)
    region = Region.at(root / "shm", "n", region_digest(ref))
    bounds = FetchOptions(part_bytes=100_000, max_parts=3, max_attempts=2, backoff_first_s=0.001)

    async def granted(num_bytes: int) -> int:
        return num_bytes

    source = HubSource(uri, options(hub, root / "cache", **given))
    try:
        fetch = Fetch(ref, region, source, LinkMeter("n/nic"), granted, options=bounds)
        await fetch.run()
    finally:
        await source.close()
    return fetch


ADDRESSES = {
    "hf:org/name": HubAddress("org/name"),
    "hf://org/name": HubAddress("org/name"),
    "HF:org/na.me-1": HubAddress("org/na.me-1"),
    "hf:org/name@v1.0": HubAddress("org/name", "v1.0"),
    "hf://org/name@refs/pr/3:a b/c.gguf": HubAddress("org/name", "refs/pr/3", "a b/c.gguf"),
    "hf:org/name:*Q4.gguf": HubAddress("org/name", "main", "*Q4.gguf"),
}


@pytest.mark.parametrize(("uri", "address"), ADDRESSES.items(), ids=ADDRESSES)
def test_an_address_has_one_spelling(uri: str, address: HubAddress) -> None:
    assert hub_address(uri) == address
    assert hub_address(address.uri) == address
    assert redacted(uri) == uri


@pytest.mark.parametrize(
    "uri",
    ["hf:name", "hf:org/name/file.gguf", "hf:org/..", "hf:org/name@", "hf:org/n:../x", "hf:org/n:/x", "hf:org/n@../x"],
)
def test_addresses_that_name_no_repository(uri: str) -> None:
    with pytest.raises(WeightsUnavailable):
        hub_address(uri)


def test_a_wrong_address_shows_no_secret() -> None:
    with pytest.raises(WeightsUnavailable) as refused:
        hub_address("hf://me:secret@huggingface.co/org/name")
    assert "secret" not in refused.value.message


def test_what_an_address_alone_says_of_its_files() -> None:
    given = ("hf:o/n.gguf", "hf:o/n:w.gguf", "hf:o/n:*.safetensors", "hf:o/n:*Q4*", "hf:o/n:w.safetensors")
    assert [is_directory(uri) for uri in given] == [None, False, True, None, False]
    assert [suffix(uri) for uri in given[:3]] == ["", ".gguf", ".safetensors"]


CHOSEN: dict[str, tuple[str, list[str], Chosen]] = {
    "one gguf": ("", ["README.md", "w.gguf", "mmproj-w.gguf"], Chosen(("w.gguf",), False)),
    "a set": ("", list(SET), Chosen(tuple(sorted(SET_NAMES)), True)),
    "one tensor file first": (
        "",
        ["config.json", "model.safetensors", "model.fp16.safetensors", "sub/x.safetensors"],
        Chosen(("config.json", "model.safetensors"), True),
    ),
    "the set of the name that loaders know": (
        "",
        ["consolidated.safetensors", "model-00001-of-00001.safetensors", "params.json"],
        Chosen(("model-00001-of-00001.safetensors", "params.json"), True),
    ),
    "a file": ("sub/w.gguf", ["sub/w.gguf", "w.gguf"], Chosen(("sub/w.gguf",), False)),
    "a pattern": ("*q4*", ["w.q4.gguf", "w.q8.gguf"], Chosen(("w.q4.gguf",), False)),
    "the set by pattern": (
        "*.safetensors",
        ["a.safetensors", "b/a.safetensors", "w.gguf"],
        Chosen(("a.safetensors",), True),
    ),
}


@pytest.mark.parametrize(("file", "names", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_the_weights_of_a_repository(file: str, names: list[str], chosen: Chosen) -> None:
    assert choose(HubAddress("o/n", file=file), names) == chosen


UNCLEAR = {
    "several quantisations": ("", ["w.q4.gguf", "w.q8.gguf"], r"as in hf:o/n:w.q4.gguf: w.q4.gguf, w.q8.gguf"),
    "both kinds": ("", ["model.safetensors", "w.gguf"], r"several .*: \*.safetensors, w.gguf"),
    "two sets": ("", ["a.safetensors", "b-00001-of-00002.safetensors"], r"several .*: a.safetensors, b-\*.safetensors"),
    "neither": ("", ["pytorch_model.bin"], "no GGUF; there are: pytorch_model.bin"),
    "nothing": ("", [], "it is empty"),
    "a set with a hole": ("", ["m-00001-of-00002.safetensors"], "1 of 2 parts"),
    "no such file": ("x.gguf", ["y.gguf"], "no file x.gguf; there are: y.gguf"),
    "a pattern of several": ("*.gguf", ["a.gguf", "b.gguf"], "several .*: a.gguf, b.gguf"),
    "a pattern of none": ("*.gguf", ["a.bin"], "no file matches"),
    "one part of a split file": (
        "",
        ["w-00001-of-00003.gguf"],
        r"3 parts; name the first one: hf:o/n:w-00001-of-00003.gguf",
    ),
}


@pytest.mark.parametrize(("file", "names", "said"), UNCLEAR.values(), ids=UNCLEAR)
def test_what_is_not_clear_is_refused_with_the_candidates(file: str, names: list[str], said: str) -> None:
    with pytest.raises(WeightsUnavailable, match=said) as refused:
        choose(HubAddress("o/n", file=file), names)
    assert refused.value.param == "weights"


async def test_the_single_gguf_comes_by_parallel_ranges(hub: HubServer, tmp_path: Path) -> None:
    fetch = await fetched("hf:org/one", hub, tmp_path)
    assert fetch.region.blob.read_bytes() == GGUF
    info = fetch.region.read_state().info
    assert info and (info.source, info.sha256) == ("hf", hashlib.sha256(GGUF).hexdigest())
    assert len([path for path in hub.fetched() if path.startswith("/store/")]) == 8  # parts of 100 kB


async def test_the_set_comes_as_a_directory(hub: HubServer, tmp_path: Path) -> None:
    fetch = await fetched("hf://org/set@main", hub, tmp_path)
    files = {p.name: p.read_bytes() for p in fetch.region.files.iterdir()}
    assert files == {name: SET[name] for name in SET_NAMES}


async def test_sizes_are_asked_of_files_where_the_listing_lacks_them(hub: HubServer, tmp_path: Path) -> None:
    hub.tells_sizes = False
    info = await HubSource("hf:org/one", options(hub, tmp_path)).measure()
    assert [(f.path, f.num_bytes, f.validator) for f in info.files] == [("", len(GGUF), etag_of(GGUF))]


async def test_what_the_cache_holds_of_a_commit_is_read_from_there(hub: HubServer, tmp_path: Path) -> None:
    """The cache names files as the hub does, so a fetch may end with files it did not begin with."""
    hub.fill_cache(tmp_path / "cache", "org/set", ["config.json", "model-00001-of-00002.safetensors"])
    source = HubSource("hf:org/set", options(hub, tmp_path / "cache"))
    snapshot = await source.resolve()
    assert {f.name for f in snapshot.files if f.cached} == {"config.json", "model-00001-of-00002.safetensors"}
    assert not snapshot.is_cached
    fetch = await fetched("hf:org/set", hub, tmp_path)
    assert (fetch.region.files / "model-00001-of-00002.safetensors").read_bytes() == SET[
        "model-00001-of-00002.safetensors"
    ]
    assert not [path for path in hub.fetched() if "00001-of" in path or "config" in path]


async def test_a_file_of_another_commit_in_the_cache_is_not_taken(hub: HubServer, tmp_path: Path) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    hub.repos["org/one"] = {"one.Q4_K_M.gguf": GGUF[::-1]}
    hub.commits["main"] = "b" * 40
    fetch = await fetched("hf:org/one", hub, tmp_path)
    assert fetch.region.blob.read_bytes() == GGUF[::-1]


@pytest.mark.parametrize("uri", ["hf:org/one", f"hf:org/one@{COMMIT}", "hf:org/one@main:one.Q4_K_M.gguf"])
async def test_offline_the_cache_alone_counts(hub: HubServer, tmp_path: Path, uri: str) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    fetch = await fetched(uri, None, tmp_path, hf_offline=True)
    assert fetch.region.blob.read_bytes() == GGUF
    assert hub.requests == []


MISSING_OFFLINE = {
    "hf:org/other": "holds none of it, and HF_HUB_OFFLINE is set",
    "hf:org/one@v2": "holds none of it",
    "hf:org/one:two.gguf": "no file two.gguf.*HF_HUB_OFFLINE",
}


@pytest.mark.parametrize(("uri", "said"), MISSING_OFFLINE.items())
async def test_offline_what_is_missing_is_said(hub: HubServer, tmp_path: Path, uri: str, said: str) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    with pytest.raises(WeightsUnavailable, match=said):
        await fetched(uri, None, tmp_path, hf_offline=True)


async def test_a_file_of_a_commit_in_the_cache_asks_nobody(hub: HubServer, tmp_path: Path) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    await fetched(f"hf:org/one@{COMMIT}:one.Q4_K_M.gguf", hub, tmp_path)
    assert hub.requests == []


async def test_where_the_hub_does_not_answer_the_cache_does(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    caplog.set_level(logging.WARNING)
    fetch = await fetched("hf:org/one", None, tmp_path)
    assert fetch.region.blob.read_bytes() == GGUF
    assert "no answer" in caplog.text and "cache" in caplog.text
    with pytest.raises(WeightsUnavailable, match="given up after 2 tries"):
        await fetched("hf:org/set", None, tmp_path)


async def test_a_fetch_does_not_go_on_at_an_older_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.fill_cache(tmp_path / "cache", "org/one")
    hub.commits["main"] = "b" * 40
    source = HubSource("hf:org/one", options(hub, tmp_path / "cache"))
    assert (await source.resolve()).commit == "b" * 40
    hub.statuses = [503]
    with pytest.raises(SourceInterrupted, match="HTTP 503"):
        await source.probe()
    hub.statuses = [503]
    checking = HubSource("hf:org/one", options(hub, tmp_path / "cache", hf_falls_back=False))
    with pytest.raises(SourceInterrupted, match="HTTP 503"):
        await checking.probe()


async def test_what_the_cache_lacks_is_asked_of_the_hub_again(hub: HubServer, tmp_path: Path) -> None:
    hub.fill_cache(tmp_path / "cache", "org/set", ["config.json"])
    hub.statuses = [503]
    fetch = await fetched("hf:org/set", hub, tmp_path)
    assert fetch.tally.num_retries == 1 and len(list(fetch.region.files.iterdir())) == len(SET_NAMES)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no repository": ({}, "hf:org/nothing", "no such repository"),
    "no revision": ({}, "hf:org/one@v9", "no revision v9"),
    "gated": ({"gated": True}, "hf:org/one", "access is restricted"),
    "private": ({"token": "t"}, "hf:org/one", "needs an HF_TOKEN"),
    "a name that the hub does not have": ({}, "hf:org/a--b", "hf:org/a--b: "),
}


@pytest.mark.parametrize(("server", "uri", "said"), REFUSED.values(), ids=REFUSED)
async def test_refused(tmp_path: Path, server: dict[str, Any], uri: str, said: str) -> None:
    with HubServer(dict(REPOS), **server) as hub:
        source = HubSource(uri, options(hub, tmp_path))
        with pytest.raises(WeightsUnavailable, match=said):
            await source.probe()


async def test_a_mirror_that_lies_reads_no_file_of_this_machine(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"mine")
    hub.commits["main"] = "../../.."
    hub.repos["org/one"] = {"secret.gguf": b"four"}
    snapshot = await HubSource("hf:org/one", options(hub, tmp_path)).resolve()
    assert (snapshot.commit, snapshot.files[0].cached) == ("main", None)
    hub.repos["org/one"] = {"../w.safetensors": b"four"}
    with pytest.raises(WeightsUnavailable, match="points outside its directory"):
        await HubSource("hf:org/one:*.safetensors", options(hub, tmp_path)).resolve()


async def test_an_answer_that_is_no_listing_may_be_another_the_next_time(tmp_path: Path) -> None:
    with WeightServer(b"<html>") as server:
        given = options(None, tmp_path, hf_endpoint=server.url.replace("http://", "http://me:secret@"))
        with pytest.raises(SourceInterrupted, match="no answer") as interrupted:
            await HubSource("hf:org/one", given).probe()
    assert "secret" not in str(interrupted.value)


async def test_what_may_pass_is_tried_again(hub: HubServer, tmp_path: Path) -> None:
    hub.statuses = [503]
    with pytest.raises(SourceInterrupted, match="HTTP 503"):
        await HubSource("hf:org/one", options(hub, tmp_path)).probe()
    hub.statuses = [500]
    assert (await fetched("hf:org/one", hub, tmp_path)).tally.num_retries == 1


async def test_a_private_repository_opens_with_the_token_which_no_log_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with HubServer(dict(REPOS), token="hf_secret") as hub:
        given = options(hub, tmp_path, hf_token="hf_secret")
        await fetched("hf:org/one", hub, tmp_path, hf_token="hf_secret")
        assert "hf_secret" not in caplog.text + repr(given) + repr(HubSource("hf:org/one", given).__dict__["_options"])
        hub.token = "other"
        with pytest.raises(WeightsUnavailable) as refused:
            await HubSource("hf:org/one", given).probe()
    assert "hf_secret" not in f"{refused.value.message} {refused.value!r}"


RESOLVE = """
import asyncio, sys
from glowplug.weights.sources.hub import HubSource
from glowplug.cli.pull import fill_cache
source = HubSource("hf:org/one")
print(fill_cache(source, asyncio.run(source.resolve()), lambda _: None) / "one.Q4_K_M.gguf")
"""


def test_the_environment_says_where_the_hub_and_its_cache_are(tmp_path: Path) -> None:
    """huggingface_hub reads it at import: hence a separate process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}

    def resolved(**env: str) -> Path:
        ran = subprocess.run(
            [sys.executable, "-c", RESOLVE], env=kept | env, capture_output=True, text=True, check=True
        )
        return Path(ran.stdout.strip())

    with HubServer(dict(REPOS), token="hf_secret") as hub:
        path = resolved(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_TOKEN="hf_secret")
        assert path.is_relative_to(tmp_path / "hf/hub") and path.read_bytes() == GGUF
        num_requests = len(hub.requests)
        assert resolved(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hf/hub"), HF_ENDPOINT=hub.url) == path
        assert len(hub.requests) == num_requests


class TwoHosts(Connections):
    """A hub that redirects to `location`."""

    def __init__(self, location: str) -> None:
        super().__init__(ConnectionLimits(connect_s=1.0, stall_s=1.0, buffer_bytes=1))
        self.location = location
        self.asked: list[tuple[str, str]] = []  # hosts and credentials

    @asynccontextmanager
    async def ask(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        self.asked.append((url.host, headers.get("Authorization", "")))
        content = iter([memoryview(GGUF[:10]), memoryview(b"")])

        async def fill() -> memoryview:
            return next(content)

        if url.host == "hub.example":
            said = {"Location": self.location, "X-Linked-Etag": f'"{etag_of(GGUF)}"'}
            yield HttpAnswer(302, "Found", httpx.Headers(said), fill)
        else:
            said = {"Content-Range": f"bytes 0-9/{len(GGUF)}"}
            yield HttpAnswer(206, "Partial Content", httpx.Headers(said), fill)


async def first_bytes(hub: HubServer, cache: Path, hosts: TwoHosts) -> bytes:
    given = options(hub, cache, hf_token="hf_secret")
    source = HubSource("hf:org/one", given, connections=hosts)
    info = await source.probe()
    source.endpoint = "https://hub.example"
    return b"".join([chunk async for chunk in source.read(info.files[0], 0, 10)])


async def test_the_token_stays_with_the_hub_where_its_store_is_another_host(hub: HubServer, tmp_path: Path) -> None:
    hosts = TwoHosts("https://cas-bridge.xethub.hf.co/x?sig=1")
    assert await first_bytes(hub, tmp_path, hosts) == GGUF[:10]
    assert hosts.asked == [("hub.example", "Bearer hf_secret"), ("cas-bridge.xethub.hf.co", "")]


@pytest.mark.parametrize("location", ["https://elsewhere.example/x", "http://cdn.hf.co/x", "https://10.0.0.1/x"])
async def test_no_other_host_is_followed(hub: HubServer, tmp_path: Path, location: str) -> None:
    hosts = TwoHosts(location)
    with pytest.raises(WeightsUnavailable, match="not followed"):
        await first_bytes(hub, tmp_path, hosts)
    assert len(hosts.asked) == 1


async def test_bytes_of_another_file_are_not_taken(hub: HubServer, tmp_path: Path) -> None:
    source = HubSource("hf:org/one", options(hub, tmp_path))
    info = await source.probe()
    hub.repos["org/one"] = {"one.Q4_K_M.gguf": GGUF[::-1]}
    with pytest.raises(SourceChanged, match="has changed"):
        async for _ in source.read(info.files[0], 0, 10):
            pass


async def test_parts_of_two_versions_are_not_mixed_where_a_mirror_names_no_commit(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.commits["main"], hub.tells_sizes = "no-commit", False
    source = HubSource("hf:org/set", options(hub, tmp_path))
    found = await source.resolve()
    source._snapshot = replace(found, files=tuple(replace(file, etag="") for file in found.files))
    (config,) = [replace(file, validator="") for file in found.info.files if file.path == "config.json"]
    assert b"".join([chunk async for chunk in source.read(config, 0, 1)]) == b"{"
    hub.repos["org/set"] = SET | {"config.json": b"[]"}
    with pytest.raises(SourceChanged, match="has changed"):
        async for _ in source.read(config, 1, 2):
            pass
    assert b"".join([chunk async for chunk in source.read(config, 0, 2)]) == b"[]"


def test_tensors_come_last_so_that_a_part_of_a_snapshot_is_not_whole(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/set"] = {"a.safetensors": GGUF, "config.json": b"{}", "vocab.txt": b"v"}
    source = HubSource("hf:org/set", options(hub, tmp_path / "cache"))
    fill_cache(source, asyncio.run(source.resolve()), lambda _: None)
    names = list(dict.fromkeys(path.rsplit("/", 1)[1] for path in hub.fetched() if "/resolve/" in path))
    assert names == ["config.json", "vocab.txt", "a.safetensors"]


def test_a_fault_of_this_machine_is_not_the_hubs(hub: HubServer, tmp_path: Path) -> None:
    source = HubSource("hf:org/one", options(hub, tmp_path))
    said = source.translated(OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(said, WeightsUnavailable) and said.message == f"{tmp_path}: No space left on device"
    assert isinstance(source.translated(ConnectionResetError(errno.ECONNRESET, "reset")), SourceInterrupted)
