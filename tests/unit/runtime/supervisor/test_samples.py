"""The sample models: valid, too many for the local fleet's memory, and a person's to edit."""

from pathlib import Path

import pytest

from glowplug.domain.units import parse_bytes
from glowplug.runtime import model_files
from glowplug.runtime.supervisor.plan import GPU_BUDGETS
from glowplug.runtime.supervisor.samples import place_samples, sample_files
from glowplug.runtime.supervisor.settings import FleetError, FleetSettings


@pytest.mark.llamacpp
def test_llamacpp_samples_compete_for_the_memory_of_three_nodes() -> None:
    models = [model for file in sample_files("llamacpp") for model in model_files.load(file)]
    budget = parse_bytes(GPU_BUDGETS["llamacpp"])
    assert len(models) >= 5
    assert all(model.memory_bytes <= budget for model in models)
    assert sum(model.memory_bytes for model in models) > budget * FleetSettings().nodes
    assert len({model.memory_bytes for model in models}) >= 4
    assert len({model.system_prompt for model in models}) == len(models)


def test_emulated_samples_fit_one_gpu_each_and_not_all_at_once() -> None:
    models = [model for file in sample_files("emulated") for model in model_files.load(file)]
    budgets = [parse_bytes(text) for text in GPU_BUDGETS["emulated"].split(",")]
    assert all(model.engine == "emulated" for model in models)
    assert all(model.memory_bytes <= min(budgets) for model in models)
    assert len({model.key for model in models}) == len(models) >= 6


def test_samples_are_copied_once_and_what_a_person_did_stays(tmp_path: Path) -> None:
    target = tmp_path / "models" / "emulated"
    place_samples(target, "emulated")
    first = sorted(target.iterdir())
    first[0].unlink()
    first[1].write_text("mine")
    place_samples(target, "emulated")
    assert sorted(target.iterdir()) == first[1:]
    assert first[1].read_text() == "mine"


def test_an_unknown_engine_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"'cuda9'.*emulated.*llamacpp"):
        place_samples(tmp_path / "models", "cuda9")
