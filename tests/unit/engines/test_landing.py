"""A reader of a filling region."""

import ast
import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import glowplug_vllm
from glowplug.domain.errors import EngineFailed
from glowplug.engines import landing as landings
from glowplug.engines import process, rendezvous
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.landing import Landing, WeightsDropped
from glowplug.engines.port import EngineHandle
from glowplug.weights.pieces import Layout
from glowplug.weights.region import RegionInfo, RegionState
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
    assert Landing.of(source) is None
    assert Landing.of(arriving.root)
    asyncio.run(arriving.land())
    arriving.complete()
    assert Landing.of(arriving.root) is None


@pytest.mark.parametrize("how", ["anew", "failed"])
def test_what_was_dropped_while_an_engine_read_it_is_seen_afterwards(arriving: ArrivingRegion, how: str) -> None:
    generation = landings.generation_of(arriving.root)
    assert generation and not landings.are_dropped(arriving.root, generation)
    asyncio.run(arriving.land(0.5))
    assert not landings.are_dropped(arriving.root, generation)
    if how == "anew":
        stage = {"stage": 0, "num_stages": 2}
        arriving.region.complete_stage(RegionInfo(path="", num_bytes=1, sha256="", source="file", seconds=1.0), **stage)
        arriving.writer.retract([(0, 1)])
        assert arriving.region.read_state(**stage).state is RegionState.FETCHING
    else:
        arriving.region.fail("weights_corrupt", "other bytes", failed_at=1.0)
    assert landings.are_dropped(arriving.root, generation)


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
    assert landings.generation_of(source) == ""


def test_bytes_may_be_read_once_their_pieces_have_landed(arriving: ArrivingRegion) -> None:
    landing = Landing(arriving.root)
    weights = arriving.root / "b.bin"

    def has(first: int, last: int, path: Path = weights) -> bool:
        return landing.has(landing.pieces(path, first, last))

    assert not has(0, 1)
    arriving.put(1)
    assert has(PIECE - 100, 2 * PIECE - 100)
    assert not has(0, PIECE) and not has(PIECE, 2 * PIECE - 99)
    assert has(7, 7) and has(0, 9, Path("/elsewhere"))
    spans = [(0, 10), (2 * PIECE, 2 * PIECE + 1), (PIECE, PIECE + 1)]
    assert landing.wait_pieces([landing.pieces(weights, *span) for span in spans]) == 2


def test_a_reader_waits_for_its_bytes(arriving: ArrivingRegion) -> None:
    landing = Landing(arriving.root)
    later(lambda: (arriving.put(5), arriving.put(0)))
    landing.wait_small_files()
    assert (arriving.root / "c.json").read_bytes() == b"\3" * 50 and (arriving.root / "d/e.txt").is_file()
    assert not landing.has(landing.pieces(arriving.root / "b.bin", PIECE, 2 * PIECE)), "weights are not waited for"
    later(lambda: [arriving.put(piece) for piece in range(1, 5)])
    landing.wait_whole()
    assert (arriving.root / "b.bin").read_bytes() == b"\2" * 5 * PIECE


def test_an_engine_waits_for_a_beginning_and_for_all(arriving: ArrivingRegion) -> None:
    landing = Landing(arriving.root)
    later(lambda: arriving.put(0))
    landing.wait_beginning(PIECE, 5.0)
    with pytest.raises(TimeoutError):
        landing.wait_beginning(PIECE + 1, 0.05)
    later(lambda: [arriving.put(piece) for piece in range(1, 6)])
    landing.wait_beginning(landing.num_bytes, 5.0)
    with pytest.raises(TimeoutError):
        landing.wait_complete(0.05)
    later(arriving.complete)
    landing.wait_complete(5.0)


def test_a_stage_waits_for_its_own_part(arriving: ArrivingRegion) -> None:
    (arriving.region.directory / "stage-1-of-2.json").write_text("{}")
    landing = Landing(arriving.root)
    landing.wait_complete(5.0, stage=1, num_stages=2)
    with pytest.raises(TimeoutError):
        landing.wait_complete(0.05, stage=0, num_stages=2)


@pytest.mark.parametrize("how", ["failed", "anew", "cleared"])
def test_weights_that_are_dropped_end_the_wait(how: str, arriving: ArrivingRegion) -> None:
    landing = Landing(arriving.root)

    def drop() -> None:
        if how == "failed":
            arriving.region.fail("weights_unavailable", "gone", failed_at=1.0)
        elif how == "anew":
            arriving.region.write_layout(Layout.of([("", 6 * PIECE)]))
        else:
            arriving.region.clear_bytes()

    later(drop)
    with pytest.raises(WeightsDropped):
        landing.wait_beginning(1, 5.0)
    with pytest.raises(WeightsDropped):
        landing.wait_whole()


def test_a_fetch_that_is_taken_up_again_goes_on_for_those_who_wait(arriving: ArrivingRegion) -> None:
    """A restarted prefetcher writes another `landed` of the same generation."""
    one, other = Landing(arriving.root), Landing(arriving.root)
    for piece in (0, 1):
        arriving.put(piece)
    arriving.close()
    again = arriving.taken_up()
    assert again.writer.layout == arriving.writer.layout and again.writer.landed.total == 2 * PIECE
    later(lambda: [again.put(piece) for piece in range(2, 6)])
    one.wait_beginning(one.num_bytes, 5.0)
    other.wait_whole()


def test_a_fetch_that_has_stalled_is_given_up(arriving: ArrivingRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings, "STALLED_S", 0.05)
    with pytest.raises(TimeoutError, match="no weights have landed"):
        Landing(arriving.root).wait_whole()


def test_a_layout_that_is_none_is_refused(arriving: ArrivingRegion) -> None:
    (arriving.region.directory / "layout.json").write_text("[]")
    with pytest.raises(WeightsDropped):
        Landing.of(arriving.root)


@pytest.mark.parametrize("module", [landings, rendezvous], ids=lambda module: module.__name__)
def test_engines_of_every_environment_share_one_file(module: ModuleType) -> None:
    """vLLM's environment has the plug-in and nothing else of Glowplug, so the file imports nothing of either."""
    path = Path(module.__file__ or "")
    assert path.samefile(Path(glowplug_vllm.__file__).with_name(path.name))
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
