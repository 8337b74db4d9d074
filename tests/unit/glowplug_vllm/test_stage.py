"""How stages notice a lost stage and report readiness. Lane: fast, 0.1 s."""

import json
import os
import threading
from pathlib import Path

import pytest

from glowplug_vllm import rendezvous, stage


class Store:
    """Like torch's store of counters."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.is_gone = False

        self.texts: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        return self.texts[key].encode()

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
    with pytest.raises(stage.StageGone, match="stage 2 has been silent for 0 s"):
        signs.look()


def test_a_loaded_worker_says_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stage.START, stage.started(tmp_path, 1.0, 2.0, 3.0))
    assert stage.report_loaded(1) == tmp_path / rendezvous.loaded(1)
    phases = json.loads((tmp_path / "loaded-1.json").read_text())["phases"]
    assert phases[0] == ["launch", 1.0, 2.0] and phases[1][:2] == ["load", 3.0] and phases[1][2] > 3.0


def test_a_stage_whose_weights_arrive_leaves_the_reader_that_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage's own reader would take unlanded bytes for weights; it needs vLLM."""
    with pytest.raises(ModuleNotFoundError), stage.own_tensors(tmp_path):
        pass
    monkeypatch.setenv("_GLOWPLUG_WEIGHTS_ARRIVE", str(tmp_path / "arrived"))
    with stage.own_tensors(tmp_path):
        pass


def cut_weights(folder: Path, stages: dict[str, list[int]] | None, **config: object) -> Path:
    files = folder / "files"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(config))
    order = {"num_layers": 30, "is_tied": True, "ranges": []} | ({"stages": stages} if stages is not None else {})
    (folder / "order.json").write_text(json.dumps(order))
    return files


def test_a_stage_has_the_layers_that_were_fetched_for_it(tmp_path: Path) -> None:
    files = cut_weights(tmp_path, {"2": [15, 15], "4": [4, 11, 11, 4]}, num_hidden_layers=30)
    assert stage.partition(files, 4, arrives=False) == "4,11,11,4"
    with pytest.raises(stage.BadCut, match="into 2, 4 stages, not into 3"):
        stage.partition(files, 3, arrives=False)


def test_a_model_that_is_a_part_of_a_larger_one_is_cut_alike(tmp_path: Path) -> None:
    files = cut_weights(tmp_path, {"2": [15, 15]}, text_config={"num_hidden_layers": 30})
    assert stage.partition(files, 2, arrives=False) == "15,15"


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        ({"n_layer": 31}, "15,16"),
        ({"llm_config": {"num_layers": 31}}, "15,16"),
        ({}, "15,16"),
        ({"num_hidden_layers": 30}, "15,15"),
        ({"num_hidden_layers": 15}, ""),
        ({"num_hidden_layers": 40}, ""),
    ],
    ids=["GPT-2", "InternVL", "unnamed", "one behind the last", "an empty stage", "too few"],
)
def test_the_model_has_the_layers_that_it_runs(tmp_path: Path, config: dict[str, object], cut: str) -> None:
    assert stage.partition(cut_weights(tmp_path, {"2": [15, 16]}, **config), 2, arrives=False) == cut


def test_vllm_cuts_what_nobody_has_cut(tmp_path: Path) -> None:
    assert stage.partition(tmp_path / "files", 2, arrives=False) == "", "no order"
    assert stage.partition(cut_weights(tmp_path, None, num_hidden_layers=30), 2, arrives=False) == "", "an older one"


def test_a_stage_waits_for_its_cut_while_weights_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cut_weights(tmp_path, {"2": [15, 15]}, num_hidden_layers=30)
    order = (tmp_path / "order.json").rename(tmp_path / "later.json")
    threading.Timer(0.05, lambda: order.rename(tmp_path / "order.json")).start()
    assert stage.partition(files, 2, arrives=True) == "15,15"
    (tmp_path / "order.json").unlink()
    monkeypatch.setattr(stage, "ORDER_S", 0.02)
    with pytest.raises(TimeoutError, match="no order is recorded"):
        stage.partition(files, 2, arrives=True)


def test_stages_with_different_cuts_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setenv(stage.PARTITION, "4,11,11,4")
    stage.agree(store, 0)
    stage.agree(store, 1)
    monkeypatch.delenv(stage.PARTITION)
    with pytest.raises(stage.BadCut, match="4,11,11,4 layers, and this one of even"):
        stage.agree(store, 2)


def test_the_last_stage_loads_as_vllm_has_it_and_the_others_without_the_head() -> None:
    with stage.without_head(is_last=True):
        pass
    with pytest.raises(ModuleNotFoundError), stage.without_head(is_last=False):
        pass
