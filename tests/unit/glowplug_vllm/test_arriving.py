"""A vLLM server's waits while its weights arrive."""

import asyncio
import json
import struct
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from glowplug.weights.region import RegionInfo, RegionState
from glowplug_vllm import arriving
from glowplug_vllm.landing import Landing
from tests.arriving_region import ArrivingRegion

PIECE = 4096


@pytest.fixture
def region(tmp_path: Path) -> ArrivingRegion:
    """Configuration, a header longer than a piece, ten pieces of one layer."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"pad": "x" * PIECE}))
    facts = {"dtype": "F32", "shape": [10 * PIECE // 4], "data_offsets": [0, 10 * PIECE]}
    header = json.dumps({"model.layers.0.w": facts, "__metadata__": {"pad": "y" * 2 * PIECE}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(10 * PIECE)
    (folder / "model.safetensors").write_bytes(content)
    return ArrivingRegion(folder, tmp_path / "shm")


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_GLOWPLUG_WEIGHTS_ARRIVE", "")


def landing_of(region: ArrivingRegion) -> Landing:
    found = Landing.of(region.root)
    assert found is not None
    return found


def test_the_server_starts_on_configuration_and_headers(region: ArrivingRegion) -> None:
    landing = landing_of(region)
    threading.Timer(0.05, lambda: asyncio.run(region.land(0.35))).start()
    arriving.wait_for_headers(landing)
    weights = region.root / "model.safetensors"
    assert json.loads((region.root / "config.json").read_text())["pad"]
    assert not landing.has(landing.pieces(weights, 0, weights.stat().st_size)), "its tensors have not landed"


@pytest.mark.parametrize(
    ("args", "config", "why"),
    [
        ({"load_format": "sharded_state"}, {}, "sharded_state"),
        ({"model_loader_extra_config": {"enable_multithread_load": True}}, {}, "model-loader-extra-config"),
        ({"quantization": "bitsandbytes"}, {}, "bitsandbytes"),
        ({}, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_what_is_read_in_another_way_is_waited_for(
    region: ArrivingRegion,
    args: dict[str, object],
    config: dict[str, object],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    landing = landing_of(region)
    asyncio.run(region.land(0.35))
    (region.root / "config.json").write_text(json.dumps(config))
    threading.Timer(0.05, lambda: asyncio.run(region.land())).start()
    arriving.begin(landing, Namespace(**args), tmp_path)
    weights = region.root / "model.safetensors"
    assert landing.has(landing.pieces(weights, 0, weights.stat().st_size)) and not arriving.is_on()
    assert why in capsys.readouterr().out
    arriving.check()


def test_a_stage_that_is_read_in_another_way_waits_for_its_part_alone(region: ArrivingRegion, tmp_path: Path) -> None:
    """The rest is never fetched; it used to wait until its start was abandoned."""
    asyncio.run(region.land(0.35))
    info = RegionInfo(path=str(region.root), num_bytes=9, sha256="", source="http", seconds=1.0)
    threading.Timer(0.02, lambda: region.region.complete_stage(info, 1, 2)).start()
    args = Namespace(load_format="sharded_state", node_rank=1, nnodes=2)
    arriving.begin(landing_of(region), args, tmp_path)
    assert region.region.read_state(stage=1, num_stages=2).state is RegionState.COMPLETE
    arriving.check()


def test_a_server_that_has_not_loaded_as_they_land_is_refused(
    region: ArrivingRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of vLLM might read zeros for weights."""
    installed: list[bool] = []
    loader = SimpleNamespace(install=lambda: installed.append(True))
    monkeypatch.setitem(sys.modules, "glowplug_vllm.arriving_load", loader)
    monkeypatch.setattr("glowplug_vllm.arriving_load", loader, raising=False)
    arriving.begin(landing_of(region), Namespace(load_format="auto"), tmp_path)
    assert installed and arriving.is_on()
    with pytest.raises(arriving.NotAsTheyLand):
        arriving.check()
    arriving.mark()
    arriving.check()
