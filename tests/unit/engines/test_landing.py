"""Both readers of a filling region: ours and the vLLM plug-in's."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.errors import EngineFailed
from glowplug.engines import landing as ours
from glowplug.engines import process
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineHandle
from glowplug.weights.pieces import Layout
from glowplug.weights.region import RegionInfo, RegionState
from glowplug_vllm import landing as vllms
from tests.arriving_region import ArrivingRegion

PIECE = 4096


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    sizes = {"a.json": 100, "b.bin": 5 * PIECE, "c.json": 50, "d/e.txt": 10}
    for number, (name, num_bytes) in enumerate(sizes.items()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes([number + 1]) * num_bytes)
    return folder


@pytest.fixture
def arriving(source: Path, tmp_path: Path) -> ArrivingRegion:
    return ArrivingRegion(source, tmp_path / "shm")


def later(do: Callable[[], object]) -> None:
    threading.Timer(0.05, do).start()


def test_weights_that_are_whole_or_in_no_region_are_not_waited_for(source: Path, arriving: ArrivingRegion) -> None:
    assert ours.Landing.of(source) is None and vllms.Landing.of(source) is None
    assert ours.Landing.of(arriving.root) and vllms.Landing.of(arriving.root)
    asyncio.run(arriving.land())
    arriving.complete()
    assert ours.Landing.of(arriving.root) is None and vllms.Landing.of(arriving.root) is None


@pytest.mark.parametrize("how", ["anew", "failed"])
def test_what_was_dropped_while_an_engine_read_it_is_seen_afterwards(arriving: ArrivingRegion, how: str) -> None:
    generation = ours.generation_of(arriving.root)
    assert generation and not ours.are_dropped(arriving.root, generation)
    asyncio.run(arriving.land(0.5))
    assert not ours.are_dropped(arriving.root, generation)
    if how == "anew":
        stage = {"stage": 0, "num_stages": 2}
        arriving.region.complete_stage(RegionInfo(path="", num_bytes=1, sha256="", source="file", seconds=1.0), **stage)
        arriving.writer.retract([(0, 1)])
        assert arriving.region.read_state(**stage).state is RegionState.FETCHING
    else:
        arriving.region.fail("weights_corrupt", "other bytes", failed_at=1.0)
    assert ours.are_dropped(arriving.root, generation)


@pytest.mark.parametrize("dropped", [True, False])
async def test_a_load_fails_otherwise_where_what_it_read_was_dropped(
    arriving: ArrivingRegion, tmp_path: Path, dropped: bool
) -> None:
    """A worker may have noticed while its server knows only of the worker's end."""

    class Failing(HostedDriver):
        async def _wait_ready(self, *_: Any, **__: Any) -> dict[str, Any]:
            if dropped:
                arriving.writer.retract([(0, 1)])
            raise EngineFailed("a worker of it ended")

    pid = process.spawn(["sleep", "60"], cwd=tmp_path, log_path=tmp_path / "log", env={})
    at = process.started_at(pid) or 0.0
    handle = EngineHandle(
        engine="x", instance_id="i-1", pid=pid, pid_started_at=at, run_dir=str(tmp_path), log_path=str(tmp_path / "log")
    )
    with pytest.raises(EngineFailed, match="a worker of it ended") as failed:
        await Failing().load(handle, arriving.root)
    assert failed.value.code == ("weights_dropped" if dropped else "engine_failed")
    assert not process.is_alive(pid, at)


def test_whole_weights_have_no_generation_that_could_be_dropped(source: Path) -> None:
    assert ours.generation_of(source) == ""


def test_bytes_may_be_read_once_their_pieces_have_landed(arriving: ArrivingRegion) -> None:
    landing = vllms.Landing(arriving.root, arriving.layout())
    weights = arriving.root / "b.bin"
    assert not landing.has(weights, 0, 1)
    arriving.put(1)
    assert landing.has(weights, PIECE - 100, 2 * PIECE - 100)
    assert not landing.has(weights, 0, PIECE) and not landing.has(weights, PIECE, 2 * PIECE - 99)
    assert landing.has(weights, 7, 7) and landing.has(Path("/elsewhere"), 0, 9)
    spans = [(weights, 0, 10), (weights, 2 * PIECE, 2 * PIECE + 1), (weights, PIECE, PIECE + 1)]
    assert landing.wait_first(spans) == 2


