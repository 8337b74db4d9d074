"""Fetching from several nodes, some of them wrong or slow."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.errors import ChecksumMismatch, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.engines.landing import Landing, WeightsDropped
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.pieces import Layout, piece_digest, read_piece_digests
from glowplug.weights.region import Region, RegionState, region_digest
from glowplug.weights.source import SourceFile, SourceInfo, SourceOptions
from glowplug.weights.sources import open_source
from glowplug.weights.sources.peer import PeerRegion, holding_of, peer_token
from glowplug.weights.writer import RegionWriter
from tests.arriving_region import has_landed
from tests.waiting import WAIT_S, until
from tests.weight_servers import PeerServer, WeightServer

DATA = random.Random(7).randbytes(1_200_001)
SHA = hashlib.sha256(DATA).hexdigest()
LAYOUT = Layout.of([("", len(DATA))])
SLOW = 0.015  # a server's seconds for 64 KiB


async def whatever(_: int) -> int:
    return 10_000_000


def fetch_of(
    ref: WeightsRef,
    root: Path,
    *peers: PeerServer,
    token: str = "",
    stall_s: float = WAIT_S,
    regions: Sequence[PeerRegion] = (),
) -> Fetch:
    source = open_source(ref.uri, SourceOptions(chunk_bytes=32_768, stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S))
    digest = region_digest(ref)
    return Fetch(
        ref,
        Region.at(root, "n", digest),
        source,
        LinkMeter("n/nic"),
        whatever,
        options=FetchOptions(part_bytes=131_072, max_parts=2, max_attempts=2, backoff_first_s=0.001),
        peers=[*(PeerRegion(peer.url, digest, token, 32_768, stall_s=stall_s) for peer in peers), *regions],
    )


def assert_whole(fetch: Fetch) -> None:
    assert fetch.region.read_state().state is RegionState.COMPLETE
    assert fetch.region.blob.read_bytes() == DATA


@pytest.mark.parametrize("sha256", [SHA, ""])
async def test_a_peer_takes_its_share_of_the_work(tmp_path: Path, sha256: str) -> None:
    with WeightServer(DATA, step_s=SLOW) as origin, PeerServer(DATA, sha256=SHA) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=sha256), tmp_path, peer)
        await fetch.run()
        assert_whole(fetch)
        assert fetch.tally.by_holder[peer.url] > len(DATA) / 10, "it is the faster one, however busy the machine"
        assert sum(fetch.tally.by_holder.values()) < 1.5 * len(DATA)


async def test_other_bytes_under_the_same_address_are_left_alone(tmp_path: Path) -> None:
    other = random.Random(8).randbytes(len(DATA))
    with WeightServer(DATA) as origin, PeerServer(other, validator='"v0"', sha256="cd" * 32) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url), tmp_path, peer)
        await fetch.run()
        assert_whole(fetch)
        assert peer.bytes_sent == 0


async def test_a_registry_that_is_dead_needs_not_answer(tmp_path: Path) -> None:
    with WeightServer(DATA, statuses=[503] * 100) as origin, PeerServer(DATA, sha256=SHA) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        await fetch.run()
        assert_whole(fetch)
        assert origin.bytes_sent == 0


def answer_of(*names: str) -> dict[str, Any]:
    return {"files": [[name, 4096, "v"] for name in names], "landed": "1" * len(names), "sha256": "", "pieces": {}}


def test_files_of_a_peer_stay_in_the_region() -> None:
    assert holding_of(answer_of("")) and holding_of(answer_of("a", "b/c"))
    for names in (("/etc/x",), ("../x",), ("a", "b/../../x"), ("a", "a"), ("a", "./a"), ("a", ""), (".",), ("a\0",)):
        assert holding_of(answer_of(*names)) is None, names


def test_no_file_is_written_outside_of_its_region(tmp_path: Path) -> None:
    for name in (str(tmp_path / "x"), "../../../x"):
        files = (SourceFile(path=name, num_bytes=5, validator=""),)
        region = Region.at(tmp_path / "shm", "n", "ab" * 32)
        with pytest.raises(WeightsUnavailable, match="points outside its directory"):
            RegionWriter(region, WeightsRef(uri="http://x"), SourceInfo(files=files, ranges=True), 1 << 20).open()
        assert not (tmp_path / "x").exists()


async def test_a_registry_that_refuses_is_believed(tmp_path: Path) -> None:
    with WeightServer(DATA, statuses=[403]) as origin, PeerServer(DATA, sha256=SHA) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        with pytest.raises(WeightsUnavailable, match="403"):
            await fetch.run()


async def test_a_registry_that_dies_midway_leaves_the_rest_to_peers(tmp_path: Path) -> None:
    with WeightServer(DATA, step_s=0.002) as origin, PeerServer(DATA, sha256=SHA, step_s=0.005) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        running = asyncio.create_task(fetch.run())
        await until(lambda: running.done() or fetch.num_bytes_landed > 100_000)
        origin.statuses += [503] * 100
        await running
        assert_whole(fetch)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 404},
        {"token": "x"},
        {"cut_after": 40_000},
        {"wrong_pieces": frozenset({3, 20, 30})},
        {"step_s": 0.3},  # beyond its reader's patience
        {"data": DATA[:-1]},
        {"data": b""},
    ],
    ids=["fails", "has none", "refuses", "dies in a piece", "wrong bytes", "stalls", "shorter", "empty"],
)
async def test_a_peer_that_is_no_good_costs_nothing_but_its_part(tmp_path: Path, fault: dict[str, Any]) -> None:
    with WeightServer(DATA, step_s=0.002) as origin, PeerServer(**{"data": DATA, "sha256": SHA, **fault}) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer, stall_s=0.2)
        await fetch.run()
        assert_whole(fetch)
        of_origin = len(DATA) - fetch.tally.by_holder.get(peer.url, 0)
        await until(lambda: origin.bytes_sent >= of_origin)


async def test_a_wrong_piece_never_lands_and_is_brought_from_another(tmp_path: Path) -> None:
    wrong = frozenset(range(3, 37))
    with WeightServer(DATA, step_s=SLOW) as origin, PeerServer(DATA, sha256=SHA, wrong_pieces=wrong) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        running = asyncio.create_task(fetch.run())
        await until(lambda: fetch.tally.num_wrong_pieces)
        generation = fetch.region.read_state().generation
        for index in range(LAYOUT.num_pieces):
            first, last = LAYOUT.piece(index)
            if has_landed(fetch.region.directory, first, last):
                assert fetch.region.blob.read_bytes()[first:last] == DATA[first:last]
        await running
        assert_whole(fetch)
        assert fetch.region.read_state().generation == generation, "what was read meanwhile counts"
        assert fetch.tally.num_wrong_pieces <= 2  # one per reader, then it is excluded


async def test_a_peer_of_an_earlier_version_is_checked_by_its_own_checksums(tmp_path: Path) -> None:
    with WeightServer(DATA, step_s=SLOW) as origin, PeerServer(DATA, sha256=SHA) as peer:
        peer.checksum = lambda content: hashlib.blake2b(content, digest_size=16).hexdigest()
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        await fetch.run()
        assert_whole(fetch)
        assert fetch.tally.num_wrong_pieces == 0 and fetch.tally.by_holder[peer.url] > 0
        digests = read_piece_digests(fetch.region.directory, LAYOUT)
        assert digests == tuple(piece_digest(DATA[slice(*LAYOUT.piece(i))]) for i in range(LAYOUT.num_pieces))


async def test_a_peer_that_lies_is_found_out_by_the_whole(tmp_path: Path) -> None:
    """Its checksums fit its wrong bytes, so they land; the generation warns readers."""
    with WeightServer(DATA, step_s=0.2) as origin:
        with PeerServer(DATA, sha256=SHA, wrong_pieces=frozenset(range(5, 30)), lies=True, step_s=0.2) as peer:
            fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
            running = asyncio.create_task(fetch.run())
            await until(lambda: fetch.region.read_state().generation and peer.url in fetch.tally.by_holder)
            reader = Landing(fetch.region.blob)
            origin.step_s = peer.step_s = 0.0
            await running
        assert_whole(fetch)
        assert 0 < fetch.tally.by_holder[peer.url] < origin.bytes_sent
        with pytest.raises(WeightsDropped):
            reader.wait_complete(1.0)


async def test_weights_without_a_checksum_are_held_against_the_peers(tmp_path: Path) -> None:
    wrong = frozenset(range(5, 30))
    with WeightServer(DATA, step_s=SLOW) as origin:
        with PeerServer(DATA, sha256=SHA, wrong_pieces=wrong, tells_digests=False) as peer:
            fetch = fetch_of(WeightsRef(uri=origin.url), tmp_path, peer)
            await fetch.run()
        assert_whole(fetch)


@pytest.mark.parametrize("holds_some", [True, False])
async def test_a_peer_with_another_checksum_does_not_forbid_weights_without_one(
    tmp_path: Path, holds_some: bool
) -> None:
    step_s = SLOW if holds_some else 0.0
    with WeightServer(DATA, step_s=step_s) as origin:
        with PeerServer(DATA, sha256="ab" * 32, landed=lambda _: holds_some) as peer:
            fetch = fetch_of(WeightsRef(uri=origin.url), tmp_path, peer)
            await fetch.run()
        assert_whole(fetch)
        assert bool(fetch.tally.by_holder.get(peer.url)) is holds_some
        if not holds_some:
            assert fetch.tally.num_bytes < 1.5 * len(DATA), "what the source has brought is not brought twice"


class ClosedPeer(PeerRegion):
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


async def test_peers_that_are_asked_no_more_are_closed_too(tmp_path: Path) -> None:
    with WeightServer(DATA) as origin, PeerServer(DATA, sha256="ab" * 32) as server:
        ref = WeightsRef(uri=origin.url)
        peer = ClosedPeer(server.url, region_digest(ref), "")
        fetch = fetch_of(ref, tmp_path, regions=[peer])
        await fetch.run()
        assert_whole(fetch)
        assert peer.is_closed


async def test_the_registry_itself_may_be_what_is_wrong(tmp_path: Path) -> None:
    with WeightServer(DATA[:-1] + b"x") as origin, pytest.raises(ChecksumMismatch):
        await fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path).run()


async def test_a_peer_that_is_filling_gives_what_it_has_so_far(tmp_path: Path) -> None:
    first_landed = [30]
    filling = PeerServer(DATA, landed=lambda piece: piece >= first_landed[0], tells_digests=False)
    with WeightServer(DATA, step_s=0.15) as origin, filling as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer)
        running = asyncio.create_task(fetch.run())
        await until(lambda: peer.bytes_sent >= 100_000)
        first_landed[0] = 0
        await running
        assert_whole(fetch)
        assert peer.num_looks > 1
        assert fetch.tally.by_holder[peer.url] > 7 * LAYOUT.piece_bytes


async def test_a_slow_source_is_relieved_of_what_it_began(tmp_path: Path) -> None:
    with ExitStack() as servers:
        origin = servers.enter_context(WeightServer(DATA, step_s=0.2))
        peers = [servers.enter_context(PeerServer(DATA, sha256=SHA)) for _ in range(2)]
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, *peers)
        await fetch.run()
        assert_whole(fetch)
        assert fetch.tally.by_holder["http"] < len(DATA) / 4


async def test_nodes_show_a_token_that_is_not_the_admins(tmp_path: Path) -> None:
    token = peer_token("secret")
    assert token and "secret" not in token and peer_token("") == ""
    with WeightServer(DATA, step_s=SLOW) as origin, PeerServer(DATA, sha256=SHA, token=token) as peer:
        fetch = fetch_of(WeightsRef(uri=origin.url, sha256=SHA), tmp_path, peer, token=token)
        await fetch.run()
        assert fetch.tally.by_holder[peer.url] > 0
