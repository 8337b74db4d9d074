"""How a pipeline's stages notice that one of them is gone, and say that they are loaded. Lane: fast, 0.1 s."""

import json
import os
from pathlib import Path

import pytest

from glowplug_vllm import rundir, stage


class Store:
    """As torch's store, of counters. `is_gone`: with the process that held it."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.is_gone = False

    def add(self, key: str, num: int) -> int:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        self.counts[key] = self.counts.get(key, 0) + num
        return self.counts[key]


def test_a_later_stage_renews_its_sign_and_ends_with_the_first(tmp_path: Path) -> None:
    store, sign = Store(), tmp_path / "loaded-0.json"
    sign.touch()
    os.utime(sign, (1.0, 1.0))
    stage.give_sign(store, 1, sign)
    assert sign.stat().st_mtime > 1.0
    store.is_gone = True
    with pytest.raises(stage.StageGone, match="the first stage is gone"):
        stage.give_sign(store, 1, sign)


def test_a_stage_whose_run_directory_is_gone_ends(tmp_path: Path) -> None:
    with pytest.raises(stage.StageGone, match="its run directory is gone"):
        stage.give_sign(Store(), 1, tmp_path / "none" / "loaded-0.json")


def test_the_first_stage_ends_when_a_later_one_gives_no_sign(tmp_path: Path) -> None:
    store, sign = Store(), tmp_path / "loaded-0.json"
    sign.touch()
    signs = stage.Signs(store, 3, silent_s=0.0)
    for later in (1, 2):
        stage.give_sign(store, later, sign)
    signs.look()
    stage.give_sign(store, 1, sign)
    with pytest.raises(stage.StageGone, match="stage 2 has given no sign for 0 s"):
        signs.look()


def test_a_loaded_worker_says_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stage.START, stage.started(tmp_path, 1.0, 2.0, 3.0))
    assert stage.report_loaded(1) == tmp_path / rundir.loaded(1)
    phases = json.loads((tmp_path / "loaded-1.json").read_text())["phases"]
    assert phases[0] == ["launch", 1.0, 2.0] and phases[1][:2] == ["load", 3.0] and phases[1][2] > 3.0


def test_a_stage_whose_weights_arrive_leaves_the_reader_that_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own reader takes bytes that have not landed for weights; where it is wanted, it needs vLLM."""
    with pytest.raises(ModuleNotFoundError), stage.own_tensors(tmp_path):
        pass
    monkeypatch.setenv("_GLOWPLUG_WEIGHTS_ARRIVE", str(tmp_path / "arrived"))
    with stage.own_tensors(tmp_path):
        pass