def test_a_reader_waits_for_its_bytes(arriving: ArrivingRegion) -> None:
    landing = vllms.Landing(arriving.root, arriving.layout())
    later(lambda: (arriving.put(5), arriving.put(0)))
    landing.wait_small_files()
    assert (arriving.root / "c.json").read_bytes() == b"\3" * 50 and (arriving.root / "d/e.txt").is_file()
    assert not landing.has(arriving.root / "b.bin", PIECE, 2 * PIECE), "weights are not waited for"
    later(lambda: [arriving.put(piece) for piece in range(1, 5)])
    landing.wait_whole()
    assert (arriving.root / "b.bin").read_bytes() == b"\2" * 5 * PIECE


def test_our_engines_wait_for_a_beginning_and_for_all(arriving: ArrivingRegion) -> None:
    landing = ours.Landing(arriving.root)
    later(lambda: arriving.put(0))
    landing.wait(PIECE, 5.0)
    with pytest.raises(TimeoutError):
        landing.wait(PIECE + 1, 0.05)
    later(lambda: [arriving.put(piece) for piece in range(1, 6)])
    landing.wait(landing.num_bytes, 5.0)
    with pytest.raises(TimeoutError):
        landing.wait_complete(0.05)
    later(arriving.complete)
    landing.wait_complete(5.0)


def test_a_stage_waits_for_its_own_part(arriving: ArrivingRegion) -> None:
    (arriving.region.directory / "stage-1-of-2.json").write_text("{}")
    landing = ours.Landing(arriving.root)
    landing.wait_complete(5.0, stage=1, num_stages=2)
    with pytest.raises(TimeoutError):
        landing.wait_complete(0.05, stage=0, num_stages=2)


@pytest.mark.parametrize("how", ["failed", "anew", "cleared"])
def test_weights_that_are_dropped_end_the_wait(how: str, arriving: ArrivingRegion) -> None:
    mine, theirs = ours.Landing(arriving.root), vllms.Landing(arriving.root, arriving.layout())

    def drop() -> None:
        if how == "failed":
            arriving.region.fail("weights_unavailable", "gone", failed_at=1.0)
        elif how == "anew":
            arriving.region.write_layout(Layout.of([("", 6 * PIECE)]))
        else:
            arriving.region.clear_bytes()

    later(drop)
    with pytest.raises(ours.WeightsDropped):
        mine.wait(1, 5.0)
    with pytest.raises(vllms.WeightsDropped):
        theirs.wait_whole()


def test_a_fetch_that_is_taken_up_again_goes_on_for_those_who_wait(arriving: ArrivingRegion) -> None:
    """A restarted prefetcher writes another `landed` of the same generation."""
    mine, theirs = ours.Landing(arriving.root), vllms.Landing(arriving.root, arriving.layout())
    for piece in (0, 1):
        arriving.put(piece)
    arriving.close()
    again = arriving.taken_up()
    assert again.writer.layout == arriving.writer.layout and again.writer.landed.total == 2 * PIECE
    later(lambda: [again.put(piece) for piece in range(2, 6)])
    mine.wait(mine.num_bytes, 5.0)
    theirs.wait_whole()


def test_a_fetch_that_has_stalled_is_given_up(arriving: ArrivingRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllms, "STALLED_S", 0.05)
    with pytest.raises(TimeoutError, match="no weights have landed"):
        vllms.Landing(arriving.root, arriving.layout()).wait_whole()


def test_a_layout_that_is_none_is_refused(arriving: ArrivingRegion) -> None:
    (arriving.region.directory / "layout.json").write_text("[]")
    with pytest.raises(vllms.WeightsDropped):
        vllms.Landing.of(arriving.root)
    with pytest.raises(ours.WeightsDropped):
        ours.Landing.of(arriving.root)
